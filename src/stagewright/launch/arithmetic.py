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

_TOKEN = re.compile(
    r"\d+#\w+|\d\w*|[A-Za-z_]\w*(?:\[[^\[\]]*\])?"
    r"|<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|[-+*/%<>=!&|^]=|[-+*/%<>=!&|^~?:(),]"
)
_ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="})
_LARGEST = 1 << 63


class Undecided(Exception):
    """An expression that is wrong, or larger than 64 bits."""


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: a | b), "&&": (2, lambda a, b: a & b), "|": (3, lambda a, b: a | b),
    "^": (4, lambda a, b: a ^ b), "&": (5, lambda a, b: a & b), "==": (6, operator.eq),
    "!=": (6, operator.ne), "<=": (7, operator.le), ">=": (7, operator.ge), "<": (7, operator.lt),
    ">": (7, operator.gt), "<<": (8, lambda a, b: a << b), ">>": (8, lambda a, b: a >> b),
    "+": (9, operator.add), "-": (9, operator.sub), "*": (10, operator.mul), "/": (10, _divide),
    "%": (10, lambda a, b: a - _divide(a, b) * b), "**": (11, lambda a, b: a**b),
}  # fmt: skip
"""Binary operators: how strongly they bind, and what they compute."""


def evaluate(text: str, lookup: Callable[[str], int], assign: Callable[[str, int], object]) -> int:
    """Value of an expression; `lookup` and `assign` get the names of variables.

    Raises Undecided; an exception of `lookup` passes through.
    """
    if _TOKEN.sub("", text).strip():
        raise Undecided
    return _Expression(_TOKEN.findall(text), lookup, assign).value()


class _Expression:
    """Evaluates an expression while it is parsed; parts with `run` False change nothing."""

    def __init__(
        self, tokens: list[str], lookup: Callable[[str], int], assign: Callable[[str, int], object]
    ) -> None:
        self.lookup, self.assign, self.tokens = lookup, assign, tokens
        self.place = 0

    def value(self) -> int:
        """Value of all of the text; empty text is 0."""
        value = self._comma(True) if self.tokens else 0
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
                value = _combine(sign[:-1], self.lookup(name), value)
            self.assign(name, value)
        return value

    def _choice(self, run: bool) -> int:
        condition = self._binary(1, run)
        if not self._takes("?"):
            return condition
        first = self._comma(run and condition != 0)
        self._need(":")
        second = self._assignment(run and condition == 0)
        return first if condition else second

    def _binary(self, weakest: int, run: bool) -> int:
        """Operators that bind at least so strongly, from the left; `**` from the right."""
        value = self._unary(run)
        while (sign := self._peek()) in _BINARY and _BINARY[sign][0] >= weakest:
            self.place += 1
            stronger = _BINARY[sign][0] + (sign != "**")
            if sign in ("&&", "||"):
                decided = (value != 0) == (sign == "||")
                right = self._binary(stronger, run and not decided)
                value = int(value != 0) if decided else int(right != 0)
            else:
                right = self._binary(stronger, run)
                value = _combine(sign, value, right) if run else 0
        return value

    def _unary(self, run: bool) -> int:
        sign = self._takes("!", "~", "-", "+", "++", "--")
        if not sign:
            return self._primary(run)
        if sign in ("++", "--") and _is_name(name := self._peek()):
            self.place += 1
            return self._step(name, sign, run)
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
        if sign := self._takes("++", "--"):
            self._step(word, sign, run)
        return value

    def _step(self, name: str, sign: str, run: bool) -> int:
        """Value of a variable after `++` or `--`."""
        value = self.lookup(name) + (1 if sign == "++" else -1) if run else 0
        if run:
            self.assign(name, value)
        return value


def _combine(sign: str, a: int, b: int) -> int:
    if sign in ("<<", "**") and not 0 <= b <= 64:
        raise Undecided
    try:
        return _in_range(int(_BINARY[sign][1](a, b)))
    except (ArithmeticError, ValueError):
        raise Undecided from None


def _in_range(value: int) -> int:
    if not -_LARGEST <= value < _LARGEST:
        raise Undecided
    return value


def _is_name(word: str) -> bool:
    return word[:1].isalpha() or word[:1] == "_"


def _literal(word: str) -> int:
    """A number: decimal, 0x, octal with a leading 0, or BASE#DIGITS up to base 36."""
    base, hash_, digits = word.partition("#")
    try:
        if len(word) > 66 or (hash_ and not 2 <= int(base) <= 36):
            raise Undecided
        if hash_:
            return _in_range(int(digits, int(base)))
        return _in_range(
            int(word, 16 if word[:2] in ("0x", "0X") else 8 if word[:1] == "0" else 10)
        )
    except ValueError:
        raise Undecided from None
