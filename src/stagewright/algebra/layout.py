"""Layouts of tensors on a mesh of ranks, and the collectives that change them.

An axis of the mesh either splits one dim of a tensor (the axis is named in `dims`), leaves an
unreduced sum (named in `partial`), or is not mentioned: then every rank along the axis holds the
same value.

>>> print(Layout((("dp",), (), ("tp",))))
[/dp, -, /tp]
>>> [str(move) for move in moves(Layout(((), ()), frozenset({"tp", "cp"})), Layout(((), ())))]
['all_reduce[cp+tp]']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

MIRROR = "mirror"
"""The axis that pairs replicas of pipeline ranks; see `Mesh.mirror`."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks as a grid: axis names and sizes, the fastest-varying axis first."""

    axes: tuple[tuple[str, int], ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Axes of each parallel degree, such as `("tp", ("tp_kv", "tp_rep"))`; degrees of one rank are
    absent."""
    mirror: str = ""
    """An axis whose positions p and size - 1 - p are replicas of each other, as pipeline ranks are
    in DualPipe. Then `MIRROR` names an axis of size two that joins each pair; its ranks are already
    counted by this axis."""
    stands_for: tuple[tuple[str, str], ...] = ()
    """Names of groups and the degrees they are: with two meshes side by side, `decode tp` is tp."""

    def degrees(self, axes: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """The joint group of some axes, by degrees: for each, the names of all of the same axes.

        >>> Mesh((("dp", 8), ("tp", 2)), (("dp", ("dp",)), ("ep", ("dp",)))).degrees({"dp", "tp"})
        (('dp', 'ep'), ('tp',))
        """
        left = set(axes)
        found: list[tuple[str, ...]] = []
        for _, parts in sorted(self.groups, key=lambda g: -len(g[1])):
            if set(parts) <= left:
                left -= set(parts)
                found.append(tuple(n for n, same in self.groups if set(same) == set(parts)))
        return tuple(sorted([*found, *((a,) for a in left)], key="/".join))

    def degree_of(self, name: str) -> str:
        """The degree that the name of a group or of an axis stands for.

        A group is its own degree unless `stands_for` says otherwise; another axis belongs to the
        first group that has it.

        >>> parts = "dp_replicate", "dp_shard"
        >>> mesh = Mesh((("dp_shard", 2), ("dp_replicate", 4)), (("dp", parts),))
        >>> mesh.degree_of("dp"), mesh.degree_of("dp_shard")
        ('dp', 'dp')
        """
        found = dict(self.stands_for).get(name)
        if found is not None:
            return found
        groups = dict(self.groups)
        return name if name in groups else next((n for n in groups if name in groups[n]), name)

    def label(self, axes: Iterable[str]) -> str:
        """The usual name of the joint group of some axes: `tp`, `dp+cp`.

        >>> cut = (("tp_rep", 2), ("tp_kv", 8))
        >>> Mesh(cut, (("tp", ("tp_kv", "tp_rep")),)).label({"tp_kv", "tp_rep"})
        'tp'
        >>> Mesh((("dp", 8),), (("dp", ("dp",)), ("ep", ("dp",)))).label({"dp"})
        'dp/ep'
        """
        return "+".join("/".join(names) for names in self.degrees(axes))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, fastest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """Number of ranks along some axes together; 1 for an axis that the mesh does not have."""
        pair = 2 if self.mirror and MIRROR in axes else 1
        return pair * math.prod(size for name, size in self.axes if name in axes)

    def stride(self, axis: str) -> int:
        """Distance in rank numbers between neighbours along `axis`."""
        return math.prod(size for _, size in self.axes[: self.names.index(axis)])

    def coords(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        return {name: rank // self.stride(name) % size for name, size in self.axes}


@dataclass(frozen=True, slots=True)
class Layout:
    """Per dim the axes that split it, outermost first, and the axes over which it is a partial sum.

    `reduction` says how the parts of a partial value combine: "sum", or "max" (a running maximum
    over a split vocabulary). A layout without axes is a complete value everywhere: a single-device
    program is a legal distributed one.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    reduction: str = "sum"

    def __post_init__(self) -> None:
        named = [a for axes in self.dims for a in axes] + list(self.partial)
        if len(named) != len(set(named)):
            raise ValueError(
                f"layout {self.dims} partial {sorted(self.partial)} names an axis twice"
            )

    def role_of(self, axis: str) -> int | str | None:
        """Role of `axis`: the index of the dim it splits, "sum" if partial, or None."""
        if axis in self.partial:
            return "sum"
        return next((i for i, axes in enumerate(self.dims) if axis in axes), None)

    def axes(self) -> frozenset[str]:
        """All axes that the layout names."""
        return self.partial.union(*self.dims)

    def show(self, dims: tuple[str, ...]) -> str:
        """The layout in the paper's notation, with these names of dims: `[B/dp, S, H @ 1/tp]`."""
        inner = ", ".join(
            d + "".join(f"/{a}" for a in axes) for d, axes in zip(dims, self.dims, strict=True)
        )
        if not self.partial:
            return f"[{inner}]"
        sum_of = "" if self.reduction == "sum" else f"{self.reduction} "
        return f"[{inner}{' ' if inner else ''}@ {sum_of}1/{'/'.join(sorted(self.partial))}]"

    def __str__(self) -> str:
        return self.show(tuple("" if axes else "-" for axes in self.dims))


@cache
def replicated(ndim: int) -> Layout:
    """Layout of a value that every rank has whole."""
    return Layout(((),) * ndim)


def split(*dims: str) -> Layout:
    """A layout from one string of axes per dim: `split("dp", "cp tp", "")`."""
    return Layout(tuple(tuple(d.split()) for d in dims))


class Move(NamedTuple):
    """A collective (or local slice) that changes the role of `axes` from `src` to `dst`.

    `src` and `dst` are a dim's index, "sum" or None, as in `Layout.role_of`. Several axes in one
    move are one collective over their joint group, outermost split first.
    """

    kind: str
    axes: tuple[str, ...]
    src: int | str | None
    dst: int | None

    def __str__(self) -> str:
        return f"{self.kind}[{'+'.join(self.axes)}]"


def collective(src: int | str | None, dst: int | str | None) -> str | None:
    """The collective that turns role `src` of an axis into `dst`: the whole theory of resharding.

    | from \\ to  | replicated | split dim  | partial sum |
    |-------------|------------|------------|-------------|
    | replicated  | -          | slice      | never       |
    | split dim   | all_gather | all_to_all | never       |
    | partial sum | all_reduce | reduce_scatter | -       |

    `slice` is local. None: both roles are equal.
    """
    match src, dst:
        case _ if src == dst:
            return None
        case None, int():
            return "slice"
        case int(), None:
            return "all_gather"
        case int(), int():
            return "all_to_all"
        case "sum", None:
            return "all_reduce"
        case "sum", int():
            return "reduce_scatter"
        case _:
            raise ValueError(
                f"no collective turns {src} into {dst}: "
                "a complete value cannot become a partial sum"
            )


def layout_after(have: Layout, move: Move) -> Layout:
    """Layout of a value that had layout `have`, after `move`."""
    dims = [tuple(a for a in axes if a not in move.axes) for axes in have.dims]
    if move.dst is not None:
        dims[move.dst] += move.axes
    partial = have.partial - set(move.axes)
    return Layout(tuple(dims), partial, have.reduction if partial else "sum")


@lru_cache(maxsize=4096)  # a training graph asks for some hundred pairs, each many times
def moves(have: Layout, to: Layout) -> tuple[Move, ...]:
    """The collectives from `have` to `to`.

    Neighbours of one kind from the same dim or sum to the same dim are merged, except all_to_alls.
    Splits nest, so an axis enters or leaves a dim only as its innermost split. Moves that shrink
    the tensor come first: onto a split, local slices, then reductions, then gathers.
    """
    return tuple(_merge_neighbours(_single_moves(have, to)))


def _single_moves(have: Layout, to: Layout) -> Iterator[Move]:
    while (move := _next_move(have, to)) is not None:
        yield move
        have = layout_after(have, move)


def _next_move(have: Layout, to: Layout) -> Move | None:
    fits: dict[str, int] = {}  # axes that may enter a dim in this move, and which
    peel: list[str] = []  # axes that must leave a dim in this move
    for i, (now, then) in enumerate(zip(have.dims, to.dims, strict=True)):
        if now and then[: len(now)] != now:
            peel.append(now[-1])
        elif len(then) > len(now):
            fits[then[len(now)]] = i
    sums = sorted(have.partial - to.partial)
    order = (
        [(a, fits[a]) for a in sums + peel if a in fits]
        + [(a, i) for a, i in fits.items() if have.role_of(a) is None]
        + [(a, None) for a in sums + peel]
    )
    if not order:
        if to.partial - have.partial:
            raise ValueError(
                f"{have} cannot become {to}: a complete value cannot become a partial sum"
            )
        return None
    axis, dst = order[0]
    src = have.role_of(axis)
    kind = collective(src, dst)
    assert kind is not None
    return Move(kind, (axis,), src, dst)


def _merge_neighbours(singles: Iterator[Move]) -> Iterator[Move]:
    last: Move | None = None
    for move in singles:
        if last is not None and move._replace(axes=last.axes) == last and move.kind != "all_to_all":
            # A gather peels the innermost axis first; everything else adds the outermost first.
            axes = move.axes + last.axes if move.kind == "all_gather" else last.axes + move.axes
            last = move._replace(axes=axes)
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last
