"""Waves: in which order ranks issue their actions, and what is said where no order can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import KINDS, Program, RankWork, TaskKind, Tasks
from stagewright.run.sections.execution import ISSUED_BY, Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.order import tables_of
from stagewright.time.simulate.timeline import TICK, Timeline, timeline
from timed import by_row, durations, row_by_row

PP, MICROBATCHES = 4, 6
SMALL: dict[str, Any] = {"model": "gpt2", "seq_length": 8}
ONCE: dict[str, Any] = {"global_batch_size": 1}


@cache
def program_of(pp: int = 2, layers: int = 2, **settings: Any) -> Program:
    return compile(Run(**SMALL, pp=pp, layers=layers, **settings)).program


def simulated(program: Program) -> Timeline:
    return timeline(program, [np.full(len(of.work.actions.tasks), 1e-6) for of in program.classes])


def waves_of_actions(line: Timeline) -> dict[tuple[int, str, int], int]:
    """By pipeline rank, kind and microbatch: the wave of the first fragment of each action."""
    found: dict[tuple[int, str, int], int] = {}
    waves = line.waves
    for batch in waves.batches:
        wave = np.repeat(np.arange(waves.count), np.diff(batch.wave))
        for w, lane, instance in zip(
            wave.tolist(), batch.lane.tolist(), batch.instance.tolist(), strict=True
        ):
            nth = int(waves.lanes.class_of[lane])
            order = line.program.classes[nth].work.order
            copy = int(waves.sequence[nth].copies[instance, 0])
            if order.kind[copy, 0] < 0:
                continue
            rank = line.program.classes[nth].pipeline_rank
            key = rank, KINDS[int(order.kind[copy, 0])], int(order.microbatch[copy, 0])
            found[key] = min(w, found.get(key, w))
    return found


def test_waves_of_1f1b_are_those_of_its_schedule() -> None:
    """As if each forward and each backward took as long: 2 (m + p - 1) in all."""
    program = program_of(PP, PP, global_batch_size=MICROBATCHES)
    found = waves_of_actions(simulated(program))
    assert len(found) == 2 * PP * MICROBATCHES
    orders = [of.work.order for of in sorted(program.classes, key=lambda of: of.pipeline_rank)]
    expected: dict[tuple[int, str, int], int] = {}
    left = [
        [
            (KINDS[k], m)
            for k, m in zip(order.kind[:, 0].tolist(), order.microbatch[:, 0].tolist(), strict=True)
            if k >= 0
        ]
        for order in orders
    ]
    now = [0] * PP
    while any(left):
        for rank, actions in enumerate(left):
            if not actions:
                continue
            kind, m = actions[0]
            other = rank - 1 if kind == "F" else rank + 1
            if 0 <= other < PP and (other, kind, m) not in expected:
                continue
            expected[rank, kind, m] = max(now[rank], expected.get((other, kind, m), -1) + 1)
            now[rank] = expected[rank, kind, m] + 1
            actions.pop(0)
    assert found == expected
    assert max(found.values()) + 1 == 2 * (MICROBATCHES + PP - 1)


def test_waves_grow_with_actions_and_not_with_tasks() -> None:
    few, many = (simulated(program_of(2, layers)).waves.count for layers in (2, 8))
    assert few == many


def test_actions_of_one_wave_need_nothing_of_each_other() -> None:
    """What a fragment reads was left in an earlier wave, or is there from the start."""
    waves = simulated(program_of(PP, PP, global_batch_size=MICROBATCHES)).waves
    written = np.full(waves.unused + 1, -1)
    for wave in range(waves.count):
        rows = [
            (batch, slice(int(batch.wave[wave]), int(batch.wave[wave + 1])))
            for batch in waves.batches
        ]
        for batch, some in rows:
            assert (written[batch.inputs[some]] < wave).all()
        for batch, some in rows:
            outs = batch.outputs[some][batch.outputs[some] != waves.unused]
            assert (written[outs] < wave).all(), "two fragments of a wave leave one time"
            written[outs] = wave
    assert (waves.arrivals >= 0).all()
    assert (written[waves.arrivals] >= 0).all()


def test_programs_of_equal_structure_share_their_waves() -> None:
    """Sizes differ, and so do durations; a row-by-row evaluation says the same of each."""
    settings = {"pp": PP, "layers": PP, "global_batch_size": MICROBATCHES}
    of = [compile(Run(**SMALL | settings | {"seq_length": length})).program for length in (8, 16)]
    lines = [timeline(each, [t * TICK for t in durations(each, 3, False)]) for each in of]
    assert lines[0].waves is lines[1].waves
    assert lines[0].ticks != lines[1].ticks
    for each, line in zip(of, lines, strict=True):
        rows = by_row(each, durations(each, 3, False))
        assert timeline(row_by_row(each), [t * TICK for t in rows]).ticks == line.ticks
    fewer = program_of(PP, PP, global_batch_size=MICROBATCHES - 1)
    assert simulated(fewer).waves is not lines[0].waves


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


class ExecutionRead:
    """An execution, and the names of the settings that were read of it."""

    def __init__(self, how: Execution, names: set[str]) -> None:
        self.how, self.names = how, names

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.how, name)


def test_orders_follow_from_the_settings_by_which_they_are_remembered() -> None:
    executions: list[dict[str, Any]] = [
        {},
        {"streams": "one"},
        {"overlap_param_gather": True, "prefetch": 2, "no_overlap": frozenset({"dp"})},
        {"launch_mode": "cuda_graph", "cuda_graph_modules": frozenset({"attn"})},
    ]
    names = set[str]()
    for how in executions:
        read = ExecutionRead(Execution(**how), names)
        tables_of(program_of(1, dp=2, zero=1), cast("Execution", read))
    assert names == {*ISSUED_BY}
