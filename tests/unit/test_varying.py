"""A column computes for each configuration what Python's own numbers compute for it alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagewright.arithmetic import ceil, exact, largest, ratio, smallest
from stagewright.varying import Cases, Varying, first_of, gcd, position_of_largest

ROWS = 7
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": ratio,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "divmod": lambda a, b: sum(divmod(a, b)),
    "ceil": lambda a, b: ceil(ratio(a, b)),
    "largest": lambda a, b: largest([a, 7, b]),
    "smallest": lambda a, b: smallest([a, b]),
}


def exactly(number: Any) -> list[Fraction]:
    """The numbers of a column, as Fractions."""
    if not isinstance(number, Varying):
        return [Fraction(number)] * ROWS
    below = np.broadcast_to(np.asarray(number.below), ROWS)
    return [Fraction(int(a), int(b)) for a, b in zip(number.above, below, strict=True)]


@pytest.mark.parametrize("largest_number", [9, 2**40, 2**62])
def test_arithmetic_is_exact(largest_number: int) -> None:
    """Random expressions of columns and numbers, also beyond 64 bits."""
    dice = random.Random(0)
    for _ in range(60):
        cases = Cases(ROWS)
        held: list[Any] = [dice.randint(1, 9), Fraction(dice.randint(1, 9), dice.randint(2, 9))]
        each: list[list[Any]] = [[x] * ROWS for x in held]
        for _ in range(2):
            each.append([dice.randint(1, largest_number) for _ in range(ROWS)])
            held.append(cases.varying(np.array(each[-1])))
        for name in dice.choices(sorted(OPERATIONS), k=5):
            i, j = dice.randrange(len(held)), dice.randrange(len(held))
            if any(x == 0 for x in each[j]):
                continue
            held.append(OPERATIONS[name](held[i], held[j]))
            pairs = zip(each[i], each[j], strict=True)
            each.append([Fraction(OPERATIONS[name](a, b)) for a, b in pairs])
            assert exactly(held[-1]) == each[-1], name
        assert cases.alike.all()


def test_questions_tell_configurations_apart() -> None:
    """The first one answers; those that would have answered otherwise are not alike."""
    cases = Cases(4)
    column = cases.varying(np.array([4, 8, 6, 9]))
    assert isinstance(column, Varying)
    assert column % 2 == 0
    assert cases.alike.tolist() == [True, True, True, False]
    assert not column > 7
    assert cases.alike.tolist() == [True, False, True, False]
    assert column
    assert column != 5
    assert cases.alike.tolist() == [True, False, True, False]


def test_whole_numbers_stay_what_they_are() -> None:
    """What columns need in the place of Python's functions does nothing else to ints."""
    assert (ceil(Fraction(7, 2)), ceil(7), largest([1, 3, 2]), gcd(12, 18)) == (4, 7, 3, 6)
    assert ratio(6, 4) == Fraction(3, 2)
    assert type(exact(np.int64(3))) is int
    assert math.ceil(ratio(3, 2)) == first_of(2)


def test_no_floats_and_no_arrays() -> None:
    """Neither would keep whole numbers exact, or configurations apart."""
    column: Any = Cases(2).varying(np.array([1, 2]))
    for other in (0.5, np.array([1, 2])):
        with pytest.raises(TypeError):
            _ = column * other
        with pytest.raises(TypeError):
            _ = other * column
    assert np.asarray(column / 2).tolist() == [0.5, 1.0]
    assert np.asarray(column).dtype == np.int64


def test_the_position_of_the_largest_is_what_is_asked() -> None:
    """Configurations with the same position are alike, whatever else compares otherwise."""
    dice = random.Random(1)
    for _ in range(40):
        cases = Cases(ROWS)
        each = [[(dice.randint(0, 1), dice.randint(0, 3)) for _ in range(ROWS)] for _ in range(3)]
        keys = [
            tuple(cases.varying(np.array([key[i] for key in of])) for i in range(2)) for of in each
        ]
        best = [max(range(3), key=lambda i: each[i][row]) for row in range(ROWS)]
        assert position_of_largest(keys) == best[0]
        assert cases.alike.tolist() == [position == best[0] for position in best]
