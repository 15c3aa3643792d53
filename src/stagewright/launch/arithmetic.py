"""Whole-number arithmetic of bash: `$(( ))`, `(( ))`, `let` and subscripts.

>>> def lookup(name):
...     return {"A": 7}[name]
>>> evaluate("-2 ** 2 + (A > 4 ? 0x10 : 010)", lookup, print)
20
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

_TOKEN = re.compile(
    r"\s*(?:(\d+#\w+|\d\w*)|([A-Za-z_]\w*(?:\[[^\[\]]*\])?)"
    r"|(<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|[-+*/%<>=!&|^]=|[-+*/%<>=!&|^~?:(),]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"),
    ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
"""Binary operators from the weakest to the strongest; `**` is stronger."""
_ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="})
_LARGEST = 1 << 63


class Undecided(Exception):
    """An expression that is wrong, or larger than 64 bits."""


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shift(a: int, b: int) -> int:
    if not 0 <= b < 64:
        raise Undecided
    return a << b


def _power(a: int, b: int) -> int:
    if not 0 <= b <= 64:
        raise Undecided
    return a**b


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "&": lambda a, b: a & b, "==": operator.eq,
    "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "<<": _shift, ">>": lambda a, b: a >> b, "+": operator.add, "-": operator.sub,
    "*": operator.mul, "/": _divide, "%": lambda a, b: a - _divide(a, b) * b, "**": _power,
}  # fmt: skip


def evaluate(text: str, lookup: Callable[[str], int], assign: Callable[[str, int], object]) -> int:
    """Value of an expression; `lookup` and `assign` get the names of variables.

    Raises Undecided; an exception of `lookup` passes through.
    """
    return _Expression(text, lookup, assign).value()


class _Expression:
    """Evaluates an expression while it is parsed; parts with `run` False change nothing."""

    def __init__(
        self, text: str, lookup: Callable[[str], int], assign: Callable[[str, int], object]
    ) -> None:
        self.lookup, self.assign = lookup, assign
        self.tokens: list[str] = []
        self.place = 0
        text, i = text.strip(), 0
        while i < len(text):
            match = _TOKEN.match(text, i)
            if match is None:
                raise Undecided
            self.tokens.append(match[0].strip())
            i = match.end()

    def value(self) -> int:
        """Value of all of the text; empty text is 0."""
        if not self.tokens:
            return 0
        value = self._comma(True)
        if self.place < len(self.tokens):
            raise Undecided
        return value

    def _peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def _takes(self, *signs: str) -> str:
        sign = self._peek()
        if sign not in signs:
            return ""
        self.place += 1
        return sign

    def _need(self, sign: str) -> None:
        if not self._takes(sign):
            raise Undecided

    def _comma(self, run: bool) -> int:
        value = self._assignment(run)
        while self._takes(","):
            value = self._assignment(run)
        return value

    def _assignment(self, run: bool) -> int:
        name, sign = self._peek(), self._peek(1)
        if not _is_name(name) or sign not in _ASSIGNMENTS:
            return self._choice(run)
        self.place += 2
        value = self._assignment(run)
        if run:
            if sign != "=":
                value = self._combine(sign[:-1], self.lookup(name), value)
            self.assign(name, value)
        return value

    def _choice(self, run: bool) -> int:
        condition = self._binary(0, run)
        if not self._takes("?"):
            return condition
        first = self._comma(run and condition != 0)
        self._need(":")
        second = self._assignment(run and condition == 0)
        return first if condition else second

    def _binary(self, level: int, run: bool) -> int:
        if level == len(_LEVELS):
            return self._raised(run)
        value = self._binary(level + 1, run)
        while sign := self._takes(*_LEVELS[level]):
            if sign in ("&&", "||"):
                decided = (value != 0) == (sign == "||")
                right = self._binary(level + 1, run and not decided)
                value = int(value != 0) if decided else int(right != 0)
            else:
                right = self._binary(level + 1, run)
                value = self._combine(sign, value, right) if run else 0
        return value

    def _raised(self, run: bool) -> int:
        base = self._unary(run)
        if not self._takes("**"):
            return base
        exponent = self._raised(run)
        return self._combine("**", base, exponent) if run else 0

    def _unary(self, run: bool) -> int:
        sign = self._takes("!", "~", "-", "+", "++", "--")
        if not sign:
            return self._primary(run)
        if sign in ("++", "--") and _is_name(name := self._peek()):
            self.place += 1
            value = self.lookup(name) + (1 if sign == "++" else -1) if run else 0
            if run:
                self.assign(name, value)
            return value
        value = self._unary(run)
        if sign == "!":
            return int(value == 0)
        return ~value if sign == "~" else -value if sign == "-" else value

    def _primary(self, run: bool) -> int:
        if self._takes("("):
            value = self._comma(run)
            self._need(")")
            return value
        word = self._peek()
        self.place += 1
        if not _is_name(word):
            return _literal(word)
        value = self.lookup(word) if run else 0
        if (sign := self._takes("++", "--")) and run:
            self.assign(word, value + (1 if sign == "++" else -1))
        return value

    def _combine(self, sign: str, a: int, b: int) -> int:
        try:
            value = int(_BINARY[sign](a, b))
        except (ArithmeticError, ValueError):
            raise Undecided from None
        return value if -_LARGEST <= value < _LARGEST else _fail()


def _fail() -> NoReturn:
    raise Undecided


def _is_name(word: str) -> bool:
    return word[:1].isalpha() or word[:1] == "_"


def _literal(word: str) -> int:
    """A number: decimal, 0x, octal with a leading 0, or BASE#DIGITS up to base 36."""
    base, hash_, digits = word.partition("#")
    try:
        if hash_:
            return int(digits, int(base)) if 2 <= int(base) <= 36 else _fail()
        if word[:2] in ("0x", "0X"):
            return int(word[2:], 16)
        value = int(word, 8 if word[:1] == "0" else 10) if len(word) < 22 else _fail()
    except ValueError:
        raise Undecided from None
    return value if value < _LARGEST else _fail()
