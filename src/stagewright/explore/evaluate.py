"""The figures of candidates in columns: structures, their templates, and the steps of pipelines.

Candidates of one structure differ in numbers (`explore.structures`). Their blocks' kernels are
timed at once (`time.columns`), the actions of their stages follow from small programs
(`explore.templates`, `explore.responses`), and a step from the order of actions (`explore.steps`).
What cannot be computed so is left out and said (`Evaluated.left`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.explore.candidates import ABSENT, HARDWARE, Candidates, distinct
from stagewright.explore.figures import Figures
from stagewright.explore.memory import Peaks, occupancy
from stagewright.explore.pipeline import rounds
from stagewright.explore.responses import Responses, Timed, responses
from stagewright.explore.steps import Lot, NeighbourMessages, Pipeline, StepColumns, steps
from stagewright.explore.structures import (
    NUMBERS,
    PIPELINE,
    Structure,
    microbatches_of,
    structures,
)
from stagewright.explore.templates import Kind, Parts, StructureTemplate, template, unlike
from stagewright.lower.assembly.assemble import Assembly
from stagewright.lower.frozen import mark_trained
from stagewright.lower.recipe import recipe_of
from stagewright.lower.variants import place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.program.columns import TaskKind
from stagewright.run.requests import allowance_of, read_bytes
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.in_flight import enough
from stagewright.schedule.schedules import SCHEDULES, make
from stagewright.time.columns import Columns, Known, MeshColumns, Placed
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.launches import host_work
from stagewright.time.simulate.utilization import sequence_flops

PLAYED = ("1f1b", "gpipe", "interleaved", "looped-bfs")
"""Schedules whose steps are played in columns."""


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
    grouped = structures(candidates)
    left = [LeftOut(*refused) for refused in grouped.refused]
    work = _Evaluation(candidates)
    for structure in grouped.found:
        left += work.add(structure)
    work.run()
    return Evaluated(work.figures(), left)


class _PlacedLot(NamedTuple):
    """Where some lots' candidates are among all."""

    lot: Lot
    at: Int


@dataclass(frozen=True, slots=True, eq=False)
class _StagePlan:
    """The blocks of a pipeline: which stage holds what."""

    run: Run
    parts: Parts | None
    layers: Int


@dataclass(eq=False)
class _Evaluation:
    """Lots of candidates by the pipeline that they are played in, and what has been found."""

    candidates: Candidates
    lots: dict[Pipeline, list[_PlacedLot]] = field(
        default_factory=dict[Pipeline, "list[_PlacedLot]"]
    )
    waits: dict[str, Float] = field(default_factory=dict[str, Float])
    plans: dict[object, _StagePlan] = field(default_factory=dict[object, _StagePlan])
    known: dict[object, float] = field(default_factory=dict[object, float])
    placed: dict[object, Placed] = field(default_factory=dict[object, Placed])
    memory: dict[str, Int] = field(default_factory=dict[str, Int])

    def __post_init__(self) -> None:
        count = len(self.candidates)
        self.seconds, self.bubble = np.full(count, np.nan), np.full(count, np.nan)
        self.mfu, self.usd = np.full(count, np.nan), np.full(count, np.nan)
        self.flops, self.peak = np.full(count, np.nan), np.full(count, np.nan)
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
        machines = _machines(own)
        templates: dict[Kind, StructureTemplate] = {}
        for group in range(int(machines.max()) + 1):
            mine = np.flatnonzero(machines == group)
            hardware, how = own.hardware(int(mine[0])), own.execution(int(mine[0]))
            self._cost(own, mine, of, hardware)
            why = _unknown(how)
            if why:
                left.append(LeftOut(of.candidates[mine], why, True))
                continue
            machine = own.machine(int(mine[0]))
            placed = self.placed.setdefault(machine.tiers, {})
            timing = _TemplateTiming(of, machine, how, templates, placed)
            for nth in np.unique(pipelines.of[mine]).tolist():
                rows = mine[pipelines.of[mine] == nth]
                plan = self._plan(own, int(rows[0]))
                if plan.parts is None or str(plan.run.schedule) not in PLAYED:
                    why = f"schedule {plan.run.schedule}" if plan.parts else "blocks between layers"
                    left.append(LeftOut(of.candidates[rows], why, True))
                    continue
                why = unlike(plan.run, plan.parts, plan.layers)
                if why:
                    left.append(LeftOut(of.candidates[rows], why, True))
                    continue
                for several in (False, True):
                    some = rows[(batch[rows] > 1) == several]
                    if len(some):
                        self._lots(of, timing, plan, some, batch[some])
        return left

    def _lots(
        self, of: Structure, timing: _TemplateTiming, plan: _StagePlan, rows: Int, microbatches: Int
    ) -> None:
        """The lots of candidates of one pipeline on one machine."""
        run = plan.run
        found, size = timing.responses(plan, several=bool(microbatches[0] > 1))
        fills = SCHEDULES[str(run.schedule)].fills
        plans = [rounds(str(run.schedule), run.pp, int(m), fills) for m in np.unique(microbatches)]
        of_m = dict(zip(np.unique(microbatches).tolist(), plans, strict=True))
        keys = {(p.played, p.before) for p in plans}
        stride = np.prod(np.stack([*of.mesh.values()]), axis=0)
        for played, before in sorted(keys):
            mine = np.array(
                [
                    (of_m[m].played, of_m[m].before) == (played, before)
                    for m in microbatches.tolist()
                ]
            )
            group = run.microbatch_group
            pipeline = Pipeline(str(run.schedule), run.pp, run.vpp, group, played, before)
            tuples = of.index[rows[mine]]
            more = np.array([of_m[m].more for m in microbatches[mine].tolist()])
            messages = NeighbourMessages(size[tuples], stride[tuples], run.pp, timing.machine)
            lot = Lot(found, tuples, plan.layers, microbatches[mine], more, messages)
            self.lots.setdefault(pipeline, []).append(_PlacedLot(lot, of.candidates[rows[mine]]))
        self._remember(of, timing, plan, rows, microbatches)

    def _remember(
        self, of: Structure, timing: _TemplateTiming, plan: _StagePlan, rows: Int, microbatches: Int
    ) -> None:
        """The memory of candidates of one pipeline."""
        run = plan.run
        shape = str(run.schedule), run.pp, run.vpp
        peaks = timing.peaks(plan, several=bool(microbatches[0] > 1))
        by_stage: list[list[int]] = plan.layers.T.tolist()
        layers = tuple(tuple(of) for of in by_stage)
        distinct, of_row = np.unique(microbatches, return_inverse=True)
        group = run.microbatch_group
        counts = np.array([enough(*shape, m, group) for m in distinct.tolist()])[of_row]
        for count in np.unique(counts).tolist():
            mine = rows[counts == count]
            found = occupancy((*shape, count, group), layers)
            assert found is not None, f"a schedule that is played: {run.schedule}"
            for name, held in peaks.at(found, of.index[mine]).items():
                if name not in self.memory:
                    self.memory[name] = np.zeros(len(self.candidates), dtype=np.int64)
                self.memory[name][of.candidates[mine]] = held

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
        price = hardware.price_usd_per_gpu_hour
        self.usd[at] = np.nan if price is None else price * world / 3600

    def _needed(self, run: Run) -> float:
        """FLOPs that the model needs for a sequence."""
        key = run.seq_length, run.decoder_seq_length, run.document_length
        if key not in self.known:
            self.known[key] = sequence_flops(run, self.candidates.model).of_step(1).full
        return self.known[key]

    def _plan(self, own: Candidates, row: int) -> _StagePlan:
        """Which stage holds what of a candidate; its numbers matter only where they are 1."""
        values = {n: own.column(n).at(row) for n in own.columns if n in SETTINGS}
        kind = {n: v is None or v > 1 for n, v in values.items() if n in NUMBERS}
        rest = {n: v for n, v in values.items() if n not in (*NUMBERS, "global_batch_size")}
        key = *sorted(kind.items()), *sorted((n, repr(v)) for n, v in rest.items())
        if key not in self.plans:
            self.plans[key] = _plan(own.run(row), self.candidates.model)
        return self.plans[key]

    # ---- steps -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Play all lots."""
        for pipeline, lots in self.lots.items():
            for place, found in zip(lots, steps(pipeline, [p.lot for p in lots]), strict=True):
                self._record(place.at, found)

    def _record(self, at: Int, found: StepColumns) -> None:
        self.seconds[at], self.bubble[at] = found.seconds, found.bubble
        for axis, seconds in found.exposed.items():
            column = self.waits.setdefault(axis, np.zeros(len(self.candidates)))
            column[at] = seconds

    def figures(self) -> Figures:
        """Everything that has been found."""
        unknown = np.full(len(self.candidates), np.nan)
        return Figures(
            seconds=self.seconds,
            memory=self.memory,
            device_memory=self.device,
            exposed=self.waits,
            bubble=self.bubble,
            tokens=self.tokens,
            mfu=self.flops / (self.seconds * self.peak),
            joules=unknown,
            usd=self.usd * self.seconds,
            exact=np.zeros(len(self.candidates), dtype=bool),
        )


def _unknown(how: Execution) -> str:
    """Why a way to execute is not computed in columns; empty: it is."""
    if how.tp_comm_overlap:
        return "tp_comm_overlap"
    if how.moe_flex_dispatcher:
        return "moe_flex_dispatcher"
    if how.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm"
    if how.overlap_slowdown:
        return "overlap_slowdown"
    return ""


def _machines(own: Candidates) -> Int:
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


def _plan(run: Run, model: ModelConfig) -> _StagePlan:
    """Which stage holds what, of a run that is not resolved, with as few microbatches as it may."""
    run = run.model_copy(update={"global_batch_size": None}).resolved(model)
    order = make(str(run.schedule), run.pp, run.microbatches, run.vpp, group=run.microbatch_group)
    placed = tie_tables(place_blocks(run, model), order, model)
    stages = mark_trained(placed, run, model, recipe_of(run, model))
    parts = Parts.of(stages)
    return _StagePlan(
        run, parts, np.zeros((0, 0), dtype=np.int64) if parts is None else parts.counts(stages)
    )


class _TemplateTiming:
    """The responses of a structure's templates on one machine."""

    def __init__(
        self,
        of: Structure,
        machine: Machine,
        how: Execution,
        templates: dict[Kind, StructureTemplate],
        placed: Placed,
    ) -> None:
        self.of, self.machine, self.how, self.templates = of, machine, how, templates
        self.known: dict[tuple[object, ...], tuple[Responses, Float]] = {}
        self.held: dict[Kind, Peaks] = {}
        self.durations = Known.none()
        self.placed = placed

    def responses(self, plan: _StagePlan, *, several: bool) -> tuple[Responses, Float]:
        """Those of a pipeline's template, and the bytes of a message between its stages."""
        run, parts = plan.run, plan.parts
        assert parts is not None
        key = run.pp > 1, run.vpp > 1, several, parts
        if key not in self.known:
            made = self._template(Kind(run.pp > 1, several, parts))
            timed = [self._timed(made, each, run) for each in (made.base, *made.more)]
            self.known[key] = responses(made, timed, self.how), self._message(made.base)
        return self.known[key]

    def peaks(self, plan: _StagePlan, *, several: bool) -> Peaks:
        """The memory of a pipeline's template."""
        assert plan.parts is not None
        of = Kind(plan.run.pp > 1, several, plan.parts)
        if of not in self.held:
            allowance = allowance_of(plan.run)
            self.held[of] = Peaks.of(self._template(of), len(self.of), allowance)
        return self.held[of]

    def _template(self, of: Kind) -> StructureTemplate:
        if of not in self.templates:
            blocks = {v: block.block for v, block in self.of.variants.items()}
            self.templates[of] = template(self.of.step, of, blocks)
        return self.templates[of]

    def _timed(self, of: StructureTemplate, assembly: Assembly, run: Run) -> Timed:
        """The seconds of the rows of an assembly, by class."""
        hardware, count = self.machine.hardware, len(self.of)
        columns = Columns(assembly.kernels, count, hardware, self.durations)
        # All configurations here have as many ranks as the machine.
        stride = np.prod(np.stack([*self.of.mesh.values()]), axis=0)
        pp = np.maximum(self.machine.gpus // stride, 1)
        meshes = MeshColumns(assembly.program, self.of.mesh, pp, self.machine, self.placed)
        # A host waits for messages or not, as the schedule of the run has it.
        small = of.run.model_copy(update={"vpp": run.vpp})
        hosts = host_work(assembly.program, small, self.how, hardware)
        found: list[tuple[Float, tuple[Float, Bool] | None]] = []
        for nth, rank in enumerate(assembly.ranks):
            seconds = columns.of_rows(rank.of.tasks, rank.kernel, meshes)
            host = None
            if hosts is not None:
                launch = hosts[nth].seconds
                host = launch.reshape(len(launch), -1), hosts[nth].waits
            found.append((seconds, host))
        return found

    def _message(self, assembly: Assembly) -> Float:
        sizes = np.zeros(len(self.of))
        pipeline = [n for n, p in enumerate(assembly.program.peers) if p.axis == "pp"]
        for rank in assembly.ranks:
            tasks = rank.of.tasks
            sends = (tasks.kind == TaskKind.SEND) & np.isin(tasks.slot, pipeline)
            kernels: list[int] = np.unique(rank.kernel[sends]).tolist()
            for kernel in kernels:
                size = np.asarray(assembly.kernels[kernel].comm_bytes, dtype=np.float64)
                sizes = np.maximum(sizes, size)
        return sizes
