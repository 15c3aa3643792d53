"""Work of a pipeline rank of an assembled program: rows, values and memory on demand."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.expand import RowNames, expand_rows
from stagewright.lower.assembly.live_ranges import value_columns
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.rank_values import (
    ValueSizes,
    memory_changes,
    rank_values,
    relabel_layers,
)
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import RankClass, Tasks, Values
from stagewright.program.memory_changes import MemoryChanges
from stagewright.program.rank_work import Actions, RankWork


class StageBytes(NamedTuple):
    """Values of a stage: layer (of the stage whose columns `Actions` has) and bytes of each."""

    stage: Stage
    layer: Int
    size: Int


class AssembledWork(RankWork):
    """Work of a rank of an assembled program."""

    def __init__(
        self,
        actions: Actions,
        order: RankOrder,
        names: RowNames,
        rank: int,
        streams: str,
        sizes: ValueSizes | None = None,
    ) -> None:
        """`sizes`: bytes of values by stage, where they differ from those of the stage."""
        self.actions, self.order, self.rank_order = actions, order, order
        self._names, self._rank, self._streams = names, rank, streams
        self._sizes: ValueSizes = sizes or {}

    @property
    def rows(self) -> Int:
        """Rows of `actions` that this rank has copies of."""
        rows = [self.actions.rows(action) for action in self.rank_order.distinct]
        return np.concatenate([np.zeros(0, dtype=np.int64), *rows])

    @property
    def stage_bytes(self) -> list[StageBytes]:
        """Values of the rank's stages, by distinct stage."""
        table = self.rank_order.table
        result: list[StageBytes] = []
        classes: list[int] = self.rank_order.stage_classes.tolist()
        for stage_class in dict.fromkeys(classes):
            stage = table.stages[stage_class].unshifted
            columns = value_columns(stage)
            layer = relabel_layers(columns.layer, stage, table.labels[stage_class])
            result.append(StageBytes(stage, layer, self._sizes.get(stage, columns.size)))
        return result

    def with_numbers(self, tasks: Tasks, sizes: ValueSizes) -> AssembledWork:
        """Replace numbers: columns of actions, and bytes of values by stage.

        Rows, dependencies and order stay the same objects.
        """
        old = self.actions
        tasks = replace(tasks, data_ptr=old.tasks.data_ptr, data=old.tasks.data)
        actions = replace(old, tasks=tasks)
        return AssembledWork(
            actions, self.rank_order, self._names, self._rank, self._streams, sizes
        )

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all copies, in program order."""
        tasks = self.actions.tasks
        return expand_rows(self.rank_order, tasks, self._names, self._rank, self._streams)

    @cached_property
    def values(self) -> Values:
        """Values in memory, with the live range of each."""
        return rank_values(self.rank_order, self._names.labels[self._rank], self._sizes)

    @cached_property
    def changes(self) -> MemoryChanges:
        """Bytes that the copies allocate and free."""
        return memory_changes(self.rank_order, self._sizes)


def assembled(rank_class: RankClass) -> AssembledWork:
    """Work of a class of an assembled program."""
    assert isinstance(rank_class.work, AssembledWork)
    return rank_class.work
