"""Order in which one pipeline rank executes copies of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stagewright.arrays import Bool, Int, distinct_numbers, is_any, offsets
from stagewright.lower.assembly.distinct_actions import ActionTable, rows_of_half
from stagewright.lower.assembly.segments import (
    FORWARD,
    HAS_PASS_PART,
    PASS_PARTS,
    UNSHARD,
    Segment,
)
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import FORWARD_PHASE, KINDS, TaskKind
from stagewright.schedule.actions import Action, Order, ScheduleStep, parts

MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this


# ---- the schedule of a rank ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RankSchedule:
    """Actions of a rank in order, each with its step of the schedule."""

    kind: Int
    """[actions]: index into `KINDS`."""
    stage: Int
    microbatch: Int
    step: Int
    """Step of the schedule; two actions that overlap share one."""
    part: Int
    """1: the second of two that overlap."""

    @classmethod
    def from_steps(cls, steps: Sequence[ScheduleStep], *, unshards: bool) -> RankSchedule:
        """Build from the steps of a rank; if `unshards`, it gathers weights of its stages first."""
        if unshards:
            first = {a.stage: a for step in reversed(steps) for a in reversed(parts(step))}
            order = dict.fromkeys(a.stage for step in steps for a in parts(step))
            steps = [*(Action(s, KINDS[UNSHARD], first[s].microbatch) for s in order), *steps]
        index = {kind: i for i, kind in enumerate(KINDS)}
        rows = [
            (index[a.kind], a.stage, a.microbatch, s, part)
            for s, step in enumerate(steps)
            for part, a in enumerate(parts(step))
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy())

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def stages(self) -> Int:
        """Stages of the rank, ascending."""
        return np.unique(self.stage)

    @cached_property
    def local_stage(self) -> Int:
        """By action, index of its stage among those of the rank."""
        return np.searchsorted(self.stages, self.stage)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + int(self.microbatch.max(initial=0))

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + int(self.step.max(initial=-1))

    @cached_property
    def action_of(self) -> Int:
        """Action by part of the pass, stage and microbatch; -1: none."""
        shape = PASS_PARTS, len(self.stages), self.microbatches
        action = np.full(shape, -1, dtype=np.int64)
        for pass_part in range(PASS_PARTS):
            actions = np.flatnonzero(HAS_PASS_PART[self.kind, pass_part])
            action[pass_part, self.local_stage[actions], self.microbatch[actions]] = actions
        return action

    @cached_property
    def once_action(self) -> Int:
        """Action with the rows once per step: [pass parts, stages]."""
        return np.stack([self._end(part, last=part > 0) for part in range(PASS_PARTS)])

    def _end(self, pass_part: int, *, last: bool) -> Int:
        """First or last action of each stage that includes a part of the pass; -1: none."""
        action = np.full(len(self.stages), -1, dtype=np.int64)
        actions = np.flatnonzero(HAS_PASS_PART[self.kind, pass_part])[:: 1 if last else -1]
        action[self.local_stage[actions]] = actions  # the last write counts
        return action

    @cached_property
    def once_per_step(self) -> Bool:
        """Mask of actions with the rows once per step; input halves have none."""
        mask = np.zeros(len(self), dtype=bool)
        actions = self.once_action[[0, 2]]
        mask[actions[actions >= 0]] = True
        return mask


@lru_cache(maxsize=16)
def rank_schedules(order: Order, *, unshards: bool) -> tuple[RankSchedule, ...]:
    """Schedule of each rank; equal orders give the same arrays."""
    return tuple(RankSchedule.from_steps(steps, unshards=unshards) for steps in order)


# ---- the order of a rank -------------------------------------------------------------------------


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
    return bool((rows_of_half(stage.backward, kind) & stage.backward.gathers).any())


class RankOrder:
    """Copies of actions of a rank, in program order (`program.columns.ActionOrder`).

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

        `gathered_by` is by action of the schedule; `optimizer_index`: index of the rank's optimizer
        action among those of `table`.
        """
        self.table, self.schedule, self.stage_classes = table, schedule, stage_classes
        self.action, self.gathered_by = action, gathered_by
        self.optimizer_index, self._num_stages = optimizer_index, num_stages
        self.begin = offsets(np.diff(table.actions.begin)[action])
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
        """Stages of the rank."""
        classes: list[int] = self.stage_classes.tolist()
        return tuple(self.table.stages[stage_class] for stage_class in classes)

    @cached_property
    def distinct(self) -> list[int]:
        """Actions that the rank has copies of, ascending."""
        return np.unique(self.action).tolist()

    @property
    def optimizer(self) -> Segment:
        """Rows of the optimizer action."""
        return self.table.optimizer_step(self.optimizer_index)

    @cached_property
    def segments(self) -> list[Segment]:
        """Segments of the rank: by stage those of forward and of backward; the optimizer action."""
        of_stages = [segment for s in self.stages for segment in (s.forward, s.backward)]
        return [*of_stages, self.optimizer]

    @cached_property
    def part_number(self) -> Int:
        """By action of the schedule, the number of its part (`ActionTable.part_number`)."""
        return self.table.part_number[self.action[self.schedule.step], self.schedule.part]

    @cached_property
    def reuses_gathered(self) -> bool:
        """True if some action uses weights that another one has gathered."""
        return bool((self.gathered_by != np.arange(len(self.gathered_by))).any())

    def copies(self, action: int) -> Int:
        """Copies of an action."""
        return np.flatnonzero(self.action == action)

    def rows(self, actions: Int, segment_rows: Int) -> Int:
        """Rows of segment rows in actions of the schedule, -1 if absent; arrays broadcast."""
        offset = self.table.row_in_action(self.part_number[actions], segment_rows)
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
        distances = deps.stage - deps.stage.min()
        columns = [deps.pass_part, deps.once_per_step, distances, dep_part]
        first, group = distinct_numbers(columns, len(carried))
        for g, example in enumerate(first.tolist()):
            members = np.flatnonzero(group == g)
            pass_part, once = int(deps.pass_part[example]), bool(deps.once_per_step[example])
            local_stage, microbatch = self._places(
                copies, int(dep_part[example]), int(deps.stage[example])
            )
            actions = (
                self.schedule.once_action[pass_part, local_stage] if once
                else self.schedule.action_of[pass_part, local_stage, microbatch]
            )  # fmt: skip
            copy[:, carried[members]], row[:, carried[members]] = self._source_rows(
                actions, pass_part, deps.segment_row[members]
            )
        return copy, row

    def _places(self, copies: Int, part: int, distance: int) -> tuple[Int, Int]:
        """Stage at a distance from a part of copies, and microbatch of the part.

        `distance` of copies of the optimizer action: the stage, as index among those of the rank.
        """
        schedule = self.schedule
        if copies[0] >= schedule.steps:
            return np.full(len(copies), distance), np.full(len(copies), -1)
        stage: Int = self.stage[copies, part] + distance
        microbatch: Int = self.microbatch[copies, part]
        return np.searchsorted(schedule.stages, stage), microbatch

    def _source_rows(self, actions: Int, pass_part: int, segment_rows: Int) -> tuple[Int, Int]:
        """Copies and rows of segment rows in actions, or in those that gather for them."""
        schedule, table = self.schedule, self.table
        source = np.broadcast_to(actions[:, None], (len(actions), len(segment_rows)))
        rows = np.broadcast_to(segment_rows, source.shape)
        gathered_by = self.gathered_by[actions]
        if (gathered_by != actions).any():
            stage = self.stages[int(schedule.local_stage[actions[0]])]
            segment = stage.backward if pass_part else stage.forward
            gathers = segment.gathers[segment_rows]
            forward = np.isin(schedule.kind[gathered_by], (FORWARD, UNSHARD))
            row_list: list[int] = segment_rows.tolist()
            matching = np.array([stage.matching_gather(r, forward=not pass_part) for r in row_list])
            source = np.where(gathers, gathered_by[:, None], source)
            other_direction = gathers & (forward != (pass_part == 0))[:, None]
            rows = np.where(other_direction, np.maximum(matching, 0), rows)
        copy = schedule.step[source]
        offset = table.row_in_action(self.part_number[source], rows)
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
