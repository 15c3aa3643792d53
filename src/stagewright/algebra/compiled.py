"""Evaluates many sizes at once over arrays of values, one entry per configuration.

>>> evaluate = compile_sizes(["B*S", "ceil(S/tp)"])
>>> evaluate({"B": 2, "S": np.array([10, 20]), "tp": 3})
array([[20, 40],
       [ 4,  7]])

Compiling turns the sizes into a list of elementary operations in which no subexpression occurs
twice. Evaluating runs the list in numpy over chunks of rows that fit in the cache.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.size import (
    Atom,
    Size,
    SizeLike,
    atom_names,
    common_denominator,
    in_printed_order,
    is_whole,
    missing_values,
    opaque_atoms,
    render,
    replace_atoms,
    size,
    symbol,
)

_CHUNK = 8192  # rows evaluated at a time, so that temporaries stay in the cache

Values = Mapping[str, NDArray[Any] | int]
"""A value per symbol: an int, or a one-dimensional array with an entry per configuration."""


def compile_sizes(sizes: Sequence[SizeLike]) -> Callable[[Values], NDArray[Any]]:
    """Compile many sizes into one function of arrays of values.

    The function takes, by symbol, ints and one-dimensional integer arrays of one length n (1 if
    all are ints), and returns an array of shape (len(sizes), n). Where no size divides outside a
    ceil and no number can leave the range, the result is int64 and exact. Otherwise it is float64,
    and each operation rounds once: whole numbers are exact below 2**53 (and so is `ceil` of a
    quotient of such numbers), others to about 1e-16 of the largest term. A ValueError says which
    values are missing or not whole numbers, which lengths differ, or where a denominator is 0.
    """
    compiled = [size(x) for x in sizes]
    symbols = sorted({name for x in compiled for name in x.symbols})
    steps, polynomials = _without_atoms(compiled)
    code = _Code()
    results = code.add_all(steps, polynomials)
    frees = _last_uses(code.operations, results)

    def evaluate(values: Values) -> NDArray[Any]:
        for x in compiled:
            if not x.symbols <= values.keys():
                raise ValueError(missing_values(x, values))
        columns = _columns(symbols, values)
        exact = _fits_int64(steps, polynomials, columns)
        out = np.empty((len(compiled), _length(values)), np.int64 if exact else np.float64)
        try:
            with np.errstate(divide="raise", invalid="raise"):
                for start in range(0, out.shape[1], _CHUNK):
                    rows = slice(start, start + _CHUNK)
                    chunk = {n: c[rows] if c.ndim else c for n, c in columns.items()}
                    made = _run(code.operations, frees, chunk, exact)
                    for nth, result in enumerate(results):
                        out[nth, rows] = made[result]
        except (ZeroDivisionError, FloatingPointError):
            zeros = [name for name, c in columns.items() if not c.all()]
            raise ValueError(f"a denominator is 0; there are zeros among {zeros}") from None
        return out

    return evaluate


def _columns(symbols: Sequence[str], values: Values) -> dict[str, NDArray[Any]]:
    """The values of the symbols as arrays."""
    columns = {name: np.asarray(values[name]) for name in symbols}
    for name, c in columns.items():
        if c.ndim > 1 or not (c.dtype.kind in "biu" or all(isinstance(v, int) for v in c.flat)):
            raise ValueError(f"{name!r} should be whole numbers in a row, not {c!r}")
    return columns


def _length(values: Values) -> int:
    """How many configurations the values describe."""
    lengths = {name: len(np.asarray(v)) for name, v in values.items() if np.ndim(v)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays of values should have one length, got {lengths}")
    return next(iter(lengths.values()), 1)


# ---- ceil and max as steps of their own, so that only polynomials remain -------------------------


class AtomStep(NamedTuple):
    """A ceil or max over polynomials in whole numbers, evaluated before the sizes that use it."""

    name: str  # as the atom prints, which no symbol can be called
    fn: str
    args: list[Size]  # of ceil: numerator and denominator


def _without_atoms(sizes: Sequence[Size]) -> tuple[list[AtomStep], list[Size]]:
    """Give every ceil and max a step and a symbol of its own; the sizes become polynomials.

    Denominators are cleared inside a step: rounding could turn 3 into 3.0000000000000004, and its
    ceil into 4.
    """
    names = atom_names(sizes)
    steps: list[AtomStep] = []
    replaced: dict[Atom, Size] = {}
    for atom in opaque_atoms(sizes):
        in_order = sorted(atom.args, key=lambda arg: render(arg, names))
        args = [replace_atoms(arg, replaced) for arg in in_order]
        # max(p, q) is max(p*d, q*d) / d only if d > 0, hence even powers.
        under = common_denominator(args, even=atom.fn == "max")
        value = symbol(names[atom])
        replaced[atom] = value if atom.fn == "ceil" else value / under
        cleared = [arg * under for arg in args] + ([under] if atom.fn == "ceil" else [])
        steps.append(AtomStep(names[atom], atom.fn, cleared))
    return steps, [replace_atoms(x, replaced) for x in sizes]


def _fits_int64(
    steps: Sequence[AtomStep], polynomials: Sequence[Size], columns: Mapping[str, NDArray[Any]]
) -> bool:
    """Whether all results are whole and no intermediate result can exceed int64.

    The bound of a polynomial is the sum of the absolute values of its terms.
    """
    limits = {n: max(1, abs(int(c.min())), abs(int(c.max()))) for n, c in columns.items() if c.size}

    def bound(x: Size) -> int:
        powers = [(c, [limits.get(str(a), 1) ** e for a, e in term]) for term, c in x.terms]
        return sum([math.prod(factors, start=abs(int(c))) for c, factors in powers])

    for step in steps:
        limits[step.name] = max(1, *map(bound, step.args))
    if not all(map(is_whole, polynomials)):
        return False
    return max([*limits.values(), *map(bound, polynomials)], default=0) < 2**63


# ---- elementary operations -----------------------------------------------------------------------


class _Operation(NamedTuple):
    """One operation on the results of earlier ones, `a` and `b` being their numbers.

    `symbol` and `constant` are leaves: the name of the one and the value of the other is `a`.
    """

    op: str
    a: Any
    b: int = 0


class _Code:
    """Operations in order, none of them twice."""

    def __init__(self) -> None:
        self._numbers: dict[_Operation, int] = {}
        self._steps: dict[str, int] = {}  # result of each step, by its name

    @property
    def operations(self) -> list[_Operation]:
        return list(self._numbers)

    def add_all(self, steps: Sequence[AtomStep], polynomials: Sequence[Size]) -> list[int]:
        """Add all steps and then the polynomials; returns the numbers of the latter's results."""
        for step in steps:
            args = [self._polynomial(arg) for arg in step.args]
            result = reduce(lambda a, b, fn=step.fn: self._add(fn, a, b), args)
            self._steps[step.name] = result
        return [self._polynomial(x) for x in polynomials]

    def _add(self, op: str, a: Any, b: int = 0) -> int:
        return self._numbers.setdefault(_Operation(op, a, b), len(self._numbers))

    def _polynomial(self, x: Size) -> int:
        out: int | None = None
        for factors, c in in_printed_order(x, {}):
            term = self._product([(name, e) for name, e in factors if e > 0], abs(c.numerator))
            under = [(name, -e) for name, e in factors if e < 0]
            if under or c.denominator != 1:
                term = self._add("/", term, self._product(under, c.denominator))
            if out is None:
                out = self._add("neg", term, term) if c < 0 else term
            else:
                out = self._add("-" if c < 0 else "+", out, term)
        return self._add("constant", 0) if out is None else out

    def _product(self, factors: Iterable[tuple[str, int]], number: int) -> int:
        """The product of powers and a number, the number last: others may share what is before."""
        found = [self._power(self._variable(name), e) for name, e in factors]
        found += [self._add("constant", number)] if number != 1 or not found else []
        return reduce(lambda a, b: self._add("*", a, b), found)

    def _variable(self, name: str) -> int:
        return self._steps[name] if name in self._steps else self._add("symbol", name)

    def _power(self, base: int, e: int) -> int:
        if e == 1:
            return base
        half = self._power(base, e // 2)
        square = self._add("*", half, half)
        return self._add("*", square, base) if e % 2 else square


def _last_uses(operations: Sequence[_Operation], results: Iterable[int]) -> list[list[int]]:
    """For each operation the operands that nothing after it needs.

    Their memory is freed, and used again while it is still in the cache.
    """
    needed = set(results)
    frees: list[list[int]] = [[] for _ in operations]
    for nth in reversed(range(len(operations))):
        op, a, b = operations[nth]
        operands: set[int] = set() if op in ("symbol", "constant") else {a, b}
        frees[nth] = [operand for operand in operands if operand not in needed]
        needed |= operands
    return frees


_MEANING: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b,
    "max": lambda a, b: np.maximum(a, b),
    "neg": lambda a, _: -a,
}


def _run(
    operations: Sequence[_Operation],
    frees: Sequence[list[int]],
    columns: Mapping[str, NDArray[Any]],
    exact: bool,
) -> list[Any]:
    """Results of all operations for some rows; None where nothing needs a result any more."""
    made: list[Any] = []
    for (op, a, b), free in zip(operations, frees, strict=True):
        if op == "symbol":
            made.append(columns[a].astype(np.int64 if exact else np.float64))
        elif op == "constant":
            made.append(a)
        elif op == "ceil":
            made.append(-(-made[a] // made[b]) if exact else np.ceil(made[a] / made[b]))
        else:
            made.append(_MEANING[op](made[a], made[b]))
        for operand in free:
            made[operand] = None
    return made
