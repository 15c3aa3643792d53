"""How large values are on one rank: the numbers behind the symbolic sizes of a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from stagewright.algebra.layout import Mesh
from stagewright.algebra.size import Size, size
from stagewright.arithmetic import ceil
from stagewright.graph.cost import bytes_per_value, local
from stagewright.graph.node import Node
from stagewright.graph.parameter import HEADS

Mean = Fraction | Callable[[tuple[str, ...]], Fraction]  # of a dim, on a rank or by its splits


Split = tuple[int, tuple[str, ...]]
"""A number of rows, and the axes that split them, outermost first."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """The rows that a rank has of splits that do not divide: those of `torch.chunk`.

    All ranks have as many rows as fit evenly, rounded up, until none are left: one rank has the
    rest, and those after it have none. `axes` are cut as one: those that FSDP shards over, in its
    order; other axes of a dim come before them. `held` are the rows of each such split on the rank;
    of a split that is not in it the first rank's. `met` collects the splits that were asked for.
    """

    axes: tuple[str, ...] = ()
    held: Mapping[Split, int] = field(default_factory=dict[Split, int])
    met: dict[Split, None] = field(default_factory=dict[Split, None])

    def __call__(self, count: int, axes: tuple[str, ...], mesh: Mesh) -> int:
        """Rows of `count` that the rank has."""
        over = self._sharding(axes)
        ranks = mesh.size(*over)
        count = -(-count // (mesh.size(*axes) // ranks))
        each = -(-count // ranks)
        if each * ranks == count:
            return each
        self.met[count, over] = None
        return self.held.get((count, over), each)

    def _sharding(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The last of `axes`: experts are split over axes of ep, and only then sharded."""
        rest = (axes[i:] for i in range(len(axes)))
        return next((some for some in rest if some == tuple(a for a in self.axes if a in some)), ())


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a dim is on one rank; a split that does not divide pads to the ceiling.

    `means` are dims of which only the mean is known, which need not be whole: the rows of experts.
    `rows` are axes that split heads and their channels as one dim, where they split channels: rows
    of a linear's weight as PyTorch's FSDP shards them. A size or a mesh axis may be `Varying`: then
    extents are, and what kernels do with these is exact for every configuration. `own` are the rows
    of this rank; None: those of the first rank, as if all were padded.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    means: Mapping[Size, Mean] = field(default_factory=dict[Size, Mean])
    rows: frozenset[str] = frozenset()
    known: dict[tuple[Size, tuple[str, ...]], int | Fraction] = field(
        default_factory=dict[tuple[Size, tuple[str, ...]], "int | Fraction"]
    )
    own: OwnRows | None = None
    optimizer: Extent | None = None
    """How large dims are where the optimizer works; None: as large as elsewhere."""

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
        if key not in self.known:
            if dim in self.means:
                mean = self.means[dim]
                self.known[key] = mean(axes) if callable(mean) else mean / self.mesh.size(*axes)
            else:
                self.known[key] = self._part(dim.value(self.sizes), axes)
        return self.known[key]

    def _part(self, count: int, axes: tuple[str, ...]) -> int:
        """Rows of `count` on one rank."""
        if self.own is not None:
            return self.own(count, axes, self.mesh)
        return -(-count // self.mesh.size(*axes))

    def elements(self, n: Node) -> int:
        """Elements of a value that one rank holds."""
        dims = [*zip(n.shape, n.layout.dims, strict=True)]
        last = len(dims) - 1
        over = tuple(a for a in dims[-1][1] if a in self.rows) if dims else ()
        if not over or n.shape[-1] in (size("M"), size("B")):
            return ceil(local(n, self))
        first = last
        while first and n.shape[first - 1] in HEADS:
            first -= 1
        count = [self(d, tuple(a for a in axes if a not in over)) for d, axes in dims]
        rows = ceil(math.prod(count[first:]))
        return ceil(math.prod(count[:first])) * self._part(rows, over)


def extent_of(
    sizes: Mapping[str, int],
    mesh: Mesh,
    means: Mapping[Size, Mean] | None = None,
    rows: frozenset[str] = frozenset(),
    own: OwnRows | None = None,
) -> Extent:
    """How large dims are on a rank of a mesh; see `Extent`. `own`: where the optimizer works."""
    means = means or {}
    optimizer = Extent(sizes, mesh, means, rows, own=own) if own is not None else None
    return Extent(sizes, mesh, means, rows, optimizer=optimizer)


def bytes_of(n: Node, extent: Extent) -> int:
    """Bytes of the part of a value that one rank holds."""
    return ceil(extent.elements(n) * bytes_per_value(n, extent))
