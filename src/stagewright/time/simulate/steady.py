"""Decode on a pipeline that never drains: one of many steps, as a server runs them.

As many batches as stages are in flight (vLLM's batch queue). The first stage begins a batch's next
step when the tokens that the last stage sampled have arrived. A rank repeats the rows of its step,
as copies of one action; messages of tokens from the last stage to the first link them. The time
between the ends of two steps is the time per output token of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, entries_of, offsets
from stagewright.program.columns import (
    ActionOrder,
    Actions,
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
        timeline = simulate(several)
        begins = [rank_class.work.order.begin[:-1] for rank_class in several.classes]
        ends = np.stack([_ends(timeline, lane, begins) for lane in range(timeline.lane_map.count)])
        elapsed = np.diff(ends, axis=1)[:, : steps - 2]  # drop the last two steps: they drain
        if len(np.unique(elapsed[:, -2:])) == 1 or 2 * steps > MAX_STEPS:
            begin, end = ends.max(axis=0)[steps - 3 : steps - 1].tolist()
            return replace(timeline, window=(begin, end))
        steps *= 2


def _ends(timeline: Timeline, lane: int, begins: Sequence[Int]) -> Int:
    """End of each step on a lane; `begins`: first row of each step, by class.

    All steps are one unit where an execution moves tasks between actions.
    """
    class_id = int(timeline.lane_map.class_of[lane])
    begin = begins[class_id]
    ends = np.zeros(len(begin), dtype=np.int64)
    for times in timeline.fragments(lane):
        instances, positions = times.instances[:, None], times.positions[None]
        rows = timeline.plan.classes[class_id].expanded_rows(instances, positions)
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
        self.step, self.steps, self._table = step, steps, step.tasks
        rows = with_tokens = np.arange(len(step.tasks))
        if message:
            self._table, with_tokens = _with_tokens(step.tasks, message)
        kind = message.get("kind")
        first = with_tokens if kind == TaskKind.SEND else rows
        last = with_tokens if kind == TaskKind.RECV else rows
        self._rows = (first, with_tokens, last)

    @cached_property
    def actions(self) -> Actions:
        """The first step, a middle step, and the last step."""
        return table_actions(_select(self._table, self._rows), offsets([*map(len, self._rows)]))

    @cached_property
    def order(self) -> ActionOrder:
        """The steps one after another."""
        action = np.ones(self.steps, np.int64)
        action[0], action[-1] = 0, 2
        return TableOrder(action, self.actions)

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all steps."""
        actions: list[int] = self.order.action.tolist()
        return _select(self._table, [self._rows[action] for action in actions])

    @cached_property
    def values(self) -> Values:
        """Values of one step."""
        return self.step.values

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Memory of one step."""
        return self.step.memory


def _with_tokens(tasks: Tasks, message: dict[str, int]) -> tuple[Tasks, Int]:
    """Append a message of tokens for each batch of a step; returns the rows and their order.

    The first kernel of a batch reads its tokens, or the last one writes them.
    """
    receives = message["kind"] == TaskKind.RECV
    size, batches = len(tasks), int(tasks.microbatch.max()) + 1
    values = dict.fromkeys(("flops", "traffic", "duration"), 0)
    values |= dict.fromkeys(("collective", "shape"), -1)
    values |= message | {"uneven_bytes": message["comm_bytes"]}
    columns = {
        name: np.append(column, np.full(batches, values.get(name, column[0]), column.dtype))
        for name, column in _columns(tasks)
    }
    columns["microbatch"][size:] = np.arange(batches)
    order: list[Int] = []
    waiter, dep = (column.tolist() for column in tasks.reads)
    for batch in range(batches):
        rows, added = np.flatnonzero(tasks.microbatch == batch), size + batch
        kernels = rows[tasks.kind[rows] == TaskKind.COMPUTE].tolist()
        waiter.append(kernels[0] if receives else added)
        dep.append(added if receives else kernels[-1])
        order += [np.array([added]), rows] if receives else [rows, np.array([added])]
    data = np.array(dep)[np.argsort(waiter, kind="stable")]
    pointer = offsets(np.bincount(waiter, minlength=size + batches))
    return replace(tasks, **columns, data_ptr=pointer, data=data), np.concatenate(order)


def _select(tasks: Tasks, steps: Sequence[Int]) -> Tasks:
    """Rows of several steps, one step after another, with consecutive numbers of batches.

    Dependencies on rows that a step lacks are left out, and so are those of the order of rows.
    """
    rows, begin = np.concatenate(steps), offsets([*map(len, steps)])
    step = np.repeat(np.arange(len(steps)), np.diff(begin))
    new_row = np.full((len(steps), len(tasks)), -1)
    new_row[step, rows] = np.arange(len(rows))
    waiter, entry = entries_of(tasks.data_ptr, rows)
    dep = new_row[step[waiter], tasks.data[entry]]
    waiter, dep = waiter[dep >= 0], dep[dep >= 0]
    columns = {name: column[rows] for name, column in _columns(tasks)}
    batches = int(tasks.microbatch.max()) + 1
    columns["microbatch"] += (step * batches).astype(columns["microbatch"].dtype)
    return replace(
        tasks, **columns, data_ptr=offsets(np.bincount(waiter, minlength=len(rows))),
        data=dep[np.lexsort((dep, waiter))].astype(np.int32),
        order_ptr=np.zeros(len(rows) + 1, np.int64), order=np.zeros(0, np.int32),
    )  # fmt: skip


def _columns(tasks: Tasks) -> Iterator[tuple[str, NDArray[Any]]]:
    """Columns of a table without its dependencies."""
    for field in fields(Tasks):
        column = getattr(tasks, field.name)
        if isinstance(column, np.ndarray) and field.name.split("_")[0] not in ("data", "order"):
            yield field.name, column
