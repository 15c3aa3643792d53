"""Tables of other tools' flags: `data/launch/TOOL.csv`, a row for each flag.

| column | |
|---|---|
| `flag` | its name without dashes before it, then other spellings; the first one is written; |
| | `sglang-*`: all that begin so |
| `values` | words that follow: a number, `0-1`, `+` or `*` |
| `ours` | `tp`: that setting has the value. `zero=1`: it has this one. `no_overlap-dp`: the list |
| | lacks an item. `model.FIELD`: part of the model. `-`: no effect on time or size. `?`: changes |
| | the step in a way that is not known here. `~`: left out, `note` says what that does to the |
| | figures. `!`: refused, `note` says what to use |
| `words` | `THEIRS>OURS`, between semicolons: values with other names; OURS is a value, |
| | `-`, `?`, `~`, or `setting=value`, several joined by `&` |
| `note` | reason or assumption |

>>> table("megatron")["tensor_model_parallel_size"].ours
'tp'
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.launch.shell import shown

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class FlagRow(NamedTuple):
    """A flag of a tool, and what it says in our terms."""

    flag: str
    values: str
    ours: str
    words: Mapping[str, str]
    note: str

    @property
    def setting(self) -> str:
        """The setting that it gives; empty for all others."""
        match = re.match(r"[a-z]\w*(?=$|[=-])", self.ours)
        return match[0] if match else ""


class Flag(NamedTuple):
    """A flag of a command line with its values; no row: a flag that the table lacks."""

    name: str
    values: tuple[str, ...]
    row: FlagRow | None

    @property
    def text(self) -> str:
        """The values as the script has them."""
        return " ".join(map(shown, self.values))


def canonical(name: str) -> str:
    """A name as a keyword: `--micro-batch-size` and `training.seq_len` have no dashes and dots.

    >>> canonical("micro-batch-size"), canonical("training.seq_len")
    ('micro_batch_size', 'training_seq_len')
    """
    return name.lstrip("-").replace("-", "_").replace(".", "_")


@cache
def table(tool: str) -> Mapping[str, FlagRow]:
    """Rows of a tool by each spelling of their flags."""
    text = files("stagewright").joinpath("data", "launch", f"{tool}.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows: dict[str, FlagRow] = {}
    for flag, values, ours, words, note in list(csv.reader(lines))[1:]:
        pairs = dict(pair.split(">", 1) for pair in words.split(";") if pair)
        first, *_ = spellings = flag.split()
        row = FlagRow(first, values, ours, pairs, note)
        rows |= {canonical(name): row for name in spellings}
    return rows


def parse(words: Sequence[str], tables: Iterable[Mapping[str, FlagRow]]) -> Iterator[Flag]:
    """Flags of a command line; words that belong to none are passed over.

    A flag that no table has takes the words up to the next one.
    """
    rows: dict[str, FlagRow] = {}
    for more in tables:
        rows |= {name: row for name, row in more.items() if name not in rows}
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        if not _is_flag(word):
            continue
        name, equals, value = word.partition("=")
        row = _row(rows, canonical(name))
        if equals:
            yield Flag(name, (value,), row)
            continue
        most = _MOST.get(row.values) if row else None
        most = int(row.values) if row and row.values.isdigit() else most
        count = 0
        while i + count < len(words) and count != most:
            following = words[i + count]
            if _is_flag(following) and not (row and row.values == "1" and count == 0 and
                                            _NUMBER.fullmatch(following)):  # fmt: skip
                break
            count += 1
        yield Flag(name, tuple(words[i : i + count]), row)
        i += count


def _row(rows: Mapping[str, FlagRow], name: str) -> FlagRow | None:
    """Row of a flag; `--no-x` switches off what `x` is, which may mean nothing here, too."""
    if name in rows:
        return rows[name]
    positive = rows.get(name.removeprefix("no_"))
    if positive and positive.ours == "-":
        return positive._replace(values="0")
    beginnings = (row for key, row in rows.items() if key[-1] == "*" and name.startswith(key[:-1]))
    return next(beginnings, None)


_MOST = {"0-1": 1}


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def value_of(text: str) -> Any:
    """A word as a number, a truth value or text.

    >>> value_of("8"), value_of("1e-2"), value_of("true"), value_of("a2a")
    (8, 0.01, True, 'a2a')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    return text
