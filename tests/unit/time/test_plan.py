"""Plans of steps: where times are, and what is said where no order can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, RankWork, TaskKind, Tasks
from stagewright.run.settings import Run
from stagewright.time.simulate.timeline import Timeline, timeline

PP, MICROBATCHES = 4, 6
SMALL: dict[str, Any] = {"model": "gpt2", "seq_length": 8}
ONCE: dict[str, Any] = {"global_batch_size": 1}


@cache
def program_of(pp: int = 2, layers: int = 2, **settings: Any) -> Program:
    return compile(Run(**SMALL, pp=pp, layers=layers, **settings)).program


def simulated(program: Program) -> Timeline:
    return timeline(program, [np.full(len(of.work.actions.tasks), 1e-6) for of in program.classes])


def test_fragments_grow_with_actions_and_not_with_tasks() -> None:
    few, many = (
        [
            {f: len(copies.instances) for f, copies in of.copies.items()}
            for of in simulated(program_of(2, layers)).plan.classes
        ]
        for layers in (2, 8)
    )
    assert few == many


# ---- what is refused -----------------------------------------------------------------------------


def moved(tasks: Tasks, order: Int) -> Tasks:
    """The rows of a rank in another order, with the same needs."""
    place = np.argsort(order)
    data = [place[tasks.data[tasks.data_ptr[r] : tasks.data_ptr[r + 1]]] for r in order]
    columns = {
        f.name: column[order]
        for f in fields(Tasks)
        for column in [getattr(tasks, f.name)]
        if isinstance(column, np.ndarray) and len(column) == len(tasks)
    }
    counts = np.concatenate([[0], np.cumsum(np.diff(tasks.data_ptr)[order])]).astype(np.int64)
    return replace(
        tasks, **columns, data_ptr=counts, data=np.concatenate(data).astype(np.int32),
        order_ptr=np.zeros(len(tasks) + 1, np.int64), order=np.zeros(0, np.int32),
    )  # fmt: skip


def with_tasks(program: Program, nth: int, tasks: Tasks) -> Program:
    """A program with other rows in one class."""
    classes = [*program.classes]
    classes[nth] = replace(classes[nth], work=RankWork.from_tables(tasks))
    return replace(program, classes=tuple(classes))


def rows_of(tasks: Tasks, *kinds: TaskKind) -> Sequence[int]:
    return np.flatnonzero(np.isin(tasks.kind, kinds)).tolist()


@pytest.mark.parametrize("kind", [TaskKind.SEND, TaskKind.RECV])
def test_messages_that_do_not_match_are_refused(kind: TaskKind) -> None:
    program = program_of(**ONCE)
    tasks = program.classes[0].tasks
    tag = tasks.tag.copy()
    tag[rows_of(tasks, kind)[0]] += 1
    to, source = (1, 0) if kind == TaskKind.SEND else (0, 1)
    counts = f"rank {to} receives 1 messages from rank {source} along pp, which sends 1, or others"
    with pytest.raises(ValueError, match=counts):
        simulated(with_tasks(program, 0, replace(tasks, tag=tag)))


def test_a_message_that_nobody_receives_is_refused() -> None:
    program = program_of(**ONCE)
    tasks = program.classes[1].tasks
    kind = tasks.kind.copy()
    kind[rows_of(tasks, TaskKind.RECV)[0]] = TaskKind.LOAD
    with pytest.raises(
        ValueError, match="rank 1 receives 0 messages from rank 0 along pp, which sends 1"
    ):
        simulated(with_tasks(program, 1, replace(tasks, kind=kind)))


def test_a_deadlock_names_collectives_too() -> None:
    """Rank 1 reduces the tied table before it sends the gradient that rank 0 waits for."""
    program = program_of(**ONCE)
    tasks = program.classes[1].tasks
    send = rows_of(tasks, TaskKind.SEND)[0]
    first = program.classes[0].tasks
    shared = {int(s) for s in first.slot[rows_of(first, TaskKind.COLLECTIVE)]}
    meets = next(r for r in rows_of(tasks, TaskKind.COLLECTIVE) if int(tasks.slot[r]) in shared)
    name = tasks.names[int(tasks.name[meets])]
    assert send < meets
    # All that the collective needs comes before the message; the message waits for it.
    needed = {meets}
    for row in range(meets, -1, -1):
        if row in needed:
            needed |= {*tasks.data[tasks.data_ptr[row] : tasks.data_ptr[row + 1]].tolist()}
    assert send not in needed
    rows = np.arange(len(tasks))
    early = np.isin(rows, [r for r in needed if r > send])
    key = np.where(early, send - 0.5, rows)
    key[meets] = send - 0.4
    order = np.argsort(key, kind="stable")
    changed = moved(tasks, order)
    # The send reads the collective.
    at = int(np.argsort(order)[send])
    pointer = changed.data_ptr.copy()
    pointer[at + 1 :] += 1
    data = np.insert(changed.data, int(changed.data_ptr[at + 1]), int(np.argsort(order)[meets]))
    changed = replace(changed, data_ptr=pointer, data=data.astype(np.int32))
    with pytest.raises(UserError) as refused:
        simulated(with_tasks(program, 1, changed))
    assert str(refused.value) == (
        "deadlock: rank 0 waits for backward.send of microbatch 0 from rank 1, which waits in "
        f"{name} for rank 0; change the order of the schedule"
    )
