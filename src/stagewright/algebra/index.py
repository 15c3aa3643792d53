"""Index expressions such as `bsm,mf->bsf`, from which shapes, FLOPs and layouts of an op follow.

A letter names an index. `(gr)` is one dim with two indices, the outer first: a head is a key-value
group and a position in the group. An upper-case letter may not be split over ranks: the op needs
the full extent of that index.

>>> bind(parse("bq(gr)d,bkgd->b(gr)qk"), [(2, 3, 8, 5), (2, 4, 2, 5)])["r"]
4
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Dim = tuple[str, ...]


class Spec(NamedTuple):
    """A parsed index expression in lower case; `whole` holds the letters that were upper case."""

    ins: tuple[tuple[Dim, ...], ...]
    out: tuple[Dim, ...]
    whole: frozenset[str]
    letters: tuple[str, ...]
    """Every letter once, those of operands first."""
    contracted: frozenset[str]
    """Letters that are summed over: those the result lacks."""
    composite: tuple[Dim, ...]
    """Every dim of several letters once."""


_DIM = re.compile(r"\(([a-zA-Z]+)\)|([a-zA-Z])")


@lru_cache(maxsize=4096)
def parse(text: str) -> Spec:
    """Read `bsm,mf->bsf`."""
    ins, arrow, out = text.partition("->")
    if not arrow:
        raise ValueError(f"index expression {text!r} has no '->'")
    whole = frozenset(c.lower() for c in text if c.isupper())
    operands, result = tuple(_dims(t) for t in ins.split(",")), _dims(out)
    dims = tuple(dict.fromkeys(d for side in (*operands, result) for d in side))
    letters = tuple(dict.fromkeys(x for d in dims for x in d))
    contracted = frozenset(letters) - {x for d in result for x in d}
    return Spec(operands, result, whole, letters, contracted, tuple(d for d in dims if len(d) > 1))


def _dims(text: str) -> tuple[Dim, ...]:
    if not re.fullmatch(f"(?:{_DIM.pattern})*", text):
        raise ValueError(f"cannot read {text!r} in an index expression")
    found = [m.group(1) or m.group(2) for m in _DIM.finditer(text)]
    return tuple(tuple(d.lower()) for d in found)


def bind(
    spec: Spec, shapes: Sequence[Sequence[Any]], out: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Letter -> size, from the operands' shapes (ints or symbolic); disagreement is a ValueError.

    `out` is the shape of the result where it is known: the result may have as a dim of its own an
    index that operands have only inside a dim such as `(gr)`.
    """
    if len(shapes) != len(spec.ins):
        raise ValueError(f"{show(spec)} takes {len(spec.ins)} operands, got {len(shapes)}")
    sizes: dict[str, Any] = {}
    if out is not None:
        sizes = {d[0]: extent for d, extent in zip(spec.out, out, strict=True) if len(d) == 1}
    composite: list[tuple[Dim, Any]] = [
        (d, extent) for d, extent in zip(spec.out, out or (), strict=out is not None) if len(d) > 1
    ]
    for dims, shape in zip(spec.ins, shapes, strict=True):
        if len(dims) != len(shape):
            raise ValueError(
                f"{show(spec)}: an operand with {len(dims)} indices has shape {tuple(shape)}"
            )
        for dim, extent in zip(dims, shape, strict=True):
            if len(dim) != 1:
                composite.append((dim, extent))
            elif (known := sizes.setdefault(dim[0], extent)) is not extent and known != extent:
                raise ValueError(
                    f"{show(spec)}: index {dim[0]!r} is both {sizes[dim[0]]} and {extent}"
                )
    for dim, extent in composite:
        free = [x for x in dim if x not in sizes]
        left, over = extent, 0
        for x in dim:
            if x in sizes and isinstance(left, int):
                left, rest = divmod(left, sizes[x])
                over += rest
            elif x in sizes:
                left = left / sizes[x]
        if over or (not free and left != 1) or len(free) > 1:
            names = "".join(dim)
            raise ValueError(f"{show(spec)}: cannot tell the sizes of ({names}) from {extent}")
        if free:
            sizes[free[0]] = left
    return sizes


def splits(
    spec: Spec,
    layouts: Iterable[Sequence[tuple[str, ...]]],
    known: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Letter -> mesh axes that split it, from the operands' layouts; disagreement is a ValueError.

    `known` gives the axes of an index that operands have only inside a dim such as `(gr)`.
    """
    found: dict[str, tuple[str, ...]] = {}
    composite: list[tuple[Dim, tuple[str, ...]]] = []
    for dims, axes_of in zip(spec.ins, layouts, strict=True):
        for dim, axes in zip(dims, axes_of, strict=True):
            if len(dim) != 1:
                composite.append((dim, axes))
            elif found.setdefault(dim[0], axes) != axes:
                raise ValueError(
                    f"{show(spec)}: index {dim[0]!r} is split by {found[dim[0]]} and by {axes}; "
                    "reshard one operand"
                )
    for (outer, inner), axes in composite:  # the axes of "(gr)" are those of g, then those of r
        first = found.setdefault(outer, (known or {}).get(outer, axes))
        if (
            axes[: len(first)] != first
            or found.setdefault(inner, axes[len(first) :]) != axes[len(first) :]
        ):
            raise ValueError(
                f"{show(spec)}: index {outer!r} is split by {first}, ({outer}{inner}) by {axes}"
            )
    return found


def layout_of(
    dims: Sequence[Dim], split_by: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim, from the axes of each letter."""
    return tuple(tuple(a for x in dim for a in split_by.get(x, ())) for dim in dims)


def show(spec: Spec) -> str:
    """The expression as text again."""

    def side(dims: Iterable[Dim]) -> str:
        parts = ["".join(x.upper() if x in spec.whole else x for x in d) for d in dims]
        return "".join(p if len(p) == 1 else f"({p})" for p in parts)

    return ",".join(side(d) for d in spec.ins) + "->" + side(spec.out)
