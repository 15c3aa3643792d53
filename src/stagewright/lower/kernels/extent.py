"""Sizes of values on one rank: numbers for the symbolic sizes of a block."""

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
"""Mean of a dim over all ranks that split it, or a function of the axes that do."""

Split = tuple[int, tuple[str, ...]]
"""A number of rows, and the axes that split them, outermost first."""


@dataclass(frozen=True, slots=True)
class LocalRows:
    """Rows of a rank in splits that do not divide, as in `torch.chunk`.

    Each rank has the mean number of rows, rounded up, until none remain: one rank has the
    remainder, and later ranks have none. `axes` are cut as one: those that FSDP shards over, in its
    order; other axes of a dim come before them. `counts`: rows of each such split on the rank; of
    other splits the first rank's.
    """

    axes: tuple[str, ...] = ()
    counts: tuple[tuple[Split, int], ...] = ()

    def split(self, count: int, axes: tuple[str, ...], mesh: Mesh) -> tuple[Split, int]:
        """Split of `count` rows, and number of rows of the rank."""
        over = self._sharding(axes)
        ranks = mesh.size(*over)
        count = -(-count // (mesh.size(*axes) // ranks))
        split = count, over
        return split, dict(self.counts).get(split, -(-count // ranks))

    def _sharding(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Suffix of `axes` that FSDP shards over: experts are split over ep first."""
        suffixes = (axes[i:] for i in range(len(axes)))
        return next((s for s in suffixes if s == tuple(a for a in self.axes if a in s)), ())


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of dims on one rank; a split that does not divide pads to the ceiling.

    `means`: dims with a known mean, possibly fractional: rows of experts. `row_axes`: axes over
    which FSDP2 shards the rows of a linear's weight; there heads and their channels count as one
    dim. `local_rows`: rows of this rank; None: those of the first rank, as if all were padded.

    Extents of equal numbers are equal, whatever their caches hold.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    means: Mapping[Size, Mean] = field(default_factory=dict[Size, Mean])
    row_axes: frozenset[str] = frozenset()
    local_rows: LocalRows | None = None
    optimizer: Extent | None = None
    """Extent of optimizer states and updates; None: this one."""
    cache: dict[tuple[Size, tuple[str, ...]], int | Fraction] = field(
        default_factory=dict[tuple[Size, tuple[str, ...]], "int | Fraction"],
        init=False,
        compare=False,
    )
    uneven: dict[Split, None] = field(default_factory=dict[Split, None], init=False, compare=False)
    """Splits evaluated so far that do not divide, if `local_rows` are set."""

    def __hash__(self) -> int:
        """Return the hash of the numbers."""
        sizes, means = frozenset(self.sizes.items()), frozenset(self.means.items())
        return hash((sizes, self.mesh, means, self.row_axes, self.local_rows, self.optimizer))

    def of_graph(self, graph: Graph) -> Extent:
        """Restrict to the sizes and axes that a graph names: others raise KeyError."""
        sizes, axes = _names(graph)
        return Extent(
            {name: number for name, number in self.sizes.items() if name in sizes},
            replace(self.mesh, axes=tuple(x for x in self.mesh.axes if x[0] in axes), groups=()),
            {dim: mean for dim, mean in self.means.items() if dim.symbols <= sizes},
            self.row_axes,
            self.local_rows,
            self.optimizer and self.optimizer.of_graph(graph),
        )

    def of(self, n: Node) -> Extent:
        """Extent of a value.

        FSDP2 stores weights and gradients with padding, and gives the optimizer views without it.
        """
        if self.optimizer is not None and (n.phase == "optimizer" or n.op == "state"):
            return self.optimizer
        return self

    def __call__(self, dim: Size, axes: tuple[str, ...]) -> int | Fraction:
        """Size on one rank of a dim that `axes` split."""
        key = (dim, axes)
        result = self.cache.get(key)
        if result is None:
            mean = self.means.get(dim)
            if mean is None:
                result = self._rows(dim.value(self.sizes), axes)
            else:
                result = (mean(axes) if callable(mean) else mean) / self.mesh.size(*axes)
            self.cache[key] = result
        return result

    def _rows(self, count: int, axes: tuple[str, ...]) -> int:
        """Rows of `count` on one rank."""
        if self.local_rows is None:
            return -(-count // self.mesh.size(*axes))
        split, rows = self.local_rows.split(count, axes, self.mesh)
        if split[0] % self.mesh.size(*split[1]):
            self.uneven[split] = None
        return rows

    def elements(self, n: Node) -> int:
        """Number of elements of a value on one rank."""
        dims = [*zip(n.shape, n.layout.dims, strict=True)]
        last = len(dims) - 1
        over = tuple(a for a in dims[-1][1] if a in self.row_axes) if dims else ()
        if not over or n.shape[-1] in (size("M"), size("B")):
            return math.ceil(local(n, self))
        first = last
        while first and n.shape[first - 1] in HEADS:
            first -= 1
        count = [self(d, tuple(a for a in axes if a not in over)) for d, axes in dims]
        rows = math.ceil(math.prod(count[first:]))
        return math.ceil(math.prod(count[:first])) * self._rows(rows, over)


def extent_of(
    sizes: Mapping[str, int],
    mesh: Mesh,
    means: Mapping[Size, Mean] | None = None,
    row_axes: frozenset[str] = frozenset(),
    local_rows: LocalRows | None = None,
) -> Extent:
    """Extent on a rank of a mesh; `local_rows`: rows of its optimizer."""
    means = means or {}
    optimizer = None
    if local_rows is not None:
        optimizer = Extent(sizes, mesh, means, row_axes, local_rows)
    return Extent(sizes, mesh, means, row_axes, optimizer=optimizer)


@lru_cache(maxsize=256)
def _names(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """Symbols of sizes, and axes, that a graph names."""
    dims = {dim for n in graph for dim in n.shape}
    dims |= {value for n in graph for _, value in n.attrs if isinstance(value, Size)}
    axes = {axis for n in graph for axis in n.layout.axes()}
    for n in graph:
        if n.op in MOVES:
            moved: Any = n["axes"]
            axes.update(moved)
    return frozenset(name for dim in dims for name in dim.symbols), frozenset(axes)


def bytes_of(n: Node, extent: Extent) -> int:
    """Bytes of a value on one rank."""
    return math.ceil(extent.elements(n) * bytes_per_value(n, extent))
