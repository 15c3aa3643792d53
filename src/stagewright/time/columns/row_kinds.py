"""Rows of a program that take equally long, and what programs and structures have in common.

Most rows of a program are copies: of the same kernel in another layer or microbatch. What they take
is found once, for all configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.lower.kernels.kernel import Kernel
from stagewright.time.columns.meshes import Groups


def digest(*parts: object) -> bytes:
    """What is equal for equal parts: arrays by their numbers, all else by how it prints."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        found.update(b";")
    return found.digest()


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


class JointProduct(NamedTuple):
    """A product that several rows are parts of: [parts, configurations] each."""

    seconds: Float
    summed: Bool
    """Whether the product is the sum of its parts: [parts]."""
    result: Float
    """Bytes of the product's result."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What programs of a structure have in common, and other structures on the same machine."""

    numbers: dict[Kernel, KernelNumbers]
    """Of the kernels of one structure."""
    groups: Groups
    """Where groups of the structure's ranks lie on the machine."""
    seconds: dict[bytes, Float]
    """Seconds by what they follow from: [configurations] each, of any structure."""
    joint: dict[bytes, JointProduct]
    """Likewise of products with parts."""

    @classmethod
    def none(cls) -> Self:
        """Nothing is known."""
        return cls({}, {}, {}, {})

    def of_structure(self) -> Self:
        """What is known when programs of another structure come."""
        return type(self)({}, {}, self.seconds, self.joint)


class RowKinds(NamedTuple):
    """What rows take, of which many take the same: rows of one kind are copies of one kernel."""

    seconds: Float
    """[kinds, configurations]."""
    kernel: Int
    """[kinds]."""
    of: Int
    """The kind of each row: [rows]."""

    @property
    def of_rows(self) -> Float:
        """Seconds of the rows: [rows, configurations]."""
        return self.seconds[self.of]


class GrowingKinds:
    """The kinds of a program's rows while their seconds are being found."""

    def __init__(self, of: Int, seconds: Iterable[Float]) -> None:
        """At first rows are of these kinds, which take so long."""
        self.of = of.copy()
        self.seconds: list[Float] = [*seconds]
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, seconds: Callable[[], Float]) -> int:
        """The number of a kind that is known by `key`."""
        if key not in self._numbers:
            self._numbers[key] = len(self.seconds)
            self.seconds.append(seconds())
        return self._numbers[key]

    def made(self, count: int, kernel: Int) -> RowKinds:
        """The kinds of rows that are copies of `kernel`, of so many configurations."""
        pairs = np.stack([self.of, kernel])
        each, of = np.unique(pairs, axis=1, return_inverse=True)
        table = np.empty((each.shape[1], count))
        for row, kind in zip(table, each[0].tolist(), strict=True):
            row[:] = self.seconds[kind]
        return RowKinds(table, each[1], of.ravel())
