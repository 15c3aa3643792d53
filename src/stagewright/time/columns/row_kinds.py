"""Rows of a program that take equally long, and what programs and structures have in common.

Most rows of a program are copies: of the same kernel in another layer or microbatch. What they take
is found once, for all configurations, and known by a number: that of equal rows is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, digest
from stagewright.lower.kernels.kernel import Kernel
from stagewright.time.columns.meshes import Groups


class KernelNumbers(NamedTuple):
    """The numbers of a kernel: [configurations] each, or one for all."""

    flops: Float
    traffic: Float
    comm_bytes: Float
    extents: Mapping[str, Float]
    """Of its shape, by name."""
    content: bytes
    """What is equal for kernels that take equally long alone."""
    comm_content: bytes
    """What is equal for equal bytes of communication."""

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        """Those of a kernel, whose numbers may be `Varying`."""
        flops, traffic, comm_bytes = (
            np.asarray(n, dtype=np.float64)
            for n in (kernel.flops, kernel.traffic, kernel.comm_bytes)
        )
        shape = kernel.shape
        sizes = {} if shape is None else shape.sizes()
        extents = {name: np.asarray(n, dtype=np.float64) for name, n in sizes.items()}
        kind = "" if shape is None else shape.kernel, kernel.dtype, kernel.phase == "backward"
        content = digest(kind, flops, traffic, [*extents], *extents.values())
        return cls(flops, traffic, comm_bytes, extents, content, digest(comm_bytes))


class DistinctRows:
    """Rows of numbers, [configurations] each, by number: equal rows have one."""

    def __init__(self) -> None:
        """None is known."""
        self.rows: list[Float] = []
        self.count = 0
        """Numbers in all rows."""
        self._number: dict[bytes, int] = {}

    def number(self, row: Float) -> int:
        """The number of a row."""
        key = digest(row)
        if key not in self._number:
            self._number[key] = len(self.rows)
            self.count += row.size
            self.rows.append(row.copy())  # not a view, which would keep its whole table
        return self._number[key]

    def table(self, numbers: Sequence[int]) -> Float:
        """Some rows of as many configurations: [rows, configurations]."""
        return np.stack([self.rows[number] for number in numbers])


class JointProduct(NamedTuple):
    """A product that several rows are parts of."""

    seconds: Sequence[int]
    """Of each part, as numbers of `Known.rows`."""
    result: Sequence[int]
    """Bytes of the product's result, for each part, likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What programs of a structure have in common, and other structures on the same machine."""

    numbers: dict[Kernel, KernelNumbers]
    """Of the kernels of one structure."""
    alone: dict[Kernel, int]
    """What these take alone, as numbers of `rows`."""
    groups: Groups
    """Where groups of the structure's ranks lie on the machine."""
    found: dict[Hashable, int]
    """Numbers of `rows` by what these follow from, of any structure."""
    joint: dict[bytes, JointProduct]
    """Likewise products with parts."""
    rows: DistinctRows

    @classmethod
    def none(cls) -> Self:
        """Nothing is known."""
        return cls({}, {}, {}, {}, {}, DistinctRows())

    def of_structure(self) -> Self:
        """What is known when programs of another structure come."""
        return type(self)({}, {}, {}, self.found, self.joint, self.rows)

    def number(self, key: Hashable, row: Callable[[], Float]) -> int:
        """The number of a row that follows from `key`."""
        if key not in self.found:
            self.found[key] = self.rows.number(row())
        return self.found[key]


class RowKinds(NamedTuple):
    """What rows take, of which many take the same: rows of one kind are copies of one kernel."""

    known: DistinctRows
    number: Int
    """Which of the known rows are the seconds of each kind: [kinds]."""
    kernel: Int
    """[kinds]."""
    of: Int
    """The kind of each row: [rows]."""

    @classmethod
    def made(cls, known: DistinctRows, number: Int, kernel: Int) -> Self:
        """Those of rows by what they take, and by the kernels that they are copies of."""
        base = int(kernel.max(initial=0)) + 1
        each, of = np.unique(number * base + kernel, return_inverse=True)
        return cls(known, each // base, each % base, of.ravel())

    @property
    def seconds(self) -> Float:
        """[kinds, configurations]."""
        return self.known.table(self.number.tolist())

    @property
    def of_rows(self) -> Float:
        """Seconds of the rows: [rows, configurations]."""
        return self.seconds[self.of]
