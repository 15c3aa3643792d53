"""Lists and ranges in place of one value: as text of the command line, and in run files.

| text        | values                                              |
|-------------|-----------------------------------------------------|
| `1,2,4,8`   | these                                               |
| `1:8`       | every whole number from 1 to 8                      |
| `8:64:8`    | from 8 to 64 in steps of 8                          |
| `1:64:x2`   | from 1 to 64, each twice the one before             |
| `none,1:4`  | what follows where nothing is given, and 1 to 4     |
| `on,off`    | of a switch: both                                   |
| `9,7/8,8`   | of a setting that is a list itself: lists between / |
| `dp/none`   | of such a setting: the list of dp, and none at all  |

No entry may be empty.

>>> values_of(int, "1:8:x2,12"), values_of(bool, "on,off"), values_of(tuple, "9,7/8,8")
((1, 2, 4, 8, 12), (True, False), ((9, 7), (8, 8)))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError

MOST_VALUES = 10_000
"""Of one setting: more are a mistake in a range, or no list that anybody wants to see searched."""

Kind = type | tuple[str, ...]

_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_NUMBERS = "values such as 1,2,4 or 1:8 or 8:64:8 or 1:64:x2"
_LISTS: Mapping[type, str] = {
    tuple: "lists with / between them, such as 9,7/8,8, and none for the default",
    frozenset: "lists with / between them, such as dp/tp,dp, and none for an empty one",
}


def is_listed(kind: Kind, value: object) -> bool:
    """Whether a value of a run file stands for several: a list, or text with a comma or a range.

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
    """The values that a list, a range or a single value stands for, in order, each once.

    `name` is the setting's, for errors. Raises UserError for what is no number, for an empty entry,
    for ranges that hold nothing, and for more than `MOST_VALUES`.
    """
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        nested = [tuple(cast("list[Any]", i)) if isinstance(i, list) else i for i in items]
        for item in items if kind not in (tuple, frozenset) else ():
            if isinstance(item, list | tuple):
                got = shown(cast("object", item))
                raise UserError(f"{name}: got {got}, a list within a list; wanted one list")
        of_each = [(i,) if kind in (tuple, frozenset) else values_of(kind, i, name) for i in nested]
        found = [each for some in of_each for each in some]
    elif isinstance(value, str):
        found = list(_of_text(kind, value, name))
    else:
        found = [_checked(value, name)]
    if not found:
        raise UserError(f"{name}: the list is empty, wanted {_wanted(kind)}")
    if kind is frozenset:
        found = [each if each is None else frozenset(each) for each in found]
    return tuple(dict.fromkeys(found))


def _checked(value: object, name: str) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} is {value}, wanted a finite number")
    return value


def _of_text(kind: Kind, text: str, name: str) -> Iterator[Any]:
    """The values of one text."""
    if not text.strip():
        return
    if kind is dict:
        raise UserError(f"{name}: takes no list; give one")
    if kind in (tuple, frozenset):
        for each in text.split("/"):
            if each.strip().lower() == "none":
                yield None if kind is tuple else ()
            else:
                yield _list_of(each, text, name, _wanted(kind))
        return
    for word in _entries(text, text, name, _wanted(kind)):
        if word.lower() == "none" and not isinstance(kind, tuple):
            yield None
        elif kind is bool:
            if word.lower() not in _SWITCH:
                raise UserError(f"{name}: got {shown(word)}, wanted on or off")
            yield _SWITCH[word.lower()]
        elif kind in (int, float):
            yield from _numbers(kind is int, word, name)
        else:
            yield word


def _wanted(kind: Kind) -> str:
    """What a list of values of a setting looks like."""
    if isinstance(kind, tuple):
        return f"words with commas between them: {', '.join(kind)}"
    if kind is bool:
        return "on, off, or on,off"
    if kind in _LISTS:
        return _LISTS[kind]
    return _NUMBERS if kind in (int, float) else "words with commas between them"


def _entries(text: str, whole: str, name: str, wanted: str) -> list[str]:
    """The words between commas; UserError where one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{name}: got {shown(whole)}, in which an entry is empty; wanted {wanted}")
    return words


def _list_of(text: str, whole: str, name: str, wanted: str) -> tuple[Any, ...]:
    """One value of a setting that is a list itself."""
    words = tuple(_entries(text, whole, name, wanted))
    if any(word.lower() == "none" for word in words):
        raise UserError(f"{name}: got {shown(whole)}, with none as one of several; wanted {wanted}")
    numbers = all(word.isdecimal() and word.isascii() for word in words)
    return tuple(map(int, words)) if numbers else words


def _numbers(whole: bool, text: str, name: str) -> Iterator[float]:
    """A number, or those of a range."""
    first, *rest = text.split(":")
    if len(rest) > 2:
        raise UserError(f"{name}: cannot read {shown(text)}, wanted {_NUMBERS}")
    low = _number(whole, first, text, name)
    if not rest:
        yield low
        return
    high = _number(whole, rest[0], text, name)
    step = rest[1] if len(rest) > 1 else "1"
    factor = step.startswith("x")
    by = _number(whole and not factor, step.removeprefix("x"), text, name)
    if high < low:
        raise UserError(f"{name}: {text} runs backwards and holds nothing; use {rest[0]}:{first}")
    if by <= (1 if factor else 0) or (factor and low <= 0):
        raise UserError(f"{name}: {text} never ends; wanted a step above 0, or a factor above 1")
    if len(rest) == 1 and (low % 1 or high % 1):
        raise UserError(f"{name}: {text} needs a step, such as {text}:0.1")
    count = 1 + int(
        math.log(high / low * (1 + 1e-12)) / math.log(by) if factor else (high - low) / by + 1e-9
    )
    if count > MOST_VALUES:
        raise UserError(
            f"{name}: {text} holds {count:,} values, wanted at most {MOST_VALUES:,}; give a step"
        )
    for nth in range(count):
        value = low * by**nth if factor else low + nth * by
        yield int(value) if whole else float(f"{value:.12g}")


def _number(whole: bool, word: str, text: str, name: str) -> float:
    try:
        value = int(word) if whole else float(word)
    except ValueError:
        what = "a whole number" if whole else "a number"
        raise UserError(f"{name}: got {shown(text)}, wanted {what}, or {_NUMBERS}") from None
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}, wanted a finite number")
    return value
