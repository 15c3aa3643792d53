"""Which keys of a file were not read although they may matter."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from stagewright.files import own_yaml
from stagewright.model.hf.keys import Json, Keys, whole_name

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


def unread(c: Keys, given: Json, unused: tuple[str, ...] = ()) -> list[str]:
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
