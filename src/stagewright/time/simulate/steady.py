"""Decode on a pipeline that never drains: one of many steps, as a server runs them.

As many batches as stages are in flight (vLLM's batch queue). The first stage begins a batch's next
step when the tokens that the last stage sampled have arrived. A rank repeats the rows of its step,
as copies of one action; messages of tokens from the last stage to the first link them. The time
between the ends of two steps is the time per output token of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import (
    ActionOrder,
    Actions,
    MemoryChanges,
    Profiles,
    Program,
    RankClass,
    RankWork,
    TableOrder,
    TaskKind,
    Tasks,
    Values,
    table_actions,
)
from stagewright.run.settings import Run
from stagewright.time.simulate.timeline import Timeline

TOKEN = 4
"""Bytes of a sampled token: int32, as vLLM keeps token ids on the GPU."""
MIN_STEPS, MAX_STEPS = 6, 48
"""Steps to simulate: the pipeline fills, and then all steps take equally long."""


def in_flight(run: Run) -> bool:
    """True if several batches are in the pipeline at once."""
    return run.mode == "decode" and run.pp > 1 and run.prefill is None


def steady_step(program: Program, tokens: int, simulate: Callable[[Program], Timeline]) -> Timeline:
    """Timeline of one step of many; all tasks outside the step have no duration in it.

    `tokens`: tokens that a rank's batch generates in a step. The number of steps doubles until two
    successive ones take equally long on every rank.
    """
    steps = MIN_STEPS
    while True:
        several = repeated(program, steps, tokens)
        line = simulate(several)
        begins = [rank_class.work.order.begin[:-1] for rank_class in several.classes]
        ends = np.stack([_ends(line, lane, begins) for lane in range(line.lane_map.count)])
        elapsed = np.diff(ends, axis=1)[:, : steps - 2]  # drop the last two steps: they drain
        if len(np.unique(elapsed[:, -2:])) == 1 or 2 * steps > MAX_STEPS:
            begin, end = ends.max(axis=0)[steps - 3 : steps - 1].tolist()
            return replace(line, window=(begin, end))
        steps *= 2


def _ends(line: Timeline, lane: int, begins: Sequence[Int]) -> Int:
    """End of each step on a lane; `begins`: first row of each step, by class.

    All steps are one unit where an execution moves tasks between actions.
    """
    class_id = int(line.lane_map.class_of[lane])
    begin = begins[class_id]
    ends = np.zeros(len(begin), dtype=np.int64)
    for times in line.fragments(lane):
        instances, positions = times.instances[:, None], times.positions[None]
        rows = line.waves.expanded_rows(class_id, instances, positions)
        step = np.searchsorted(begin, rows, side="right") - 1
        np.maximum.at(ends, step, times.end(np.arange(len(times.positions))))
    return ends


def repeated(program: Program, steps: int, tokens: int) -> Program:
    """Repeat a step `steps` times, linked by token messages.

    Batches of later steps have consecutive numbers in the column `microbatch`.
    """
    first = min(rank_class.pipeline_rank for rank_class in program.classes)
    last = max(rank_class.pipeline_rank for rank_class in program.classes)
    send_slot = _slot(program.classes, first, TaskKind.SEND)
    recv_slot = _slot(program.classes, last, TaskKind.RECV)
    tag = 1 + max(int(rank_class.tasks.tag.max()) for rank_class in program.classes)
    classes: list[RankClass] = []
    for rank_class in program.classes:
        message = {"tag": tag, "comm_bytes": tokens * TOKEN}
        if rank_class.pipeline_rank == first:
            message |= {"kind": TaskKind.RECV, "slot": recv_slot}
        elif rank_class.pipeline_rank == last:
            message |= {"kind": TaskKind.SEND, "slot": send_slot}
        else:
            message = {}
        work = RepeatedWork(rank_class.work, steps, message)
        classes.append(replace(rank_class, work=work))
    return replace(program, classes=tuple(classes))


def _slot(classes: Sequence[RankClass], pipeline_rank: int, kind: TaskKind) -> int:
    """Peer that a pipeline rank sends to, or receives from."""
    tasks = next(c.tasks for c in classes if c.pipeline_rank == pipeline_rank)
    return int(tasks.slot[tasks.kind == kind][0])


class RepeatedWork(RankWork):
    """Several steps of a rank: copies of an action with all rows of a step.

    The first stage receives the tokens of a batch before it, except in its first step; the last
    stage sends them after it, except in its last step.
    """

    def __init__(self, step: RankWork, steps: int, message: dict[str, int]) -> None:
        """`message`: columns of the message of tokens; empty for stages without one."""
        self.step, self.steps = step, steps
        tasks = step.tasks
        with_tokens = _with_tokens(tasks, message) if message else tasks
        first, last = (
            with_tokens if message.get("kind") == kind else tasks
            for kind in (TaskKind.SEND, TaskKind.RECV)
        )
        self._steps = (first, with_tokens, last)

    @cached_property
    def actions(self) -> Actions:
        """The first step, a middle step, and the last step."""
        tasks = self._numbered(self._steps)
        begin = np.cumsum([0, *map(len, self._steps)])
        return table_actions(tasks, begin)

    @cached_property
    def order(self) -> ActionOrder:
        """The steps one after another."""
        action = np.ones(self.steps, np.int64)
        action[0], action[-1] = 0, 2
        return TableOrder(action, self.actions)

    @cached_property
    def changes(self) -> MemoryChanges:
        """No changes: the memory of a step of decode is constant."""
        start, begin = self.step.changes.start, self.actions.begin
        zeros = np.zeros((len(start), int(begin[-1])), np.int64)
        return MemoryChanges(start, self.order.action, Profiles(zeros, zeros, begin))

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all steps."""
        actions: list[int] = self.order.action.tolist()
        return self._numbered([self._steps[action] for action in actions])

    def _numbered(self, steps: Sequence[Tasks]) -> Tasks:
        """Concatenate steps, and number their batches consecutively."""
        batches = int(self.step.tasks.microbatch.max()) + 1
        return _concatenated([
            replace(tasks, microbatch=(tasks.microbatch + n * batches).astype(np.int32))
            for n, tasks in enumerate(steps)
        ])  # fmt: skip

    @cached_property
    def values(self) -> Values:
        """Values of one step."""
        return self.step.values

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Memory of one step."""
        return self.step.memory


def _concatenated(tables: Sequence[Tasks]) -> Tasks:
    """Concatenate tables with equal names, ops and shapes."""
    starts = np.cumsum([0, *map(len, tables)])
    columns: dict[str, Any] = {}
    for f in fields(Tasks):
        parts = [getattr(tasks, f.name) for tasks in tables]
        if not isinstance(parts[0], np.ndarray):
            continue
        if f.name in ("data", "order"):
            parts = [p + np.asarray(a, p.dtype) for p, a in zip(parts, starts, strict=False)]
        if f.name in ("data_ptr", "order_ptr"):
            ends = np.cumsum([0, *(int(p[-1]) for p in parts)])
            parts = [[0], *(p[1:] + a for p, a in zip(parts, ends, strict=False))]
        columns[f.name] = np.concatenate(parts)
    columns["data_ptr"] = columns["data_ptr"].astype(np.int64)
    columns["order_ptr"] = columns["order_ptr"].astype(np.int64)
    return replace(tables[0], **columns)


def _with_tokens(tasks: Tasks, message: dict[str, int]) -> Tasks:
    """Add a message of tokens before each batch of a step, or after it."""
    receives = message["kind"] == TaskKind.RECV
    rows: list[Int] = []
    for batch in range(int(tasks.microbatch.max()) + 1):
        batch_rows, added = np.flatnonzero(tasks.microbatch == batch), np.array([-1 - batch])
        rows += [added, batch_rows] if receives else [batch_rows, added]
    row = np.concatenate(rows)  # old row, or -1 - batch for a message
    is_message = row < 0
    new_row = np.zeros(len(tasks), np.int64)
    new_row[row[~is_message]] = np.flatnonzero(~is_message)
    columns: dict[str, Any] = {
        f.name: column[np.maximum(row, 0)]
        for f in fields(Tasks)
        for column in [getattr(tasks, f.name)]
        if f.name not in ("data", "order", "data_ptr", "order_ptr")
        and isinstance(column, np.ndarray)
    }
    columns["microbatch"][is_message] = -1 - row[is_message]
    values = dict.fromkeys(("flops", "traffic", "duration"), 0)
    values |= dict.fromkeys(("collective", "shape"), -1)
    values |= message | {"uneven_bytes": message["comm_bytes"]}
    for name in values.keys() & columns.keys():
        columns[name][is_message] = values[name]
    # The first kernel of a batch reads its tokens; the last one writes them.
    added_deps: list[tuple[int, int]] = []
    for index in np.flatnonzero(is_message).tolist():
        kernels = (tasks.kind == TaskKind.COMPUTE) & (tasks.microbatch == -1 - row[index])
        kernel = int(new_row[np.flatnonzero(kernels)[0 if receives else -1]])
        added_deps.append((kernel, index) if receives else (index, kernel))
    columns |= _deps(tasks, "data", row, new_row, added_deps)
    return replace(tasks, **columns, **_deps(tasks, "order", row, new_row, []))


def _deps(
    tasks: Tasks, name: str, row: Int, new_row: Int, added: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Dependency table of moved rows, with added dependencies."""
    pointer, deps = getattr(tasks, f"{name}_ptr"), getattr(tasks, name)
    count = np.where(row < 0, 0, np.diff(pointer)[np.maximum(row, 0)])
    waiter = np.repeat(np.arange(len(row)), count)
    offset = np.arange(len(waiter)) - np.repeat(np.cumsum(count) - count, count)
    dep = new_row[deps[pointer[np.maximum(row, 0)][waiter] + offset]]
    pairs = np.array(added, dtype=np.int64).reshape(-1, 2)
    waiter, dep = np.append(waiter, pairs[:, 0]), np.append(dep, pairs[:, 1])
    ends = np.cumsum(np.bincount(waiter, minlength=len(row)))
    return {
        f"{name}_ptr": np.concatenate([[0], ends]).astype(np.int64),
        name: dep[np.lexsort((dep, waiter))].astype(deps.dtype),
    }
