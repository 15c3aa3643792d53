"""Points in lowering where training frameworks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
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
    """Megatron-LM at each point where frameworks differ; subclasses override points.

    A point that a subclass does not override combines those of its `parts`.
    """

    parts: tuple[Habit, ...] = ()

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit with the numbers of a resolved run; None: the run does not have it."""
        return cls()

    def allocation(self, allocation: Allocation) -> Allocation:
        """Rules for values of a block that share bytes, given those of other habits."""
        return reduce(lambda rules, part: part.allocation(rules), self.parts, allocation)

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Bytes on one rank that the kernel of a value saves in addition to the value."""
        return sum(part.workspace_bytes(n, extent) for part in self.parts)

    def scratch(self, t: Kernel, size: Mapping[Node, int]) -> int:
        """Bytes on one rank that a task needs while it runs, in addition to its operators'."""
        return sum(part.scratch(t, size) for part in self.parts)

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Additional permanent bytes of a block, by category; those of parts differ."""
        return dict(x for part in self.parts for x in part.permanent_bytes(graph, size).items())

    def bucket(self, bucket: str) -> str:
        """Reductions of one block that are merged, as in `kernels.lowering.KernelRules`."""
        return reduce(lambda merged, part: part.bucket(merged), self.parts, bucket)

    def message_buffers(self) -> int:
        """Number of permanent buffers for each message between stages."""
        return max((part.message_buffers() for part in self.parts), default=0)

    def unit_weights(self) -> UnitWeights:
        """Lifetime of gathered weights in a pipeline."""
        weights = (part.unit_weights() for part in self.parts)
        return next(filter(any, weights), UnitWeights())

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Reorder and merge the tasks of an action; None: in order, a row each.

        `root`: blocks of the stage outside of all layers.
        """
        arranged = (part.arrange(items, root, forward=forward) for part in self.parts)
        return next((rows for rows in arranged if rows is not None), None)

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """Reorder and merge the updates of a rank's blocks; None: in order, a row each."""
        arranged = (part.arrange_updates(items) for part in self.parts)
        return next((rows for rows in arranged if rows and len(rows) < len(items)), None)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Touch values that live longer than the action's tasks require."""
        for part in self.parts:
            part.extend_live_ranges(values, action)


MEGATRON_LM = Habit()
