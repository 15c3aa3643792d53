"""Pipelines of candidates: the blocks of each stage, and the schedule simulated on arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers, latest
from stagewright.lower.variants import PlacedVariant, place_blocks
from stagewright.run.settings import Run
from stagewright.schedule.actions import Action, Order, Overlap, ScheduleStep, flat, parts
from stagewright.schedule.play import PlannedStep, ends, plan
from stagewright.schedule.schedules import SCHEDULES, make
from stagewright.searching.block_costs import PER_LAYER_SETTINGS, PIPELINE_SETTINGS, Blocks
from stagewright.searching.candidates import Candidates

_CHUNK = 1 << 24
"""Chunk limit: actions x candidates."""


class Pipeline(NamedTuple):
    """Schedule with its sizes, and the kind of each block on each stage."""

    schedule: str
    pp: int
    vpp: int
    microbatch_group: int | None
    stages: tuple[tuple[int, ...], ...]

    def order(self, microbatches: int) -> Order:
        """Actions of each rank."""
        group = self.microbatch_group
        return make(self.schedule, self.pp, microbatches, self.vpp, group=group)

    @property
    def period(self) -> int:
        """Microbatches after which the order of actions repeats."""
        return self.microbatch_group or (2 * self.pp if pairs_ranks(self.schedule) else self.pp)

    def simulated_counts(self, microbatches: int) -> tuple[int, ...]:
        """All microbatches, or two counts one period apart (for extrapolation)."""
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return (microbatches,)
        filled = (schedule.fills + 1) * self.period
        if microbatches <= filled + 2 * self.period:
            return (microbatches,)
        first = filled + microbatches % self.period
        counts = (first, first + self.period)
        takes_both = all(schedule.takes(self.pp, n, self.microbatch_group) for n in counts)
        return counts if takes_both else (microbatches,)

    @property
    def forwards_first(self) -> bool:
        """True if all microbatches are in flight at once."""
        return self.schedule in SCHEDULES and SCHEDULES[self.schedule].forwards_first


def pairs_ranks(schedule: str) -> bool:
    """True if ranks r and pp - 1 - r have the same stages, as in DualPipe."""
    return schedule in SCHEDULES and SCHEDULES[schedule].pairs_ranks


class PipelineTimes(NamedTuple):
    """Simulated times of an order of actions, per candidate."""

    rank_ends: Float
    """End of the last action of each rank: [ranks, candidates]."""
    last: list[list[tuple[int, str, Float]]]
    """Stage, kind and end of the last backward pass of each stage, by rank, in order of time."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionCosts:
    """Seconds of actions by kind: [stages, candidates]."""

    seconds: Mapping[str, Float]
    gathers: Mapping[str, Float]
    """Part of `seconds` before the first block: gathers, which may overlap its message."""
    kernels: Mapping[str, Float]
    """Kernels of forward and backward passes, which overlapping passes run in turn."""
    launches: Mapping[str, Float]
    """Launches of the same, in turn as well."""
    overlap_exposed: Float
    """0: two passes overlap fully; 1: they run in turn: [candidates]."""

    def of_step(self, step: ScheduleStep, chunk: slice = slice(None)) -> Float:
        """Seconds of an action, or of two that overlap."""
        if not isinstance(step, Overlap):
            return self.seconds[step.kind][step.stage, chunk]
        f, b = step.forward.stage, step.backward.stage
        in_turn = [
            table["F"][f, chunk] + table["B"][b, chunk] for table in (self.kernels, self.launches)
        ]
        passes = self.seconds["F"][f, chunk], self.seconds[step.backward.kind][b, chunk]
        least, most = latest([*in_turn, *passes]), sum(passes)
        return least + self.overlap_exposed[chunk] * np.maximum(most - least, 0.0)

    def of_rank(self, steps: Sequence[ScheduleStep]) -> Float:
        """Seconds of all steps of a rank in total: [candidates]."""
        keys = [tuple((action.kind, action.stage) for action in parts(step)) for step in steps]
        examples = dict(zip(keys, steps, strict=True))
        return sum(
            (count * self.of_step(examples[key]) for key, count in Counter(keys).items()),
            np.zeros_like(self.overlap_exposed),
        )

    def delay(self, step: ScheduleStep, message: Float, chunk: slice) -> Float:
        """Seconds of a message to a step, less the gather that overlaps it."""
        action = step.forward if isinstance(step, Overlap) else step
        return message[chunk] - self.gathers[action.kind][action.stage, chunk]


class Occupancy(NamedTuple):
    """Microbatches in flight on each stage of a rank during a backward pass."""

    rank: int
    stage: int
    """Stage of the backward pass."""
    stages: tuple[int, ...]
    """Stages of the rank."""
    counts: tuple[int, ...]
    """Microbatches whose activations each of these stages saves, this pass included."""


def pipelines(
    candidates: Candidates, blocks: Blocks
) -> Iterator[tuple[Pipeline, tuple[int, ...], Int]]:
    """Groups of candidates with one pipeline and one tuple of simulated microbatch counts."""
    per_layer = [name for name in PER_LAYER_SETTINGS if name in candidates.columns]
    names = {*PIPELINE_SETTINGS, *(("recompute", *per_layer) if per_layer else ())} - {
        "global_batch_size"
    }
    placed = candidates.distinct(*(name for name in candidates.columns if name in names))
    runs: list[Run] = []
    stages_of_tuple: list[tuple[tuple[int, ...], ...]] = []
    for index in placed.first.tolist():
        run = candidates.run(index).resolved(candidates.model)
        stages = [
            tuple(_cost_column(run, block, blocks) for block in stage)
            for stage in place_blocks(run, candidates.model)
        ]
        runs.append(run)
        stages_of_tuple.append(tuple(stages))
    microbatches = candidates.microbatches
    first, tuple_of = distinct_numbers([placed.tuple_of, microbatches], len(candidates))
    number_of: dict[tuple[Pipeline, tuple[int, ...]], int] = {}
    number = np.zeros(len(first), dtype=np.int64)
    for n, index in enumerate(first.tolist()):
        count, tuple_index = int(microbatches[index]), int(placed.tuple_of[index])
        run = runs[tuple_index]
        pipeline = Pipeline(
            str(run.schedule), run.pp, run.vpp, run.group_of(count), stages_of_tuple[tuple_index]
        )
        key = pipeline, pipeline.simulated_counts(count)
        number[n] = number_of.setdefault(key, len(number_of))
    group = number[tuple_of]
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(number_of) + 1))
    for n, (pipeline, counts) in enumerate(number_of):
        yield pipeline, counts, order[bounds[n] : bounds[n + 1]]


def _cost_column(run: Run, placed: PlacedVariant, blocks: Blocks) -> int:
    """Column of a block in `pass_costs`: its kind, in the set of columns that applies."""
    variant, layer = placed
    without_recompute = run.recompute == "full" and layer >= 0 and not variant.recomputed
    column_set = 2 * variant.activations_on_host + without_recompute
    return blocks.kind(placed) + len(blocks.kinds) * column_set


def simulate_order(order: Order, costs: ActionCosts, message: Float) -> PipelineTimes:
    """Simulate an order of actions; a `message` [candidates] goes from rank to rank."""
    planned, count = plan(order), len(message)
    last_of_rank, last_backwards = _last_steps(planned, len(order))
    reported = {*last_of_rank, *(n for of_stage in last_backwards for n in of_stage.values())}
    step_ends = {n: np.zeros(count) for n in reported}
    size = max(1, _CHUNK // len(planned))
    for begin in range(0, count, size):
        chunk = slice(begin, begin + size)
        chunk_ends = ends(
            planned,
            partial(costs.of_step, chunk=chunk),
            partial(costs.delay, message=message, chunk=chunk),
        )
        for n, column in step_ends.items():
            column[chunk] = chunk_ends[n]
    last = [
        [(stage, kind, step_ends[n]) for (stage, kind), n in of_stage.items()]
        for of_stage in last_backwards
    ]
    return PipelineTimes(np.array([step_ends[n] for n in last_of_rank]), last)


def _last_steps(
    planned: Sequence[PlannedStep], ranks: int
) -> tuple[list[int], list[dict[tuple[int, str], int]]]:
    """Last step of each rank, and last backward pass of each of its stages, in order of time."""
    last = [0] * ranks
    backwards: list[dict[tuple[int, str], int]] = [{} for _ in range(ranks)]
    for n, planned_step in enumerate(planned):
        for rank in planned_step.ranks:
            last[rank] = n
            for action in parts(planned_step.step):
                if action.kind in "BW":
                    backwards[rank].pop((action.stage, "B"), None)
                    backwards[rank].pop((action.stage, "W"), None)
                    backwards[rank][action.stage, action.kind] = n
    return last, backwards


@lru_cache(maxsize=256)
def occupancies(order: Order) -> tuple[Occupancy, ...]:
    """Occupancies at backward passes, the undominated ones: only these can be the peak.

    Another dominates if it has as many microbatches in flight or more on every stage of the rank.
    """
    result: list[Occupancy] = []
    for rank, steps in enumerate(order):
        stages = tuple(sorted({action.stage for action in flat(steps)}))
        in_flight = dict.fromkeys(stages, 0)
        undominated: dict[int, set[tuple[int, ...]]] = {}
        for action in _backwards_first(steps):
            if action.kind == "F":
                in_flight[action.stage] += 1
                continue
            counts, others = tuple(in_flight.values()), undominated.setdefault(action.stage, set())
            if counts not in others and not any(_dominates(other, counts) for other in others):
                others -= {other for other in others if _dominates(counts, other)}
                others.add(counts)
            if action.kind != "I":
                in_flight[action.stage] -= 1
        result += [
            Occupancy(rank, stage, stages, counts)
            for stage, tuples in undominated.items()
            for counts in sorted(tuples)
        ]
    return tuple(result)


def _backwards_first(steps: Sequence[ScheduleStep]) -> Iterator[Action]:
    """Actions of steps; an overlapped backward pass first, since it frees memory."""
    for step in steps:
        yield from reversed(parts(step))


def _dominates(counts: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(counts, other, strict=True))
