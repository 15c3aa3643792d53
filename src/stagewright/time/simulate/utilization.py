"""How well a step uses the GPUs: FLOPs that a model needs, and FLOPs that kernels execute.

One convention, PaLM's (arXiv 2204.02311, appendix B), for both: attention counts as if nothing were
masked. FLOPs that are executed are never fewer than those needed, so that HFU is never below
MFU. Beside both stand the causal figures, which leave out what a mask leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, exact_sum
from stagewright.graph.table import Timing
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.frozen import WHAT_TRAINS, trains_all
from stagewright.model.config import ModelConfig
from stagewright.program.columns import PHASES, Program, TaskKind, Tasks
from stagewright.program.shapes import GEMM
from stagewright.run.settings import Run
from stagewright.time.cost import timing_of
from stagewright.time.expense.power import RUNNING_FRACTION, kernel_energy
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.timeline import TICK, Timeline


class Flops(NamedTuple):
    """FLOPs with attention in full, and without the pairs of query and key that are masked."""

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
    """Of the scores with which indexers choose keys, which no gradient reaches."""
    gradients: float | None = None
    """Of the products of backward, where not all parameters train; None: twice `products`."""
    without_gradient: frozenset[int] = frozenset()
    """Layers whose attention no gradient reaches."""

    def of_step(self, sequences: int) -> Flops:
        """The FLOPs of training with so many sequences: backward needs twice those of forward, less
        the gradients of frozen weights, and those of inputs below all that trains."""
        backward = 2 * self.products if self.gradients is None else self.gradients
        once = sequences * (self.choices + self.products + backward)
        full = causal = 0.0
        for layer, pairs in self.attention.items():
            passes = sequences * (1 if layer in self.without_gradient else 3)
            full, causal = full + passes * pairs.full, causal + passes * pairs.causal
        return Flops(once + full, once + causal)


def sequence_flops(run: Run, model: ModelConfig) -> SequenceFlops:
    """The FLOPs that a model needs for one sequence of a resolved run of training."""
    alone = Run(model=run.model, seq_length=run.seq_length, global_batch_size=1)
    # A model that leaves out tokens beyond the capacity of experts needs no FLOPs for those.
    kept = ("decoder_seq_length", "document_length", "moe_expert_capacity_factor", *WHAT_TRAINS)
    return _flops_alone(alone.model_copy(update={name: getattr(run, name) for name in kept}), model)


@lru_cache(maxsize=16)  # many runs of a search have the same
def _flops_alone(alone: Run, model: ModelConfig) -> SequenceFlops:
    """The FLOPs of a sequence on one device."""
    tasks = compile(alone, model).program.classes[0].tasks
    forward = tasks.phase == PHASES.index("forward")
    products = exact_sum(tasks.flops[forward & _timed_as(tasks, Timing.PRODUCT)])
    attention: dict[int, Flops] = {}
    for row in np.flatnonzero(forward & _timed_as(tasks, Timing.ATTENTION)).tolist():
        of = dict(tasks.shapes[int(tasks.shape[row])].extents)
        keys = min(of["window"] or of.get("chunk") or of["k"], of["k"])
        full = 2.0 * of["batch"] * of["heads"] * of["q"] * keys * (of["d"] + of["v"])
        layer = int(tasks.layer[row])
        before = attention.get(layer, Flops(0.0, 0.0))
        attention[layer] = Flops(before.full + full, before.causal + float(tasks.flops[row]))
    scored = np.array([shape.kernel == "index_topk" for shape in tasks.shapes] + [False])
    choices = exact_sum(tasks.flops[forward & scored[tasks.shape]])
    if trains_all(alone):
        return SequenceFlops(float(products), attention, float(choices))
    backward = tasks.phase == PHASES.index("backward")
    gradients = exact_sum(tasks.flops[backward & _timed_as(tasks, Timing.PRODUCT)])
    reached = tasks.layer[_timed_as(tasks, Timing.ATTENTION_BACKWARD)].tolist()
    without = frozenset(attention) - {*reached}
    return SequenceFlops(float(products), attention, float(choices), float(gradients), without)


def model_flops(run: Run, model: ModelConfig) -> Flops:
    """The FLOPs that a model needs for a step of a resolved run of training."""
    return sequence_flops(run, model).of_step(run.global_batch_size or 0)


def executed_flops(program: Program, needed: SequenceFlops | None = None) -> Flops:
    """FLOPs that the kernels of all ranks execute, recomputation and padding included.

    In full, the FLOPs of a pass through a layer's attention are multiplied by the ratio of all its
    pairs of query and key to the pairs that its mask leaves: layers that share an action have one
    mask. Without `needed` (inference, where
    each request has a length of its own) both figures are those that kernels execute.
    """
    layers = dict(needed.attention) if needed else dict[int, Flops]()
    causal, masked = 0, 0.0
    for of in program.classes:
        actions, ranks = of.work.actions, len(of.ranks)
        tasks = actions.tasks
        copies = np.bincount(of.work.order.action, minlength=len(actions.begin) - 1)
        executed = tasks.flops * np.repeat(copies, np.diff(actions.begin))
        causal += exact_sum(executed) * ranks
        fused = _timed_as(tasks, Timing.ATTENTION, Timing.ATTENTION_BACKWARD)
        for layer, pairs in layers.items():
            flops = exact_sum(executed[fused & (tasks.layer == layer)]) * ranks
            masked += flops * (pairs.full / pairs.causal - 1)
    return Flops(causal + masked, float(causal))


def _timed_as(tasks: Tasks, *timings: Timing) -> Bool:
    """Which tasks are kernels that one of the models in `timings` times."""
    kernels = [timing_of(shape.kernel) in timings for shape in tasks.shapes]
    return np.array([*kernels, False], dtype=bool)[tasks.shape]


def running_and_drawn(line: Timeline, mean: Breakdown, machine: Machine) -> tuple[float, float]:
    """The share of a step in which kernels of the mean GPU run, and their mean power over TDP.

    A collective that is waited for is a kernel that computes nothing.
    """
    drawn = 0.0
    for lane in line.lanes:
        run = (lane.kind == TaskKind.COMPUTE) & (lane.end > lane.begin)
        took = (lane.end - lane.begin)[run].astype(np.float64) * TICK
        of_lane = kernel_energy(lane.of.work.actions.tasks, lane.row[run], took, machine.hardware)
        drawn += of_lane * len(lane.ranks) / machine.gpus / line.seconds
    exposed = sum(mean.exposed.values()) / line.seconds
    running = sum(mean.kernels.values()) / line.seconds + exposed
    return min(running, 1.0), drawn + RUNNING_FRACTION * exposed


def without_rates(compiled: CompiledRun, hardware: Hardware) -> list[str]:
    """Data types that a served checkpoint's products run in and that some hardware has not.

    In training such products are an error: a recipe is chosen for the hardware.
    """
    return [] if compiled.run.mode == "train" else missing_rates(compiled.program, hardware)


def missing_rates(program: Program, hardware: Hardware) -> list[str]:
    """Data types of a program's products that some hardware has not."""
    used: set[str] = set()
    for of in program.classes:
        shapes = [nth for nth, shape in enumerate(of.tasks.shapes) if shape.kernel == GEMM]
        rows = np.isin(of.tasks.shape, shapes)
        used |= {of.tasks.dtypes[int(i)] for i in np.unique(of.tasks.dtype[rows])}
    return sorted(dtype for dtype in used if hardware.rate_of(dtype) is None)
