"""Names of other tools that are options here, too: for options, run files and keywords.

They are rows of the tables of these tools. `OTHERS` set other settings than one of their name, with
help; `FOREIGN` says why an option sets nothing. Names are spelled as `canonical` has them.
`run.other_names` translates values with them; `written` finds the flag of a tool for a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from stagewright.launch.tables import FlagRow, canonical, flag_rows, rows, table, value_of

TABLES = ("megatron", "vllm", "torchtitan", "common")
"""Tables whose names are options here; of two rows of a name `common` has the one that counts."""


class OtherName(NamedTuple):
    """An option of another tool whose setting follows from its value and from other settings."""

    name: str
    """Name as a keyword, with underscores."""
    flag: str
    help: str
    kind: type | tuple[str, ...]
    """bool, int, str, or the words to choose from."""
    makes: tuple[str, ...]
    """The settings that follow."""
    names: tuple[str, ...] = ()
    """Other spellings of the option, without the dashes before them."""


_DOTS = ("qkv_proj", "out_proj", "mlpwi", "mlpwo")
REMAT_POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "none": None,
    "minimal": _DOTS,
    "minimal_with_context": ("context", *_DOTS),
    "save_dot_with_context_except_mlp": ("qkv_proj", "context", "out_proj"),
    "save_dot_except_mlpwi": ("qkv_proj", "out_proj", "mlpwo"),
    "save_dot_except_mlp": ("qkv_proj", "out_proj"),
    "save_qkv_proj": ("qkv_proj",),
    "save_out_proj": ("out_proj",),
    "full": (),
    "minimal_offloaded": _DOTS,
    "qkv_proj_offloaded": ("qkv_proj",),
}
"""MaxText's policies (`Decoder.get_remat_policy`) and what each keeps; None: everything."""
OFFLOADED_POLICIES = ("minimal_offloaded", "qkv_proj_offloaded")
"""Policies that keep it in host memory."""


def _others() -> Iterator[OtherName]:
    kinds = {"int": int, "bool": bool, "str": str, "policies": tuple(REMAT_POLICIES)}
    for flag, names, kind, makes, text in rows("other_names.csv"):
        words = kinds.get(kind) or tuple(kind.split("|"))
        yield OtherName(
            canonical(flag), f"--{flag}", text, words, tuple(makes.split()), tuple(names.split())
        )


OTHERS: Mapping[str, OtherName] = {of.name: of for of in _others()}
"""Options of other tools by name."""

# ---- settings by other names ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Without:
    """Said of a set by a switch: that it lacks this item."""

    item: str

    def __str__(self) -> str:
        return f"without {self.item}"


@cache
def _by_setting() -> Mapping[str, list[FlagRow]]:
    by_setting: dict[str, list[FlagRow]] = {}
    for row in (row for tool in TABLES for row in flag_rows(tool)):
        if row.setting and not row.note:
            by_setting.setdefault(row.setting, []).append(row)
    return by_setting


def other_names(setting: str) -> dict[str, Any]:
    """Names of a setting and its values in other tools, by field of `Setting`.

    >>> other_names("tp")["names"]
    ('tensor-model-parallel-size', 'tensor-parallel-size', 'parallelism.tensor_parallel_degree')
    """
    names: list[str] = []
    shorts: list[str] = []
    switches: dict[str, Any] = {}
    words: dict[str, str] = {}
    same: dict[str, Any] = {}
    for row in _by_setting().get(setting, ()):
        constant = row.ours[len(setting) :]
        if constant:
            if row.values == "0":
                given = Without(constant[1:]) if constant[0] == "-" else value_of(constant[1:])
                switches[row.flag] = given
            continue
        ours = {value for value in row.words.values() if not value.startswith("!")}
        if ours & {"true", "false", "-"}:
            continue
        first, *others = row.spellings
        shorts += [name for name in others if name.startswith("-")]
        if canonical(first) != setting:
            names.append(first)
        for theirs, value in row.words.items():
            if value.startswith("!"):
                words[theirs] = value[1:]
            elif value not in ("?", "~", theirs) and "=" not in value:
                same[theirs] = value or None
    return {
        "names": tuple(names),
        "short": "".join(shorts[:1]),
        "switches": switches,
        "words": words,
        "same_words": same,
    }


def written(tool: str, setting: str, value: str) -> tuple[str, ...] | None:
    """Flag of a tool with its value that says a setting has this value; None: it has none.

    >>> written("megatron", "tp", "8"), written("megatron", "recompute_modules", "norm")
    (('tensor-model-parallel-size', '8'), ('recompute-modules', 'layernorm'))
    >>> written("megatron", "order", "tp-cp-ep-pp-dp"), written("megatron", "schedule", "zbv")
    (('use-tp-pp-dp-mapping',), None)
    """
    of_setting = [row for row in flag_rows(tool) if row.setting == setting]
    ranked = sorted(of_setting, key=lambda row: (bool(row.note), row.ours != setting))
    wanted = value_of(value)
    for row in sorted(ranked, key=lambda row: canonical(row.flag) != setting):
        constant = row.ours[len(setting) + 1 :]
        if row.values == "0":
            if wanted == value_of(constant or "true"):
                return (row.flag,)
            if wanted is False and not constant:
                return (f"no-{row.flag}",)
        elif not constant:
            pairs = [*row.words.items()][::-1]
            words = {value_of(ours): theirs for theirs, ours in pairs if _is_value(ours)}
            if wanted in words:
                return row.flag, words[wanted]
            is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
            if is_number or not (words or any("=" in word for word in row.words.values())):
                return row.flag, value
    return None


def _is_value(word: str) -> bool:
    """True for a value of ours, which a row gives for a word of theirs."""
    return word != "" and word[0] not in "!?~-" and "=" not in word


# ---- options of which nothing follows ------------------------------------------------------------

OF_MODEL = "it belongs to the model; name a preset or a config.json"
_NOTHING = "it changes nothing that Stagewright computes; drop it"


def _advice(row: FlagRow) -> str:
    """What to say about an option that is none here; empty: nothing."""
    if row.ours.startswith("model."):
        return OF_MODEL
    return {"-": _NOTHING, "!": row.note}.get(row.ours, "")


_ROWS: Mapping[str, FlagRow] = {
    name: row for tool in (*TABLES[::-1], "common") for name, row in table(tool).items()
}
IGNORED: Mapping[str, int | None] = {n: row.limit for n, row in _ROWS.items() if row.ours == "-"}
"""Options that change nothing that is computed, and how many values each takes; None: any.

A command line may have them; in run files and keywords they are refused."""
FOREIGN: Mapping[str, str] = {n: said for n, row in _ROWS.items() if (said := _advice(row))}
"""What to say about options that are none here."""
