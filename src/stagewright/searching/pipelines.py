"""Pipelines of candidates: the blocks of each stage, and the schedule's order played on arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers, latest
from stagewright.lower.variants import PlacedVariant, place_blocks
from stagewright.run.settings import Run
from stagewright.schedule.actions import Action, Order, Overlap, ScheduleStep, flat, parts
from stagewright.schedule.play import PlannedStep, ends, plan
from stagewright.schedule.schedules import SCHEDULES, known_order
from stagewright.searching.block_costs import PARTLY, PIPELINE, Blocks
from stagewright.searching.candidates import Candidates

_AT_ONCE = 1 << 24
"""Numbers of an array over actions and candidates that is made at once."""


class Pipeline(NamedTuple):
    """A schedule with its sizes, and the kind of each block on each stage."""

    schedule: str
    pp: int
    vpp: int
    group: int | None
    stages: tuple[tuple[int, ...], ...]

    def order(self, microbatches: int) -> Order:
        """Actions of each rank."""
        return known_order(self.schedule, self.pp, microbatches, self.vpp, self.group)

    @property
    def round(self) -> int:
        """Microbatches after which the order of actions repeats."""
        return self.group or (2 * self.pp if pairs_ranks(self.schedule) else self.pp)

    def played(self, microbatches: int) -> tuple[int, ...]:
        """Microbatches to play: all; or of many two numbers, between which a full pipeline takes
        one more round."""
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return (microbatches,)
        filled = (schedule.fills + 1) * self.round
        if microbatches <= filled + 2 * self.round:
            return (microbatches,)
        first = filled + microbatches % self.round
        return (first, first + self.round)

    @property
    def forwards_first(self) -> bool:
        """True if all microbatches are in flight at once."""
        return self.schedule in SCHEDULES and SCHEDULES[self.schedule].forwards_first


def pairs_ranks(schedule: str) -> bool:
    """True if ranks r and pp - 1 - r have the same stages, as in DualPipe."""
    return schedule in SCHEDULES and SCHEDULES[schedule].pairs_ranks


class Played(NamedTuple):
    """An order in time: [candidates] each."""

    ranks: Float
    """End of the last action of each rank: [ranks, candidates]."""
    last: list[list[tuple[int, str, Float]]]
    """Stages of each rank in the order of their last backward passes: the stage, the kind of that
    action, and its end."""


class Occupancy(NamedTuple):
    """Microbatches in flight on each stage of a rank while it runs a backward pass."""

    rank: int
    stage: int
    """The stage of that pass."""
    stages: tuple[int, ...]
    """The stages of the rank."""
    counts: tuple[int, ...]
    """Microbatches of each of them whose activations are saved, that of the pass included."""


def pipelines(rows: Candidates, blocks: Blocks) -> Iterator[tuple[Pipeline, tuple[int, ...], Int]]:
    """Candidates by pipeline and by the microbatches that are played of it, by their numbers."""
    partly = [name for name in PARTLY if name in rows.columns]
    names = {*PIPELINE, *(("recompute", *partly) if partly else ())} - {"global_batch_size"}
    placed = rows.distinct(*(name for name in rows.columns if name in names))
    found: list[Pipeline] = []
    for row in placed.first.tolist():
        run = rows.run(row).resolved(rows.model)
        stages = [
            tuple(_kind(run, each, blocks) for each in stage)
            for stage in place_blocks(run, rows.model)
        ]
        group = run.microbatch_group
        found.append(Pipeline(str(run.schedule), run.pp, run.vpp, group, tuple(stages)))
    known: dict[tuple[Pipeline, tuple[int, ...]], int] = {}
    first, of = distinct_numbers([placed.of, rows.microbatches], len(rows))
    number = np.zeros(len(first), dtype=np.int64)
    for n, row in enumerate(first.tolist()):
        pipeline = found[int(placed.of[row])]
        key = pipeline, pipeline.played(int(rows.microbatches[row]))
        number[n] = known.setdefault(key, len(known))
    group_of = number[of]
    order = np.argsort(group_of, kind="stable")
    bounds = np.searchsorted(group_of[order], np.arange(len(known) + 1))
    for n, (pipeline, played) in enumerate(known):
        yield pipeline, played, order[bounds[n] : bounds[n + 1]]


def _kind(run: Run, placed: PlacedVariant, blocks: Blocks) -> int:
    """Column of the costs of a block (`pass_costs`)."""
    variant, layer = placed
    stored = run.recompute == "full" and layer >= 0 and not variant.recomputed
    sets = 2 * variant.activations_on_host + stored
    return blocks.kind(placed) + len(blocks.kinds) * sets


def play_order(
    order: Order,
    costs: Mapping[str, Float],
    kernels: Mapping[str, Float],
    launches: Mapping[str, Float],
    message: Float,
    gathers: Mapping[str, Float],
) -> Played:
    """Play an order on seconds of actions by kind: [stages, candidates].

    Two that overlap take at least as long as their `kernels`, and as their `launches`. A `message`
    [candidates] goes from rank to rank; `gathers`, part of the costs, may run while an action waits
    for it.
    """
    planned, count = plan(order), len(message)
    ends_of_ranks, passes = _last_steps(planned, len(order))
    kept = {*ends_of_ranks, *(n for of_rank in passes for n in of_rank.values())}
    ended = {n: np.zeros(count) for n in kept}
    size = max(1, _AT_ONCE // len(planned))
    for begin in range(0, count, size):
        part = slice(begin, begin + size)

        found = ends(
            planned,
            partial(step_seconds, costs=costs, kernels=kernels, launches=launches, part=part),
            partial(_delay, message=message, gathers=gathers, part=part),
        )
        for n, column in ended.items():
            column[part] = found[n]
    last = [[(stage, kind, ended[n]) for (stage, kind), n in of_rank.items()] for of_rank in passes]
    return Played(np.array([ended[n] for n in ends_of_ranks]), last)


def _delay(
    step: ScheduleStep, *, message: Float, gathers: Mapping[str, Float], part: slice
) -> Float:
    """Seconds of a message to a step, less what the step does before it needs it."""
    action = step.forward if isinstance(step, Overlap) else step
    return message[part] - gathers[action.kind][action.stage, part]


def _last_steps(
    planned: Sequence[PlannedStep], ranks: int
) -> tuple[list[int], list[dict[tuple[int, str], int]]]:
    """The last step of each rank, and the last backward pass of each of its stages, in order."""
    own = [0] * ranks
    passes: list[dict[tuple[int, str], int]] = [{} for _ in range(ranks)]
    for n, of in enumerate(planned):
        for rank in of.ranks:
            own[rank] = n
            for action in flat([of.step]):
                if action.kind in "BW":
                    passes[rank].pop((action.stage, "B"), None)
                    passes[rank].pop((action.stage, "W"), None)
                    passes[rank][action.stage, action.kind] = n
    return own, passes


def step_seconds(
    step: ScheduleStep,
    costs: Mapping[str, Float],
    kernels: Mapping[str, Float],
    launches: Mapping[str, Float],
    part: slice = slice(None),
) -> Float:
    """Seconds of a step; two that overlap take turns with their kernels, and their launches."""
    if not isinstance(step, Overlap):
        return costs[step.kind][step.stage, part]
    f, b = step.forward.stage, step.backward.stage
    both = [each["F"][f, part] + each["B"][b, part] for each in (kernels, launches)]
    return latest([*both, costs["F"][f, part], costs[step.backward.kind][b, part]])


def work(
    order: Order,
    costs: Mapping[str, Float],
    kernels: Mapping[str, Float],
    launches: Mapping[str, Float],
) -> Float:
    """Seconds of all steps of each rank: [ranks, candidates]."""
    tallies: list[dict[tuple[tuple[str, int], ...], tuple[ScheduleStep, int]]] = []
    for steps in order:
        tally: dict[tuple[tuple[str, int], ...], tuple[ScheduleStep, int]] = {}
        for step in steps:
            key = tuple((action.kind, action.stage) for action in flat([step]))
            tally[key] = (step, tally.get(key, (step, 0))[1] + 1)
        tallies.append(tally)
    return np.array(
        [sum(n * step_seconds(step, costs, kernels, launches) for step, n in tally.values())
         for tally in tallies]
    )  # fmt: skip


@lru_cache(maxsize=256)
def occupancies(order: Order) -> tuple[Occupancy, ...]:
    """The situations of all ranks in which most is in flight."""
    found: list[Occupancy] = []
    for rank, steps in enumerate(order):
        stages = tuple(sorted({action.stage for action in flat(steps)}))
        counts = dict.fromkeys(stages, 0)
        most: dict[int, set[tuple[int, ...]]] = {}
        for action in _backwards_first(steps):
            if action.kind == "F":
                counts[action.stage] += 1
                continue
            now, others = tuple(counts.values()), most.setdefault(action.stage, set())
            if now not in others and not any(_covers(other, now) for other in others):
                others -= {other for other in others if _covers(now, other)}
                others.add(now)
            if action.kind != "I":
                counts[action.stage] -= 1
        found += [
            Occupancy(rank, stage, stages, now)
            for stage, situations in most.items()
            for now in sorted(situations)
        ]
    return tuple(found)


def _backwards_first(steps: Sequence[ScheduleStep]) -> Iterator[Action]:
    """Actions of steps; of two that overlap the backward pass first, which frees memory."""
    for step in steps:
        yield from reversed(parts(step))


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
