"""One number of many configurations at once: what computes with whole numbers computes with these.

A `Varying` has an entry per configuration, in exact arithmetic. Where code asks a column a question
(`if ranks > 1`), the first configuration answers for all; those that would have answered otherwise
are no longer `Cases.alike`: they need a computation of their own. So nobody has to say beforehand
what decides about the way that a computation takes.

>>> cases = Cases(3)
>>> tp = cases.varying(np.array([2, 4, 1]))
>>> heads = ceil(10 / tp) if tp > 1 else 10
>>> np.asarray(heads).tolist(), cases.alike.tolist()
([5, 3, 10], [True, True, False])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.arithmetic import ManyNumbers, ceil
from stagewright.arrays import Bool
from stagewright.integers import MOST, Whole, bound, floor, is_1, is_same, plus, times

Number: TypeAlias = "int | Fraction | Varying"
"""A number of one configuration, or of many."""


class Cases:
    """Configurations that are computed together, as long as they go the same way."""

    def __init__(self, count: int) -> None:
        """So many configurations, of which the first answers all questions."""
        self.count = count
        self.alike: Bool = np.ones(count, dtype=bool)
        """The configurations that have answered all questions as the first one has."""

    def varying(self, values: NDArray[np.integer[Any]]) -> Number:
        """A number of each configuration: an int where it is the same for all."""
        array = np.asarray(values)
        if array.shape != (self.count,) or array.dtype.kind not in "iu":
            raise ValueError(f"wanted {self.count} whole numbers, got {array!r}")
        if (array == array[0]).all():
            return int(array[0])
        return Varying(self, array.astype(np.int64), 1, bound(array))

    def answer(self, answers: NDArray[Any]) -> bool:
        """The first configuration's answer to a question."""
        first = bool(answers[0])
        self.alike &= answers == first
        return first


class Varying(ManyNumbers):
    """An exact number, whole or a fraction, per configuration; immutable.

    Arithmetic and comparisons are those of ints and Fractions; floats are refused, since whole
    numbers beyond 2^53 would not survive them. `np.asarray(number)` is an array of int64, of
    Python's ints where 64 bits do not hold a number, or of float64 for fractions.
    """

    __slots__ = ("above", "below", "cases", "most")
    __array_ufunc__ = None  # arithmetic with arrays would lose configurations in silence

    def __init__(self, cases: Cases, above: NDArray[Any], below: Whole, most: int) -> None:
        """The numbers `above / below`: `below` is positive, no `above` is more than +-`most`."""
        self.cases, self.above, self.below, self.most = cases, above, below, most

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        found = self.above if is_1(self.below) else (self.above / self.below).astype(np.float64)
        return found if dtype is None else found.astype(dtype)

    def __repr__(self) -> str:
        return f"<{self.first} and {self.cases.count - 1} others>"

    def __str__(self) -> str:
        """The number of the first configuration, for which errors speak."""
        return str(self.first)

    @property
    def denominator(self) -> Whole:
        """1 where the numbers are whole."""
        return 1 if is_1(self.below) or self == ceil(self) else self.below

    @property
    def numerator(self) -> Varying:
        """The numbers themselves where they are whole."""
        return self if is_1(self.below) else self.__floor__()

    @property
    def first(self) -> int | Fraction:
        """The number of the first configuration."""
        if is_1(self.below):
            return int(self.above[0])
        below = self.below if isinstance(self.below, int) else int(self.below[0])
        found = Fraction(int(self.above[0]), below)
        return found.numerator if found.denominator == 1 else found

    # ---- arithmetic ------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Varying:
        terms = _parts(other)
        if terms is None:
            return NotImplemented
        above, below, most = terms
        if is_same(self.below, below):
            return self._of(*plus(self.above, self.most, above, most), below)
        left = times(self.above, self.most, below, bound(below))
        right = times(above, most, self.below, bound(self.below))
        return self._of(*plus(*left, *right), self.under(below))

    __radd__ = __add__

    def __neg__(self) -> Varying:
        return self._of(-self.above, self.most, self.below)

    def __sub__(self, other: Any) -> Varying:
        terms = _parts(other)
        return NotImplemented if terms is None else self + -other

    def __rsub__(self, other: Any) -> Varying:
        return -self + other

    def __mul__(self, other: Any) -> Varying:
        terms = _parts(other)
        if terms is None:
            return NotImplemented
        above, below, most = terms
        return self._of(*times(self.above, self.most, above, most), self.under(below))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Varying:
        terms = _parts(other)
        if terms is None:
            return NotImplemented
        above, below, most = terms
        over = times(self.above, self.most, below, bound(below))
        return self._quotient(*over, times(above, most, self.below, bound(self.below))[0])

    def __rtruediv__(self, other: Any) -> Varying:
        terms = _parts(other)
        if terms is None:
            return NotImplemented
        above, below, most = terms
        over = times(above, most, self.below, bound(self.below))
        return self._quotient(*over, times(self.above, self.most, below, bound(below))[0])

    def __floordiv__(self, other: Any) -> Varying:
        return (self / other).__floor__()

    def __rfloordiv__(self, other: Any) -> Varying:
        return (other / self).__floor__()

    def __mod__(self, other: Any) -> Varying:
        return self - other * (self // other)

    def __rmod__(self, other: Any) -> Varying:
        return other - self * (other // self)

    def __divmod__(self, other: Any) -> tuple[Varying, Varying]:
        quotient = self // other
        return quotient, self - other * quotient

    def __rdivmod__(self, other: Any) -> tuple[Varying, Varying]:
        quotient = other // self
        return quotient, other - self * quotient

    def __pow__(self, exponent: int) -> Varying:
        return (
            reduce(lambda a, b: a * b, [self] * (exponent - 1), self) if exponent else self * 0 + 1
        )

    def __floor__(self) -> Varying:
        return self._of(floor(self.above, self.below), self.most, 1)

    def __ceil__(self) -> Varying:
        return -(-self).__floor__()

    def _of(self, above: Whole, most: int, below: Whole) -> Varying:
        if isinstance(above, int):
            above = np.full(self.cases.count, above, dtype=np.int64 if most <= MOST else object)
        return Varying(self.cases, above, below, most)

    def under(self, other: Whole) -> Whole:
        """The product of two denominators."""
        if is_1(other):
            return self.below
        return times(self.below, bound(self.below), other, bound(other))[0]

    def _quotient(self, above: Whole, most: int, below: Whole) -> Varying:
        """A quotient; where configurations that go on alone divide by 0, 1 stands for that."""
        if (below if isinstance(below, int) else below[0]) == 0:
            raise ZeroDivisionError("division of a varying number by 0")
        if isinstance(below, int):
            sign = 1 if below > 0 else -1
            return self._of(above * sign, most, below * sign)
        if below.min() > 0:
            return self._of(above, most, below)
        return self._of(above * np.sign(below), most, np.where(below == 0, 1, np.abs(below)))

    @property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        return is_1(self.below)

    def larger(self, other: Any) -> Varying:
        """The larger number of each configuration."""
        terms = _parts(other) or (0, 1, 1)
        left, right = _comparable(self, terms)
        below = self.below if is_same(self.below, terms[1]) else self.under(terms[1])
        above = np.asarray(np.maximum(left, right))
        return Varying(self.cases, above, below, max(bound(left), bound(right)))

    # ---- questions -------------------------------------------------------------------------------

    def __index__(self) -> int:
        """The number itself, as a size of something: configurations with another are not alike."""
        first = self.first
        assert isinstance(first, int)
        assert self == first
        return first

    def __bool__(self) -> bool:
        return self.cases.answer(self.above != 0)

    def __eq__(self, other: object) -> bool:
        return self is other or self._asked(other, np.equal)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._asked(other, np.less)

    def __le__(self, other: Any) -> bool:
        return self._asked(other, np.less_equal)

    def __gt__(self, other: Any) -> bool:
        return self._asked(other, np.greater)

    def __ge__(self, other: Any) -> bool:
        return self._asked(other, np.greater_equal)

    __hash__ = object.__hash__

    def _asked(self, other: Any, question: Callable[..., NDArray[Any]]) -> bool:
        terms = _parts(other)
        if terms is None:
            raise TypeError(f"a varying number and {other!r} cannot be compared")
        return self.cases.answer(question(*_comparable(self, terms)))


# ---- what code that takes either writes in the place of Python's own -----------------------------


def divides(ranks: Any, number: Any) -> Any:
    """Whether a whole number is a multiple of another, as a column of 0 and 1 where they vary."""
    rest = number % ranks
    if not isinstance(rest, Varying):
        return rest == 0
    return Varying(rest.cases, (rest.above == 0).astype(np.int64), 1, 1)


def position_of_largest(keys: Sequence[tuple[Any, ...]]) -> int:
    """The position of the largest of some tuples of whole numbers, the first of equal ones.

    Configurations where another one is the largest are not alike: to compare the tuples one by one
    would ask more than which one it is.

    >>> cases = Cases(3)
    >>> several = cases.varying(np.array([2, 3, 9]))
    >>> position_of_largest([(1, 4), (1, several), (0, 8)]), cases.alike.tolist()
    (0, [True, True, False])
    """
    cases = next((x.cases for key in keys for x in key if isinstance(x, Varying)), None)
    if cases is None:
        return max(range(len(keys)), key=keys.__getitem__)
    arrays = [[np.broadcast_to(np.asarray(x), cases.count) for x in key] for key in keys]
    best, largest_key = np.zeros(cases.count, dtype=np.int64), arrays[0]
    for position, key in enumerate(arrays[1:], 1):
        larger = np.zeros(cases.count, dtype=bool)
        for mine, other in reversed([*zip(key, largest_key, strict=True)]):
            larger = (mine > other) | ((mine == other) & larger)
        best = np.where(larger, position, best)
        pairs = zip(key, largest_key, strict=True)
        largest_key = [np.where(larger, mine, other) for mine, other in pairs]
    return Varying(cases, best, 1, len(keys)).__index__()


def gcd(a: Any, b: Any) -> Any:
    """The greatest common divisor of whole numbers."""
    if not (isinstance(a, Varying) or isinstance(b, Varying)):
        return math.gcd(a, b)
    number, other = (a, b) if isinstance(a, Varying) else (b, a)
    above, _, most = _parts(other) or (0, 1, 1)
    return Varying(number.cases, np.gcd(number.above, above), 1, max(number.most, most))


def in_steps(function: Callable[[float], float], number: Any, steps: int) -> Any:
    """What a function makes of a number, as a whole number of steps, of which `steps` are 1.

    >>> in_steps(math.exp, 0, 10), in_steps(math.sqrt, Cases(2).varying(np.array([4, 9])), 10)
    (Fraction(1, 1), <2 and 1 others>)
    """
    if not isinstance(number, Varying):
        return Fraction(round(function(float(number)) * steps), steps)
    values, of = np.unique(np.asarray(number, dtype=np.float64), return_inverse=True)
    found = np.array([round(function(x) * steps) for x in values.tolist()], dtype=np.int64)
    return Varying(number.cases, found[of], steps, max(1, int(np.abs(found).max())))


def first_of(number: Any) -> Any:
    """The number of the first configuration; any other number as it is."""
    return number.first if isinstance(number, Varying) else number


# ---- exact arithmetic on arrays ------------------------------------------------------------------


def _parts(number: Any) -> tuple[Whole, Whole, int] | None:
    """Numerator, denominator and a bound of the numerator; None: not an exact number."""
    if isinstance(number, Varying):
        return number.above, number.below, number.most
    if isinstance(number, int):
        return int(number), 1, max(1, abs(number))
    if isinstance(number, Fraction):
        return number.numerator, number.denominator, max(1, abs(number.numerator))
    return None


def _comparable(a: Varying, b: tuple[Whole, Whole, int]) -> tuple[Whole, Whole]:
    """Two numbers, times the product of their denominators."""
    above, below, most = b
    if is_same(a.below, below):
        return a.above, above
    left = times(a.above, a.most, below, bound(below))
    return left[0], times(above, most, a.below, bound(a.below))[0]
