"""Configurations that share a structure: the same graphs and kernels, with other numbers.

The blocks of a structure are built, sharded and lowered once, by the functions that compile a
single run, with a `Varying` in the place of every number that differs: degrees of parallelism,
micro-batch size, sequence length. What makes two configurations differ in structure is nowhere
written down: it is whatever these functions ask of the numbers on their way (`varying.Cases`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.arrays import Int
from stagewright.graph.node import Node
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.kernels import Kernel
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.varying import Number


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBlock:
    """A block of which every number is an int, or a `Varying` with an entry per tuple.

    `np.asarray(number)` is an array in both cases: of int64, or float64 for means of experts.
    """

    block: LoweredBlock
    """What the assembly takes; its numbers are ints or columns."""

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The tasks of the block in order: `flops`, `traffic`, `comm_bytes` and the extents of
        `shape` are numbers of one rank."""
        return self.block.tasks

    @property
    def size(self) -> Mapping[Node, Number]:
        """Bytes of every value on one rank."""
        return self.block.size  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Configurations whose blocks have the same graphs and kernels.

    A *tuple* is one combination of the numbers that blocks depend on. Many configurations have the
    same one: pipeline stages and the number of microbatches do not enter a block.
    """

    run: Run
    """The first configuration: what all have in common, with the first tuple's numbers."""
    model: ModelConfig
    candidates: Int
    """The configurations, by their numbers among all candidates: [candidates]."""
    index: Int
    """Which tuple each of them has: [candidates]."""
    tuples: Mapping[str, Int]
    """The numbers by the name of their setting (`tp`, `micro_batch_size`): [tuples] each."""
    mesh: Mapping[str, Int]
    """The size of each mesh axis, fastest axis first, but for the pipeline's: [tuples] each."""
    sizes: Mapping[str, Number]
    """The number behind each named dim."""
    variants: Mapping[BlockVariant, ColumnBlock]
    """The distinct blocks of the model."""
