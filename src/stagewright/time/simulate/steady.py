"""Decode on a pipeline that never drains: one of many steps, as a server runs them.

As many batches as stages are in flight (vLLM's batch queue): while the last stage computes one
batch, the others compute batches behind it, and the first stage begins a batch's next step when the
tokens that the last one sampled have come back. So a rank repeats the rows of its step, as copies
of one action; a message of tokens from the last stage to the first closes the circle, and the time
between the ends of two steps is the time per output token of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import Program, RankClass, TaskKind, Tasks
from stagewright.program.memory_changes import MemoryChanges, Profiles
from stagewright.program.rank_work import ActionOrder, Actions, RankWork
from stagewright.program.tables import Values
from stagewright.run.settings import Run
from stagewright.time.simulate.timeline import Timeline

TOKEN = 4
"""Bytes of a sampled token: int32, as vLLM keeps token ids on the GPU."""
FEWEST, MOST = 6, 48
"""Steps that are simulated: the pipeline fills, and then all steps take equally long."""


def in_flight(run: Run) -> bool:
    """Whether batches of other requests are in the pipeline while a batch of the step runs."""
    return run.mode == "decode" and run.pp > 1 and run.prefill is None


def steady_step(of: Program, tokens: int, simulated: Callable[[Program], Timeline]) -> Timeline:
    """The timeline of one step of many; all tasks outside the step have no duration in it.

    `tokens` are those that a rank's batch gets in a step. Steps are added until two in a row take
    equally long on every rank.
    """
    steps = FEWEST
    while True:
        line = simulated(repeated(of, steps, tokens))
        ends = np.stack([_ends(line, lane, steps) for lane in range(line.waves.lanes.count)])
        # The steps before the last two are whole: the first stage is one step ahead of the last.
        took = np.diff(ends, axis=1)[:, : steps - 2]
        if len(np.unique(took[:, -2:])) == 1 or 2 * steps > MOST:
            begin, end = ends.max(axis=0)[steps - 3 : steps - 1].tolist()
            return replace(line, window=(begin, end))
        steps *= 2


def _ends(line: Timeline, lane: int, steps: int) -> Int:
    """The end of each step on a lane."""
    last = np.zeros(steps, dtype=np.int64)
    for run in line.runs(lane):
        np.maximum.at(last, run.instances, run.end(np.arange(len(run.positions))).max(axis=1))
    return last


def repeated(of: Program, steps: int, tokens: int) -> Program:
    """The program of a step, so many times, each batch waiting for its tokens of the step before.

    Batches of later steps count on in the column `microbatch`.
    """
    first = min(each.pipeline_rank for each in of.classes)
    last = max(each.pipeline_rank for each in of.classes)
    ahead = _slot(of.classes, first, TaskKind.SEND)
    behind = _slot(of.classes, last, TaskKind.RECV)
    tag = 1 + max(int(each.tasks.tag.max()) for each in of.classes)
    again: list[RankClass] = []
    for each in of.classes:
        size = tokens * TOKEN
        if each.pipeline_rank == first:
            message = {"kind": TaskKind.RECV, "slot": behind, "tag": tag, "comm_bytes": size}
        elif each.pipeline_rank == last:
            message = {"kind": TaskKind.SEND, "slot": ahead, "tag": tag, "comm_bytes": size}
        else:
            message = {}
        again.append(replace(each, work=RepeatedWork(each.work, steps, message)))
    return replace(of, classes=tuple(again))


def _slot(classes: Sequence[RankClass], pipeline_rank: int, kind: TaskKind) -> int:
    """The peer that a pipeline rank sends to, or receives from."""
    tasks = next(of.tasks for of in classes if of.pipeline_rank == pipeline_rank)
    return int(tasks.slot[tasks.kind == kind][0])


class RepeatedWork(RankWork):
    """Several steps of a rank's work: each is a copy of an action that has all rows of a step.

    The first stage receives the tokens of a batch before it, but in its first step; the last stage
    sends them after it, but in its last step.
    """

    def __init__(self, step: RankWork, steps: int, message: dict[str, int]) -> None:
        """`message` has the columns of the message of tokens; empty for stages without one."""
        self.step, self.steps = step, steps
        whole = step.tasks
        with_tokens = _with_tokens(whole, message) if message else whole
        first, last = (
            with_tokens if message.get("kind") == kind else whole
            for kind in (TaskKind.SEND, TaskKind.RECV)
        )
        self._steps = (first, with_tokens, last)

    @cached_property
    def actions(self) -> Actions:
        """The first step, one between, and the last step."""
        tasks = self._numbered(self._steps)
        begin = np.cumsum([0, *map(len, self._steps)])
        size, needs = len(tasks), len(tasks.data)
        return Actions(tasks, begin, np.zeros(size, np.int64), np.zeros(needs, dtype=bool))

    @cached_property
    def order(self) -> ActionOrder:
        """The steps one after another."""
        action = np.ones(self.steps, np.int64)
        action[0], action[-1] = 0, 2
        return _Repeated(action, self.actions)

    @cached_property
    def changes(self) -> MemoryChanges:
        """None: a step of decode holds the same bytes all the time."""
        start, begin = self.step.changes.start, self.actions.begin
        nothing = np.zeros((len(start), int(begin[-1])), np.int64)
        return MemoryChanges(start, self.order.action, Profiles(nothing, nothing, begin))

    @cached_property
    def tasks(self) -> Tasks:
        """The rows of all steps."""
        actions: list[int] = self.order.action.tolist()
        return self._numbered([self._steps[action] for action in actions])

    def _numbered(self, steps: Sequence[Tasks]) -> Tasks:
        """Steps one after another, whose batches have numbers of their own."""
        batches = int(self.step.tasks.microbatch.max()) + 1
        return _concatenated([
            replace(each, microbatch=(each.microbatch + n * batches).astype(np.int32))
            for n, each in enumerate(steps)
        ])  # fmt: skip

    @cached_property
    def values(self) -> Values:
        """Those of one step."""
        return self.step.values

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """That of one step."""
        return self.step.memory


class _Repeated:
    """The order of whole steps."""

    def __init__(self, action: Int, actions: Actions) -> None:
        self.action = action
        self.begin = np.concatenate([[0], np.cumsum(np.diff(actions.begin)[action])])
        self.kind, self.stage, self.microbatch = (np.full((len(action), 2), -1) for _ in range(3))
        self._tag = actions.tasks.tag.astype(np.int64)

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """No needs are carried: tokens come as messages."""
        nothing = np.zeros((int((self.action == action).sum()), len(entries)), np.int64)
        return nothing, nothing

    def tags(self, action: int, rows: Int) -> Int:
        """Equal in all steps: messages come in the order of steps."""
        return np.repeat(self._tag[rows][None], int((self.action == action).sum()), axis=0)

    def cache_key(self) -> Sequence[object]:
        """Nothing besides the table."""
        return ()


def _concatenated(tables: Sequence[Tasks]) -> Tasks:
    """Tables with the same names, ops and shapes one after another."""
    starts = np.cumsum([0, *map(len, tables)])
    columns: dict[str, Any] = {}
    for f in fields(Tasks):
        parts = [getattr(of, f.name) for of in tables]
        if not isinstance(parts[0], np.ndarray):
            continue
        if f.name in ("data", "order"):
            parts = [of + np.asarray(a, of.dtype) for of, a in zip(parts, starts, strict=False)]
        if f.name in ("data_ptr", "order_ptr"):
            ends = np.cumsum([0, *(int(of[-1]) for of in parts)])
            parts = [[0], *(of[1:] + a for of, a in zip(parts, ends, strict=False))]
        columns[f.name] = np.concatenate(parts)
    columns["data_ptr"] = columns["data_ptr"].astype(np.int64)
    columns["order_ptr"] = columns["order_ptr"].astype(np.int64)
    return replace(tables[0], **columns)


def _with_tokens(of: Tasks, message: dict[str, int]) -> Tasks:
    """A step with a message of tokens before each batch, or after it."""
    receives = message["kind"] == TaskKind.RECV
    batches = int(of.microbatch.max()) + 1
    rows: list[Int] = []
    for batch in range(batches):
        mine = np.flatnonzero(of.microbatch == batch)
        own = np.array([-1 - batch])
        rows += [own, mine] if receives else [mine, own]
    row = np.concatenate(rows)
    there = row >= 0
    place = np.zeros(len(of), np.int64)
    place[row[there]] = np.flatnonzero(there)
    columns: dict[str, Any] = {
        f.name: column[np.maximum(row, 0)]
        for f in fields(Tasks)
        for column in [getattr(of, f.name)]
        if f.name not in ("data", "order", "data_ptr", "order_ptr")
        and isinstance(column, np.ndarray)
    }
    columns["microbatch"][~there] = -1 - row[~there]
    none = dict.fromkeys(("flops", "traffic", "duration"), 0)
    none |= dict.fromkeys(("collective", "shape"), -1)
    for name, value in (none | message | {"uneven_bytes": message["comm_bytes"]}).items():
        if name in columns:
            columns[name][~there] = value
    # A batch's first kernel reads its tokens; they are those of its last kernel.
    extra: list[tuple[int, int]] = []
    for at in np.flatnonzero(~there).tolist():
        kernels = np.flatnonzero((of.kind == TaskKind.COMPUTE) & (of.microbatch == -1 - row[at]))
        end = int(place[kernels[0 if receives else -1]])
        extra.append((end, at) if receives else (at, end))
    columns |= _needs(of, "data", row, place, extra) | _needs(of, "order", row, place, [])
    return replace(of, **columns)


def _needs(
    of: Tasks, name: str, row: Int, place: Int, extra: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """A dependency table of rows in new places, with further dependencies."""
    pointer, needs = getattr(of, f"{name}_ptr"), getattr(of, name)
    count = np.where(row < 0, 0, np.diff(pointer)[np.maximum(row, 0)])
    owner = np.repeat(np.arange(len(row)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    needed = place[needs[pointer[np.maximum(row, 0)][owner] + nth]]
    pairs = np.array(extra, dtype=np.int64).reshape(-1, 2)
    owner, needed = np.append(owner, pairs[:, 0]), np.append(needed, pairs[:, 1])
    turn = np.lexsort((needed, owner))
    ends = np.cumsum(np.bincount(owner, minlength=len(row)))
    return {
        f"{name}_ptr": np.concatenate([[0], ends]).astype(np.int64),
        name: needed[turn].astype(needs.dtype),
    }
