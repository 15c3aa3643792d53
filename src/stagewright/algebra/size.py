"""Exact symbolic sizes: Laurent polynomials over the rationals, in normal form and interned.

>>> B, S, H, dp = map(size, ["B", "S", "H", "dp"])
>>> tokens = B * S / dp
>>> 2 * tokens * H - 1
2*B*S*H/dp - 1
>>> tokens.value({"B": 8, "S": 4096, "dp": 4})
8192
>>> tokens.subs({"B": 8 * dp}) is 8 * S
True

A symbol stands for a whole number. What a size counts (elements, bytes, FLOPs) is up to its user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, reduce
from numbers import Rational
from operator import index
from typing import TypeAlias
from weakref import WeakValueDictionary

Term: TypeAlias = frozenset[tuple[str, int]]  # {("S", 1), ("tp", -1)} is S/tp; no exponent is 0.
Number: TypeAlias = int | Fraction  # An int wherever whole: ints are ten times as fast.
_Row: TypeAlias = tuple[int, int, list[tuple[str, int]], list[tuple[str, int]]]

_ONE: Term = frozenset()
_FIRST = {"B": 0, "S": 1}  # Batch and sequence print first, as shapes are written.


def _operator(meaning: Callable[[Size, Size], Size]) -> Callable[[Size, Size | Number], Size]:
    """A method that also takes numbers, and returns NotImplemented for other types."""

    def method(self: Size, other: Size | Number) -> Size:
        b = _operand(other)
        return NotImplemented if b is None else meaning(self, b)

    return method


class Size:
    """An immutable sum of coefficient * product(symbol ** int), made by `size` and arithmetic.

    Equal sizes are one object. A constant equals its int or Fraction, and hashes like it.
    """

    __slots__ = ("__weakref__", "_hash", "_rows", "_symbols", "_text", "terms")
    __array_ufunc__ = None  # So that numpy.int64(2) * size is a Size, not an array of one.
    terms: frozenset[tuple[Term, Number]]
    _hash: int
    _text: str | None
    _symbols: frozenset[str] | None
    _rows: list[_Row] | None

    def __new__(cls, terms: Mapping[Term, Number]) -> Size:
        """Return the one size that has these terms; coefficients may be zero."""
        key = frozenset([(t, c if type(c) is int else _lean(c)) for t, c in terms.items() if c])
        self = _INTERNED.get(key)
        if self is None:
            self = super().__new__(cls)
            self.terms = key
            self._text = self._symbols = self._rows = None
            self._hash = hash(_constant(self) if self.is_number else key)
            _INTERNED[key] = self
        return self

    @property
    def symbols(self) -> frozenset[str]:
        """The names of all symbols."""
        if self._symbols is None:
            self._symbols = frozenset(name for term, _ in self.terms for name, _ in term)
        return self._symbols

    @property
    def is_number(self) -> bool:
        """True for a constant, whole or not."""
        return not any(term for term, _ in self.terms)

    def subs(self, values: Mapping[str, SizeLike]) -> Size:
        """Replace symbols, all at once, by whole sizes; names that the size lacks are ignored.

        A ValueError says where a sum would end up in a denominator.
        """
        new = {n: size(values[n]) for n in self.symbols if n in values}
        if not new:
            return self
        parts: list[Size] = []
        for term, c in self.terms:
            part = Size({frozenset([(name, e) for name, e in term if name not in new]): c})
            for name, e in term:
                if name in new:
                    power = new[name] ** abs(e)
                    part = _mul(part, power) if e > 0 else _divide(part, power)
            parts.append(part)
        return total(parts)

    def value(self, values: Mapping[str, int]) -> int:
        """Return the exact whole number; a ValueError says what is missing or does not divide.

        >>> size("H/tp").value({"H": 64, "tp": 6})
        Traceback (most recent call last):
        ValueError: H/tp = 64/6 is not a whole number with {'H': 64, 'tp': 6}
        """
        number = _lean(self._evaluate(values))
        if isinstance(number, int):
            return number
        # 64/6 says more than 32/3: its numbers are the user's own.
        under = _common_denominator(self)
        shown = f"{(self * under)._evaluate(values)}/{under._evaluate(values)}"
        raise ValueError(f"{self} = {shown} is not a whole number with {self._given(values)}")

    def _evaluate(self, values: Mapping[str, int]) -> Number:
        if self._rows is None:
            self._rows = _rows(self)
        try:
            # numpy's integers, which overflow in silence, become Python's.
            return _add_up(self._rows, {name: index(values[name]) for name in self.symbols})
        except KeyError:
            lacking = ", ".join(map(repr, sorted(self.symbols - values.keys())))
            known = sorted(values)
            raise ValueError(f"{self} needs a value for {lacking}; known: {known}") from None
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{self}: {error}, with {self._given(values)}") from None

    def _given(self, values: Mapping[str, int]) -> dict[str, int]:
        return {name: values[name] for name in sorted(self.symbols)}

    def __eq__(self, other: object) -> bool:
        """True if the normal forms are equal; whole numbers and fractions compare too."""
        b = _operand(other)
        if b is None:
            return NotImplemented
        # Not only `is`: two threads may intern the same size in the same moment.
        return self is b or (self._hash == b._hash and self.terms == b.terms)

    def __hash__(self) -> int:
        """Return the hash that was computed once."""
        return self._hash

    def __bool__(self) -> bool:
        """True if the size is not the constant 0."""
        return bool(self.terms)

    __add__ = __radd__ = _operator(lambda a, b: total([a, b]))
    __sub__ = _operator(lambda a, b: total([a, -b]))
    __rsub__ = _operator(lambda a, b: total([b, -a]))
    __mul__ = __rmul__ = _operator(lambda a, b: _mul(a, b))
    __truediv__ = _operator(lambda a, b: _divide(a, b))
    __rtruediv__ = _operator(lambda a, b: _divide(b, a))

    def __neg__(self) -> Size:
        """Return minus this."""
        return _mul(self, _number(-1))

    def __pow__(self, n: int) -> Size:
        """Raise to a whole power, for a single term also a negative one."""
        n = index(n)
        if n < 0:
            return _divide(_number(1), self) ** -n
        if len(self.terms) == 1:
            ((term, c),) = self.terms
            return Size({frozenset([(a, e * n) for a, e in term if n]): c**n})
        half = self ** (n // 2) if n > 1 else _number(1)
        return half * half * self if n % 2 else half * half

    def __str__(self) -> str:
        """Print the normal form, the same in every process; `size` reads it back."""
        if self._text is None:
            self._text = _render(self)
        return self._text

    __repr__ = __str__

    def __reduce__(self) -> tuple[Callable[[str], Size], tuple[str]]:
        """Pickle and copy as text, so that the result is interned where it arrives."""
        return _parse, (str(self),)


SizeLike: TypeAlias = Size | int | Fraction | str
_INTERNED: WeakValueDictionary[frozenset[tuple[Term, Number]], Size] = WeakValueDictionary()


def size(x: SizeLike) -> Size:
    """Return `x` as a Size: a number, the name of a symbol, or an expression in text.

    >>> size("S") + size(2), size("B*S/dp")
    (S + 2, B*S/dp)
    """
    if isinstance(x, str):
        return _symbol(x) if x.isidentifier() else _parse(x)
    out = _operand(x)
    if out is None:
        raise TypeError(f"a size is a whole number, a fraction or a str, not {x!r}")
    return out


def total(sizes: Iterable[SizeLike]) -> Size:
    """Return the sum, in time linear in the terms (adding up one by one is quadratic)."""
    out: dict[Term, Number] = {}
    for x in sizes:
        for term, c in size(x).terms:
            out[term] = out.get(term, 0) + c
    return Size(out)


def product(sizes: Iterable[SizeLike]) -> Size:
    """Return the product; the empty product is 1."""
    number: Number = 1
    exponents: dict[str, int] = {}
    sums: list[Size] = []
    for x in map(size, sizes):
        if len(x.terms) != 1:
            sums.append(x)
            continue
        ((term, c),) = x.terms
        number *= c
        for name, e in term:
            exponents[name] = exponents.get(name, 0) + e
    single = Size({frozenset([(a, e) for a, e in exponents.items() if e]): number})
    return reduce(_mul, sums, single)


def _operand(x: object) -> Size | None:
    if isinstance(x, Size):
        return x
    if isinstance(x, int | Fraction):
        return _number(x)
    if isinstance(x, Rational):  # numpy's integers
        return _number(Fraction(int(x.numerator), int(x.denominator)))
    return None


def _lean(c: Number) -> Number:
    return c.numerator if c.denominator == 1 else c


@lru_cache(4096)
def _number(x: Number) -> Size:
    return Size({_ONE: Fraction(x)})


@lru_cache(4096)
def _symbol(name: str) -> Size:
    return Size({frozenset({(name, 1)}): 1})


def _mul(a: Size, b: Size) -> Size:
    few = len(a.terms) * len(b.terms) <= 4  # Lest the cache keep large sizes alive.
    return (_mul_cached if few else _mul_cached.__wrapped__)(a, b)


@lru_cache(8192)
def _mul_cached(a: Size, b: Size) -> Size:
    out: dict[Term, Number] = {}
    for s, c in a.terms:
        for t, d in b.terms:
            factors = dict(s)
            for name, e in t:
                factors[name] = factors.get(name, 0) + e
            term = frozenset([(name, e) for name, e in factors.items() if e])
            out[term] = out.get(term, 0) + c * d
    return Size(out)


def _divide(a: Size, b: Size) -> Size:
    if len(b.terms) != 1:
        raise ValueError(f"cannot divide {a} by {b}: only a single term divides exactly")
    return _mul(a, _inverse(b))


@lru_cache(4096)
def _inverse(x: Size) -> Size:
    ((term, c),) = x.terms
    return Size({frozenset([(name, -e) for name, e in term]): 1 / Fraction(c)})


def _constant(x: Size) -> Number:
    return dict(x.terms).get(_ONE, 0)


def is_whole(x: Size) -> bool:
    """True if the form shows that the value is whole for all whole symbols."""
    return all(type(c) is int and all(e > 0 for _, e in term) for term, c in x.terms)


def _common_denominator(x: Size) -> Size:
    """The least single term that clears all divisions."""
    number = 1
    exponents: dict[str, int] = {}
    for term, c in x.terms:
        number = math.lcm(number, c.denominator)
        for name, e in term:
            if e < 0:
                exponents[name] = max(exponents.get(name, 0), -e)
    return Size({frozenset(exponents.items()): number})


def _rows(x: Size) -> list[_Row]:
    """The terms as (numerator, denominator, factors above, factors below)."""
    return [
        (
            c.numerator,
            c.denominator,
            [(a, e) for a, e in term if e > 0],
            [(a, -e) for a, e in term if e < 0],
        )
        for term, c in x.terms
    ]


def _add_up(rows: list[_Row], known: Mapping[str, int]) -> Number:
    whole: Number = 0
    rest: Number = 0
    p: Number
    q: Number
    for p, q, above, below in rows:
        for name, e in above:
            p *= known[name] ** e
        for name, e in below:
            q *= known[name] ** e
        quotient, left = divmod(p, q)  # Most divisions come out even, and Fraction is slow.
        whole += quotient
        if left:
            rest += Fraction(left, q)
    return whole + rest


# --- Text ----------------------------------------------------------------------------------------


def _in_printed_order(x: Size) -> list[tuple[list[tuple[str, int]], Number]]:
    """Terms, and factors in them, as they print: high powers first, the constant last."""

    def rank(factor: tuple[str, int]) -> tuple[int, str, str, int]:
        name, e = factor
        return _FIRST.get(name, len(_FIRST)), name.casefold(), name, -e

    terms = [(sorted(term, key=rank), c) for term, c in x.terms]
    terms.sort(key=lambda t: (-sum([e for _, e in t[0] if e > 0]), not t[0], [*map(rank, t[0])]))
    return terms


def _render(x: Size) -> str:
    out: list[str] = []
    for factors, c in _in_printed_order(x):
        powers = [(name if abs(e) == 1 else f"{name}^{abs(e)}", e) for name, e in factors]
        above = [text for text, e in powers if e > 0]
        if abs(c) != 1 or not above:
            above.insert(0, str(abs(c)))
        out.append((" - " if c < 0 else " + ") if out else "-" if c < 0 else "")
        out.append("*".join(above) + "".join([f"/{text}" for text, e in powers if e < 0]))
    return "".join(out) or "0"


# One power at a time, as people read towers of them in two ways.
_POWER = r"(?:\^|\*\*)\s*-?[0-9]+(?!\s*(?:\^|\*\*))"
_TOKEN = re.compile(rf"\s*({_POWER}|[-+*/()]|[^-+*/,()^\s]+|\S)")


@dataclass(slots=True)
class _Open:
    """State of the parser since a parenthesis opened."""

    terms: list[Size] = field(default_factory=list[Size])
    term: Size = field(default_factory=lambda: _number(1))
    divide: bool = False


def _parse(text: str) -> Size:
    text = text.rstrip()
    stack, operand, at = [_Open()], None, 0
    for match in _TOKEN.finditer(text + ")"):
        token, at = match[1], match.start(1)
        opened = stack[-1]
        if operand is None:  # Expected: a number, a symbol, or what may precede one.
            if token == "-":
                opened.term = -opened.term
            elif token == "(":
                stack.append(_Open())
            elif token.isascii() and token.isdecimal():
                operand = _number(int(token))
            elif token.isidentifier():
                operand = _symbol(token)
            else:
                break
        elif token[0] in "^*" and len(token) > 1:
            operand **= int(token.lstrip("^* "))
        elif token in {"*", "/", "+", "-", ")"}:
            opened.term = (
                _divide(opened.term, operand) if opened.divide else _mul(opened.term, operand)
            )
            opened.divide, operand = token == "/", None
            if token not in "*/":
                opened.terms.append(opened.term)
                opened.term = _number(-1 if token == "-" else 1)
            if token == ")":
                operand = total(opened.terms)
                stack.pop()
            if not stack:
                break
        else:
            break
    if stack or operand is None or at < len(text):
        wanted = "a number, a symbol or a parenthesis" if operand is None else "an operator"
        raise ValueError(f"cannot read the size {text!r}: column {at + 1} should be {wanted}")
    return operand
