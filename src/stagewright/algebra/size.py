"""Exact symbolic sizes: Laurent polynomials over the rationals, in normal form and interned.

>>> B, S, H, dp = map(size, ["B", "S", "H", "dp"])
>>> tokens = B * S / dp
>>> 2 * tokens * H + ceil_div("V", "tp") - 1
2*B*S*H/dp + ceil(V/tp) - 1
>>> tokens.value({"B": 8, "S": 4096, "dp": 4})
8192
>>> tokens.subs({"B": 8 * dp}) is 8 * S
True

A symbol stands for a whole number. What a size counts (elements, bytes, FLOPs) is up to its user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, reduce
from numbers import Rational
from operator import index
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary


class Opaque(NamedTuple):
    """A factor that the algebra treats as a symbol: `ceil(p)` or `max(p, q, ...)`."""

    fn: str
    args: frozenset[Size]  # Unordered, as max is; interned sizes make == and hash cheap.
    whole: bool  # Whether every value is whole; follows from the other two.


Atom: TypeAlias = str | Opaque  # A str is a symbol.
Term: TypeAlias = frozenset[tuple[Atom, int]]  # {("S", 1), ("tp", -1)} is S/tp; no exponent is 0.
Number: TypeAlias = int | Fraction  # An int wherever whole: ints are ten times as fast.
_Row: TypeAlias = tuple[int, int, list[tuple[Atom, int]], list[tuple[Atom, int]]]

_ONE: Term = frozenset()
_FIRST = {"B": 0, "S": 1}  # Batch and sequence print first, as shapes are written.


def _operator(meaning: Callable[[Size, Size], Size]) -> Callable[[Size, Size | Number], Size]:
    """A method that also takes numbers, and returns NotImplemented for other types."""

    def method(self: Size, other: Size | Number) -> Size:
        b = _operand(other)
        return NotImplemented if b is None else meaning(self, b)

    return method


class Size:
    """An immutable sum of coefficient * product(atom ** int), made by `size` and arithmetic.

    Equal sizes are one object. A constant equals its int or Fraction, and hashes like it.
    """

    __slots__ = ("__weakref__", "_hash", "_plan", "_symbols", "_text", "terms")
    __array_ufunc__ = None  # So that numpy.int64(2) * size is a Size, not an array of one.
    terms: frozenset[tuple[Term, Number]]
    _hash: int
    _text: str | None
    _symbols: frozenset[str] | None
    _plan: tuple[list[tuple[Opaque, list[list[_Row]]]], list[_Row]] | None

    def __new__(cls, terms: Mapping[Term, Number]) -> Size:
        """Return the one size that has these terms; coefficients may be zero."""
        key = frozenset([(t, c if type(c) is int else _lean(c)) for t, c in terms.items() if c])
        self = _INTERNED.get(key)
        if self is None:
            self = super().__new__(cls)
            self.terms = key
            self._text = self._symbols = self._plan = None
            self._hash = hash(_constant(self) if self.is_number else key)
            _INTERNED[key] = self
        return self

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read what `str` prints; a ValueError names the column where that fails.

        >>> Size.parse("2*B*S/dp - max(S, 1)^2/3 + ceil(V/tp)*H")
        2*B*S/dp + ceil(V/tp)*H - 1/3*max(S, 1)^2
        """
        return _parse(text)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of all symbols, including those inside ceil and max."""
        if self._symbols is None:
            parts = [self, *(arg for atom in opaque_atoms([self]) for arg in atom.args)]
            atoms = (a for x in parts for term, _ in x.terms for a, _ in term)
            self._symbols = frozenset(a for a in atoms if isinstance(a, str))
        return self._symbols

    @property
    def is_number(self) -> bool:
        """True for a constant, whole or not."""
        return not any(term for term, _ in self.terms)

    def subs(self, values: Mapping[str, SizeLike]) -> Size:
        """Replace symbols, all at once, by whole sizes; names that the size lacks are ignored.

        A ValueError says where a sum would end up in a denominator.
        """
        new: dict[Atom, Size] = {n: size(values[n]) for n in self.symbols if n in values}
        if not new:
            return self
        for atom in opaque_atoms([self]):
            new[atom] = _call(atom.fn, [replace_atoms(arg, new) for arg in atom.args])
        return replace_atoms(self, new)

    def value(self, values: Mapping[str, int]) -> int:
        """Return the exact whole number; a ValueError says what is missing or does not divide.

        >>> Size.parse("H/tp").value({"H": 64, "tp": 6})
        Traceback (most recent call last):
        ValueError: H/tp = 64/6 is not a whole number with {'H': 64, 'tp': 6}
        """
        number = _lean(self._evaluate(values))
        if isinstance(number, int):
            return number
        # 64/6 says more than 32/3: its numbers are the user's own.
        under = common_denominator([self])
        shown = f"{(self * under)._evaluate(values)}/{under._evaluate(values)}"
        raise ValueError(f"{self} = {shown} is not a whole number with {self._given(values)}")

    def _evaluate(self, values: Mapping[str, int]) -> Number:
        if self._plan is None:
            steps = [(atom, [_rows(arg) for arg in atom.args]) for atom in opaque_atoms([self])]
            self._plan = steps, _rows(self)
        steps, rows = self._plan
        try:
            # numpy's integers, which overflow in silence, become Python's.
            known: dict[Atom, Number] = {name: index(values[name]) for name in self.symbols}
            for atom, args in steps:
                known[atom] = most = max([_add_up(arg, known) for arg in args])
                if atom.fn == "ceil":
                    known[atom] = math.ceil(most)
            return _add_up(rows, known)
        except KeyError:
            raise ValueError(missing_values(self, values)) from None
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
        """Print the normal form, the same in every process; `parse` reads it back."""
        if self._text is None:
            self._text = render(self, atom_names([self]))
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
        return symbol(x) if x.isidentifier() else _parse(x)
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
    exponents: dict[Atom, int] = {}
    sums: list[Size] = []
    for x in map(size, sizes):
        if len(x.terms) != 1:
            sums.append(x)
            continue
        ((term, c),) = x.terms
        number *= c
        for atom, e in term:
            exponents[atom] = exponents.get(atom, 0) + e
    single = Size({frozenset([(a, e) for a, e in exponents.items() if e]): number})
    return reduce(_mul, sums, single)


def ceil_div(a: SizeLike, b: SizeLike) -> Size:
    """Return a / b rounded up, for a single term `b`; terms known to be whole leave the ceil.

    >>> ceil_div(7, 2), ceil_div("B*S", "S"), ceil_div("V", "tp"), ceil_div("V + tp", "tp")
    (4, B, ceil(V/tp), ceil(V/tp) + 1)
    """
    return _call("ceil", [_divide(size(a), size(b))])


def maximum(*sizes: SizeLike) -> Size:
    """Return the largest of one or more sizes; sizes that differ by a number are decided at once.

    >>> maximum(3, 5), maximum("S", "S + 1"), maximum("H/tp", 1)
    (5, S + 1, max(H/tp, 1))
    """
    best: dict[Size, Number] = {}  # From a size without its constant to the largest constant.
    for x in map(size, sizes):
        atoms = _outer([x])
        nested = len(atoms) == 1 and atoms[0].fn == "max" and x == symbol(atoms[0])
        for arg in atoms[0].args if nested else [x]:
            c = _constant(arg)
            best[arg - c] = max(c, best.get(arg - c, c))
    args = frozenset([rest + c for rest, c in best.items()])
    if not args:
        raise ValueError("maximum needs at least one size")
    if len(args) == 1:
        return next(iter(args))
    return symbol(Opaque("max", args, all(map(is_whole, args))))


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
def symbol(atom: Atom) -> Size:
    """The size that is this symbol, ceil or max."""
    return Size({frozenset({(atom, 1)}): 1})


def _mul(a: Size, b: Size) -> Size:
    few = len(a.terms) * len(b.terms) <= 4  # Lest the cache keep large sizes alive.
    return (_mul_cached if few else _mul_cached.__wrapped__)(a, b)


@lru_cache(8192)
def _mul_cached(a: Size, b: Size) -> Size:
    out: dict[Term, Number] = {}
    for s, c in a.terms:
        for t, d in b.terms:
            factors = dict(s)
            for atom, e in t:
                factors[atom] = factors.get(atom, 0) + e
            term = frozenset([(atom, e) for atom, e in factors.items() if e])
            out[term] = out.get(term, 0) + c * d
    return Size(out)


def _divide(a: Size, b: Size) -> Size:
    if len(b.terms) != 1:
        raise ValueError(f"cannot divide {a} by {b}: only a single term divides exactly")
    return _mul(a, _inverse(b))


@lru_cache(4096)
def _inverse(x: Size) -> Size:
    ((term, c),) = x.terms
    return Size({frozenset([(atom, -e) for atom, e in term]): 1 / Fraction(c)})


def _constant(x: Size) -> Number:
    return dict(x.terms).get(_ONE, 0)


def is_whole(x: Size) -> bool:
    """True if the form shows that the value is whole for all whole symbols."""
    return all(type(c) is int and all(map(_is_whole_factor, term)) for term, c in x.terms)


def _is_whole_factor(factor: tuple[Atom, int]) -> bool:
    return factor[1] > 0 and (isinstance(factor[0], str) or factor[0].whole)


def _call(fn: str, args: Sequence[Size]) -> Size:
    """Apply `ceil`, `max` or, where `fn` is empty, a parenthesis."""
    if fn == "max":
        return maximum(*args)
    if len(args) != 1:
        raise ValueError(f"{fn or 'a parenthesis'} holds one size, got {', '.join(map(str, args))}")
    if not fn:
        return args[0]
    parts = [Size({t: c}) for t, c in args[0].terms]
    whole = total(x for x in parts if is_whole(x))
    rest = args[0] - whole
    if rest.is_number:
        return whole + math.ceil(_constant(rest))
    return whole + symbol(Opaque("ceil", frozenset({rest}), True))


def _outer(sizes: Iterable[Size]) -> list[Opaque]:
    return [a for x in sizes for term, _ in x.terms for a, _ in term if isinstance(a, Opaque)]


def opaque_atoms(sizes: Iterable[Size]) -> list[Opaque]:
    """Every ceil and max in `sizes`, once, each after those inside it (without recursion)."""
    done: dict[Opaque, None] = {}
    stack = _outer(sizes)
    while stack:
        inner = [atom for atom in _outer(stack[-1].args) if atom not in done]
        stack += inner
        if not inner:
            done[stack.pop()] = None
    return list(done)


def replace_atoms(x: Size, new: Mapping[Atom, Size]) -> Size:
    """The size with the factors in `new` replaced; atoms inside a ceil or max are not looked at."""
    parts: list[Size] = []
    for term, c in x.terms:
        part = Size({frozenset([(a, e) for a, e in term if a not in new]): c})
        for atom, e in term:
            if atom in new:
                power = new[atom] ** abs(e)
                part = _mul(part, power) if e > 0 else _divide(part, power)
        parts.append(part)
    return total(parts)


def common_denominator(sizes: Iterable[Size], even: bool = False) -> Size:
    """The least single term that clears all divisions; `even`: with even exponents only."""
    number = 1
    exponents: dict[Atom, int] = {}
    for term, c in [pair for x in sizes for pair in x.terms]:
        number = math.lcm(number, c.denominator)
        for atom, e in term:
            if e < 0:
                exponents[atom] = max(exponents.get(atom, 0), -e + (even and e % 2))
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


def _add_up(rows: list[_Row], known: Mapping[Atom, Number]) -> Number:
    whole: Number = 0
    rest: Number = 0
    p: Number
    q: Number
    for p, q, above, below in rows:
        for atom, e in above:
            p *= known[atom] ** e
        for atom, e in below:
            q *= known[atom] ** e
        quotient, left = divmod(p, q)  # Most divisions come out even, and Fraction is slow.
        whole += quotient
        if left:
            rest += Fraction(left, q)
    return whole + rest


def missing_values(x: Size, values: Mapping[str, object]) -> str:
    """The message of the error that says which symbols of `x` have no value."""
    lacking = ", ".join(repr(name) for name in sorted(x.symbols) if name not in values)
    return f"{x} needs a value for {lacking}; known: {sorted(values)}"


# --- Text ----------------------------------------------------------------------------------------


def atom_names(sizes: Iterable[Size]) -> dict[Atom, str]:
    """The text of each ceil and max in `sizes`."""
    names: dict[Atom, str] = {}
    for atom in opaque_atoms(sizes):
        args = sorted([(arg.is_number, render(arg, names)) for arg in atom.args])
        names[atom] = f"{atom.fn}({', '.join([text for _, text in args])})"
    return names


def in_printed_order(
    x: Size, names: Mapping[Atom, str]
) -> list[tuple[list[tuple[str, int]], Number]]:
    """Terms, and factors in them, as they print: high powers first, the constant last."""

    def rank(factor: tuple[str, int]) -> tuple[int, str, str, int]:
        name, e = factor
        return _FIRST.get(name, len(_FIRST)), name.casefold(), name, -e

    named = [
        ([(a if isinstance(a, str) else names[a], e) for a, e in term], c) for term, c in x.terms
    ]
    terms = [(sorted(factors, key=rank), c) for factors, c in named]
    terms.sort(key=lambda t: (-sum([e for _, e in t[0] if e > 0]), not t[0], [*map(rank, t[0])]))
    return terms


def render(x: Size, names: Mapping[Atom, str]) -> str:
    """The text of a size; `names` has the text of each ceil and max in it."""
    out: list[str] = []
    for factors, c in in_printed_order(x, names):
        powers = [(name if abs(e) == 1 else f"{name}^{abs(e)}", e) for name, e in factors]
        above = [text for text, e in powers if e > 0]
        if abs(c) != 1 or not above:
            above.insert(0, str(abs(c)))
        out.append((" - " if c < 0 else " + ") if out else "-" if c < 0 else "")
        out.append("*".join(above) + "".join([f"/{text}" for text, e in powers if e < 0]))
    return "".join(out) or "0"


# One power at a time, as people read towers of them in two ways.
_POWER = r"(?:\^|\*\*)\s*-?[0-9]+(?!\s*(?:\^|\*\*))"
_TOKEN = re.compile(rf"\s*({_POWER}|(?:ceil|max)?\s*\(|[-+*/,)]|[^-+*/,()^\s]+|\S)")


@dataclass(slots=True)
class _Open:
    """State of the parser since a parenthesis opened."""

    fn: str = ""
    args: list[Size] = field(default_factory=list[Size])
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
            elif token[-1] == "(":
                stack.append(_Open(token[:-1].rstrip()))
            elif token.isascii() and token.isdecimal():
                operand = _number(int(token))
            elif token.isidentifier():
                operand = symbol(token)
            else:
                break
        elif token[0] in "^*" and len(token) > 1:
            operand **= int(token.lstrip("^* "))
        elif token in {"*", "/", "+", "-", ",", ")"}:
            opened.term = (
                _divide(opened.term, operand) if opened.divide else _mul(opened.term, operand)
            )
            opened.divide, operand = token == "/", None
            if token not in "*/":
                opened.terms.append(opened.term)
                opened.term = _number(-1 if token == "-" else 1)
            if token in ",)":
                opened.args.append(total(opened.terms))
                opened.terms = []
            if token == ")":
                operand = _call(opened.fn, opened.args)
                stack.pop()
            if not stack:
                break
        else:
            break
    if stack or operand is None or at < len(text):
        wanted = "a number, a symbol or a parenthesis" if operand is None else "an operator"
        raise ValueError(f"cannot read the size {text!r}: column {at + 1} should be {wanted}")
    return operand
