"""Lists and ranges of values, as text of the command line and in run files.

| text        | values                                         |
|-------------|------------------------------------------------|
| `1,2,4,8`   | these                                          |
| `1:8`       | every integer from 1 to 8                      |
| `8:64:8`    | from 8 to 64 in steps of 8                     |
| `1:64:x2`   | 1, 2, 4, ..., 64                               |
| `none,1:4`  | the default, and 1 to 4                        |
| `on,off`    | both values of a switch                        |
| `9,7/8,8`   | two values of a setting whose values are lists |
| `dp/none`   | such a setting: the list of dp, and no list    |

>>> values_of(int, "1:8:x2,12"), values_of(bool, "on,off"), values_of(tuple, "9,7/8,8")
((1, 2, 4, 8, 12), (True, False), ((9, 7), (8, 8)))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.run.sections.declare import items_of

MOST_VALUES = 10_000
"""Maximum values of one setting."""

Kind = type | tuple[str, ...]

_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_NUMBERS = "values such as 1,2,4 or 1:8 or 8:64:8 or 1:64:x2"
_EXPECTED: Mapping[type, str] = {
    int: _NUMBERS,
    float: _NUMBERS,
    bool: "on, off, or on,off",
    tuple: "lists with / between them, such as 9,7/8,8, and none for the default",
    frozenset: "lists with / between them, such as dp/tp,dp, and none for an empty one",
}


def _expected(kind: Kind) -> str:
    """Expected text of a list, for errors."""
    if isinstance(kind, tuple):
        return f"words with commas between them: {', '.join(kind)}"
    return _EXPECTED.get(kind, "words with commas between them")


def is_listed(kind: Kind, value: object) -> bool:
    """True if a value of a run file is a list of values, or text with a comma or a range.

    >>> is_listed(int, [1, 2]), is_listed(int, "1:8"), is_listed(int, 8), is_listed(tuple, [9, 7])
    (True, True, False, False)
    """
    if kind in (tuple, frozenset):
        if isinstance(value, str):
            return "/" in value
        items = cast("list[object]", value) if isinstance(value, list) else []
        return bool(items) and all(isinstance(item, list) for item in items)
    if kind is dict:
        return False
    if isinstance(value, list | tuple):
        return True
    if not isinstance(value, str) or "\n" in value:  # the text of a file is one value
        return False
    return bool(re.search(r"[,:]" if kind in (int, float) else ",", value))


def values_of(kind: Kind, value: object, name: str = "value") -> tuple[Any, ...]:
    """Values of a list, a range or a single value, in order, without repetition.

    `name`: the setting, for errors. Raises UserError for an invalid number, an empty entry or
    range, and more than `MOST_VALUES`.
    """
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        nested = [tuple(cast("list[Any]", i)) if isinstance(i, list) else i for i in items]
        for item in items if kind not in (tuple, frozenset) else ():
            if isinstance(item, list | tuple):
                got = shown(cast("object", item))
                raise UserError(f"{name}: got {got}, a list within a list; wanted one list")
        if kind in (tuple, frozenset):
            values = nested
        else:
            values = [v for item in nested for v in values_of(kind, item, name)]
    elif isinstance(value, str):
        values = list(_parse(kind, value, name))
    else:
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}, wanted a finite number")
        values = [value]
    if not values:
        raise UserError(f"{name}: the list is empty, wanted {_expected(kind)}")
    if kind is frozenset:
        values = [v if v is None else frozenset(cast("Iterable[Any]", v)) for v in values]
    return tuple(dict.fromkeys(values))


def _parse(kind: Kind, text: str, name: str) -> Iterator[Any]:
    """Values of a text."""
    if not text.strip():
        return
    if kind is dict:
        raise UserError(f"{name}: takes no list; give one")
    for item in text.split("/") if kind in (tuple, frozenset) else [text]:
        words = [word.strip() for word in item.split(",")]
        if not all(words):
            raise UserError(
                f"{name}: got {shown(text)}, in which an entry is empty; wanted {_expected(kind)}"
            )
        if kind in (tuple, frozenset):
            yield _parse_tuple(kind, words, text, name)
        else:
            for word in words:
                yield from _parse_word(kind, word, name)


def _parse_tuple(kind: Kind, words: Sequence[str], text: str, name: str) -> tuple[Any, ...] | None:
    """One value of a setting whose values are lists."""
    if any(word.lower() == "none" for word in words):
        if len(words) == 1:
            return None if kind is tuple else ()
        raise UserError(
            f"{name}: got {shown(text)}, with none as one of several; wanted {_expected(kind)}"
        )
    return items_of(",".join(words))


def _parse_word(kind: Kind, word: str, name: str) -> Iterator[Any]:
    if word.lower() == "none" and not isinstance(kind, tuple):
        yield None
    elif kind is bool:
        if word.lower() not in _SWITCH:
            raise UserError(f"{name}: got {shown(word)}, wanted on or off")
        yield _SWITCH[word.lower()]
    elif kind in (int, float):
        yield from _parse_range(kind is int, word, name)
    else:
        yield word


def _parse_range(integer: bool, text: str, name: str) -> Iterator[float]:
    """A number, or the numbers of a range."""
    first, *rest = text.split(":")
    if len(rest) > 2:
        raise UserError(f"{name}: cannot read {shown(text)}, wanted {_NUMBERS}")
    low = _parse_number(integer, first, text, name)
    if not rest:
        yield low
        return
    high = _parse_number(integer, rest[0], text, name)
    step_text = rest[1] if len(rest) > 1 else "1"
    geometric = step_text.startswith("x")
    step = _parse_number(integer and not geometric, step_text.removeprefix("x"), text, name)
    if high < low:
        raise UserError(f"{name}: {text} runs backwards and holds nothing; use {rest[0]}:{first}")
    if step <= (1 if geometric else 0) or (geometric and low <= 0):
        raise UserError(f"{name}: {text} never ends; wanted a step above 0, or a factor above 1")
    if len(rest) == 1 and (low % 1 or high % 1):
        raise UserError(f"{name}: {text} needs a step, such as {text}:0.1")
    steps = (
        math.log(high / low * (1 + 1e-12)) / math.log(step)
        if geometric
        else (high - low) / step + 1e-9
    )
    if not steps < MOST_VALUES:
        count = f"{1 + int(steps):,}" if steps < 1e18 else "endless"
        raise UserError(
            f"{name}: {text} holds {count} values, wanted at most {MOST_VALUES:,}; give a step"
        )
    for i in range(1 + int(steps)):
        value = low * step**i if geometric else low + i * step
        yield int(value) if integer else float(f"{value:.12g}")


def _parse_number(integer: bool, word: str, text: str, name: str) -> float:
    try:
        if not word.isascii() or "_" in word:  # which Python reads
            raise ValueError
        value = int(word) if integer else float(word)
    except ValueError:
        expected = "a whole number" if integer else "a number"
        raise UserError(f"{name}: got {shown(text)}, wanted {expected}, or {_NUMBERS}") from None
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}, wanted a finite number")
    return value
