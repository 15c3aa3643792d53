"""Tensors in the paper's notation, `x[B/dp, S, H @ 1/tp]` (STAGE, arXiv 2511.10480, Table III).

A dim is a size and the parallel degrees that split it, outermost first. After `@` stand the degrees
over which the value is still a sum.

>>> tensor("[B/dp, S, 4*H/tp @ 1/cp]")
Tensor(dims=('B', 'S', '4*H'), axes=(('dp',), (), ('tp',)), partial=('cp',))
>>> print(tensor("[B/dp, S, 4*H/tp @ 1/cp]"))
[B/dp, S, 4*H/tp @ 1/cp]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text

DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
"""Degrees that may split a dim. `edp`: the ranks that hold the same experts."""

PARTS = {
    "tp.kv": "ranks of tp that hold different key-value heads; the other ranks share these heads",
    "tp.groups": "ranks of tp that hold different groups of the heads of a state-space layer",
    "tp.heads": "ranks of tp that hold different heads of one such group",
    "tp.caches": "ranks of tp with caches of their own; the other ranks share a cache's tokens",
}
"""Parts of a degree, which may split a dim that the whole degree does not divide."""

SPLITS = (*DEGREES, *PARTS)


class Tensor(NamedTuple):
    """A shape and its layout: sizes as text, and the parallel degrees that split each dim."""

    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = ("/".join((d, *axes)) for d, axes in zip(self.dims, self.axes, strict=True))
        return f"[{', '.join(dims)}{' @ 1/' + '/'.join(self.partial) if self.partial else ''}]"


class NotationError(ValueError):
    """Text that cannot be read, and the position of the mistake."""

    def __init__(self, message: str, at: int) -> None:
        """`at` counts characters from the beginning of the text."""
        super().__init__(message)
        self.at = at


@lru_cache(maxsize=4096)
def tensor(text: str, at: int = 0) -> Tensor:
    """Read `[B/dp, S, H @ 1/tp]`; `at` is where the text begins, for a NotationError."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        raise NotationError(f"got {text!r}, wanted a tensor such as [B/dp, S, H/tp]", at)
    at += text.index("[") + 1
    shape, sums, partial = inner[1:-1].partition("@")
    dims: list[str] = []
    axes: list[tuple[str, ...]] = []
    for start, part in parts(shape, ",") if shape.strip() else ():
        words = list(parts(part, "/"))
        split: list[str] = []
        while len(words) > 1 and words[-1][1] in SPLITS:
            split.insert(0, words.pop()[1])
        size = "/".join(word for _, word in words)
        if not size:
            raise NotationError("a dim without a size; wanted such as B/dp", at + start)
        if size in SPLITS:
            raise NotationError(f"{size} is a parallel degree, wanted a size", at + start)
        dims.append(size)
        axes.append(tuple(split))
    parsed = Tensor(tuple(dims), tuple(axes), _sums(partial, at + len(shape) + 1) if sums else ())
    _check_once([axis for axes in (*parsed.axes, parsed.partial) for axis in axes], at - 1)
    return parsed


def _check_once(named: list[str], at: int) -> None:
    """A NotationError if a degree, or what two of its parts have in common, comes twice."""
    for i, axis in enumerate(named):
        for other in named[:i]:
            if axis == other:
                raise NotationError(f"{axis} comes twice; it may split one dim only", at)
            disjoint = {axis, other} == {"tp.groups", "tp.heads"}
            if axis.partition(".")[0] == other.partition(".")[0] and not disjoint:
                raise NotationError(
                    f"{other} and {axis} name the same ranks; they may split one dim only", at
                )


def _sums(text: str, at: int) -> tuple[str, ...]:
    numerator, *degrees = (word.strip() for word in text.split("/"))
    if numerator != "1" or not degrees:
        raise NotationError(f"got @{text}, wanted a partial sum such as @ 1/tp", at)
    for degree in degrees:
        if degree not in DEGREES:
            hint = did_you_mean(degree, DEGREES)
            raise NotationError(f"{degree!r} is no parallel degree{hint}", at)
    return tuple(degrees)


def parts(text: str, by: str) -> Iterator[tuple[int, str]]:
    """Split where no parenthesis is open; yields where each part begins, and the part.

    >>> list(parts("B, max(S, 1)", ","))
    [(0, 'B'), (3, 'max(S, 1)')]
    """
    depth = start = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == by and not depth:
            yield _trimmed(text, start, i)
            start = i + 1
    yield _trimmed(text, start, len(text))


def _trimmed(text: str, start: int, end: int) -> tuple[int, str]:
    """A part without the blanks around it, and where it begins."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), part.strip()


def where(text: str, at: int) -> str:
    """Line and column of a position in a text, both counted from 1.

    >>> where("one\\ntwo", 5)
    'line 2, column 2'
    """
    before = text[:at]
    return f"line {before.count(chr(10)) + 1}, column {at - (before.rfind(chr(10)) + 1) + 1}"


_ROW = re.compile(r"\s*([^\s\[\]#]+)\s*(\[[^\]#]*\])\s*(?:#.*)?$")


def table(path: str | Path) -> dict[str, Tensor]:
    """Read a strategy from a file: per line a name and its layout, such as `wq [M, A/tp, D]`."""
    text = read_text(path, "rows such as wq [M, A/tp, D]").replace("\r\n", "\n")
    rows: dict[str, Tensor] = {}
    start = 0
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            row = _ROW.match(line)
            try:
                if row is None:
                    wanted = "a name and where it lives, such as wq [M, A/tp, D]"
                    raise NotationError(f"got {line.strip()[:60]!r}, wanted {wanted}", start)
                name = row.group(1)
                if name in rows:
                    raise NotationError(f"{name} comes twice; keep one", start)
                rows[name] = tensor(row.group(2), start + row.start(2))
            except NotationError as error:
                raise UserError(f"{path}, {where(text, error.at)}: {error}") from None
        start += len(line) + 1
    return rows
