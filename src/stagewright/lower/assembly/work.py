"""The work of a pipeline rank: rows, values and memory are made when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from stagewright.lower.assembly.expand import Names, expanded
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.rank_values import MemoryPlan, RankValues, Sizes, changes_of
from stagewright.program.columns import Tasks, Values
from stagewright.program.step import Actions, MemoryChanges, RankWork


class AssembledWork(RankWork):
    """The work of a rank of an assembled program."""

    def __init__(
        self,
        actions: Actions,
        values: RankValues,
        plan: MemoryPlan | None,
        names: Names,
        rank: int,
        streams: str,
        sizes: Sizes | None = None,
    ) -> None:
        """`plan` is None where live ranges depend on the order of actions; `sizes`: bytes of the
        values of stages where they are not those of the stages."""
        self._actions, self._values, self._plan = actions, values, plan
        self._names, self._rank, self._streams = names, rank, streams
        self._sizes: Sizes = sizes or {}

    @property
    def actions(self) -> Actions:
        """The distinct actions of the program."""
        return self._actions

    @property
    def order(self) -> RankOrder:
        """The copies of the actions."""
        return self._values.order

    @cached_property
    def tasks(self) -> Tasks:
        """The rows of all copies, in program order."""
        return expanded(self.order, self._actions.tasks, self._names, self._rank, self._streams)

    @cached_property
    def values(self) -> Values:
        """The values in memory, with the live range of each."""
        return self._values.expanded(self._names.naming(self._rank), self._sizes)

    @cached_property
    def changes(self) -> MemoryChanges:
        """What the copies allocate and free."""
        if self._plan is None:
            return changes_of(self.order, self.values)
        return self._plan.changes(self._rank, self._sizes)

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes at the peak in program order, by category, and their sum, `peak`."""
        return self.changes.at_peak()
