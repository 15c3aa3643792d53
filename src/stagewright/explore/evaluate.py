"""The figures of candidates in columns: structures, their templates, and the steps of pipelines.

Candidates of one structure differ in numbers (`explore.structures`). Their blocks' kernels are
timed at once (`time.columns`), the actions of their stages follow from small programs
(`explore.templates`, `explore.responses`), and a step from the order of actions (`explore.steps`).
Candidates that cannot be evaluated so are listed with a reason (`Evaluated.left`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_values
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.search.candidates import ABSENT, Candidates, distinct
from stagewright.search.figures import Figures
from stagewright.explore.memory import Peaks
from stagewright.explore.occupancy import enough, occupancy
from stagewright.explore.pipeline.rounds import rounds
from stagewright.explore.shared.plans import PipelineShape, StagePlan, stage_plan
from stagewright.explore.shared.tuples import Shared
from stagewright.explore.steps import EquallyPlayed, PlayedConfigurations, StepColumns, steps
from stagewright.explore.structures import (
    NUMBERS,
    PIPELINE,
    Structure,
    structures,
)
from stagewright.explore.timed_memory.peaks import LatePeaks
from stagewright.explore.timing import (
    JoinedFigures,
    KnownOnMachine,
    MachineTiming,
    TemplateFigures,
    Templates,
)
from stagewright.garbage import seldom_collected
from stagewright.run.requests import read_bytes
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.pipeline import Pipeline
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
    """The figures of all candidates; NaN for those in `left`."""

    figures: Figures
    left: Sequence[LeftOut]


@seldom_collected()
def evaluate(candidates: Candidates, shared: Shared | None = None) -> Evaluated:
    """The figures of candidates, in their order.

    `shared`: what others of the same model have in common with them, which is not found again.
    """
    work = _Evaluation(candidates, shared or Shared())
    try:
        grouped = structures(candidates, work.shared)
    finally:
        work.shared.forget_blocks()
    left = [LeftOut(*refused) for refused in grouped.refused]
    waiting = deque(grouped.found)
    del grouped
    while waiting:  # a structure is dropped before the next one: its blocks take much memory
        left += work.add(waiting.popleft())
    work.run()
    timed = work.seconds, work.joules, work.bubble, *work.waits.values()
    endless = np.flatnonzero(np.any([abs(column) > _LONGEST for column in timed], axis=0))
    if len(endless):
        for column in timed:
            column[endless] = np.nan
        left.append(LeftOut(endless, "an action that waits for none before it", True))
    return Evaluated(work.figures(), left)


class _PlacedConfigurations(NamedTuple):
    """Configurations that are played, and the numbers of their candidates among all, by part."""

    played: PlayedConfigurations
    at: list[Int]


class _PlayedAlike(NamedTuple):
    """Candidates of one pipeline, of one structure or of several that are joined."""

    tuples: Int
    """Which tuple of the structure, or of those that are joined, each has."""
    microbatches: Int
    at: Int
    """Their numbers among all candidates."""


@dataclass(eq=False)
class _Evaluation:
    """The figures of candidates, while structures are added one by one and when all are played."""

    candidates: Candidates
    shared: Shared
    tables: dict[tuple[Hashable, Hashable], JoinedFigures] = field(
        default_factory=dict[tuple[Hashable, Hashable], JoinedFigures]
    )
    """By what machines have in common (`KnownOnMachine.key`) and by form (`Responses.form`)."""
    machines: dict[Hashable, Machine] = field(default_factory=dict[Hashable, Machine])
    waits: dict[str, Float] = field(default_factory=dict[str, Float])
    plans: dict[object, StagePlan] = field(default_factory=dict[object, StagePlan])
    on: dict[Hashable, KnownOnMachine] = field(default_factory=dict[Hashable, KnownOnMachine])
    memory: dict[str, Int] = field(default_factory=dict[str, Int])
    late: list[tuple[Int, dict[str, Int]]] = field(default_factory=list[tuple[Int, dict[str, Int]]])
    """The memory of candidates whose transfers free it behind later kernels: their numbers, and
    bytes by category."""

    def __post_init__(self) -> None:
        count = len(self.candidates)
        self.seconds, self.bubble = np.full(count, np.nan), np.full(count, np.nan)
        self.flops, self.peak = np.full(count, np.nan), np.full(count, np.nan)
        self.usd, self.joules = np.full(count, np.nan), np.full(count, np.nan)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.device = np.zeros(count, dtype=np.int64)

    # ---- structures ------------------------------------------------------------------------------

    def add(self, of: Structure) -> list[LeftOut]:
        """Put the candidates of a structure where `run` finds them; returns those that cannot be
        played."""
        left: list[LeftOut] = []
        own = self.candidates.take(of.candidates)
        names = [n for n in PIPELINE if n in own.columns]
        pipelines = own.distinct(*names)
        batch = own.microbatches
        machines = own.machines
        templates = Templates(of)
        for group in range(int(machines.max()) + 1):
            mine = np.flatnonzero(machines == group)
            try:
                key, timing = self._timing(own, mine, templates)
            except UserError as error:
                left.append(LeftOut(of.candidates[mine], str(error), True))
                continue
            for nth in np.unique(pipelines.of[mine]).tolist():
                rows = mine[pipelines.of[mine] == nth]
                alike = _PlayedAlike(of.index[rows], batch[rows], of.candidates[rows])
                try:
                    self._put(alike, self._plan(own, int(rows[0])), key, timing)
                except UserError as error:
                    left.append(LeftOut(alike.at, str(error), True))
        return left

    def _timing(
        self, own: Candidates, mine: Int, templates: Templates
    ) -> tuple[Hashable, MachineTiming]:
        """The times of a structure's templates on the machine of some of its candidates, and what
        is equal for equal machines; a UserError where columns have no such times."""
        first = int(mine[0])
        hardware, how = own.hardware(first), own.execution(first)
        self._cost(own, mine, templates.of, hardware)
        why = _unknown(how, own.cluster(first))
        if why:
            raise UserError(why)
        machine = own.machine(first)
        key = KnownOnMachine.key(machine)
        if key not in self.on:
            self.on[key] = KnownOnMachine.of(self.shared.durations(key))
        routed = self._routed(own, mine, how)
        return key, MachineTiming(templates, machine, how, self.on[key], routed)

    def _put(
        self, alike: _PlayedAlike, plan: StagePlan, key: Hashable, timing: MachineTiming
    ) -> None:
        """Put candidates of one structure, pipeline and machine behind those of the same form; a
        UserError, which says why they cannot be played, leaves everything as it is."""
        if plan.unlike:
            raise UserError(plan.unlike)
        several = bool(alike.microbatches[0] > 1)  # all of a structure's candidates, or none
        found = timing.figures(plan.kinds[several], plan.run)
        late = timing.late(found)
        shapes = [*_by_shape(plan, alike)]
        if late is not None:
            self.late += [held for shape, some in shapes for held in _held(shape, late, some)]
        self.machines[key] = timing.machine
        table = self.tables.setdefault((key, found.responses.form), JoinedFigures())
        for shape, some in shapes:
            table.add(found, shape, *some)

    def _routed(self, own: Candidates, mine: Int, how: Execution) -> Routed | None:
        """How a flexible dispatcher of some candidates of one structure sends tokens."""
        if not how.moe_flex_dispatcher:
            return None
        model = self.candidates.model
        return Routed.of(own.run(int(mine[0])).resolved(model), model)

    def _cost(self, own: Candidates, mine: Int, of: Structure, hardware: Hardware) -> None:
        """What does not follow from the time of a step: tokens, FLOPs, memory of the device."""
        at, model = of.candidates[mine], self.candidates.model
        batch = _global_batch(own, mine)
        columns = [own.column(name)[mine] for name in ("seq_length", "decoder_seq_length")]
        lengths = distinct(columns, len(mine))
        runs = [own.run(row).resolved(model) for row in mine[lengths.first].tolist()]
        needed = np.array([self._needed(run) for run in runs])
        self.flops[at] = needed[lengths.of] * batch
        tokens = np.array([run.seq_length or 0 for run in runs])
        self.tokens[at] = tokens[lengths.of] * batch
        first = runs[0]
        world = first.world_size  # of all that have the machine
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
        values.pop("global_batch_size", None)
        # All structures have the same columns, in the same order.
        key = tuple(kind[n] if n in kind else repr(v) for n, v in values.items())
        if key not in self.plans:
            self.plans[key] = stage_plan(
                own.run(row), self.candidates.model, self.shared.by_settings
            )
        return self.plans[key]

    # ---- steps -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Play all pipelines, and find what their ranks hold."""
        sets: dict[Pipeline, list[_PlacedConfigurations]] = {}
        self.on.clear()  # figures of templates take most of the memory: none is held twice for long
        for key in [*self.tables]:
            table = self.tables.pop(key)
            figures = table.join()
            timed_as = figures.responses.classes
            for shape, users in table.users():
                every = _PlayedAlike(*users)
                machine = self.machines[key[0]]
                placed = _played_configurations(shape, machine, figures, timed_as, every)
                sets.setdefault(shape.pipeline, []).append(placed)
                for at, held in _held(shape, figures.peaks, every):
                    self._remember(at, held)
        for at, held in self.late:
            self._remember(at, held)
        for pipeline, some in sets.items():
            played = steps(pipeline, [placed.played for placed in some])
            for placed, found in zip(some, played, strict=True):
                for at, columns in zip(placed.at, found, strict=True):
                    self._record(at, columns, placed.played.messages.machine)

    def _remember(self, at: Int, memory: Mapping[str, Int]) -> None:
        """The memory of some candidates."""
        for name, held in memory.items():
            if name not in self.memory:
                self.memory[name] = np.zeros(len(self.candidates), dtype=np.int64)
            self.memory[name][at] = held

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


def _by_shape(plan: StagePlan, alike: _PlayedAlike) -> Iterator[tuple[PipelineShape, _PlayedAlike]]:
    """Candidates of one plan by the shapes that its pipeline has with their microbatches."""
    counts, of_row = distinct_values(alike.microbatches)
    shapes = [plan.shape(count) for count in counts.tolist()]
    if all(own is shapes[0] for own in shapes):
        yield shapes[0], alike
        return
    for shape in dict.fromkeys(shapes):
        mine = np.array([own is shape for own in shapes])[of_row]
        yield shape, _PlayedAlike(*(column[mine] for column in alike))


def _held(
    shape: PipelineShape, peaks: Peaks | LatePeaks, every: _PlayedAlike
) -> Iterator[tuple[Int, dict[str, Int]]]:
    """The memory of candidates of one pipeline, by their numbers."""
    of, layers = shape.pipeline, shape.by_stage
    counts = enough(of, every.microbatches)
    after = peaks.lasting if isinstance(peaks, LatePeaks) else ""
    for count in np.unique(counts).tolist():
        mine = counts == count
        found = occupancy(of, count, layers, after)
        assert found is not None, f"a schedule that is played: {of.schedule}"
        yield every.at[mine], peaks.at(found, every.tuples[mine])


def _played_configurations(
    shape: PipelineShape,
    machine: Machine,
    figures: TemplateFigures,
    timed_as: Int,
    every: _PlayedAlike,
) -> _PlacedConfigurations:
    """Candidates of one pipeline, by the microbatches that are played of them."""
    of = shape.pipeline
    counts, of_row = distinct_values(every.microbatches)
    plans = [rounds(of.schedule, of.pp, m, of.group) for m in counts.tolist()]
    more = np.array([plan.more for plan in plans])
    tuples, of_tuple = distinct_values(every.tuples)
    parts: list[EquallyPlayed] = []
    at: list[Int] = []
    for played, before in sorted({(plan.played, plan.before) for plan in plans}):
        these = np.array([(plan.played, plan.before) == (played, before) for plan in plans])
        mine = np.flatnonzero(these[of_row])
        part = EquallyPlayed(
            played,
            before,
            of=of_tuple[mine],
            microbatches=every.microbatches[mine],
            more=more[of_row[mine]],
        )
        parts.append(part)
        at.append(every.at[mine])
    own = figures.message[tuples], figures.stride[tuples], figures.beyond[tuples]
    configurations = PlayedConfigurations(
        responses=figures.responses,
        tuples=tuples,
        timed_as=timed_as[tuples],
        messages=NeighbourMessages(*own, of.pp, machine),
        layers=np.array(shape.layers, dtype=np.int64),
        parts=parts,
    )
    return _PlacedConfigurations(configurations, at)


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


def _global_batch(own: Candidates, rows: Int) -> Int:
    """Sequences of a step of some candidates."""
    given = own.column("global_batch_size")[rows].numbers()
    if (given != ABSENT).all():
        return given
    some = own.take(rows)
    size = some.numbers("micro_batch_size") * some.numbers("dp")
    return np.where(given == ABSENT, size * some.microbatches, given)
