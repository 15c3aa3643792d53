"""Order in which one pipeline rank executes copies of actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from stagewright.arrays import Int, is_any
from stagewright.lower.assembly.distinct_actions import ActionTable, rows_of_half
from stagewright.lower.assembly.rank_schedule import FORWARD, UNSHARD, RankSchedule
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import FORWARD_PHASE, TaskKind

MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this


def gathered_by(schedule: RankSchedule, stages: Sequence[Stage], *, keeps_gathered: bool) -> Int:
    """Index of the action that gathers each action's weights; `stages` are those of the rank.

    With `keeps_gathered`, weights that a backward gathers stay until the next forward of the stage
    has used them.
    """
    gathered_by = np.arange(len(schedule))
    for local_stage, stage in enumerate(stages) if keeps_gathered else ():
        actions = np.flatnonzero(schedule.local_stage == local_stage)
        kinds = schedule.kind[actions]
        uses = np.array([uses_weights(stage, kind) for kind in kinds.tolist()], dtype=bool)
        actions, forward = actions[uses], kinds[uses] == FORWARD
        releases = np.cumsum(forward) - forward  # number of earlier forwards: each frees weights
        gathered_by[actions] = actions[np.searchsorted(releases, releases)]
    return gathered_by


def uses_weights(stage: Stage, kind: int) -> bool:
    """True if actions of the kind need gathered weights; the weight half of a backward may not."""
    if kind in (FORWARD, UNSHARD):
        return True
    return bool((rows_of_half(stage, kind) & stage.backward.gathers).any())


class RankOrder:
    """Copies of actions of a rank, in program order (`program.rank_work.ActionOrder`).

    One for each step of the schedule, then the optimizer action if it has rows.
    """

    def __init__(
        self,
        table: ActionTable,
        schedule: RankSchedule,
        stage_classes: Int,
        action: Int,
        gathered_by: Int,
        optimizer_index: int,
        num_stages: int,
    ) -> None:
        """`stage_classes` is by stage of the rank, `action` by copy.

        `gathered_by` is by action of the schedule, `optimizer_index` an index into
        `ActionTable.optimizer_steps`.
        """
        self.table, self.schedule, self.stage_classes = table, schedule, stage_classes
        self.action, self.gathered_by = action, gathered_by
        self.optimizer_index, self._num_stages = optimizer_index, num_stages
        sizes = np.diff(table.actions.begin)[action]
        self.begin: Int = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.total = int(self.begin[-1])
        self.optimizer_begin = int(self.begin[schedule.steps])
        """First row of the optimizer action."""
        columns = np.full((3, len(action), 2), -1, dtype=np.int64)
        columns[:, schedule.step, schedule.part] = (
            schedule.kind, schedule.stage, schedule.microbatch,
        )  # fmt: skip
        self.kind: Int = columns[0]
        self.stage: Int = columns[1]
        self.microbatch: Int = columns[2]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the rank, whichever ranks their messages go to."""
        classes: list[int] = self.stage_classes.tolist()
        return tuple(self.table.stages[stage_class].unshifted for stage_class in classes)

    @cached_property
    def distinct(self) -> list[int]:
        """Actions that the rank has copies of, ascending."""
        return np.unique(self.action).tolist()

    @cached_property
    def part_rows(self) -> Int:
        """By action of the schedule, index into `ActionTable.part_rows`."""
        return self.table.part_rows_of[self.action[self.schedule.step], self.schedule.part]

    @cached_property
    def reuses_gathered(self) -> bool:
        """True if some action uses weights that another one has gathered."""
        return bool((self.gathered_by != np.arange(len(self.gathered_by))).any())

    @cached_property
    def _first_of_step(self) -> Int:
        """By copy, its first action of the schedule."""
        return np.searchsorted(self.schedule.step, np.arange(self.schedule.steps))

    def copies(self, action: int) -> Int:
        """Copies of an action."""
        return np.flatnonzero(self.action == action)

    def take(self, copies: Int) -> tuple[RankOrder, Int]:
        """Select and renumber copies; also the original microbatch of each."""
        old = self.schedule
        new_step = np.full(len(self.action), -1, dtype=np.int64)
        new_step[copies] = np.arange(len(copies))
        step = new_step[old.step]
        actions = np.lexsort((old.part, step))[np.count_nonzero(step < 0) :]
        new_action = np.empty(len(old), dtype=np.int64)
        new_action[actions] = np.arange(len(actions))
        microbatches, microbatch = np.unique(old.microbatch[actions], return_inverse=True)
        schedule = RankSchedule(
            old.kind[actions], old.local_stage[actions], microbatch, step[actions],
            old.part[actions],
        )  # fmt: skip
        order = RankOrder(
            self.table, schedule, self.stage_classes, self.action[copies],
            new_action[self.gathered_by[actions]], self.optimizer_index, self._num_stages,
        )  # fmt: skip
        return order, microbatches

    def rows(self, actions: Int, segment_rows: Int) -> Int:
        """Rows of segment rows in actions of the schedule, -1 if absent; arrays broadcast."""
        offset = self.table.offset(self.part_rows[actions], segment_rows)
        begin = self.begin[self.schedule.step[actions]]
        return np.where(offset < 0, -1, begin + offset)

    # ---- dependencies ----------------------------------------------------------------------------

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """Copies and rows that dependencies of an action refer to (see `ActionOrder`)."""
        table, copies = self.table, self.copies(action)
        shape = len(copies), len(entries)
        copy = np.broadcast_to(copies[:, None], shape).copy()
        row = np.broadcast_to(table.actions.tasks.data[entries].astype(np.int64), shape).copy()
        carried = np.flatnonzero(table.actions.carried[entries])
        if not len(carried) or not len(copies):
            return copy, row
        deps, dep_part = table.deps.take(entries[carried]), table.dep_part[entries[carried]]
        groups, group = np.unique(
            np.stack([deps.pass_part, deps.once_per_step.astype(np.int64), deps.stage, dep_part]),
            axis=1, return_inverse=True,
        )  # fmt: skip
        for g, (pass_part, once, distance, part) in enumerate(groups.T.tolist()):
            members = np.flatnonzero(group.ravel() == g)
            actions = self._source_actions(copies, pass_part, distance, part, once=bool(once))
            copy[:, carried[members]], row[:, carried[members]] = self._source_rows(
                actions, pass_part, deps.segment_row[members]
            )
        return copy, row

    def _source_actions(
        self, copies: Int, pass_part: int, distance: int, part: int, *, once: bool
    ) -> Int:
        """By copy, the action with a part of the pass of the stage at a distance."""
        schedule = self.schedule
        if copies[0] >= schedule.steps:  # the optimizer action
            return np.full(len(copies), schedule.once_action[pass_part, distance])
        readers = self._first_of_step[copies] + part
        local_stage = np.searchsorted(schedule.stages, schedule.stage[readers] + distance)
        if once:
            return schedule.once_action[pass_part, local_stage]
        return schedule.action_of[pass_part, local_stage, schedule.microbatch[readers]]

    def _source_rows(self, actions: Int, pass_part: int, segment_rows: Int) -> tuple[Int, Int]:
        """Copies and rows of segment rows in actions, or in those that gather for them."""
        schedule, table = self.schedule, self.table
        owner = np.broadcast_to(actions[:, None], (len(actions), len(segment_rows)))
        rows = np.broadcast_to(segment_rows, owner.shape)
        gathered_by = self.gathered_by[actions]
        if (gathered_by != actions).any():
            stage = self.stages[int(schedule.local_stage[actions[0]])]
            segment = stage.backward if pass_part else stage.forward
            gathers = segment.gathers[segment_rows]
            forward = np.isin(schedule.kind[gathered_by], (FORWARD, UNSHARD))
            row_list: list[int] = segment_rows.tolist()
            matching = np.array([stage.matching_gather(r, forward=not pass_part) for r in row_list])
            owner = np.where(gathers, gathered_by[:, None], owner)
            other_direction = gathers & (forward != (pass_part == 0))[:, None]
            rows = np.where(other_direction, np.maximum(matching, 0), rows)
        copy = schedule.step[owner]
        offset = table.offset(self.part_rows[owner], rows)
        return copy, table.actions.begin[self.action[copy]] + offset

    # ---- messages --------------------------------------------------------------------------------

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers of rows of an action: [copies of it, rows].

        Equal on both ends, and distinct for all messages between two ranks.
        """
        table, copies = self.table, self.copies(action)
        tasks, part = table.actions.tasks, table.actions.part[rows]
        local = tasks.tag[rows].astype(np.int64)
        stage, microbatch = self.stage[copies][:, part], self.microbatch[copies][:, part]
        forward = tasks.phase[rows] == FORWARD_PHASE
        pipeline = is_any(tasks.slot[rows], table.pipeline_peers)
        receives = tasks.kind[rows] == TaskKind.RECV
        # A message between stages is numbered by the earlier one.
        boundary = stage - (pipeline & (receives == forward))
        tag = (boundary * 2 + ~forward) * table.max_messages + local
        tags = (tag + microbatch * (self._num_stages * 2 * table.max_messages)) % MAX_TAG
        return np.where((local >= 0) & (microbatch >= 0), tags, local)

    def cache_key(self) -> Sequence[object]:
        """Cache key of `sources` and `tags`: dependencies, gathers, numbering of messages."""
        table, schedule = self.table, self.schedule
        classes: list[int] = np.unique(self.stage_classes).tolist()
        gathering = [table.stages[c] for c in classes] if self.reuses_gathered else []
        return (
            *table.deps, table.dep_part, self.gathered_by, self.stage_classes, self.optimizer_index,
            self._num_stages, table.max_messages, schedule.stages, *gathering,
        )  # fmt: skip
