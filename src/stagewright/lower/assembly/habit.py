"""Points in lowering where training frameworks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Self

from stagewright.graph.node import Graph, Node
from stagewright.lower.assembly.buckets import Item, Row
from stagewright.lower.assembly.lifetimes import Allocation
from stagewright.lower.assembly.segments import ActionRows
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.kernels.extent import Extent
from stagewright.lower.kernels.kernel import Kernel
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


class UnitWeights(NamedTuple):
    """Lifetime of gathered weights in a pipeline, beyond the action that gathers them."""

    keeps_gathered: bool = False
    """Weights stay gathered after a backward and are freed by the next forward: the action of a
    stage that follows a backward gathers nothing."""
    gathers_first: bool = False
    """A rank gathers the weights of all its stages before its first action."""


class Habit:
    """Megatron-LM at each point where frameworks differ; subclasses override points."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit with the numbers of a resolved run; None: the run does not have it."""
        return cls()

    def allocation(self, allocation: Allocation) -> Allocation:
        """Rules for values of a block that share bytes, given those of other habits."""
        return allocation

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Bytes on one rank that the kernel of a value saves in addition to the value."""
        return 0

    def scratch(self, t: Kernel, size: Mapping[Node, int]) -> int:
        """Bytes on one rank that a task needs while it runs, in addition to its operators'."""
        return 0

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Additional permanent bytes of a block, by category."""
        return {}

    def bucket(self, bucket: str) -> str:
        """Reductions of one block that are merged, as in `kernels.lowering.KernelRules`."""
        return bucket

    def message_buffers(self) -> int:
        """Number of permanent buffers for each message between stages."""
        return 0

    def unit_weights(self) -> UnitWeights:
        """Lifetime of gathered weights in a pipeline."""
        return UnitWeights()

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Reorder and merge the tasks of an action; None: in order, a row each.

        `root`: blocks of the stage outside of all layers.
        """
        return None

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """Reorder and merge the updates of a rank's blocks; None: in order, a row each."""
        return None

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Touch values that live longer than the action's tasks require."""


MEGATRON_LM = Habit()
