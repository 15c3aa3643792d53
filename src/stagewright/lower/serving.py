"""A step of inference, compiled: forward only, and ranks of data parallelism differ in sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.graph.node import Graph, Node
from stagewright.lower.assemble import lower
from stagewright.lower.capacity import capacity
from stagewright.lower.kernels import Extent, Kernel, bytes_of, carried, extent_of, handed_on
from stagewright.lower.per_rank import place_along, shared
from stagewright.lower.serving_memory import ServedFootprint, served_footprint, served_memory
from stagewright.lower.stages import Placed
from stagewright.lower.training import (
    Compiled,
    Kind,
    check_rows,
    lowered,
    parameters,
    place_blocks,
    recipe_of,
    sharded,
    sizes_of,
    table_of,
)
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.experts import mean_expert_sizes
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.run.requests import loads
from stagewright.run.settings import Run
from stagewright.schedule.schedules import Order, forward_only

Sizes = Mapping[str, int]


def compiled(run: Run, model: ModelConfig, table: Mapping[str, str]) -> Compiled:
    """A step of a resolved run that has been checked; `table` as in `compiler.compile`."""
    mesh, plan = parallelization(run, model)
    # Ranks with the same tokens share experts outside of those that exchange tokens: what comes
    # back to a rank is then the sum that it has a part of, and nothing is gathered.
    same = [a for a in plan.expert if a not in plan.tokens]
    expert = (*same, *(a for a in plan.expert if a not in same))
    plan = replace(plan, expert=expert, table=table_of(run, model, table))
    load = loads(run, model)
    for some in load.sizes:
        check_rows(plan, run, model, {**sizes_of(run, model), **some})
    order = forward_only(run.pp, run.microbatches)
    places = place_blocks(run, model)
    recipe = recipe_of(run, model)
    graphs = {
        kind: sharded(kind, run, model, plan, sizes_of(run, model), recipe)
        for kind in dict.fromkeys(kind for stage in places for kind, _ in stage)
    }
    step = _Step(run, model, plan, order, places, graphs)
    program = shared(
        [step.program(some) for some in load.sizes],
        place_along(mesh, (*plan.data, *plan.stripes)),
        load.of,
        lambda rank, which: step.held(rank, [load.sizes[v] for v in which]),
    )
    texts = {kind.label(graphs): graph for kind, graph in graphs.items()}
    fitting = capacity(run, step.peak) if run.device_memory else None
    return Compiled(run, model, *parameters(model), texts, order, program, fitting)


@dataclass(slots=True, eq=False)
class _Step:
    """A model on its ranks, to be given the sizes of a batch."""

    run: Run
    model: ModelConfig
    plan: Plan
    order: Order
    places: Sequence[Sequence[tuple[Kind, int]]]
    graphs: Mapping[Kind, Graph]
    tasks: dict[Kind, Sequence[Kernel]] = field(default_factory=dict[Kind, Sequence[Kernel]])
    footprints: dict[tuple[int, ...], dict[Kind, ServedFootprint]] = field(
        default_factory=dict[tuple[int, ...], dict[Kind, ServedFootprint]]
    )
    handed: dict[Kind, tuple[dict[str, Node], frozenset[str]]] = field(init=False)
    """Of each kind of block, what it is handed besides the stream, and what it hands on."""

    def __post_init__(self) -> None:
        """Note what the blocks exchange."""
        self.handed = {
            kind: (carried(graph), frozenset(c.name for c in handed_on(graph)))
            for kind, graph in self.graphs.items()
        }

    def extent(self, sizes: Sizes) -> Extent:
        means = mean_expert_sizes(self.run, self.model, self.plan, sizes.get("routed", 0))
        return extent_of({**sizes_of(self.run, self.model), **sizes}, self.plan.mesh, means)

    def program(self, sizes: Sizes) -> Program:
        """What every rank does if all have batches of these sizes."""
        extent = self.extent(sizes)
        blocks = {k: lowered(g, self.run, self.plan.mesh, extent) for k, g in self.graphs.items()}
        self.tasks = {kind: block.tasks for kind, block in blocks.items()}
        stages = [
            [
                Placed(blocks[kind], layer, f"layer{layer}" if layer >= 0 else kind.block)
                for kind, layer in stage
            ]
            for stage in self.places
        ]
        return lower(stages, self.order, self.plan.mesh, clip_grad=False, streams=self.run.streams)

    def footprint(self, sizes: Sizes) -> dict[Kind, ServedFootprint]:
        """Bytes of each kind of block; which task needs what does not depend on sizes."""
        key = tuple(sizes.values())
        if key not in self.footprints:
            extent = self.extent(sizes)
            self.footprints[key] = {
                kind: served_footprint(graph, self.tasks[kind], extent)
                for kind, graph in self.graphs.items()
            }
        return self.footprints[key]

    def held(self, rank: int, microbatches: Iterable[Sizes]) -> dict[str, int]:
        """Bytes of a pipeline rank by category."""
        found: list[list[ServedFootprint]] = []
        for sizes in microbatches:
            of, passing = self.footprint(sizes), self.passing(rank, sizes)
            found.append(
                [
                    of[kind]._replace(peak=of[kind].peak + more)
                    for (kind, _), more in zip(self.places[rank], passing, strict=True)
                ]
            )
        return served_memory(found)

    def passing(self, rank: int, sizes: Sizes) -> list[int]:
        """Bytes beside each block of what it, or one behind it, is handed besides the stream."""
        extent = self.extent(sizes)
        found: list[int] = []
        later: dict[str, int] = {}
        for r in range(self.run.pp - 1, rank - 1, -1):
            for kind, _ in reversed(self.places[r]):
                reads, made = self.handed[kind]
                later |= {name: bytes_of(n, extent) for name, n in reads.items()}
                later = {name: size for name, size in later.items() if name not in made}
                if r == rank:
                    found.append(sum(later.values()))
        return found[::-1]

    def peak(self, other: Run) -> int:
        """The most that any rank holds in another step on the same ranks."""
        load = loads(other, self.model)
        return max(
            self.held(rank, [load.sizes[int(v)] for v in way])["peak"]
            for way in np.unique(load.of, axis=0)
            for rank in range(self.run.pp)
        )
