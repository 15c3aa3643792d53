"""Read a model from the config.json that Hugging Face publishes with its weights.

Each architecture has a row in `families.FAMILIES`: a map from the fields of a model to keys, a
preset of the family for what its files do not say (norms, gates). `data/config_defaults.yaml` has
the keys that may be left out, with their defaults; all other keys of a map are required. Files of
models with more than text (`Qwen3VLForConditionalGeneration`) are read through the object that
describes the text part (`text_config`). A class that nobody knows is read by the names that most
decoders share (`unknown`).

Number formats (`torch_dtype`, `dtype`) belong to a run and are not read, but for those of
checkpoints in few bits (`quantization`); neither are losses that balance experts, factors that
scale values without adding any (of experts' weights, multipliers of Granite, MiniMax and Falcon-H1,
limits of time steps), nor layers for multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import NamedTuple, NoReturn, cast

from stagewright.errors import UserError
from stagewright.files import own_yaml
from stagewright.model.hf.families import FAMILIES, MISSING
from stagewright.model.hf.keys import Family, Fields, Json, Keys, whole_name
from stagewright.model.hf.unknown import by_common_names

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "lm_config")
"""The objects in which files of models with more than text describe the text part."""

OTHER_PARTS = ("vision_config", "vision_tower_config", "audio_config", "speech_config")
"""The objects in which these files describe parts that are not read."""

_WRAPPER, _DECODER = "ForConditionalGeneration", "ForCausalLM"
_OUTER_KEYS = ("tie_word_embeddings", "vocab_size")
"""Keys outside the text part that count for it unless it has its own."""

BY_MODEL_TYPE = {name: row for row in reversed(FAMILIES.values()) for name in row.model_types}
"""The first family of each model type."""

WAYS_OUT = (
    "use --as FAMILY to read the file as a known family, such as --as llama, or describe the model "
    "in a .stg file (model NAME like PRESET)"
)


class Reading(NamedTuple):
    """The content of a file."""

    like: str
    """The preset that the model is like."""
    fields: Fields
    """The fields of the model in which the file says otherwise."""
    notes: tuple[str, ...] = ()
    """Assumptions and omissions, a sentence each."""


def read(file: str, data: Json, as_family: str = "") -> Reading:
    """The model of a file; `as_family` names the family that it is read as, whatever it says."""
    keys = Keys(file, data)
    notes: list[str] = []
    names = [*_names(keys)]
    while part := next((k for k in TEXT_PARTS if k in keys.values), ""):
        others = [k for k in OTHER_PARTS if isinstance(keys.get(k), dict)]
        notes += _left_out(keys, part, others)
        outer = {key: keys.values[key] for key in _OUTER_KEYS if key in keys.values}
        keys = keys.inside(part, outer)
        names = [*_names(keys), *names]
    family, model_type = _family(keys, names, as_family)
    given, unused = keys.values, ()
    if family is None:
        like, fields, assumed = _unknown(keys, names)
        notes.insert(0, assumed)
    else:
        keys = Keys(file, family.defaults(model_type) | keys.values, keys.prefix)
        try:
            like, fields = family.like, family.read(keys)
        except UserError as error:
            raise UserError(f"{error}; correct the key, or {WAYS_OUT}") from None
        fields |= _draft_head(keys, names)
        unused = family.unused
        if family.remark:
            notes.append(f"{file}: {family.remark}")
    if not keys.prefix:
        parts = [k for k in OTHER_PARTS if isinstance(given.get(k), dict)]
        keys.seen.update(parts)
        notes += _left_out(keys, "", parts)
    return Reading(like, fields, (*notes, *_unread(keys, given, unused)))


def _draft_head(c: Keys, names: list[str]) -> Fields:
    """Fields of a head that drafts for another model, such as `LlamaForCausalLMEagle3`.

    Its logits may be of a smaller vocabulary (vllm-project/vllm
    `vllm/model_executor/models/llama_eagle3.py`); the embedding is that of the other model.
    """
    kind = re.search(r"Eagle3?", names[0]) if names else None
    if kind is None:
        return {}
    head = kind.group().lower()
    fields: Fields = {"draft_head": head, "final_norm": head != "eagle"}
    if c.get("draft_vocab_size") is not None:
        fields["vocab_size"] = c.size("vocab_size", "draft_vocab_size")
    return fields


def _left_out(keys: Keys, part: str, others: list[str]) -> list[str]:
    """The note about parts of a model that are not read."""
    if not others:
        return []
    names = " and ".join(f"{keys.prefix}{name}" for name in others)
    named = f" ({keys.prefix}{part})" if part else ""
    return [
        f"only the text part{named} is counted: the parameters, FLOPs and memory of "
        f"{names} are left out"
    ]


def _names(c: Keys) -> Iterator[str]:
    """The class of a file, or of a part of a file, and its model type, where it has them."""
    listed = c.values.get("architectures")
    if listed:  # not missing, null or empty
        name = cast("list[object]", listed)[0] if isinstance(listed, list) else None
        if not isinstance(name, str):
            c.reject("architectures", "a list of names")
        yield name
    if c.values.get("model_type") is not None:
        yield c.text("model_type")


def _family(c: Keys, names: list[str], as_family: str) -> tuple[Family | None, object]:
    """The family of a file and the model type whose defaults count; None if nobody knows it."""
    if as_family:
        return _named(as_family), as_family
    if not names:
        c.reject("model_type", f"text; {WAYS_OUT}")
    own = c.values.get("model_type")
    # A wrapper may lack something although the class of its text part is known.
    for name in names:
        if name in MISSING:
            _refuse(c, name, f"has {MISSING[name]}, which is not supported")
    for name in names:
        row = _known(name)
        if row is None:
            continue
        other = BY_MODEL_TYPE.get(own) if isinstance(own, str) and name != own else None
        if other is not None and own not in row.model_types and name == names[0]:
            wanted = " or ".join(row.model_types)
            c.reject(
                "model_type",
                f"{wanted}, as architectures names {name}; or say --as {wanted} or {own}",
            )
        return row, own if own in row.model_types else name
    return None, own


def _known(name: str) -> Family | None:
    """The family of a class or of a model type; a wrapper's class is that of its decoder."""
    if name.endswith(_WRAPPER) and name not in FAMILIES:
        name = name.removesuffix(_WRAPPER) + _DECODER
    return FAMILIES.get(name) or BY_MODEL_TYPE.get(
        name, BY_MODEL_TYPE.get(name.removesuffix("_text"))
    )


def _unknown(c: Keys, names: list[str]) -> tuple[str, Fields, str]:
    """A decoder of a class that nobody knows: the preset, the fields, and what was assumed."""
    name = names[0]
    try:
        like, fields, assumed = by_common_names(c)
    except UserError as error:
        why = f"is not known, and its keys are not those of a decoder: {error}{_hint(name)}"
        raise UserError(f"{whole_name(name)} {why}; {WAYS_OUT}") from None
    return (
        like,
        fields,
        (
            f"{whole_name(name)} is not known: {c.file} is read by the names that decoders share, "
            f"which assumes {assumed}; --as FAMILY reads it as a known family"
        ),
    )


def _hint(name: str) -> str:
    """The family whose name is most like this one, leaving out what all classes end with."""
    known = {_stem(k): k for k in (*FAMILIES, *BY_MODEL_TYPE)}
    close = get_close_matches(_stem(name[:80]), known, n=1, cutoff=0.75)
    return f"; did you mean {known[close[0]]!r}?" if close else ""


def _stem(name: str) -> str:
    return name.removesuffix(_WRAPPER).removesuffix(_DECODER)


def _named(name: str) -> Family:
    """The family that --as names."""
    if row := _known(name):
        return row
    firsts = dict.fromkeys(row.model_types[0] for row in FAMILIES.values())
    raise UserError(
        f"--as {whole_name(name)} names no family{_hint(name)}; wanted a model type of "
        f"transformers or its class, one of {', '.join(firsts)}"
    )


def _refuse(c: Keys, name: str, why: str) -> NoReturn:
    """Raise the error about a class that cannot be read."""
    raise UserError(f"{whole_name(name)} {why}: {c.file}; {WAYS_OUT}")


# ---- keys that were not read ---------------------------------------------------------------------

_MOST_NAMED = 12
_AHEAD_KEYS = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers"),
    *("use_mtp", "num_mtp_layers"),
)
_AHEAD = (
    "{file}: the layers for multi-token prediction ({key}) are left out, as published counts of "
    "parameters leave them out{more}"
)
_ADDED = "; in training, --mtp-num-layers adds them"


@cache
def _harmless() -> tuple[frozenset[str], tuple[str, ...]]:
    """Keys that change neither parameters, FLOPs nor memory, and words that end such keys."""
    text = files("stagewright").joinpath("data", "config_harmless.yaml").read_text("utf-8")
    data = own_yaml(text)
    return frozenset(data["keys"]), tuple(data["endings"])


def _unread(c: Keys, given: Json, unused: tuple[str, ...] = ()) -> list[str]:
    """Notes about what the file asks for and the model lacks; `given` are the file's own keys.

    One names the keys that no reader has asked for, unless all of them are harmless.

    A key that is null, false, zero or empty asks for nothing.
    """
    keys, endings = _harmless()
    more = "" if c.fields.get("residual_streams", 1) > 1 else _ADDED
    notes = [_AHEAD.format(file=c.file, key=k, more=more) for k in _AHEAD_KEYS if c.get(k)][:1]
    left = [
        whole_name(key)
        for key, value in given.items()
        if key not in c.seen
        and key not in keys
        and key not in unused
        and not key.endswith(endings)
        and value
    ]
    if not left:
        return notes
    others = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    named = ", ".join(left[:_MOST_NAMED]) + others
    return [
        *notes,
        f"{c.file}: not understood, and may change parameters, FLOPs or memory: {named}",
    ]
