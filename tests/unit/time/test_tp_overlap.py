"""Collectives of tensor parallelism in pieces beside products: closed forms, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stagewright.evidence import training
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.run.settings import Run
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine

LLAMA: dict[str, Any] = {"model": "llama3-70b", "layers": 2, "tp": 4, "sequence_parallel": True}
MACHINE = Machine.of(resolve("h100-sxm"), gpus=4)


def both(**settings: Any) -> tuple[Program, np.ndarray, np.ndarray]:
    program = compile(Run(**{**LLAMA, **settings})).program
    (whole,), (cut,) = (task_seconds(program, MACHINE, tp_comm_overlap=on) for on in (False, True))
    return program, whole, cut


def test_the_longer_and_a_piece_of_the_shorter() -> None:
    """Of what the MLP gathers and what it scatters; both products are longer than all they hide."""
    program, whole, cut = both()
    t = program.classes[0].tasks
    names = [t.names[i] for i in t.name]
    up = [names.index(f"layer0.{name}") for name in ("gate", "up")]
    down = [names.index("layer0.mlp_out")]
    for collective, products in (("mlp_norm_out.all_gather", up),
                                 ("mlp_reduced.reduce_scatter", down)):  # fmt: skip
        move = names.index(f"layer0.{collective}")
        g = cut[products].sum()
        assert whole[products].sum() < g < 1.1 * whole[products].sum()
        assert whole[move] < g
        assert cut[move] + g == pytest.approx(g + whole[move] / 4)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_is_cut(precision: str, *, joint: bool) -> None:
    """Per layer two gathers and two scatters forward, in backward the gathers of gradients.

    What forward has kept and gathers again, and the scatters of gradients, whose inputs are sums
    of several products, wait for nothing that they could go beside.
    """
    program, whole, cut = both(precision=precision, joint_projections=joint)
    t = program.classes[0].tasks
    moves = t.kind == TaskKind.COLLECTIVE
    changed = moves & (cut != whole)
    assert (cut[moves] <= whole[moves]).all()
    assert changed.sum() == 2 * (4 + 2)
    assert (t.layer[changed] >= 0).all()
    kernels = t.kind == TaskKind.COMPUTE
    assert (cut[kernels] >= whole[kernels]).all()


@pytest.mark.parametrize(
    "settings", [{"sequence_parallel": False}, {"tp": 1, "dp": 4, "sequence_parallel": False}]
)
def test_nothing_to_cut(settings: dict[str, Any]) -> None:
    _, whole, cut = both(**settings)
    assert np.array_equal(whole, cut)


def test_what_was_measured_stays() -> None:
    program, _, _ = both()
    (of,) = program.classes
    measured = np.where(of.tasks.kind == TaskKind.COMPUTE, 10**6, 0)
    tasks = replace(of.tasks, duration=measured)
    known = replace(program, classes=(replace(of, work=of.work.with_tasks(tasks)),))
    (cut,) = task_seconds(known, MACHINE, tp_comm_overlap=True)
    assert np.array_equal(cut[measured > 0], measured[measured > 0] * 1e-9)


@pytest.mark.numerics
def test_gain_of_async_tp() -> None:
    """torchtitan's pairs of runs with and without it: ours is as much faster, within 7 points."""
    rows = {m.row: m for m in training.rows("torchtitan")}
    pairs = [(row, row.replace("async_tp=1", "async_tp=0")) for row in rows
             if "async TP 8B, async_tp=1" in row]  # fmt: skip
    assert len(pairs) == 2
    for with_, without in pairs:
        seconds = [training.step_seconds(rows[r], training.machine_of(rows[r]))
                   for r in (without, with_)]  # fmt: skip
        measured = rows[with_].measured / rows[without].measured
        assert seconds[0] / seconds[1] == pytest.approx(measured, abs=0.07)
