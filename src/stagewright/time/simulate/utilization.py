"""Utilization of the GPUs: FLOPs that a model needs, and FLOPs that kernels execute.

Both use PaLM's convention (arXiv 2204.02311, appendix B): attention counts as if nothing were
masked. Executed FLOPs are never fewer than needed ones, so that HFU is never below MFU. The causal
figures leave out masked pairs of query and key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int, exact_sum
from stagewright.graph.table import Timing
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.parameters import WHAT_TRAINS, trains_all
from stagewright.model.config import ModelConfig
from stagewright.program.columns import BACKWARD_PHASE, FORWARD_PHASE, Program, TaskKind, Tasks
from stagewright.program.shapes import GEMM
from stagewright.run.settings import Run
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.power import RUNNING_FRACTION, kernel_energies
from stagewright.time.roofline import timing_of
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.timeline import TICK, Lane, Timeline


class Flops(NamedTuple):
    """FLOPs with attention in full, and without masked pairs of query and key."""

    full: float
    causal: float


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """FLOPs of one sequence in forward on one device, without recomputation and padding."""

    products: float
    """Of matrix products."""
    attention: Mapping[int, Flops]
    """Of attention, by layer; -1: outside the layers."""
    choices: float = 0.0
    """Of the indexers that choose keys, which no gradient reaches."""
    gradients: float | None = None
    """Of products of the backward pass, if some weights are frozen; None: twice `products`."""
    without_gradient: frozenset[int] = frozenset()
    """Layers whose attention no gradient reaches."""

    def of_step(self, sequences: int) -> Flops:
        """FLOPs of a training step with `sequences` sequences.

        The backward pass needs twice those of the forward pass, less the gradients of frozen
        weights and of inputs below all trained weights.
        """
        backward = 2 * self.products if self.gradients is None else self.gradients
        products = sequences * (self.choices + self.products + backward)
        full = causal = 0.0
        for layer, pairs in self.attention.items():
            passes = sequences * (1 if layer in self.without_gradient else 3)
            full, causal = full + passes * pairs.full, causal + passes * pairs.causal
        return Flops(products + full, products + causal)


def sequence_flops(run: Run, model: ModelConfig) -> SequenceFlops:
    """FLOPs that a model needs for one sequence of a resolved run of training."""
    single = Run(model=run.model, seq_length=run.seq_length, global_batch_size=1)
    # Tokens beyond the capacity of experts need no FLOPs.
    names = ("decoder_seq_length", "document_length", "moe_expert_capacity_factor", *WHAT_TRAINS)
    single = single.model_copy(update={name: getattr(run, name) for name in names})
    return _single_sequence_flops(single, model)


@lru_cache(maxsize=16)  # many runs of a search have the same
def _single_sequence_flops(run: Run, model: ModelConfig) -> SequenceFlops:
    """FLOPs of a run with one sequence, on one device."""
    tasks = compile(run, model).program.classes[0].tasks
    forward = tasks.phase == FORWARD_PHASE
    products = exact_sum(tasks.flops[forward & _timed_as(tasks, Timing.PRODUCT)])
    attention: dict[int, Flops] = {}
    for row in np.flatnonzero(forward & _timed_as(tasks, Timing.ATTENTION)).tolist():
        e = dict(tasks.shapes[int(tasks.shape[row])].extents)
        keys = min(e["window"] or e.get("chunk") or e["k"], e["k"])
        full = 2.0 * e["batch"] * e["heads"] * e["q"] * keys * (e["d"] + e["v"])
        layer = int(tasks.layer[row])
        before = attention.get(layer, Flops(0.0, 0.0))
        attention[layer] = Flops(before.full + full, before.causal + float(tasks.flops[row]))
    is_indexer = np.array([shape.kernel == "index_topk" for shape in tasks.shapes] + [False])
    choices = exact_sum(tasks.flops[forward & is_indexer[tasks.shape]])
    if trains_all(run):
        return SequenceFlops(float(products), attention, float(choices))
    backward = tasks.phase == BACKWARD_PHASE
    gradients = exact_sum(tasks.flops[backward & _timed_as(tasks, Timing.PRODUCT)])
    reached = tasks.layer[_timed_as(tasks, Timing.ATTENTION_BACKWARD)].tolist()
    without = frozenset(attention) - {*reached}
    return SequenceFlops(float(products), attention, float(choices), float(gradients), without)


def model_flops(run: Run, model: ModelConfig) -> Flops:
    """FLOPs that a model needs for a step of a resolved run of training."""
    return sequence_flops(run, model).of_step(run.global_batch_size or 0)


def executed_flops(program: Program, needed: SequenceFlops | None = None) -> Flops:
    """FLOPs that the kernels of all ranks execute, recomputation and padding included.

    Full: causal FLOPs times unmasked/masked pairs, per layer. Without `needed` (inference) both
    figures are those that kernels execute.
    """
    layers = dict(needed.attention) if needed else dict[int, Flops]()
    causal, masked = 0, 0.0
    for rank_class in program.classes:
        actions, ranks = rank_class.work.actions, len(rank_class.ranks)
        tasks = actions.tasks
        copies = np.bincount(rank_class.work.order.action, minlength=len(actions.begin) - 1)
        executed = tasks.flops * np.repeat(copies, np.diff(actions.begin))
        causal += exact_sum(executed) * ranks
        fused = _timed_as(tasks, Timing.ATTENTION, Timing.ATTENTION_BACKWARD)
        for layer, pairs in layers.items():
            flops = exact_sum(executed[fused & (tasks.layer == layer)]) * ranks
            if pairs.causal:  # 0: sequences of one token
                masked += flops * (pairs.full / pairs.causal - 1)
    return Flops(causal + masked, float(causal))


def _timed_as(tasks: Tasks, *timings: Timing) -> Bool:
    """Mask of kernels with one of the models in `timings`."""
    kernels = [timing_of(shape.kernel) in timings for shape in tasks.shapes]
    return np.array([*kernels, False], dtype=bool)[tasks.shape]


class LaneEnergies(NamedTuple):
    """Kernels of a lane that take time, with the energy of each."""

    kernel: Int
    """Issue index."""
    seconds: Float
    joules_over_tdp: Float
    """Energy in seconds at TDP."""


def lane_energies(lane: Lane, hardware: Hardware) -> LaneEnergies:
    """Energies of the kernels of a lane, those of communication streams included."""
    kernel = np.flatnonzero((lane.kind == TaskKind.COMPUTE) & (lane.end > lane.begin))
    seconds = (lane.end - lane.begin)[kernel].astype(np.float64) * TICK
    tasks = lane.rank_class.work.actions.tasks
    return LaneEnergies(
        kernel, seconds, kernel_energies(tasks, lane.row[kernel], seconds, hardware)
    )


def running_and_power(timeline: Timeline, mean: Breakdown, machine: Machine) -> tuple[float, float]:
    """Share of a step in which kernels of the mean GPU run, and their mean power over TDP.

    A collective that is waited for is a kernel that computes nothing.
    """
    power = 0.0
    for lane in timeline.lanes:
        energy = float(lane_energies(lane, machine.hardware).joules_over_tdp.sum())
        power += energy * len(lane.ranks) / machine.gpus / timeline.seconds
    exposed = sum(mean.exposed.values()) / timeline.seconds
    running = sum(mean.kernels.values()) / timeline.seconds + exposed
    return min(running, 1.0), power + RUNNING_FRACTION * exposed


def without_rates(compiled: CompiledRun, hardware: Hardware) -> list[str]:
    """Data types of a served checkpoint's products that hardware does not support.

    In training such products are an error: a recipe is chosen for the hardware.
    """
    return [] if compiled.run.mode == "train" else missing_rates(compiled.program, hardware)


def missing_rates(program: Program, hardware: Hardware) -> list[str]:
    """Data types of a program's products that hardware does not support."""
    used: set[str] = set()
    for rank_class in program.classes:
        tasks = rank_class.tasks
        shapes = [i for i, shape in enumerate(tasks.shapes) if shape.kernel == GEMM]
        rows = np.isin(tasks.shape, shapes)
        used |= {tasks.dtypes[int(i)] for i in np.unique(tasks.dtype[rows])}
    return sorted(dtype for dtype in used if hardware.rate_of(dtype) is None)
