"""Rules of single fields of a model, read from their annotations: types and limits.

>>> class Sizes(NamedTuple):
...     heads: Annotated[int, Count(1, 64)] = 1
>>> rules(Sizes)["heads"].wanted(0)
'a whole number from 1 to 64'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin
from typing import get_type_hints as _hints

MOST = 2**31
"""The largest size that is believed where nothing smaller is said."""


class Count(NamedTuple):
    """The least and the largest whole number of a field, or of each item of a tuple."""

    least: int
    most: int = MOST
    words: str = ""
    """Words for the wanted value, where they say more than the limits."""

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Number:
    """A condition of a finite number, in words and as a test."""

    words: str
    accepts: Callable[[float], bool]


@dataclass(frozen=True)
class _Mechanisms:
    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


class Needs(_Mechanisms):
    """The field has its default in a model without these mechanisms (`checks.MECHANISMS`)."""


class Excludes(_Mechanisms):
    """The field has its default in a model with any of these mechanisms (`checks.MECHANISMS`)."""


ANY_NUMBER = Number("a number", lambda x: True)
POSITIVE = Number("a number above 0", lambda x: x > 0)
FRACTION = Number("a number above 0 and at most 1", lambda x: 0 < x <= 1)
PROBABILITY = Number("a number from 0 to below 1", lambda x: 0 <= x < 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that a field may have, and the mechanisms that it belongs to."""

    type: Any
    """The annotated type without None."""
    default: Any
    optional: bool = False
    """The field may be None."""
    count: Count | None = None
    number: Number = ANY_NUMBER
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The words to choose from, of a field that is one of several words."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def wanted(self, value: object) -> str:
        """The wanted value, in words; empty if this value is right."""
        if self.optional and value is None:
            return ""
        words = self._wanted(value)
        return f"None or {words}" if words and self.optional else words

    def _wanted(self, value: object) -> str:
        if self.type is str:
            return "" if type(value) is str else "text"
        if self.type is bool:
            return "" if type(value) is bool else "True or False"
        if self.type is int and self.count:
            right = is_count(value, self.count.least, self.count.most)
            return "" if right else f"a whole number {self.count}"
        if self.type is float:
            right = is_number(value) and self.number.accepts(cast(float, value))
            return "" if right else self.number.words
        if self.choices:
            return "" if value in self.choices else f"one of {', '.join(self.choices)}"
        if self.count:
            items = cast("tuple[object, ...]", value) if type(value) is tuple else (None,)
            right = all(is_count(item, self.count.least, self.count.most) for item in items)
            return "" if right else self.count.words or f"whole numbers {self.count}"
        return ""


def is_count(value: object, least: int, most: int) -> bool:
    """True for a whole number within limits; True and 1.0 are none."""
    return type(value) is int and least <= value <= most


def is_number(value: object) -> bool:
    """True for a number one would write: NaN, infinity and 10**400 are none."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e9


@cache
def rules(kind: type) -> dict[str, Rule]:
    """The rule of each field of a dataclass, in the order of its fields."""
    fields = getattr(kind, "__dataclass_fields__", {})
    return {
        name: _rule(hint, fields[name].default if name in fields else MISSING)
        for name, hint in _hints(kind, include_extras=True).items()
    }


def _rule(hint: Any, default: object) -> Rule:
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *given = get_args(hint)
        notes = tuple(given)
    optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if optional:
        hint = next(x for x in get_args(hint) if x is not NoneType)
    return Rule(
        type=hint,
        default=default,
        optional=optional,
        count=next((x for x in notes if isinstance(x, Count)), None),
        number=next((x for x in notes if isinstance(x, Number)), ANY_NUMBER),
        needs=tuple(n for x in notes if isinstance(x, Needs) for n in x.names),
        excludes=tuple(n for x in notes if isinstance(x, Excludes) for n in x.names),
    )
