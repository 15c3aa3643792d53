"""What ZeRO moves in every microbatch, at least."""

from __future__ import annotations

import math

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.explore.candidates import Candidates
from stagewright.parallel.degrees import parallelization, reduces_each_microbatch
from stagewright.program.communicators import Communicator
from stagewright.run.settings import Run
from stagewright.time.collectives import collectives_seconds
from stagewright.time.columns.meshes import places_of


def seconds_of_zero(candidates: Candidates, rows: Int, mesh: Int, weights: Float) -> Float:
    """Seconds of a step in which a rank moves weights and gradients in microbatches: [rows].

    `mesh`: a number by machine and degrees of each row; `weights`: bytes that the rank holds of
    them before ZeRO splits these. 0 with experts, which lie on other ranks than layers do.
    """
    found = np.zeros(len(rows))
    if candidates.model.num_experts:
        return found
    some = candidates.take(rows)
    zero = some.numbers("zero")
    key = mesh * 4 + zero
    for one in np.unique(key[zero >= 2]):
        mine = np.flatnonzero(key == one)
        found[mine] = _each_microbatch(some, int(mine[0]), weights[mine])
    return some.microbatches * found


def _each_microbatch(some: Candidates, row: int, size: Float) -> Float:
    """Seconds in which the ranks of a row's ZeRO move weights and gradients of these bytes."""
    run = some.run(row).resolved(some.model)
    reduced, gathered = _times(run)
    if not (reduced or gathered):
        return np.zeros_like(size)
    mesh, plan = parallelization(run, some.model)
    machine = some.machine(row)
    ranks = math.prod(mesh.size(axis) for axis in plan.shard)
    found = np.zeros_like(size)
    for place in places_of(Communicator(plan.shard), mesh, machine):
        took = reduced * collectives_seconds("reduce_scatter", size, place, machine)
        took += gathered * collectives_seconds("all_gather", size / ranks, place, machine)
        found = np.maximum(found, took)
    return found


def _times(run: Run) -> tuple[float, float]:
    """How often each microbatch reduces gradients and gathers weights, of as many bytes as the
    weights that a stage holds."""
    whole = run.framework == "megatron" and run.precision == "bf16" and not run.params_dtype
    share = 1.0 if whole else 0.25
    gathered = (1 + run.reshard_after_forward) if run.zero == 3 else 0
    width = 2 if whole and run.grad_reduce_dtype is None else 1  # sums in fp32
    return share * width * reduces_each_microbatch(run), share * gathered
