"""The figures of candidates in columns: structures, their templates, and the steps of pipelines.

Candidates of one structure differ in numbers (`explore.structures`). Their blocks' kernels are
timed at once (`time.columns`), the actions of their stages follow from small programs
(`explore.templates`, `explore.responses`), and a step from the order of actions (`explore.steps`).
What cannot be computed so is left out and said (`Evaluated.left`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.explore.candidates import ABSENT, HARDWARE, Candidates, distinct
from stagewright.explore.figures import Figures
from stagewright.explore.memory import Peaks, occupancy
from stagewright.explore.pipeline import rounds
from stagewright.explore.shared.plans import PipelineShape, StagePlan, stage_plan
from stagewright.explore.shared.tuples import Shared
from stagewright.explore.steps import Lot, Pipeline, StepColumns, steps
from stagewright.explore.structures import (
    NUMBERS,
    PIPELINE,
    Structure,
    microbatches_of,
    structures,
)
from stagewright.explore.templates import Kind, unlike
from stagewright.explore.timing import KnownOnMachine, MachineTiming, TemplateFigures, Templates
from stagewright.run.requests import read_bytes
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.in_flight import enough
from stagewright.time.columns.neighbours import NeighbourMessages
from stagewright.time.expense.power import watts_per_gpu
from stagewright.time.experts.dispatch import Routed
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import sequence_flops

_LONGEST = 1e20
"""Seconds that no step takes: what starts before every time (`actions.NEVER`) has got into them."""


class LeftOut(NamedTuple):
    """Candidates whose figures are not known in columns."""

    candidates: Int
    reason: str
    possible: bool
    """Whether the run can be had: then `simulate` says."""


class Evaluated(NamedTuple):
    """The figures of all candidates, NaN of those that are left."""

    figures: Figures
    left: Sequence[LeftOut]


def evaluate(candidates: Candidates) -> Evaluated:
    """The figures of candidates, in their order."""
    work = _Evaluation(candidates)
    grouped = structures(candidates, work.shared)
    left = [LeftOut(*refused) for refused in grouped.refused]
    waiting = deque(grouped.found)
    del grouped
    work.shared.forget_tuples()
    while waiting:  # a structure is dropped before the next one: its blocks take much memory
        structure = waiting.popleft()
        try:
            left += work.add(structure)
        except UserError as error:
            left.append(LeftOut(structure.candidates, str(error), True))
        del structure
    work.run()
    timed = work.seconds, work.joules, work.bubble, *work.waits.values()
    endless = np.flatnonzero(np.any([abs(column) > _LONGEST for column in timed], axis=0))
    if len(endless):
        for column in timed:
            column[endless] = np.nan
        left.append(LeftOut(endless, "an action that waits for none before it", True))
    return Evaluated(work.figures(), left)


class _PlacedLot(NamedTuple):
    """Where some lots' candidates are among all."""

    lot: Lot
    at: Int


class _PlayedAlike(NamedTuple):
    """Candidates of one structure in one pipeline."""

    tuples: Int
    microbatches: Int
    at: Int
    """Their numbers among all candidates."""


class _JoinedTemplates:
    """The figures of several structures' templates behind each other, and who uses them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.begin: dict[int, int] = {}
        self.parts: list[TemplateFigures] = []
        self.count = 0
        self.batches: dict[PipelineShape, list[_PlayedAlike]] = {}

    def add(self, of: TemplateFigures, shape: PipelineShape, batch: _PlayedAlike) -> None:
        """Candidates whose tuples are those of `of`."""
        if id(of) not in self.begin:
            self.begin[id(of)] = self.count
            self.parts.append(of)
            self.count += len(of.stride)
        moved = batch._replace(tuples=batch.tuples + self.begin[id(of)])
        self.batches.setdefault(shape, []).append(moved)


@dataclass(eq=False)
class _Evaluation:
    """Lots of candidates by the pipeline that they are played in, and what has been found."""

    candidates: Candidates
    shared: Shared = field(default_factory=Shared)
    tables: dict[object, _JoinedTemplates] = field(default_factory=dict[object, _JoinedTemplates])
    waits: dict[str, Float] = field(default_factory=dict[str, Float])
    plans: dict[object, StagePlan] = field(default_factory=dict[object, StagePlan])
    on: dict[Hashable, KnownOnMachine] = field(default_factory=dict[Hashable, KnownOnMachine])
    memory: dict[str, Int] = field(default_factory=dict[str, Int])

    def __post_init__(self) -> None:
        count = len(self.candidates)
        self.seconds, self.bubble = np.full(count, np.nan), np.full(count, np.nan)
        self.flops, self.peak = np.full(count, np.nan), np.full(count, np.nan)
        self.usd, self.joules = np.full(count, np.nan), np.full(count, np.nan)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.device = np.zeros(count, dtype=np.int64)

    # ---- structures ------------------------------------------------------------------------------

    def add(self, of: Structure) -> list[LeftOut]:
        """Make lots of the candidates of a structure; returns those that cannot be played."""
        left: list[LeftOut] = []
        own = self.candidates.take(of.candidates)
        names = [n for n in PIPELINE if n in own.columns]
        pipelines = own.distinct(*names)
        batch = microbatches_of(own)
        machines = machines_of(own)
        templates = Templates(of)
        for group in range(int(machines.max()) + 1):
            mine = np.flatnonzero(machines == group)
            hardware, how = own.hardware(int(mine[0])), own.execution(int(mine[0]))
            self._cost(own, mine, of, hardware)
            why = _unknown(how, own.cluster(int(mine[0])))
            if why:
                left.append(LeftOut(of.candidates[mine], why, True))
                continue
            machine = own.machine(int(mine[0]))
            key = KnownOnMachine.key(machine)
            if key not in self.on:
                self.on[key] = KnownOnMachine.none()
            routed = self._routed(own, mine, how)
            timing = MachineTiming(templates, machine, how, self.on[key], routed)
            for nth in np.unique(pipelines.of[mine]).tolist():
                rows = mine[pipelines.of[mine] == nth]
                plan = self._plan(own, int(rows[0]))
                why = unlike(plan.run, plan.order, plan.parts)
                if why or plan.parts is None:
                    left.append(LeftOut(of.candidates[rows], why, True))
                    continue
                for several in (False, True):
                    some = rows[(batch[rows] > 1) == several]
                    if len(some):
                        of_plan = plan.run, plan.order, plan.parts, plan.layers
                        kind = Kind.of(*of_plan, several=several)
                        try:
                            found = timing.figures(kind, plan.run)
                        except UserError as error:
                            left.append(LeftOut(of.candidates[some], str(error), True))
                            continue
                        table = self.tables.setdefault(
                            (found.responses.form, key), _JoinedTemplates(machine)
                        )
                        mine_at = _PlayedAlike(of.index[some], batch[some], of.candidates[some])
                        table.add(found, plan.shape, mine_at)
        return left

    def _routed(self, own: Candidates, mine: Int, how: Execution) -> Routed | None:
        """How a flexible dispatcher of some candidates of one structure sends tokens."""
        if not how.moe_flex_dispatcher:
            return None
        model = self.candidates.model
        return Routed.of(own.run(int(mine[0])).resolved(model), model)

    def _cost(self, own: Candidates, mine: Int, of: Structure, hardware: Hardware) -> None:
        """What does not follow from the time of a step: tokens, FLOPs, memory of the device."""
        at = of.candidates[mine]
        first = own.run(int(mine[0])).resolved(self.candidates.model)
        lengths = own.numbers("seq_length")[mine]
        batch = _global_batch(own)[mine]
        for length in np.unique(lengths).tolist():
            some = lengths == length
            run = first if length == ABSENT else first.model_copy(update={"seq_length": length})
            needed = self._needed(run)
            self.flops[at[some]] = needed * batch[some]
            self.tokens[at[some]] = batch[some] * (run.seq_length or 0)
        world = own.world_size[mine]
        self.peak[at] = peak_flops(hardware, PRECISIONS[first.precision].product) * world
        asked = first.device_memory
        self.device[at] = hardware.memory if asked is None else read_bytes(asked)
        given = own.cluster(int(mine[0])).price
        price = hardware.price_usd_per_gpu_hour if given is None else given
        self.usd[at] = np.nan if price is None else price * world / 3600

    def _needed(self, run: Run) -> float:
        """FLOPs that the model needs for a sequence."""
        model = self.candidates.model
        return self.shared.by_settings.of(
            "flops", run, lambda run: sequence_flops(run, model).of_step(1).full
        )

    def _plan(self, own: Candidates, row: int) -> StagePlan:
        """Which stage holds what of a candidate; its numbers matter only where they are 1."""
        values = {n: own.column(n).at(row) for n in own.columns if n in SETTINGS}
        kind = {n: v is None or v > 1 for n, v in values.items() if n in NUMBERS}
        rest = {n: v for n, v in values.items() if n not in (*NUMBERS, "global_batch_size")}
        key = *sorted(kind.items()), *sorted((n, repr(v)) for n, v in rest.items())
        if key not in self.plans:
            self.plans[key] = stage_plan(
                own.run(row), self.candidates.model, self.shared.by_settings
            )
        return self.plans[key]

    # ---- steps -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Play all pipelines, and find what their ranks hold."""
        lots: dict[Pipeline, list[_PlacedLot]] = {}
        self.on.clear()  # figures of templates take most of the memory: none is held twice for long
        for key in [*self.tables]:
            table = self.tables.pop(key)
            figures = TemplateFigures.concatenated(table.parts)
            table.parts.clear()
            timed_as = figures.responses.classes
            for shape, batches in table.batches.items():
                every = _PlayedAlike(*map(np.concatenate, zip(*batches, strict=True)))
                for pipeline, lot in _lots(shape, table.machine, figures, timed_as, every):
                    lots.setdefault(pipeline, []).append(lot)
                self._remember(shape, figures.peaks, every)
        for pipeline, some in lots.items():
            for place, found in zip(some, steps(pipeline, [p.lot for p in some]), strict=True):
                self._record(place.at, found, place.lot.messages.machine)

    def _remember(self, shape: PipelineShape, peaks: Peaks, every: _PlayedAlike) -> None:
        """The memory of candidates of one pipeline."""
        distinct, of_row = np.unique(every.microbatches, return_inverse=True)
        own = shape.schedule, shape.pp, shape.vpp
        counts = np.array([enough(*own, m, shape.group) for m in distinct.tolist()])[of_row]
        for count in np.unique(counts).tolist():
            mine = counts == count
            found = occupancy((*own, count, shape.group), tuple(zip(*shape.layers, strict=True)))
            assert found is not None, f"a schedule that is played: {shape.schedule}"
            for name, held in peaks.at(found, every.tuples[mine]).items():
                if name not in self.memory:
                    self.memory[name] = np.zeros(len(self.candidates), dtype=np.int64)
                self.memory[name][every.at[mine]] = held

    def _record(self, at: Int, found: StepColumns, machine: Machine) -> None:
        watts = watts_per_gpu(machine.hardware, found.running, found.drawn)
        self.joules[at] = watts * machine.gpus * found.seconds
        self.seconds[at], self.bubble[at] = found.seconds, found.bubble
        for axis, seconds in found.exposed.items():
            column = self.waits.setdefault(axis, np.zeros(len(self.candidates)))
            column[at] = seconds

    def figures(self) -> Figures:
        """Everything that has been found."""
        return Figures(
            seconds=self.seconds,
            memory=self.memory,
            device_memory=self.device,
            exposed=self.waits,
            bubble=self.bubble,
            tokens=self.tokens,
            mfu=self.flops / (self.seconds * self.peak),
            joules=self.joules,
            usd=self.usd * self.seconds,
            exact=np.zeros(len(self.candidates), dtype=bool),
        )


def _lots(
    shape: PipelineShape,
    machine: Machine,
    figures: TemplateFigures,
    timed_as: Int,
    every: _PlayedAlike,
) -> Iterator[tuple[Pipeline, _PlacedLot]]:
    """Candidates of one pipeline by the microbatches that are played of them."""
    schedule, pp, vpp, group, by_variant = shape
    distinct, of_row = np.unique(every.microbatches, return_inverse=True)
    plans = [rounds(schedule, pp, m) for m in distinct.tolist()]
    more = np.array([plan.more for plan in plans])
    layers = np.array(by_variant, dtype=np.int64)
    for played, before in sorted({(plan.played, plan.before) for plan in plans}):
        these = np.array([(plan.played, plan.before) == (played, before) for plan in plans])
        mine = np.flatnonzero(these[of_row])
        tuples = every.tuples[mine]
        own = figures.message[tuples], figures.stride[tuples], figures.beyond[tuples]
        messages = NeighbourMessages(*own, pp, machine)
        microbatches, rest = every.microbatches[mine], more[of_row[mine]]
        lot = Lot(figures.responses, tuples, timed_as[tuples], layers, microbatches, rest, messages)
        yield Pipeline(schedule, pp, vpp, group, played, before), _PlacedLot(lot, every.at[mine])


def _unknown(how: Execution, cluster: ClusterSection) -> str:
    """Why a way to execute is not computed in columns; empty: it is."""
    if cluster.stragglers:
        return "stragglers"
    if how.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm"
    if how.overlap_slowdown:
        return "overlap_slowdown"
    if how.collective_checks:  # their seconds follow from the ranks of each group
        return "collective_checks"
    return ""


def machines_of(own: Candidates) -> Int:
    """Numbers of candidates' machines and ways to execute: equal for equal ones."""
    names = [
        n for n in own.columns
        if n == HARDWARE or (n in EXPERIMENT and EXPERIMENT[n].section in ("cluster", "execution"))
    ]  # fmt: skip
    key = distinct([own.column(n) for n in names], len(own)).of
    _, world = np.unique(own.world_size, return_inverse=True)
    return np.unique(key * (int(world.max()) + 1) + world, return_inverse=True)[1].ravel()


def _global_batch(own: Candidates) -> Int:
    """Sequences of a step."""
    given = own.numbers("global_batch_size")
    if (given != ABSENT).all():
        return given
    size = own.numbers("micro_batch_size") * own.numbers("dp")
    return np.where(given == ABSENT, size * microbatches_of(own), given)
