"""Decode on a pipeline that never drains: one of many steps, as a server runs them.

As many batches as stages are in flight (vLLM's batch queue): while the last stage computes one
batch, the others compute batches behind it, and the first stage begins a batch's next step when the
tokens that the last one sampled have come back. So the program of a step is repeated, a message of
tokens from the last stage to the first closes the circle, and the time between the ends of two
steps is the time per output token of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import Program, RankClass, TaskKind, Tasks
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
        ends = np.stack([_ends(lane.end, lane.of.tasks, lane.issue.rows, steps)
                         for lane in line.lanes])  # fmt: skip
        # The steps before the last two are whole: the first stage is one step ahead of the last.
        took = np.diff(ends, axis=1)[:, : steps - 2]
        if len(np.unique(took[:, -2:])) == 1 or 2 * steps > MOST:
            return _window(line, *ends.max(axis=0)[steps - 3 : steps - 1].tolist())
        steps *= 2


def _ends(end: Int, tasks: Tasks, rows: Int, steps: int) -> Int:
    """The end of each step on a lane, whose places have these ends and rows."""
    batch = tasks.microbatch[rows].astype(np.int64)
    step = batch * steps // (int(batch.max()) + 1)
    last = np.zeros(steps, dtype=np.int64)
    np.maximum.at(last, step, end)
    return last


def _window(line: Timeline, begin: int, end: int) -> Timeline:
    """The timeline between two moments, which starts at 0."""

    def inside(times: Int) -> Int:
        return np.clip(times, begin, end) - begin

    lanes = tuple(
        replace(lane, **{
            name: inside(getattr(lane, name)) for name in ("launched", "ready", "begin", "end")
        }, since=lane.since and lane.since._replace(end=inside(lane.since.end)))
        for lane in line.lanes
    )  # fmt: skip
    return replace(line, lanes=lanes, steady=True)


# ---- the program of many steps -------------------------------------------------------------------


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
        way = None
        if each.pipeline_rank == first:
            way = _Tokens(TaskKind.RECV, behind, tag, tokens * TOKEN)
        elif each.pipeline_rank == last:
            way = _Tokens(TaskKind.SEND, ahead, tag, tokens * TOKEN)
        work = each.work.with_tasks(_Steps(each.tasks, steps, way).tasks())
        again.append(replace(each, work=work))
    return replace(of, classes=tuple(again))


def _slot(classes: Sequence[RankClass], pipeline_rank: int, kind: TaskKind) -> int:
    """The peer that a pipeline rank sends to, or receives from."""
    tasks = next(of.tasks for of in classes if of.pipeline_rank == pipeline_rank)
    return int(tasks.slot[tasks.kind == kind][0])


class _Tokens(NamedTuple):
    """The message of sampled tokens: sent behind a batch, or received before it."""

    kind: TaskKind
    slot: int
    tag: int
    size: int  # bytes


class _Steps:
    """The tasks of a step several times, with a message of tokens between two steps of a batch."""

    def __init__(self, of: Tasks, steps: int, way: _Tokens | None) -> None:
        self.of, self.steps, self.way = of, steps, way
        self.batches = int(of.microbatch.max()) + 1
        rows: list[Int] = []
        step: list[Int] = []
        for nth in range(steps):
            for batch in range(self.batches):
                mine = np.flatnonzero(of.microbatch == batch)
                if way and way.kind == TaskKind.RECV and nth > 0:
                    mine = np.concatenate([[-1 - batch], mine])
                if way and way.kind == TaskKind.SEND and nth < steps - 1:
                    mine = np.concatenate([mine, [-1 - batch]])
                rows.append(mine)
                step.append(np.full(len(mine), nth))
        self.rows = np.concatenate(rows)
        """The row that each task repeats; -1 - batch: the message of a batch's tokens."""
        self.step = np.concatenate(step)
        place = np.zeros((steps, len(of)), dtype=np.int64)
        real = self.rows >= 0
        place[self.step[real], self.rows[real]] = np.flatnonzero(real)
        self.place = place

    def tasks(self) -> Tasks:
        """The repeated table."""
        message = self.rows < 0
        tables = ("data", "order", "data_ptr", "order_ptr")
        columns: dict[str, Any] = {
            f.name: column[np.maximum(self.rows, 0)]
            for f in fields(Tasks)
            for column in [getattr(self.of, f.name)]
            if f.name not in tables and isinstance(column, np.ndarray)
        }
        batch = np.where(message, -1 - self.rows, columns["microbatch"])
        columns["microbatch"] = (batch + self.step * self.batches).astype(np.int32)
        if self.way is not None:
            none = dict.fromkeys(("flops", "traffic"), 0) | dict.fromkeys(
                ("collective", "shape"), -1
            )
            sent = {"kind": self.way.kind, "slot": self.way.slot, "tag": self.way.tag}
            sizes = {"comm_bytes": self.way.size, "uneven_bytes": self.way.size, "duration": 0}
            for name, value in (none | sent | sizes).items():
                if name in columns:
                    columns[name][message] = value
        columns |= self._needs("data", self._extra()) | self._needs("order", {})
        return replace(self.of, **columns)

    def _extra(self) -> dict[int, int]:
        """By task, the task whose result it reads besides: a batch's tokens, or its last kernel."""
        found: dict[int, int] = {}
        compute = self.of.kind == TaskKind.COMPUTE
        for message in np.flatnonzero(self.rows < 0).tolist():
            batch, step = -1 - int(self.rows[message]), int(self.step[message])
            kernels = np.flatnonzero(compute & (self.of.microbatch == batch))
            if self.way is not None and self.way.kind == TaskKind.SEND:
                found[message] = int(self.place[step, kernels[-1]])
            else:
                found[int(self.place[step, kernels[0]])] = message
        return found

    def _needs(self, name: str, extra: dict[int, int]) -> dict[str, Any]:
        """A dependency table, with one dependency more of some tasks."""
        pointer, needs = getattr(self.of, f"{name}_ptr"), getattr(self.of, name)
        row = np.maximum(self.rows, 0)
        count = np.where(self.rows < 0, 0, np.diff(pointer)[row])
        owner = np.repeat(np.arange(len(row)), count)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        needed = self.place[self.step[owner], needs[pointer[row][owner] + nth]]
        owner = np.concatenate([owner, np.array([*extra], dtype=np.int64)])
        needed = np.concatenate([needed, np.array([*extra.values()], dtype=np.int64)])
        turn = np.lexsort((needed, owner))
        ends = np.cumsum(np.bincount(owner, minlength=len(row)))
        return {
            f"{name}_ptr": np.concatenate([[0], ends]).astype(np.int64),
            name: needed[turn].astype(needs.dtype),
        }
