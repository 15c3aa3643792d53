"""Lower bounds of what candidates take in columns: seconds of a step, and bytes of a rank.

Each candidate is relaxed (`bounding.relaxed`) to one with less work and less memory. Many share one
relaxed candidate, and few structures are left of hundreds. The templates of `explore.evaluate` give
the time of a relaxed candidate's actions and the memory that a microbatch keeps: both are lower
bounds of the candidate's own. A rank runs all of its actions behind each other, after its first
microbatch has come through the stages before it, and a stage holds no less than its share of what
ZeRO splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, distinct_numbers
from stagewright.errors import UserError
from stagewright.explore.bounding.least_action import LeastAction
from stagewright.explore.bounding.recomputed import (
    Recomputed,
    is_not_plain,
    least_recomputed,
    plain,
)
from stagewright.explore.bounding.relaxed import relaxed, without_extras
from stagewright.explore.bounding.stages import (
    OVERLAPPING,
    TWICE,
    held_by,
    kind_of,
    least_occupancy,
    played,
)
from stagewright.explore.bounding.weights import StageWeights
from stagewright.explore.bounding.zero import Moved, ShardedStates
from stagewright.search.candidates import Candidates, Distinct
from stagewright.explore.responses import Responses
from stagewright.explore.shared.plans import PipelineShape, StagePlan, stage_plan
from stagewright.explore.shared.tuples import Shared
from stagewright.explore.structures import NUMBERS, PIPELINE, structures
from stagewright.explore.templates import Kind, unlike
from stagewright.explore.timing import (
    JoinedFigures,
    KnownOnMachine,
    MachineTiming,
    TemplateFigures,
    Templates,
)
from stagewright.program.columns import CATEGORIES
from stagewright.run.sections import SETTINGS
from stagewright.schedule.schedules import IN_TURN
from stagewright.time.experts.dispatch import Routed

_ELSEWHERE = ("sequence_parallel", "cp_comm_type", "dp_shard", "order", "zero")
"""Settings that do not decide which block is on which stage, once ZeRO is off."""
_SPLIT = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""Categories of memory by the first ZeRO stage that splits them."""
_NOT_PLAIN = ("activations", "communication", "workspace")
"""Categories of memory in which candidates that are not plain (`recomputed`) may hold less."""
_ADDED = 3 * 4 / 2
"""The most bytes that adding a gradient moves, for each byte of a weight of two bytes."""
_ADDED_WHOLE = (2 + 4) / 2 + 2 * (4 + 4) / 2 + _ADDED
"""As `_ADDED`, of PyTorch without FSDP: a cast of 2 bytes to 4, copies of 4 into the bucket that is
reduced and out of it (torch's reducer.cpp), and the sum."""
_ROUNDING = 1 - 1e-9
"""Sums of seconds in another order differ by less."""


class CandidateBounds(NamedTuple):
    """What candidates take at least, as `explore.evaluate` would have it: [candidates] each."""

    seconds: Float
    """Of a step; 0 where nothing is known."""
    bytes: Float
    """Of the fullest rank; 0 where nothing is known."""
    device_memory: Int
    """Bytes that a rank may use."""
    rough: Bool
    """Whether the bounds of the candidate alone may be higher."""


def bounds(candidates: Candidates, *, simulated: bool = False) -> CandidateBounds:
    """The bounds of all candidates of a training step; `simulated`: bytes are those that a
    simulated step holds at least, where estimates may say more."""
    return _bounds_of(candidates, rough=False, simulated=simulated)


def rough_bounds(candidates: Candidates) -> CandidateBounds:
    """As `bounds`, at less cost: candidates that compute activations again, or keep some on the
    host, share the bounds of those that do neither (`bounding.recomputed`); of their bytes only
    weights, gradients and optimizer states count."""
    return _bounds_of(candidates, rough=True)


def _bounds_of(candidates: Candidates, *, rough: bool, simulated: bool = False) -> CandidateBounds:
    zero = np.zeros(len(candidates))
    shared = is_not_plain(candidates) & rough
    found = CandidateBounds(zero, zero.copy(), candidates.device_memory, shared)
    if candidates.base.run.mode == "train" and len(candidates):
        alike = candidates.regardless_of_memory()
        _Relaxation(alike, rough=rough, simulated=simulated).bound(found)
    return found


class _Relaxation:
    """Candidates (rows), and those that they relax to."""

    def __init__(self, candidates: Candidates, *, rough: bool, simulated: bool) -> None:
        self.on_host = candidates.column("optimizer_cpu_offload").is_one_of(True)
        # Forwards hide communication of backwards, and the other way round.
        self.mixed = candidates.column("overlap_moe_expert_parallel_comm").is_one_of(True)
        self.rows = without_extras(candidates)
        self.rough = is_not_plain(candidates) & rough
        self.recomputed: Recomputed | None = None
        if self.rough.any():
            self.recomputed = least_recomputed(candidates)
            self.rows = plain(self.rows)
        # Of millions of rows: four bytes for each.
        self.machines = self.rows.machines.astype(np.int32)
        self.microbatches = self.rows.microbatches.astype(np.int32)
        self.shards = (self.rows.numbers("dp") * self.rows.numbers("cp")).astype(np.int32)
        self.zero = self.rows.numbers("zero").astype(np.int8)
        # FSDP reduces gradients before it adds them: a rank adds its part.
        self.of_parts = (self.zero >= 2) & ~candidates.column("framework").is_one_of("megatron")
        self.alone = (self.microbatches == 1) | self.of_parts
        # Memory is counted over time (`timed_memory`), and transfers may begin late.
        self.timed = candidates.column("grad_reduce").is_one_of("microbatch") | simulated
        self.timed |= (self.zero >= 2) | ~candidates.column("schedule").is_one_of(*IN_TURN, None)
        self.bandwidth = np.zeros(len(self.rows), dtype=np.float32)
        for group in range(int(self.machines.max()) + 1):
            mine = np.flatnonzero(self.machines == group)
            hardware = self.rows.hardware(int(mine[0]))
            reached = hardware.memory_bandwidth_fraction * hardware.memory_bandwidth_gb_s
            self.bandwidth[mine] = 1e9 * reached
        self.states = ShardedStates.of_candidates(candidates)
        self.relaxed = relaxed(self.rows)
        self.shared = Shared()
        self.plans: list[StagePlan | None] = []

    def bound(self, found: CandidateBounds) -> None:
        """Write the bounds of all candidates."""
        for joined in self._joined_figures().values():
            figures = joined.join()
            for shape, (every, of_rows) in joined.users():
                numbers = [self.microbatches, self.zero, self.states.of, self.on_host, self.mixed]
                if self.recomputed is not None:
                    numbers.append(self.recomputed.kind)
                distinct = _distinct((every, *(number[of_rows] for number in numbers)))
                tuples, rows = every[distinct.first], of_rows[distinct.first]
                layers = np.array(shape.layers, dtype=np.int64)
                weights = StageWeights.of(figures.peaks, layers, tuples)
                least = self._seconds(shape, layers, figures.responses, tuples, rows, weights)
                found.seconds[of_rows] = _ROUNDING * least[distinct.of]
                held = self._held(shape, every, of_rows)
                tuples, rows = every[held.first], of_rows[held.first]
                found.bytes[of_rows] = self._bytes(shape, figures, tuples, rows)[held.of]

    # ---- relaxed candidates and their templates --------------------------------------------------

    def _pipelines(self) -> Int:
        """Which plan each row has, after the plans of all pipelines have been made."""
        of = self.relaxed
        names = [
            n for n in of.columns
            if n in SETTINGS and n not in (*NUMBERS, *_ELSEWHERE, "global_batch_size")
        ]  # fmt: skip
        alike = of.distinct(*names)
        one = {} if of.model.num_experts else {"dp": 1}
        for row in alike.first.tolist():
            try:
                plan = stage_plan(
                    of.run(row).model_copy(update=one), of.model, self.shared.by_settings
                )
                usable = not unlike(plan.run, plan.order, plan.parts)
                self.plans.append(plan if usable else None)
            except UserError:
                self.plans.append(None)
        return alike.of

    def _joined_figures(self) -> dict[object, JoinedFigures]:
        """The figures of templates by form, with the rows that use them by pipeline."""
        plan_of = self._pipelines()
        users = self._rows_by_relaxed(plan_of)
        tables: dict[object, JoinedFigures] = {}
        known: dict[object, KnownOnMachine] = {}
        if not users:
            return tables
        first = np.array([int(rows[0]) for rows in users])
        for structure in structures(self.relaxed.take(first), self.shared).found:
            templates = Templates(structure)
            timings: dict[int, MachineTiming] = {}
            members: list[int] = structure.candidates.tolist()
            mine = [users[member] for member in members]
            tuples = np.repeat(structure.index, [len(of) for of in mine])
            every = np.concatenate(mine)
            kind = _distinct((self.machines[every], plan_of[every])).of
            for of_kind in _by(kind, np.arange(len(every))):
                some = every[of_kind]
                plan = self.plans[int(plan_of[some[0]])]
                if plan is None or plan.parts is None:
                    continue
                timing = self._timing(int(some[0]), templates, timings, known)
                template = Kind.plain(plan.run, plan.parts, plan.layers)
                try:
                    figures = timing.figures(template, plan.run)
                except UserError:  # columns leave these, too
                    continue
                table = tables.setdefault(figures.responses.form, JoinedFigures())
                table.add(figures, plan.shape(plan.run.microbatches), tuples[of_kind], some)
        return tables

    def _rows_by_relaxed(self, plan_of: Int) -> list[Int]:
        """Rows by the candidate and the machine that they relax to."""
        parts: dict[Any, int] = {}
        every = [None if plan is None else plan.parts for plan in self.plans]
        part = np.array([-1 if of is None else parts.setdefault(of, len(parts)) for of in every])
        names = (n for n in self.relaxed.columns if n not in (*PIPELINE, "global_batch_size"))
        kind = self.relaxed.distinct(*names).of
        rows = np.flatnonzero(part[plan_of] >= 0)
        split = self.rows.numbers("pp") > 1
        read = [of[rows] for of in (kind, self.machines, part[plan_of], split)]
        return _by(_distinct(read).of, rows) if len(rows) else []

    def _timing(
        self,
        row: int,
        templates: Templates,
        known: dict[int, MachineTiming],
        on: dict[object, KnownOnMachine],
    ) -> MachineTiming:
        """The times of templates on a row's machine."""
        group = int(self.machines[row])
        if group not in known:
            machine = self.rows.machine(row)
            key = KnownOnMachine.key(machine)
            near = on.setdefault(key, KnownOnMachine.of(self.shared.durations(key)))
            how = replace(self.rows.execution(row), collective_checks=False)
            run, model = templates.of.run, self.rows.model
            routed = Routed.of(run, model) if how.moe_flex_dispatcher else None
            known[group] = MachineTiming(templates, machine, how, near, routed, usual=True)
        return known[group]

    # ---- seconds ---------------------------------------------------------------------------------

    def _seconds(
        self,
        shape: PipelineShape,
        layers: Int,
        of: Responses,
        tuples: Int,
        rows: Int,
        weights: StageWeights,
    ) -> Float:
        """At least what a step takes: all actions of a rank, and what it waits for."""
        stages, pp = layers.shape[1], shape.pipeline.pp
        known: dict[tuple[object, ...], LeastAction] = {}

        def action(stage: int, letter: str) -> LeastAction:
            kind = kind_of(stage, stages)
            key = kind, letter, layers[:, stage].tobytes()
            if key not in known:
                moments, sums = (
                    of.at(((kind, letter),), False, tuples, layers[:, [stage]], part)
                    for part in (of.moments, of.sums)
                )
                known[key] = LeastAction.of(moments, sums.row(0))
            return known[key]

        microbatches = self.microbatches[rows]
        again = 0.0 if self.recomputed is None else self.recomputed.seconds[rows]
        held = held_by(shape.pipeline, stages)
        moved = self._moved(held, rows, weights.of_layers)
        beside = self._beside_others(shape, rows)
        best, filled, drained = (np.zeros(len(rows)) for _ in range(3))
        filling: list[Float] = []
        for rank in range(pp):
            filling.append(filled)
            own, share = held[rank], 1 if len(held[rank]) <= stages // pp else 2
            every = [action(s, letter) for s in own for letter in "FB"]
            work = sum(np.where(beside, of.busy, of.whole) for of in every)
            work = work + again * layers[:, own].sum()
            work = work - self.alone[rows] * self._adding(rows, weights.all[own].sum(axis=0))
            hosts = sum(action(s, letter).launched for s in own for letter in "FB")
            first, last = action(min(own), "F"), action(rank, "B")
            late = np.minimum(first.after - first.whole, 0.0) if min(own) else 0.0
            sent = np.minimum(last.sent - last.whole, 0.0) if rank else 0.0
            own_end = filling[min(own)] + late + microbatches * work / share
            best = np.maximum(best, own_end + moved.summed)
            best = np.maximum(best, (microbatches - 1) * hosts / share)
            if shape.pipeline.schedule in IN_TURN:
                best = np.maximum(best, own_end + sent + drained)
            adding = self.alone[rows] * self._adding(rows, weights.all[rank])
            filled = filled + action(rank, "F").passed
            drained = drained + np.where(beside, 0.0, np.maximum(last.passed - adding, 0.0))
        return np.maximum(best + moved.renewed, microbatches * moved.inside)

    def _beside_others(self, shape: PipelineShape, rows: Int) -> Bool:
        """Rows whose actions' communication may be hidden by kernels of other actions.

        The halves of a backward wait as long as the whole one, or longer: each has fewer kernels.
        """
        return self.mixed[rows] | (shape.pipeline.schedule in OVERLAPPING)

    def _moved(self, held: Sequence[Sequence[int]], rows: Int, weights: Float) -> Moved:
        """What ranks move along dp, at least; `weights` are bytes by stage, `held` its ranks.

        The rank with fewest weights moves least once in a step.
        """
        ranks = [weights[own].sum(axis=0) for own in held]
        return self.states.moved(self.states.of[rows], np.max(ranks, axis=0), np.min(ranks, axis=0))

    def _adding(self, rows: Int, weights: Float) -> Float:
        """Seconds that it takes at most to add the gradients of a microbatch to those before it.

        One microbatch has none before it, which its relaxed candidate has, and ranks that add parts
        of them add less, and need no buckets. Gradients and sums are of up to four bytes, and read
        and written once: three times what `weights` have.
        """
        moved = np.where(self.of_parts[rows], _ADDED_WHOLE, _ADDED)
        return moved * weights / self.bandwidth[rows]

    # ---- bytes -----------------------------------------------------------------------------------

    def _held(self, shape: PipelineShape, tuples: Int, rows: Int) -> Distinct:
        """Candidates of one pipeline, by what decides what they hold."""
        counts = played(shape.pipeline, self.microbatches[rows])
        numbers = (
            self.zero, self.shards, self.mixed, self.on_host, self.rough, self.of_parts, self.timed,
        )  # fmt: skip
        return _distinct((tuples, counts, *(of[rows] for of in numbers)))

    def _bytes(self, shape: PipelineShape, of: TemplateFigures, tuples: Int, rows: Int) -> Float:
        """At least what the fullest rank holds."""
        assert of.certain is not None, "templates of bounds say what is certain"
        scale = np.ones((len(CATEGORIES), len(rows)))
        for name, stage in _SPLIT.items():
            split = self.zero[rows] >= stage
            scale[CATEGORIES.index(name), split] /= self.shards[rows][split]
        scale[CATEGORIES.index("optimizer"), self.on_host[rows]] = 0.0
        scale[CATEGORIES.index("gathered_parameters"), self.zero[rows] > 0] = 0.0
        scale[CATEGORIES.index("gradients"), self.alone[rows]] = 0.0
        # Without ZeRO, a step of PyTorch's optimizer needs room for whole gradients.
        scale[CATEGORIES.index("workspace"), self.of_parts[rows]] = 0.0
        for name in _NOT_PLAIN:
            scale[CATEGORIES.index(name), self.rough[rows]] = 0.0
        if shape.pipeline.schedule == TWICE:
            return np.zeros(len(rows))
        counts = played(shape.pipeline, self.microbatches[rows])
        held = np.zeros(len(rows))
        for count in np.unique(counts).tolist():
            try:
                found = least_occupancy(shape.pipeline, count, shape.by_stage)
            except UserError:  # a run that is refused
                continue
            for peaks, timed in ((of.peaks, False), (of.certain, True)):
                mine = (counts == count) & (self.timed[rows] == timed)
                if mine.any():
                    held[mine] = peaks.least(found, tuples[mine], scale[:, mine])
        return np.where(self.mixed[rows], 0.0, held)  # what is in flight differs


def _distinct(columns: Sequence[NDArray[np.integer[Any] | np.bool_]]) -> Distinct:
    """The distinct tuples of columns of numbers."""
    return Distinct(*distinct_numbers(columns, len(columns[0])))


def _by(number: Int, rows: Int) -> list[Int]:
    """Rows with the same number, in their order."""
    order = np.argsort(number, kind="stable")
    edges = np.flatnonzero(np.diff(number[order])) + 1
    return np.split(rows[order], edges)
