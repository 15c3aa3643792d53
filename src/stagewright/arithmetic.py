"""Arithmetic on exact numbers of one configuration, or of many at once (`varying`).

What code that takes either writes in the place of Python's own. Sizes are read and printed with it,
for which nobody should wait until numpy is imported.

>>> ceil(7), ceil(Fraction(7, 2)), largest([3, 5]), ratio(1, 2)
(7, 4, 5, Fraction(1, 2))
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from operator import index
from typing import Any


class ManyNumbers:
    """An exact number of each of many configurations: `varying.Varying`.

    No abstract base class: to ask whether a number is one of these would take four times as long.
    """

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        raise NotImplementedError

    def larger(self, other: Any) -> Any:
        """The larger number of each configuration."""
        raise NotImplementedError

    def __truediv__(self, other: Any) -> Any:
        raise NotImplementedError

    def __rtruediv__(self, other: Any) -> Any:
        raise NotImplementedError


def is_integer(number: object) -> bool:
    """Whether this is a whole number, or whole numbers of many configurations."""
    return isinstance(number, int) or (isinstance(number, ManyNumbers) and number.is_whole)


def exact(number: Any) -> Any:
    """An int from whatever stands for one (numpy's overflow in silence); many as they are."""
    return number if isinstance(number, ManyNumbers) else index(number)


def ceil(number: Any) -> Any:
    """The least whole number that is not less; of whole numbers, they themselves."""
    return number if is_integer(number) else math.ceil(number)


def largest(numbers: Iterable[Any]) -> Any:
    """The largest number of each configuration: `max` would ask which one it is."""
    every = [*numbers]
    many = [x for x in every if isinstance(x, ManyNumbers)]
    if not many:
        return max(every)
    some = [max(rest)] if (rest := [x for x in every if not isinstance(x, ManyNumbers)]) else []
    return reduce(lambda a, b: a.larger(b), [*many, *some])


def smallest(numbers: Iterable[Any]) -> Any:
    """The smallest number of each configuration."""
    return -largest([-x for x in numbers])


def ratio(above: Any, below: Any) -> Any:
    """The exact quotient: a Fraction, or that of many configurations."""
    if isinstance(above, ManyNumbers) or isinstance(below, ManyNumbers):
        return above / below
    return Fraction(above, below)
