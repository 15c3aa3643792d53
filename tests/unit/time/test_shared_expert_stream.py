"""Shared experts beside routed ones, in a decode step."""

from __future__ import annotations

import numpy as np

from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.time.durations import task_seconds
from stagewright.time.engines import with_shared_expert_stream
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import bytes_per_second

B200 = resolve("b200")


def step(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of the tasks of a layer with experts, alone and with the shared one beside, and
    the bytes of each."""
    run = Run(model="deepseek-r1", layers=4, mode="decode", batch_size=tokens, tp=8)
    program = compile(run).program
    alone = task_seconds(program, Machine.of(B200, gpus=8).for_inference())[0]
    tasks = program.classes[0].tasks
    layer = tasks.layer == 3
    beside = with_shared_expert_stream(tasks, alone, B200)
    assert np.array_equal(alone[~layer], beside[~layer])  # the first three layers have no experts
    return alone[layer], beside[layer], tasks.traffic[layer]


def test_a_small_shared_expert_is_hidden() -> None:
    """Gate, up, their activation and the product down."""
    alone, beside, _ = step(8)
    hidden = alone != beside
    assert hidden.sum() == 4
    assert not beside[hidden].any()


def test_both_take_no_less_than_their_bytes() -> None:
    alone, beside, moved = step(256)
    hidden = np.flatnonzero(alone != beside)
    assert len(hidden)
    assert beside.sum() > moved.sum() / bytes_per_second(B200)


def test_a_long_step_has_one_stream() -> None:
    alone, beside, _ = step(2048)
    assert np.array_equal(alone, beside)
