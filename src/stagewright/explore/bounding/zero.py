"""What ZeRO and data parallelism move at least, in every microbatch and once in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers
from stagewright.search.candidates import HARDWARE, Candidates
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization, reduces_each_microbatch
from stagewright.program.communicators import Communicator
from stagewright.run.settings import Run
from stagewright.time.collectives import collectives_seconds
from stagewright.time.columns.meshes import places_of
from stagewright.time.network import Machine, Placement


class Moved(NamedTuple):
    """Seconds in which a rank moves weights and gradients: [rows] each."""

    inside: Float
    """In each microbatch, beside kernels."""
    summed: Float
    """Once in a step, while kernels wait."""
    renewed: Float
    """Once in a step, when the optimizer is done."""


class _Shares(NamedTuple):
    """What the ranks of a candidate move, as shares of the bytes of their weights."""

    places: tuple[Placement, ...]
    """Where the ranks lie that hold parts of the same states, or copies."""
    ranks: int
    reduced: float
    """In each microbatch."""
    gathered: float
    """In each microbatch."""
    summed: float
    """Once in a step, and kernels wait for it where the execution has no overlap along dp."""
    renewed: float
    """Once in a step: gathered when the optimizer is done."""
    whole: bool
    """Whether all ranks of dp have the sums, or each has a part."""


_NOTHING = _Shares((), 1, 0.0, 0.0, 0.0, 0.0, whole=True)


_DECIDES = (
    "tp", "cp", "dp", "pp", "dp_shard", "order", "zero", "framework", "precision", "params_dtype",
    "grad_reduce", "grad_reduce_dtype", "fsdp_reduce", "reshard_after_forward", "lora_rank",
    "freeze", "trainable", HARDWARE, "topology", "algorithm",
)  # fmt: skip
"""Settings that decide what is moved, and between which ranks."""


class _MovedAlike(NamedTuple):
    """Candidates whose ranks move alike."""

    shares: _Shares
    machine: Machine


@dataclass(frozen=True, slots=True, eq=False)
class ShardedStates:
    """What ranks of candidates move of weights and gradients."""

    kinds: Sequence[_MovedAlike]
    of: Int
    """Which of the kinds each candidate has: [candidates]."""

    @classmethod
    def of_candidates(cls, rows: Candidates) -> Self:
        """Those of all candidates."""
        overlaps = rows.column("no_overlap")
        waits = overlaps.is_one_of(*(axes for axes in overlaps.values if "dp" in axes))
        gathers = ~rows.column("overlap_param_gather").is_one_of(True)
        systems = rows.distinct(HARDWARE, "topology", "algorithm").of
        decides = rows.distinct(*_DECIDES).of, rows.microbatches > 1, waits, gathers
        first, of = distinct_numbers(decides, len(rows))
        numbers: dict[object, int] = {}
        found: list[_MovedAlike] = []
        kinds: list[int] = []
        some: list[int] = first.tolist()
        for row in some:
            machine = rows.machine(row)
            shares = _shares_of(rows.run(row).resolved(rows.model), rows.model, machine)
            # What runs beside kernels takes no time of its own.
            shares = shares._replace(
                summed=shares.summed * waits[row], renewed=shares.renewed * gathers[row]
            )
            alike = shares, int(systems[row]), machine.gpus
            if alike not in numbers:
                numbers[alike] = len(found)
                found.append(_MovedAlike(shares, machine))
            kinds.append(numbers[alike])
        return cls(found, np.array(kinds, dtype=np.int64)[of])

    def moved(self, kinds: Int, most: Float, least: Float) -> Moved:
        """Seconds of candidates of these kinds. `most` and `least` are the bytes of weights, before
        ZeRO splits them, of the rank that has most and of the one that has fewest."""
        found = Moved(*(np.zeros(len(kinds)) for _ in Moved._fields))
        present: list[int] = np.unique(kinds).tolist()
        for nth in present:
            mine = np.flatnonzero(kinds == nth)
            of = self.kinds[nth]
            if not of.shares.places:
                continue
            found.inside[mine] = _longest(_inside, of, most[mine])
            found.summed[mine] = _longest(_summed, of, least[mine])
            found.renewed[mine] = _longest(_renewed, of, least[mine])
        return found


def _shares_of(run: Run, model: ModelConfig, machine: Machine) -> _Shares:
    """What the ranks of a resolved run move.

    Nothing is known of experts, which lie on other ranks than layers do.
    """
    if model.num_experts:
        return _NOTHING
    mesh, plan = parallelization(run, model)
    axes = plan.shard if run.zero else (*plan.data, *plan.context)
    ranks = math.prod(mesh.size(axis) for axis in axes)
    if ranks == 1:
        return _NOTHING
    places = places_of(Communicator(axes), mesh, machine.tiers)
    known = run.framework == "megatron" and run.precision == "bf16" and not run.params_dtype
    share = 1.0 if known else 0.25
    width = 2 if known and run.grad_reduce_dtype is None else 1  # sums in fp32
    trained = not (run.lora_rank or run.freeze or run.trainable)
    each, sums = reduces_each_microbatch(run), share * width * trained
    gathered = (1 + run.reshard_after_forward) * share if run.zero == 3 else 0.0
    renewed = share if known and trained and run.zero in (1, 2) else 0.0
    late = 0.0 if each or not known else sums
    return _Shares(places, ranks, sums * each, gathered, late, renewed, whole=run.zero == 0)


def _longest(
    seconds: Callable[[_Shares, Float, Placement, Machine], Float], of: _MovedAlike, size: Float
) -> Float:
    """Seconds of the slowest group of ranks."""
    places = of.shares.places
    return np.max([seconds(of.shares, size, place, of.machine) for place in places], axis=0)


def _inside(of: _Shares, size: Float, place: Placement, machine: Machine) -> Float:
    """Seconds of a microbatch in which ranks move weights and gradients of so many bytes."""
    found = np.zeros_like(size)
    if of.reduced:
        found = of.reduced * collectives_seconds("reduce_scatter", size, place, machine)
    if of.gathered:
        parts = size / of.ranks
        found = found + of.gathered * collectives_seconds("all_gather", parts, place, machine)
    return found


def _summed(of: _Shares, size: Float, place: Placement, machine: Machine) -> Float:
    """Seconds in which ranks sum the gradients of a step."""
    op = "all_reduce" if of.whole else "reduce_scatter"
    return collectives_seconds(op, of.summed * size, place, machine)


def _renewed(of: _Shares, size: Float, place: Placement, machine: Machine) -> Float:
    """Seconds in which ranks gather the weights of the next step."""
    return collectives_seconds("all_gather", of.renewed * size / of.ranks, place, machine)
