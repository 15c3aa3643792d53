"""The order in which one pipeline rank executes copies of actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from stagewright.arrays import Int, is_any
from stagewright.lower.assembly.distinct_actions import ActionTable, half_of
from stagewright.lower.assembly.rank_schedule import FORWARD, UNSHARD, RankSchedule
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import PHASES, TaskKind

MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this
_FORWARD = PHASES.index("forward")


def suppliers(schedule: RankSchedule, stages: Sequence[Stage], *, kept: bool) -> Int:
    """By action, the action that has gathered the weights it uses: itself, or one before.

    `stages` are those of the rank. Where weights are `kept`, what a backward has gathered stays
    until the next forward of the stage has used it.
    """
    supplier = np.arange(len(schedule))
    for place, stage in enumerate(stages) if kept else ():
        actions = np.flatnonzero(schedule.place == place)
        kinds = schedule.kind[actions]
        uses = np.array([uses_weights(stage, kind) for kind in kinds.tolist()], dtype=bool)
        actions, forward = actions[uses], kinds[uses] == FORWARD
        until = np.cumsum(forward) - forward  # how many forwards have let go of weights before
        supplier[actions] = actions[np.searchsorted(until, until)]
    return supplier


def uses_weights(stage: Stage, kind: int) -> bool:
    """Whether weights are gathered for an action, unless they still are; not for the half of a
    backward that makes the gradients of weights."""
    if kind in (FORWARD, UNSHARD):
        return True
    return bool((half_of(stage, kind) & stage.backward.gathers).any())


class RankOrder:
    """The copies of actions of a rank, in program order (`program.step.ActionOrder`).

    There is one for each step of the schedule, and one for the rows after all actions if there are
    some.
    """

    def __init__(
        self,
        table: ActionTable,
        schedule: RankSchedule,
        contents: Int,
        action: Int,
        supplier: Int,
        after: int,
        num_stages: int,
    ) -> None:
        """`contents`: of each stage of the rank; `supplier` as in `suppliers`; `action`: that of
        each copy; `after`: which rows are after all actions, if any, by number among
        `ActionTable.afters`."""
        self.table, self.schedule, self.contents = table, schedule, contents
        self.action, self.supplier = action, supplier
        self.after, self._num_stages = after, num_stages
        sizes = np.diff(table.actions.begin)[action]
        self.begin: Int = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.total = int(self.begin[-1])
        self.end = int(self.begin[schedule.steps])
        """Where the rows after all actions begin."""
        columns = np.full((3, len(action), 2), -1, dtype=np.int64)
        columns[:, schedule.step, schedule.part] = (
            schedule.kind, schedule.stage, schedule.microbatch,
        )  # fmt: skip
        self.kind: Int = columns[0]
        self.stage: Int = columns[1]
        self.microbatch: Int = columns[2]

    @cached_property
    def distinct(self) -> list[int]:
        """The actions that the rank has copies of, ascending."""
        return np.unique(self.action).tolist()

    @cached_property
    def form(self) -> Int:
        """By action of the schedule, its form."""
        return self.table.form_of[self.action[self.schedule.step], self.schedule.part]

    @cached_property
    def borrows(self) -> bool:
        """Whether some action uses weights that another one has gathered."""
        return bool((self.supplier != np.arange(len(self.supplier))).any())

    @cached_property
    def _first_of_step(self) -> Int:
        """By copy, its first action of the schedule."""
        return np.searchsorted(self.schedule.step, np.arange(self.schedule.steps))

    def copies(self, action: int) -> Int:
        """The copies of an action."""
        return np.flatnonzero(self.action == action)

    def rows(self, actions: Int, places: Int) -> Int:
        """The rows of places of actions of the schedule, -1 where they are not there.

        Both are arrays that numpy can broadcast.
        """
        offset = self.table.offset(self.form[actions], places)
        begin = self.begin[self.schedule.step[actions]]
        return np.where(offset < 0, -1, begin + offset)

    # ---- needs -----------------------------------------------------------------------------------

    def sources(self, action: int, needs: Int) -> tuple[Int, Int]:
        """Where needs of rows of an action are met: copies and rows, each [copies of it, needs].

        Rows are those of `Actions.tasks`, in the action that the source copy is of.
        """
        table, copies = self.table, self.copies(action)
        shape = len(copies), len(needs)
        copy = np.broadcast_to(copies[:, None], shape).copy()
        row = np.broadcast_to(table.actions.tasks.data[needs].astype(np.int64), shape).copy()
        at = np.flatnonzero(table.actions.carried[needs])
        if not len(at) or not len(copies):
            return copy, row
        of, part = table.needs.take(needs[at]), table.need_part[needs[at]]
        groups, group = np.unique(
            np.stack([of.half, of.once.astype(np.int64), of.stage, part]),
            axis=1, return_inverse=True,
        )  # fmt: skip
        for n, (half, once, stage, nth) in enumerate(groups.T.tolist()):
            mine = np.flatnonzero(group.ravel() == n)
            actions = self._acting(copies, half, stage, nth, once=bool(once))
            copy[:, at[mine]], row[:, at[mine]] = self._found(actions, half, of.place[mine])
        return copy, row

    def _acting(self, copies: Int, half: int, stage: int, part: int, *, once: bool) -> Int:
        """The actions of the schedule that have a half of a stage, for each of some copies."""
        of = self.schedule
        if copies[0] >= of.steps:  # after all actions
            return np.full(len(copies), of.once[half, stage])
        mine = self._first_of_step[copies] + part
        place = np.searchsorted(of.stages, of.stage[mine] + stage)
        if once:
            return of.once[half, place]
        return of.by_microbatch[half, place, of.microbatch[mine]]

    def _found(self, actions: Int, half: int, places: Int) -> tuple[Int, Int]:
        """Copies and rows of places of a half of actions, or of those that gather for them."""
        of, table = self.schedule, self.table
        owner = np.broadcast_to(actions[:, None], (len(actions), len(places)))
        place = np.broadcast_to(places, owner.shape)
        by = self.supplier[actions]
        if (by != actions).any():
            stage = table.stages[int(self.contents[of.place[actions[0]]])]
            segment = stage.backward if half else stage.forward
            gathers = segment.gathers[places]
            forward = np.isin(of.kind[by], (FORWARD, UNSHARD))
            at: list[int] = places.tolist()
            other = np.array([stage.gathered_elsewhere(p, forward=not half) for p in at])
            owner = np.where(gathers, by[:, None], owner)
            turns = gathers & (forward != (half == 0))[:, None]
            place = np.where(turns, np.maximum(other, 0), place)
        copy = of.step[owner]
        offset = table.offset(self.form[owner], place)
        return copy, table.actions.begin[self.action[copy]] + offset

    # ---- messages --------------------------------------------------------------------------------

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers, equal on both ends and different for all messages between two ranks, of
        rows of all copies of an action: [copies of it, rows]."""
        table, copies = self.table, self.copies(action)
        tasks, part = table.actions.tasks, table.actions.part[rows]
        local = tasks.tag[rows].astype(np.int64)
        stage, microbatch = self.stage[copies][:, part], self.microbatch[copies][:, part]
        forward = tasks.phase[rows] == _FORWARD
        pipeline = is_any(tasks.slot[rows], table.pipeline_peers)
        receives = tasks.kind[rows] == TaskKind.RECV
        # A message between stages is numbered by the earlier one.
        boundary = stage - (pipeline & (receives == forward))
        tag = (boundary * 2 + ~forward) * table.messages + local
        tags = (tag + microbatch * (self._num_stages * 2 * table.messages)) % MAX_TAG
        return np.where((local >= 0) & (microbatch >= 0), tags, local)

    def structure(self) -> Sequence[object]:
        """Needs, what gathers weights for what, and how messages are numbered."""
        table, of = self.table, self.schedule
        contents: list[int] = self.contents.tolist()
        borrowed = [table.stages[n] for n in sorted(set(contents))] if self.borrows else []
        return (
            *table.needs, table.need_part, self.supplier, self.contents, self.after,
            self._num_stages, table.messages, of.stages, *borrowed,
        )  # fmt: skip
