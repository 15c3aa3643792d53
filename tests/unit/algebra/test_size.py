"""Sizes: algebraic laws, text and substitution, each against exact fractions."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import cases
from stagewright.algebra.size import Size, product, size, total

pytestmark = pytest.mark.numerics  # exact arithmetic against Fraction, on many draws

NAMES = ["B", "S", "H", "tp", "lambda"]  # A keyword of Python must not confuse generated code.
Values = dict[str, int]
# A size beside its meaning: the same operations, done on fractions.
Pair = tuple[Size, Callable[[Values], Fraction]]


def both(operation: Callable[..., Any], *args: Pair) -> Pair:
    """Apply an operation to sizes, and to fractions."""
    made = operation(*[x for x, _ in args])
    return made, lambda v: Fraction(operation(*[meaning(v) for _, meaning in args]))


symbols: st.SearchStrategy[Pair] = st.sampled_from(NAMES).map(
    lambda n: (size(n), lambda v: Fraction(v[n]))
)
numbers: st.SearchStrategy[Pair] = st.fractions(-3, 3, max_denominator=4).map(
    lambda c: (size(c), lambda v: c)
)
divisors: st.SearchStrategy[Pair] = st.one_of(
    symbols,
    st.integers(1, 4).map(lambda c: (size(c), lambda v: Fraction(c))),
)


def grow(pairs: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    """One more operation on top."""
    return st.one_of(
        st.builds(lambda a, b: both(lambda x, y: x + y, a, b), pairs, pairs),
        st.builds(lambda a, b: both(lambda x, y: x - y, a, b), pairs, pairs),
        st.builds(lambda a, b: both(lambda x, y: x * y, a, b), pairs, pairs),
        st.builds(lambda a, b: both(lambda x, y: x / y, a, b), pairs, divisors),
        st.builds(lambda a, n: both(lambda x: x**n, a), pairs, st.integers(0, 2)),
    )


pairs = st.recursive(symbols | numbers, grow, max_leaves=8)
sizes = pairs.map(lambda p: p[0])
values = st.fixed_dictionaries({n: st.integers(1, 6) for n in NAMES})


@given(sizes, sizes, sizes)
def test_sizes_are_a_commutative_ring(a: Size, b: Size, c: Size) -> None:
    assert a + b is b + a
    assert a * b is b * a
    assert (a + b) + c is a + (b + c)
    assert (a * b) * c is a * (b * c)
    assert a * (b + c) is a * b + a * c
    assert a + 0 is a is a * 1
    assert a - a == 0
    assert a * 0 == 0
    assert 0 - (0 - a) is a
    assert a - b is -(b - a)


@given(sizes, divisors, st.integers(-3, 3), st.integers(-3, 3))
def test_a_single_term_divides_exactly(a: Size, divisor: Pair, m: int, n: int) -> None:
    d, _ = divisor
    assert a / d * d is a
    assert 1 / d is d**-1
    assert d**m * d**n is d ** (m + n)


@given(pairs, values)
def test_values_are_those_of_exact_fractions(p: Pair, v: Values) -> None:
    x, meaning = p
    expected = meaning(v)
    assert x.subs(v) == expected
    assert hash(x.subs(v)) == hash(expected)
    if expected.denominator == 1:
        assert x.value(v) == expected
        assert type(x.value(v)) is int
    else:
        with pytest.raises(ValueError, match="is not a whole number with"):
            x.value(v)


@given(pairs, values, st.sets(st.sampled_from(NAMES)))
def test_substitution_may_be_partial_and_by_sizes(p: Pair, v: Values, first: set[str]) -> None:
    x, meaning = p
    part = x.subs({n: v[n] for n in first})
    assert part.symbols <= x.symbols - first
    assert part.subs(v) == meaning(v)
    swapped = x.subs({"S": 2 * size("H"), "H": "S"})  # All at once: the new H stays.
    assert swapped.subs(v) == meaning({**v, "S": 2 * v["H"], "H": v["S"]})


@given(sizes)
def test_text_reads_back(x: Size) -> None:
    assert size(str(x)) is x
    assert pickle.loads(pickle.dumps(x)) is x
    assert copy.deepcopy(x) is x


@given(st.lists(sizes, max_size=6))
def test_total_and_product_are_repeated_operations(xs: list[Size]) -> None:
    assert total(xs) is sum(xs, size(0))
    assert product(xs) is reduce(lambda a, b: a * b, xs, size(1))


@cases
def test_normal_forms_print_as_written(text: str) -> None:
    assert str(size(text)) == text


@cases
def test_expressions_come_to_one_normal_form(text: str, normal: str) -> None:
    assert str(size(text)) == normal


@cases
def test_bad_text_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size(text)


def test_numbers_equal_and_hash_as_sizes() -> None:
    assert size(3) == 3 == size(Fraction(3))
    assert size("S") != 3
    assert size("S") != "S"
    assert {size(3): "three"}[3] == "three"
    assert hash(size(Fraction(1, 2))) == hash(Fraction(1, 2))
    assert not size(0)
    assert size(0).is_number
    assert size("3/2").is_number
    assert not size("S").is_number
    assert size(np.int64(4)) == 4
    assert np.int64(4) * size("S") is 4 * size("S")


def test_errors_name_both_operands_and_the_values() -> None:
    H, tp = size("H"), size("tp")
    with pytest.raises(ValueError, match=r"cannot divide H by tp \+ 1: only a single term"):
        H / (tp + 1)
    with pytest.raises(ValueError, match="cannot divide H by 0"):
        H / 0
    with pytest.raises(ValueError, match=r"cannot divide 1 by tp \+ 1"):
        (tp + 1) ** -2
    with pytest.raises(ValueError, match=r"cannot divide H by cp \+ 1"):
        (H / tp).subs({"tp": "cp + 1"})
    with pytest.raises(
        ValueError, match=r"^H/tp = 64/6 is not a whole number with {'H': 64, 'tp': 6}$"
    ):
        (H / tp).value({"H": 64, "tp": 6, "dp": 2})
    with pytest.raises(ValueError, match=r"^H/tp needs a value for 'tp'; known: \['H', 'dp'\]$"):
        (H / tp).value({"H": 64, "dp": 2})
    with pytest.raises(ValueError, match=r"^H/tp: .*zero, with {'H': 64, 'tp': 0}"):
        (H / tp).value({"H": 64, "tp": 0})
    with pytest.raises(ValueError, match=r"^H: 'float' object .* with {'H': 2.5}"):
        H.value({"H": 2.5})
    with pytest.raises(TypeError, match=r"a size is a whole number, a fraction or a str, not 1\.5"):
        size(1.5)
    with pytest.raises(TypeError, match="unsupported operand"):
        H + 1.5


def test_values_do_not_overflow() -> None:
    big = np.int64(2**62)
    assert size("S^3").value({"S": big}) == 2**186


@pytest.mark.numerics
def test_large_sizes() -> None:
    terms = [f"{i + 1}*x{i}/tp" for i in range(5_000)]
    wide = size(" + ".join(terms))
    assert wide is total(terms)
    assert wide.value({"tp": 1} | {f"x{i}": 1 for i in range(5_000)}) == sum(range(5_001))
    assert len(product(f"x{i}" for i in range(5_000)).symbols) == 5_000


def test_text_is_the_same_in_every_process_and_numpy_stays_out() -> None:
    code = (
        "import sys; from stagewright.algebra.size import *; "
        "x = size('(dp + B*S*H/tp + b)*s^2 + c*b/a - B/b + 3'); "
        "assert 'numpy' not in sys.modules; print(x)"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in "123"
    }
    assert len(texts) == 1
