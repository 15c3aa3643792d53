"""The work of a pipeline rank: rows, values and memory are made when they are asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.expand import Names, expanded
from stagewright.lower.assembly.live_ranges import value_columns
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.rank_values import Sizes, memory_changes, rank_values, relabelled
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import RankClass, Tasks, Values
from stagewright.program.step import Actions, MemoryChanges, RankWork


class StageHeld(NamedTuple):
    """The values of a stage: layer (that of an example stage) and bytes of each."""

    stage: Stage
    layer: Int
    size: Int


class AssembledWork(RankWork):
    """The work of a rank of an assembled program."""

    def __init__(
        self,
        actions: Actions,
        order: RankOrder,
        names: Names,
        rank: int,
        streams: str,
        sizes: Sizes | None = None,
    ) -> None:
        """`sizes`: bytes of the values of stages where they are not those of the stages."""
        self._actions, self._order = actions, order
        self._names, self._rank, self._streams = names, rank, streams
        self._sizes: Sizes = sizes or {}

    @cached_property
    def actions(self) -> Actions:
        """The distinct actions of the program."""
        return self._actions

    @cached_property
    def order(self) -> RankOrder:
        """The copies of the actions."""
        return self._order

    @property
    def rows(self) -> Int:
        """The rows of `actions` that this rank has copies of."""
        rows = [self.actions.rows(action) for action in self.order.distinct]
        return np.concatenate([np.zeros(0, dtype=np.int64), *rows])

    @property
    def held(self) -> list[StageHeld]:
        """The values of the rank's stages, by distinct stage."""
        table = self.order.table
        found: list[StageHeld] = []
        contents: list[int] = self.order.contents.tolist()
        for content in dict.fromkeys(contents):
            stage = table.stages[content].base
            columns = value_columns(stage)
            layer = relabelled(columns.layer, stage, table.naming[content])
            found.append(StageHeld(stage, layer, self._sizes.get(stage, columns.size)))
        return found

    def with_numbers(self, tasks: Tasks, sizes: Sizes) -> AssembledWork:
        """The same work with other numbers: columns of actions, and bytes of the values of stages.

        Rows, needs and order stay, as the same objects.
        """
        of = self._actions
        same = replace(tasks, data_ptr=of.tasks.data_ptr, data=of.tasks.data)
        actions = Actions(same, of.begin, of.part, of.carried)
        return AssembledWork(actions, self._order, self._names, self._rank, self._streams, sizes)

    @cached_property
    def tasks(self) -> Tasks:
        """The rows of all copies, in program order."""
        return expanded(self.order, self._actions.tasks, self._names, self._rank, self._streams)

    @cached_property
    def values(self) -> Values:
        """The values in memory, with the live range of each."""
        return rank_values(self._order, self._names.naming(self._rank), self._sizes)

    @cached_property
    def changes(self) -> MemoryChanges:
        """What the copies allocate and free."""
        return memory_changes(self._order, self._sizes)


def assembled(of: RankClass) -> AssembledWork:
    """The work of a class of an assembled program."""
    assert isinstance(of.work, AssembledWork)
    return of.work
