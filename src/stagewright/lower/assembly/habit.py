"""The places in lowering where training frameworks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Self

from stagewright.graph.node import Graph, Node
from stagewright.lower.assembly.buckets import Item, Row
from stagewright.lower.assembly.lifetimes import Allocation
from stagewright.lower.assembly.stage_values import ActionRows, StageValues
from stagewright.lower.kernels.extent import Extent
from stagewright.lower.kernels.kernel import Kernel
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


class UnitWeights(NamedTuple):
    """How long gathered weights live in a pipeline, beyond the action that gathers them."""

    kept: bool = False
    """A backward leaves them gathered, a forward frees them: the action of a stage that follows a
    backward gathers nothing."""
    before: bool = False
    """A rank gathers the weights of all its stages before its first action."""


class Habit:
    """What Megatron-LM does at each place where frameworks differ; subclasses do otherwise."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """The habit with the numbers of a resolved run; None: the run does not have it."""
        return cls()

    def allocation(self, allocation: Allocation) -> Allocation:
        """Which values of a block have bytes of their own, given what other habits say."""
        return allocation

    def bytes_beside(self, n: Node, extent: Extent) -> int:
        """Bytes on one rank that the kernel of a value keeps beside the value itself."""
        return 0

    def scratch(self, t: Kernel, size: Mapping[Node, int]) -> int:
        """Bytes on one rank that a task needs while it runs, beyond what its operators say."""
        return 0

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Further bytes of a block that are allocated all the time, by category."""
        return {}

    def bucket(self, bucket: str) -> str:
        """Which reductions of one block are merged, as `lower.kernels` takes it."""
        return bucket

    def message_buffers(self) -> int:
        """Buffers allocated all the time for each message between stages; 0: none."""
        return 0

    def unit_weights(self) -> UnitWeights:
        """How long gathered weights live in a pipeline."""
        return UnitWeights()

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """The tasks of an action in order, some merged; None: as they are, a row each.

        `root` are the blocks of the stage that stand outside of all layers.
        """
        return None

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """The updates of the blocks of a rank in order, some gathers merged; None: as they are, a
        row each."""
        return None

    def prolong(self, values: StageValues, action: ActionRows) -> None:
        """Touch values that live longer than the action's tasks need them."""


MEGATRON_LM = Habit()
