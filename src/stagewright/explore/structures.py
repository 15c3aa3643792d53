"""Configurations that share a structure: the same graphs and kernels, with other numbers.

The blocks of a structure are built, sharded and lowered once, by the functions that compile a
single run, with a `Varying` in the place of every number that differs: degrees of parallelism,
micro-batch size, sequence length. What makes two configurations differ in structure is nowhere
written down: it is whatever these functions ask of the numbers on their way (`varying.Cases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stagewright.arrays import Int, distinct_numbers
from stagewright.errors import UserError
from stagewright.search.candidates import ABSENT, Candidates
from stagewright.explore.shared.plans import pipeline_blocks
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.shared.tuples import Shared, Tuples
from stagewright.graph.node import Graph
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.blocks import BLOCK_PASSES, NumberedBlock, place_values
from stagewright.lower.training import STAGES, TrainingStep
from stagewright.lower.variants import BlockVariant, graph_of
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import axes_of
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time.columns.meshes import AxisOrders

_Made = TypeVar("_Made")

NUMBERS = (
    "tp", "cp", "dp", "ep", "etp", "dp_shard",
    "micro_batch_size", "seq_length", "decoder_seq_length",
)  # fmt: skip
"""Settings that a block has as numbers."""

ORDER = "order"
"""The order of axes, which decides where the ranks of a group lie. With experts it decides the axes
themselves: they are made of those of other degrees."""

PIPELINE = ("pp", *STAGES)
"""Settings that decide which blocks are on which stage, and no block's numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Configurations whose blocks have the same graphs and kernels.

    A *tuple* is one combination of the numbers that blocks depend on. Many configurations have the
    same one: pipeline stages and the number of microbatches do not enter a block.
    """

    step: TrainingStep
    """The step of all tuples at once, in the first candidate's pipeline, with few microbatches."""
    candidates: Int
    """The configurations, by their numbers among all candidates: [candidates]."""
    index: Int
    """Which tuple each of them has: [candidates]."""
    variants: Mapping[BlockVariant, LoweredBlock]
    """The distinct blocks of all pipelines of the candidates: each of their numbers is an int, or a
    `Varying` with an entry per tuple."""
    orders: AxisOrders
    """In which order the tuples have the axes of the mesh: it says where groups of ranks lie."""

    def __len__(self) -> int:
        """The number of tuples."""
        return len(self.orders.of)

    @property
    def run(self) -> Run:
        """What all candidates have in common, with the numbers of all tuples."""
        return self.step.run

    @property
    def mesh(self) -> Mapping[str, Int]:
        """The size of each mesh axis but for the pipeline's: [tuples] each."""
        axes = [(name, size) for name, size in self.step.mesh.axes if name != "pp"]
        return {name: np.broadcast_to(np.asarray(size), len(self)) for name, size in axes}

    @property
    def stride(self) -> Int:
        """Distance between the ranks of two neighbouring stages of a pipeline: [tuples]."""
        found, sizes = np.ones(len(self), dtype=np.int64), self.mesh
        for nth, names in enumerate(self.orders.names):
            mine = self.orders.of == nth
            for name in names[: names.index("pp")]:
                found[mine] *= sizes[name][mine]
        return found

    @property
    def ranks_of_stage(self) -> Int:
        """Ranks that hold a stage of a pipeline, along all other axes of the mesh: [tuples]."""
        return np.prod(np.stack([*self.mesh.values()]), axis=0)


class Refused(NamedTuple):
    """Candidates that have no structure here."""

    candidates: Int
    reason: str
    possible: bool
    """Whether the run can be had, but not in columns: it has to be compiled alone."""


class Structures(NamedTuple):
    """All candidates, by structure."""

    found: Sequence[Structure]
    refused: Sequence[Refused]


def unsupported(run: Run, model: ModelConfig) -> str:
    """Why runs like this one are not computed in columns; empty: they are."""
    if run.mode != "train":
        return "inference"
    if run.expert_load:
        return "expert_load"
    if run.strategy:
        return "strategy"
    if model.state_space is not None:
        return "state-space layers"
    return ""


def structures(candidates: Candidates, shared: Shared | None = None) -> Structures:
    """Candidates grouped by structure, each structure with its blocks in columns.

    `shared`: what was made of other runs of the same model.
    """
    shared = shared or Shared()
    found: list[Structure] = []
    refused: list[Refused] = []
    for members in _alike_but_for_numbers(candidates):
        why = unsupported(candidates.run(int(members[0])), candidates.model)
        if why:
            refused.append(Refused(members, why, possible=True))
            continue
        there, variants = _variants(candidates, members, refused, shared.by_settings)
        if len(there):
            _SameButNumbers(candidates, there, variants, shared).add_to(found, refused)
    return Structures(found, refused)


def _variants(
    candidates: Candidates, members: Int, refused: list[Refused], shared: BySettingsRead
) -> tuple[Int, list[BlockVariant]]:
    """The distinct blocks of all pipelines of some candidates, without those that cannot be."""
    own = candidates.take(members)
    pipelines = own.distinct(*(name for name in PIPELINE if name in own.columns))
    variants: dict[BlockVariant, None] = {}
    there = np.ones(len(members), dtype=bool)
    several = _has_several(own)
    for nth, first in enumerate(pipelines.first):
        try:
            run = _with_few_microbatches(own.run(int(first)), own.model, several=several)
            _, blocks = pipeline_blocks(run, own.model, shared)
        except UserError as error:
            there &= pipelines.of != nth
            refused.append(Refused(members[pipelines.of == nth], str(error), possible=False))
            continue
        variants |= dict.fromkeys(blocks.variants)
    return members[there], [*variants]


def _has_several(alike: Candidates) -> bool:
    """Whether candidates that differ only in numbers have several microbatches."""
    return bool(alike.take(slice(1)).microbatches[0] > 1)


def _with_few_microbatches(run: Run, model: ModelConfig, *, several: bool) -> Run:
    """A resolved run with as few microbatches as its schedule takes; two where it has several."""
    late: Any = run.model_copy(update={"global_batch_size": None}).resolved(model)
    count = max(int(late.microbatches), 1 + several)
    return late.model_copy(update={"global_batch_size": late.micro_batch_size * late.dp * count})


def _alike_but_for_numbers(candidates: Candidates) -> Iterator[Int]:
    """Candidates that differ only in numbers, and in pipelines of one kind."""
    names = [n for n in candidates.columns if n in SETTINGS]
    kinds = [n for n in names if n not in apart_from_graphs(candidates.model)]
    marks = [candidates.numbers(n) == ABSENT for n in names if n in NUMBERS]
    marks += [candidates.numbers("global_batch_size") == ABSENT, candidates.microbatches > 1]
    if "schedule" in names:
        column = candidates.column("schedule")
        twice = np.array([_holds_twice(value) for value in column.values])
        marks.append(twice[column.codes])
    _, key = distinct_numbers([candidates.distinct(*kinds).of, *marks], len(candidates))
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    yield from np.split(order, edges)


def apart_from_graphs(model: ModelConfig) -> tuple[str, ...]:
    """Settings that the graph of a block follows from only where its code asks a number a question
    (`varying.Cases`)."""
    placed = () if model.num_experts else (ORDER,)
    return (*NUMBERS, *PIPELINE, *placed, "global_batch_size")


def _holds_twice(schedule: str | None) -> bool:
    """Whether a schedule holds every stage twice, as DualPipe does."""
    return schedule in SCHEDULES and SCHEDULES[schedule].pairs_ranks


class _SameButNumbers:
    """Candidates that differ in numbers and in their pipelines only."""

    def __init__(
        self, candidates: Candidates, members: Int, variants: Sequence[BlockVariant], shared: Shared
    ) -> None:
        self.candidates, self.members, self.variants = candidates, members, variants
        self.shared = shared
        self.own = candidates.take(members)
        names = [n for n in NUMBERS if n in candidates.columns] or ["tp"]
        tuples = self.own.distinct(*names, ORDER)
        self.index = tuples.of
        self.numbers = {n: self.own.numbers(n)[tuples.first] for n in names}
        self.count = len(tuples)
        order = self.own.column(ORDER)
        self.orders, self.order = order.values, order.codes[tuples.first].astype(np.int64)
        self.several = _has_several(self.own)

    def add_to(self, found: list[Structure], refused: list[Refused]) -> None:
        """Find the structures of the group."""
        for rows, _ in self._split(np.arange(self.count), self._of_all, refused):
            for sharded, graphs in self._split(rows, self._graphs, refused):
                lower = partial(self._structure, graphs=graphs)
                for alike, structure in self._split(sharded, lower, refused):
                    if len(alike) < len(structure):  # without the numbers of those that went off
                        structure = self._structure(self._tuples(alike), alike, graphs)
                    found.append(structure)

    def _tuples(self, rows: Int) -> Tuples:
        """The numbers of some tuples, but for those that follow from others."""
        given = {n: v[rows] for n, v in self.numbers.items() if v[0] != ABSENT}
        return self.shared.tuples(given, len(rows))

    def _of_all(self, tuples: Tuples, rows: Int) -> TrainingStep:
        """The step of some tuples, in the first pipeline."""
        return TrainingStep.of(self._resolved(tuples), self.candidates.model, {})

    def _resolved(self, tuples: Tuples) -> Run:
        """A run with the numbers of tuples: its own batch has other microbatches with these.

        Numbers that are equal are one object, as `BySettingsRead` knows them.
        """
        run = self.own.run(0).model_copy(update={**tuples.numbers})
        run = _with_few_microbatches(run, self.candidates.model, several=self.several)
        numbers = {n: tuples.one(getattr(run, n)) for n in (*NUMBERS, "global_batch_size")}
        return run.model_copy(update=numbers)

    def _graphs(self, tuples: Tuples, rows: Int) -> dict[BlockVariant, Graph]:
        """The graph of each block."""
        step = self._of_all(tuples, rows)  # asks whether there is such a step
        return {variant: self._graph(graph_of(variant), step, tuples) for variant in self.variants}

    def _graph(self, variant: BlockVariant, step: TrainingStep, tuples: Tuples) -> Graph:
        """The graph of a block: each pass is made once for all steps that agree in what it reads,
        of graphs that are equal when it begins."""
        block = step.build(variant)
        for name in BLOCK_PASSES:
            after = partial(TrainingStep.after_pass, name=name, variant=variant, block=block)
            what = name, variant, block.graph.content, (*block.primal.items(),)
            block = self.shared.graph(what, step.run, tuples, _of_blocks(step, after))
        return block.graph

    def _lowered(
        self, variant: BlockVariant, graph: Graph, step: TrainingStep, tuples: Tuples
    ) -> LoweredBlock:
        """A block with the numbers of tuples: many variants differ only in where values are."""

        def numbered(step: TrainingStep) -> NumberedBlock:
            extent = step.extent(step.routing.even() if step.routing else None)
            return step.number_block(graph, extent)

        what = "numbered", graph.content
        block = self.shared.block(what, step.run, tuples, _of_blocks(step, numbered))
        placed = partial(place_values, block, variant)
        return self.shared.block(("placed", variant, block), step.run, tuples, placed)

    def _structure(
        self, tuples: Tuples, rows: Int, graphs: Mapping[BlockVariant, Graph]
    ) -> Structure:
        """The blocks of some tuples in columns."""
        step = self._of_all(tuples, rows)
        lowered = {v: self._lowered(v, graph, step, tuples) for v, graph in graphs.items()}
        number = np.full(self.count, -1)
        number[rows] = np.arange(len(rows))
        index = number[self.index]
        mine = np.flatnonzero(index >= 0)
        orders = self._axis_orders(step, rows)
        return Structure(step, self.members[mine], index[mine], lowered, orders)

    def _axis_orders(self, step: TrainingStep, rows: Int) -> AxisOrders:
        """In which order some tuples have the axes of the step's mesh."""
        codes, of = np.unique(self.order[rows], return_inverse=True)
        names: list[tuple[str, ...]] = []
        for code in codes.tolist():
            run = step.run.model_copy(update={ORDER: self.orders[code]})
            names.append(tuple(axis.name for axis in axes_of(run, step.model)))
        return AxisOrders(tuple(names), of.ravel().astype(np.int64))

    def _split(
        self, rows: Int, make: Callable[[Tuples, Int], _Made], refused: list[Refused]
    ) -> Iterator[tuple[Int, _Made]]:
        """What is made of tuples that go the same way, for each such set of tuples."""
        while len(rows):
            tuples = self._tuples(rows)
            cases = tuples.cases
            try:
                made = make(tuples, rows)
                alike, rows = rows[cases.alike], rows[~cases.alike]
                yield alike, made
            except UserError as error:
                self._refuse(rows[cases.alike], str(error), refused, possible=False)
                rows = rows[~cases.alike]
            except TypeError as error:  # a computation that takes no `Varying`
                self._refuse(rows[cases.alike], str(error), refused, possible=True)
                rows = rows[~cases.alike]

    def _refuse(self, rows: Int, why: str, refused: list[Refused], *, possible: bool) -> None:
        of = self.members[np.isin(self.index, rows)]
        refused.append(Refused(of, why, possible))


def _of_blocks(step: TrainingStep, make: Callable[[TrainingStep], _Made]) -> Callable[[Run], _Made]:
    """What is made of a step, of a run of the same model: once for all groups of candidates."""

    def of_run(run: Run) -> _Made:
        return make(TrainingStep.of_blocks(run, step.model, {}))

    return of_run
