"""Tables of other tools' flags: `data/launch/TOOL.csv`, a row for each flag.

| column | |
|---|---|
| `flag` | spellings without dashes before them; `search --as` writes the first; |
| | `sglang-*`: all that begin so |
| `values` | words that follow: a number, `0-1`, `+` or `*` |
| `ours` | `tp`: the flag's value is that of tp. `zero=1`: the flag, whatever its value, sets zero |
| | to 1. `no_overlap-dp`: the flag removes dp from the list. `model.` and a field: its value. |
| | `-`: no effect on time or size. `?`: changes the step in a way that is not known here. |
| | `~`: left out, `note` says what that does to the figures. `!`: refused, `note` says what |
| | to use |
| `words` | `THEIRS>OURS`, between semicolons: values with other names; OURS is a value, |
| | `-`, `?`, `~`, or `setting=value`, several joined by `&`. Where `ours` is `-` and a word is |
| | `-`, all values without a word are `?` |
| `note` | reason or assumption |

>>> table("megatron")["tensor_model_parallel_size"].ours
'tp'
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, cast

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class FlagRow(NamedTuple):
    """A flag of a tool, and what it says in our terms."""

    flag: str
    values: str
    ours: str
    words: Mapping[str, str]
    note: str
    spellings: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """The setting that it gives; empty for all others."""
        match = re.match(r"[a-z]\w*(?=$|[=-])", self.ours)
        return match[0] if match else ""

    def effect_of(self, text: str) -> str:
        """What a value of a flag without a setting does: `-`, `?` or `~`.

        >>> table("vllm")["cpu_offload_gb"].effect_of("0.0")
        '-'
        """
        value = value_of(text)
        words = (word for theirs, word in self.words.items() if value_of(theirs) == value)
        return next(words, "?" if "-" in self.words.values() else "-")

    @property
    def limit(self) -> int | None:
        """Largest number of values; None: any number."""
        return int(self.values[-1]) if self.values[-1:].isdigit() else None

    @property
    def bounds_memory(self) -> bool:
        """True if memory is an upper bound without the flag's effect, as the note says."""
        return re.search(r"memory (is an|are) upper bound", self.note) is not None


def canonical(name: str) -> str:
    """A name as a keyword: `--micro-batch-size` and `training.seq_len` have no dashes and dots.

    >>> canonical("micro-batch-size"), canonical("training.seq_len")
    ('micro_batch_size', 'training_seq_len')
    """
    return name.lstrip("-").replace("-", "_").replace(".", "_")


@cache
def flag_rows(tool: str) -> tuple[FlagRow, ...]:
    """Rows of a tool, in order."""
    made: list[FlagRow] = []
    for flag, values, ours, words, note in rows("launch", f"{tool}.csv"):
        pairs = dict(pair.split(">", 1) for pair in words.split(";") if pair)
        spellings = tuple(flag.split())
        made.append(FlagRow(spellings[0], values, ours, pairs, note, spellings))
    return tuple(made)


@cache
def table(tool: str) -> Mapping[str, FlagRow]:
    """Rows of a tool by each spelling of their flags; of two, the first."""
    by_name: dict[str, FlagRow] = {}
    for row in flag_rows(tool):
        for name in row.spellings:
            by_name.setdefault(canonical(name), row)
    return by_name


def rows(*path: str) -> list[list[str]]:
    """Rows below the header of a CSV of the package's data, without comments."""
    text = files("stagewright").joinpath("data", *path).read_text("utf-8")
    return list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))[1:]


def row_of(rows: Mapping[str, FlagRow], name: str) -> FlagRow | None:
    """Row of a flag. `--no-x` has the row of `x`, switched off, or ignored if `x` is."""
    if name in rows:
        return rows[name]
    positive = rows.get(name.removeprefix("no_"))
    if positive and positive.ours == "-":
        return positive._replace(values="0")
    if positive and positive.values == "0" and positive.ours == positive.setting:
        return positive._replace(ours=f"{positive.setting}=false")
    beginnings = (row for key, row in rows.items() if key[-1] == "*" and name.startswith(key[:-1]))
    return next(beginnings, None)


def value_of(text: str) -> Any:
    """A word as a number, a truth value or text.

    >>> value_of("8"), value_of("1e-2"), value_of("true"), value_of("a2a")
    (8, 0.01, True, 'a2a')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    return text


def nested(values: Mapping[str, str]) -> dict[str, Any]:
    """Words by keys with dots as nested mappings of values.

    >>> nested({"stage": "3", "bf16.enabled": "true"})
    {'stage': 3, 'bf16': {'enabled': True}}
    """
    whole: dict[str, Any] = {}
    for name, text in values.items():
        put(whole, name, value_of(text))
    return whole


def dotted(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested mappings by keys with dots: the reverse of `nested`.

    >>> [*dotted({"stage": 3, "bf16": {"enabled": True}})]
    [('stage', 3), ('bf16.enabled', True)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def put(data: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a key with dots in nested mappings."""
    *keys, last = name.split(".")
    for key in keys:
        inner = data.get(key)
        data[key] = inner if isinstance(inner, dict) else {}
        data = data[key]
    data[last] = value
