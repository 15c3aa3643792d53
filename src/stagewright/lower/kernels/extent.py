"""How large values are on one rank: the numbers behind the symbolic sizes of a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from stagewright.algebra.layout import Mesh
from stagewright.algebra.size import Size, size
from stagewright.graph.cost import bytes_per_value, local
from stagewright.graph.node import Graph, Node
from stagewright.graph.parameter import HEADS
from stagewright.graph.table import MOVES

Mean = Fraction | Callable[[tuple[str, ...]], Fraction]
"""The mean of a dim over all ranks that split it, or as a function of the axes that do."""

Split = tuple[int, tuple[str, ...]]
"""A number of rows, and the axes that split them, outermost first."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows that a rank has of splits that do not divide: those of `torch.chunk`.

    All ranks have as many rows as fit evenly, rounded up, until none are left: one rank has the
    rest, and those after it have none. `axes` are cut as one: those that FSDP shards over, in its
    order; other axes of a dim come before them. `held` are the rows of each such split on the rank;
    of a split that is not in it the first rank's.
    """

    axes: tuple[str, ...] = ()
    held: tuple[tuple[Split, int], ...] = ()

    def split(self, count: int, axes: tuple[str, ...], mesh: Mesh) -> tuple[Split, int]:
        """The split of `count` rows, and how many of these the rank has."""
        over = self._sharding(axes)
        ranks = mesh.size(*over)
        count = -(-count // (mesh.size(*axes) // ranks))
        split = count, over
        return split, dict(self.held).get(split, -(-count // ranks))

    def _sharding(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The last of `axes`: experts are split over axes of ep, and only then sharded."""
        rest = (axes[i:] for i in range(len(axes)))
        return next((some for some in rest if some == tuple(a for a in self.axes if a in some)), ())


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a dim is on one rank; a split that does not divide pads to the ceiling.

    `means` are dims of which only the mean is known, which need not be whole: the rows of experts.
    `rows` are axes that split heads and their channels as one dim, where they split channels: rows
    of a linear's weight as PyTorch's FSDP shards them. `own` are the rows of this rank; None: those
    of the first rank, as if all were padded.

    Extents of equal numbers are equal, whatever has been asked of them.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    means: Mapping[Size, Mean] = field(default_factory=dict[Size, Mean])
    rows: frozenset[str] = frozenset()
    own: OwnRows | None = None
    optimizer: Extent | None = None
    """How large dims are where the optimizer works; None: as large as elsewhere."""
    known: dict[tuple[Size, tuple[str, ...]], int | Fraction] = field(
        default_factory=dict[tuple[Size, tuple[str, ...]], "int | Fraction"],
        init=False,
        compare=False,
    )
    uneven: dict[Split, None] = field(default_factory=dict[Split, None], init=False, compare=False)
    """Splits that were asked for and do not divide, where there are `own` rows."""

    def __hash__(self) -> int:
        """Return the hash of the numbers."""
        sizes, means = frozenset(self.sizes.items()), frozenset(self.means.items())
        return hash((sizes, self.mesh, means, self.rows, self.own, self.optimizer))

    def of_graph(self, graph: Graph) -> Extent:
        """The extent of the sizes and axes that a graph names: another one is a KeyError."""
        sizes, axes = _names(graph)
        return Extent(
            {name: number for name, number in self.sizes.items() if name in sizes},
            replace(self.mesh, axes=tuple(x for x in self.mesh.axes if x[0] in axes), groups=()),
            {dim: mean for dim, mean in self.means.items() if dim.symbols <= sizes},
            self.rows,
            self.own,
            self.optimizer and self.optimizer.of_graph(graph),
        )

    def of(self, n: Node) -> Extent:
        """How large the dims of a value are.

        FSDP2 stores weights and gradients with padding, and hands the optimizer views without it.
        """
        if self.optimizer is not None and (n.phase == "optimizer" or n.op == "state"):
            return self.optimizer
        return self

    def __call__(self, dim: Size, axes: tuple[str, ...]) -> int | Fraction:
        """Points of a dim that `axes` split."""
        key = (dim, axes)
        found = self.known.get(key)
        if found is None:
            mean = self.means.get(dim)
            if mean is None:
                found = self._part(dim.value(self.sizes), axes)
            else:
                found = (mean(axes) if callable(mean) else mean) / self.mesh.size(*axes)
            self.known[key] = found
        return found

    def _part(self, count: int, axes: tuple[str, ...]) -> int:
        """Rows of `count` on one rank."""
        if self.own is None:
            return -(-count // self.mesh.size(*axes))
        split, rows = self.own.split(count, axes, self.mesh)
        if split[0] % self.mesh.size(*split[1]):
            self.uneven[split] = None
        return rows

    def elements(self, n: Node) -> int:
        """Elements of a value that one rank holds."""
        dims = [*zip(n.shape, n.layout.dims, strict=True)]
        last = len(dims) - 1
        over = tuple(a for a in dims[-1][1] if a in self.rows) if dims else ()
        if not over or n.shape[-1] in (size("M"), size("B")):
            return math.ceil(local(n, self))
        first = last
        while first and n.shape[first - 1] in HEADS:
            first -= 1
        count = [self(d, tuple(a for a in axes if a not in over)) for d, axes in dims]
        rows = math.ceil(math.prod(count[first:]))
        return math.ceil(math.prod(count[:first])) * self._part(rows, over)


def extent_of(
    sizes: Mapping[str, int],
    mesh: Mesh,
    means: Mapping[Size, Mean] | None = None,
    rows: frozenset[str] = frozenset(),
    own: OwnRows | None = None,
) -> Extent:
    """How large dims are on a rank of a mesh; see `Extent`. `own`: where the optimizer works."""
    means = means or {}
    optimizer = Extent(sizes, mesh, means, rows, own) if own is not None else None
    return Extent(sizes, mesh, means, rows, optimizer=optimizer)


@lru_cache(maxsize=256)
def _names(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """The symbols of sizes, and the axes, that a graph names."""
    dims = {dim for n in graph for dim in n.shape}
    dims |= {value for n in graph for _, value in n.attrs if isinstance(value, Size)}
    axes = {axis for n in graph for axis in n.layout.axes()}
    for n in graph:
        if n.op in MOVES:
            moved: Any = n["axes"]
            axes.update(moved)
    return frozenset(name for dim in dims for name in dim.symbols), frozenset(axes)


def bytes_of(n: Node, extent: Extent) -> int:
    """Bytes of the part of a value that one rank holds."""
    return math.ceil(extent.elements(n) * bytes_per_value(n, extent))
