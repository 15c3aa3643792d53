"""Tasks that stand for those of all microbatches take the same as these."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.lower.compile import compile
from stagewright.program import representatives as module
from stagewright.program.columns import Tasks
from stagewright.program.representatives import representatives
from stagewright.run.settings import Run
from stagewright.time.cost import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from timed import RUNS

MANY = {name: run for name, run in RUNS.items() if run.get("global_batch_size", 0) >= 6}


@pytest.mark.parametrize("name", MANY)
def test_all_tasks_take_what_their_representatives_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compile(Run(**MANY[name])).program
    machine = Machine.of(resolve("h100-sxm"), gpus=program.mesh.world_size)
    found = task_seconds(program, machine)
    seen: list[Tasks] = []

    def none(tasks: Tasks) -> None:
        seen.append(tasks)

    monkeypatch.setattr(module, "representatives", none)
    every = task_seconds(program, machine)
    assert len(seen) == len(program.classes)
    assert all(map(np.array_equal, found, every))


def of_four_microbatches() -> Tasks:
    (of,) = compile(Run(**RUNS["dp"] | {"global_batch_size": 8})).program.classes
    return of.tasks


def test_a_representative_reads_what_its_tasks_read() -> None:
    (tasks,) = (
        c.tasks for c in compile(Run(**RUNS["dp"] | {"global_batch_size": 8})).program.classes
    )
    few = representatives(tasks)
    assert few is not None
    assert len(few.tasks) < len(tasks) / 2
    owner, needed = tasks.reads
    own, read = few.tasks.reads
    pairs = {*zip(own.tolist(), read.tolist(), strict=True)}
    assert {*zip(few.of[owner].tolist(), few.of[needed].tolist(), strict=True)} == pairs
    assert (few.tasks.name[few.of] == tasks.name).all()


def test_tasks_that_differ_between_microbatches_have_none() -> None:
    (tasks,) = (
        c.tasks for c in compile(Run(**RUNS["dp"] | {"global_batch_size": 8})).program.classes
    )
    row = int(np.flatnonzero(tasks.microbatch == 2)[0])
    flops = tasks.flops.copy()
    flops[row] += 1
    assert representatives(module.replace(tasks, flops=flops)) is None
