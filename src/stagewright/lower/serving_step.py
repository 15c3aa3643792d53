"""Steps of serving: an inference step of any batch, its memory, and the requests that fit.

As in `lower.training`, a block variant is one graph. The ranks of data parallelism serve different
requests: sizes differ between ranks and between microbatches, tasks and their order do not. So the
step is lowered once per distinct batch, and the columns of each rank are merged from these
programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import LoweredBlock, StageBlock
from stagewright.lower.blocks import lower_block, shard_block
from stagewright.lower.compiled_run import Capacity, CompiledRun
from stagewright.lower.kernels.extent import Extent, bytes_of, extent_of
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.lower.kernels.live_values import carried, outputs
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.routing import BusiestRanks, mean_expert_sizes
from stagewright.lower.strategy_table import check_table, table_of
from stagewright.lower.variants import BlockVariant, PlacedVariant, labels, place_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program, RankClass, RankWork, Shape, Tasks
from stagewright.program.communicators import place_along
from stagewright.run import lengths
from stagewright.run.requests import Loads, allowance_of, loads, read_bytes
from stagewright.run.settings import Run
from stagewright.schedule.generators import forward_only

Sizes = Mapping[str, int]
"""Sizes that depend on the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingStep:
    """Blocks and layouts of a resolved inference run, for any batch."""

    run: Run
    model: ModelConfig
    mesh: Mesh
    plan: Plan
    sizes: Sizes
    """Sizes that do not depend on the batch."""
    stages: Sequence[Sequence[PlacedVariant]]
    graphs: Mapping[BlockVariant, Graph]
    busiest: BusiestRanks | None = None
    """None: all experts get equal numbers of tokens."""

    @classmethod
    def of(
        cls, run: Run, model: ModelConfig, table: Mapping[str, str], batches: Sequence[Sizes]
    ) -> Self:
        """Step of a run that has been checked; `table` as in `lower.compile`.

        Raises UserError where the table does not suit the sizes of `batches`.
        """
        mesh, plan = parallelization(run, model)
        # The axes over which experts exchange tokens are innermost. Ranks with the same tokens then
        # share experts outside of the exchange: each gets back its part of the sum, and nothing is
        # gathered.
        expert = tuple(sorted(plan.expert, key=plan.tokens.__contains__))
        plan = replace(plan, expert=expert, table=table_of(run, model, table))
        sizes = sizes_of(run, model)
        for batch in batches:
            check_table(plan, mesh, run, model, {**sizes, **batch})
        stages = place_blocks(run, model)
        recipe = recipe_of(run, model)
        variants = dict.fromkeys(variant for stage in stages for variant, _ in stage)
        graphs = {v: shard_block(v, run, model, mesh, plan, sizes, recipe) for v in variants}
        busiest = BusiestRanks.of(run, model, mesh, plan)
        return cls(run, model, mesh, plan, sizes, stages, graphs, busiest)

    def extent(self, batch: Sizes) -> Extent:
        """Sizes of dims on a rank with a batch."""
        routed = batch.get("routed", 0)
        run, model, mesh, plan = self.run, self.model, self.mesh, self.plan
        means = mean_expert_sizes(run, model, mesh, plan, routed, self.busiest)
        return extent_of({**self.sizes, **batch}, mesh, means)

    def lower_blocks(self, batch: Sizes) -> dict[BlockVariant, LoweredBlock]:
        """Lower each block with a batch."""
        extent = self.extent(batch)
        return {v: lower_block(graph, self.run, extent, v) for v, graph in self.graphs.items()}


def compile_serving(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a step of a resolved, checked run; `table` as in `lower.compile`."""
    load = loads(run, model)
    step = ServingStep.of(run, model, table, load.sizes)
    mesh, plan, graphs, stages = step.mesh, step.plan, step.graphs, step.stages
    order = forward_only(run.pp, run.microbatches)

    programs: list[Program] = []  # by batch: the program of all ranks, if all serve this one
    kernels: dict[BlockVariant, Sequence[LoweredTask]] = {}
    for batch in load.sizes:
        blocks = step.lower_blocks(batch)
        placed = [[StageBlock(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in stages]
        programs.append(assemble(placed, order, mesh, streams=run.streams))
        kernels = {v: block.tasks for v, block in blocks.items()}
    memory = ServingMemory(stages, graphs, kernels, step.extent)

    def peak(other: Run) -> int:
        """Peak bytes of the fullest rank in another step on the same ranks."""
        other_load = loads(other, model)
        return max(
            memory.by_category(rank, [other_load.sizes[int(i)] for i in batches])["peak"]
            for batches in np.unique(other_load.of, axis=0)
            for rank in range(run.pp)
        )

    row_of_rank = place_along(mesh, (*plan.data, *plan.stripes))
    merged = merge_programs(programs, row_of_rank, load, memory)
    texts = {label: graphs[v] for v, label in labels([*graphs]).items()}
    fitting = capacity(run, peak) if run.device_memory else None
    return CompiledRun(run, model, *parameters(model), texts, order, merged, fitting)


# ---- programs of ranks with different requests ---------------------------------------------------


def merge_programs(
    programs: Sequence[Program], row_of_rank: Int, load: Loads, memory: ServingMemory
) -> Program:
    """Merge programs that have equal tasks of different sizes.

    Rank r has in microbatch m the sizes of `programs[load.of[row_of_rank[r], m]]`, each of which is
    the program of all ranks if all have these sizes.
    """
    first = programs[0]
    index: dict[Shape, int] = {}
    shape_index = [  # by program: index of its shapes in the merged table; last, an entry for -1
        np.array([*(index.setdefault(s, len(index)) for s in p.classes[0].tasks.shapes), -1], "i4")
        for p in programs
    ]
    distinct, of = np.unique(load.of, axis=0, return_inverse=True)
    classes: list[RankClass] = []
    for i, c in enumerate(first.classes):
        variants = [p.classes[i].tasks for p in programs]
        batches_of_rank = of.ravel()[row_of_rank[c.ranks]]
        # Layers of a stage may not depend on sizes that differ: equal columns are one class.
        merged: dict[object, RankClass] = {}
        for row in np.unique(batches_of_rank):
            batches: list[int] = distinct[row].tolist()
            columns = _merge_columns(variants, shape_index, batches)
            by_category = memory.by_category(c.pipeline_rank, [load.sizes[b] for b in batches])
            ranks = c.ranks[batches_of_rank == row]
            key = *(column.tobytes() for column in columns.values()), *by_category.items()
            if key in merged:
                ranks = np.sort(np.concatenate((merged[key].ranks, ranks)))
            tasks = replace(variants[0], shapes=tuple(index), **columns)
            work = RankWork.from_tables(tasks, by_category)
            merged[key] = RankClass(ranks, c.pipeline_rank, work)
        classes += merged.values()
    return replace(first, classes=tuple(classes))


def _merge_columns(
    variants: Sequence[Tasks], shape_index: Sequence[Int], batches: Sequence[int]
) -> dict[str, Int]:
    """Columns that depend on sizes: rows of microbatch m from the variant `batches[m]`."""

    def sizes(batch: int) -> dict[str, Int]:
        tasks = variants[batch]
        columns = {name: getattr(tasks, name) for name in ("flops", "traffic", "comm_bytes")}
        return columns | {"shape": shape_index[batch][tasks.shape]}

    columns = sizes(batches[0])
    for m, batch in enumerate(batches):
        rows = variants[batches[0]].microbatch == m
        columns = {name: np.where(rows, new, columns[name]) for name, new in sizes(batch).items()}
    return columns


# ---- memory --------------------------------------------------------------------------------------


class ServedFootprint(NamedTuple):
    """Bytes of one block on one rank, in inference."""

    parameters: int
    tables: Mapping[str, int]  # parameters that blocks of a rank share
    kv_cache: int  # of the requests of one microbatch
    peak: int  # peak of other live values


class ServingMemory:
    """Memory of each pipeline rank, for any batches; footprints of blocks are cached.

    Allocation is ideal: a value is live from the kernel that makes it to the last that reads it.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[PlacedVariant]],
        graphs: Mapping[BlockVariant, Graph],
        tasks: Mapping[BlockVariant, Sequence[LoweredTask]],
        extent: Callable[[Sizes], Extent],
    ) -> None:
        """`tasks`: by block, for any sizes, on which their reads and writes do not depend."""
        self.stages, self.graphs, self.tasks, self.extent = stages, graphs, tasks, extent
        self._footprints: dict[tuple[int, ...], dict[BlockVariant, ServedFootprint]] = {}
        self._live_values = {
            variant: (carried(graph), frozenset(value.name for value in outputs(graph)))
            for variant, graph in self.graphs.items()
        }
        """By block, its inputs other than the stream, and the names of its outputs."""

    def by_category(self, rank: int, batches: Iterable[Sizes]) -> dict[str, int]:
        """Bytes of a pipeline rank by category, and their peak; `batches` by microbatch.

        The requests of all microbatches have their keys and values in the cache at once.
        """
        microbatches = [self._on_rank(rank, sizes) for sizes in batches]
        tables = {name: size for block in microbatches[0] for name, size in block.tables.items()}
        parameters = sum(block.parameters for block in microbatches[0])
        bytes_by_category = {
            "parameters": parameters + sum(tables.values()),
            "kv_cache": sum(block.kv_cache for blocks in microbatches for block in blocks),
            "activations": max(block.peak for blocks in microbatches for block in blocks),
        }
        return bytes_by_category | {"peak": sum(bytes_by_category.values())}

    def _on_rank(self, rank: int, sizes: Sizes) -> list[ServedFootprint]:
        """Footprints of a pipeline rank's blocks, including values that are live across them.

        A value other than the stream is live across a block if an earlier block made it and this
        one or a later one reads it.
        """
        extent, key = self.extent(sizes), tuple(sizes.values())
        if key not in self._footprints:
            self._footprints[key] = {
                variant: served_footprint(graph, self.tasks[variant], extent)
                for variant, graph in self.graphs.items()
            }
        blocks: list[ServedFootprint] = []
        live: dict[str, int] = {}
        for r in range(len(self.stages) - 1, rank - 1, -1):
            for variant, _ in reversed(self.stages[r]):
                inputs, made = self._live_values[variant]
                live |= {name: bytes_of(n, extent) for name, n in inputs.items()}
                live = {name: size for name, size in live.items() if name not in made}
                if r == rank:
                    block = self._footprints[key][variant]
                    blocks.append(block._replace(peak=block.peak + sum(live.values())))
        return blocks[::-1]


def served_footprint(graph: Graph, tasks: Sequence[LoweredTask], extent: Extent) -> ServedFootprint:
    """Footprint of a block in inference."""
    params = {n for n in graph if n.op == "param"}
    caches = {n for n in graph if n.op == "state"}
    # Caches are written in place; values that blocks exchange outlive a block.
    written = {n for n in graph if n.op == "cache" or n.role is Role.CACHE}
    static = {*params, *caches, *written, *carried(graph).values()}
    return ServedFootprint(
        sum(bytes_of(n, extent) for n in params if not n.binding.tied),
        {n.binding.tied: bytes_of(n, extent) for n in params if n.binding.tied},
        sum(bytes_of(n, extent) for n in caches),
        _peak([t for t in tasks if t.section is BlockSection.FORWARD], static, extent),
    )


def _peak(tasks: Sequence[LoweredTask], static: set[Node], extent: Extent) -> int:
    """Peak bytes while the tasks run, without the `static` values."""
    values = [[n for n in dict.fromkeys((*t.reads, *t.made)) if n not in static] for t in tasks]
    last_use = {n: i for i, used in enumerate(values) for n in used}
    live: dict[Node, int] = {}
    peak = 0
    for i, used in enumerate(values):
        live |= {n: bytes_of(n, extent) for n in used if n not in live}
        peak = max(peak, sum(live.values()))
        live = {n: size for n, size in live.items() if last_use[n] > i}
    return peak


# ---- capacity ------------------------------------------------------------------------------------


def capacity(run: Run, peak: Callable[[Run], int]) -> Capacity:
    """Number and length of requests that fit, of a resolved inference run.

    `peak`: max bytes of tensors on a rank, of this run with other requests. A step fits if the peak
    and the run's `memory_allowance` are at most the memory of a device, as in `program.fit.fit_of`,
    which needs programs; the steps tried here have only peaks.
    """
    assert run.device_memory is not None
    memory = read_bytes(run.device_memory)
    room = memory - allowance_of(run)

    def fits(**settings: int) -> bool:
        try:
            return peak(run.model_copy(update=settings)) <= room
        except UserError:  # exceeds a bound of the run's settings
            return False

    requests = run.dp * _largest(lambda n: fits(batch_size=n * run.dp))
    return Capacity(memory, peak(run) <= room, requests, _longest(run, fits))


def _longest(run: Run, fits: Callable[..., bool]) -> int | None:
    if run.requests is not None:
        return None
    varied, fixed = "context_length", 1 + run.num_speculative_tokens
    if run.mode == "prefill":
        varied, fixed = "prompt_length", run.context_length or 0
    # A contiguous cache reserves the longest request.
    room = ("max_model_len",) if run.kv_cache == "contiguous" else ()
    length = _largest(lambda n: fits(**{varied: n - fixed}, **dict.fromkeys(room, n)), fixed + 1)
    return None if length > lengths.LARGEST // 2 else length


def _largest(fits: Callable[[int], bool], lowest: int = 1) -> int:
    """Largest number that fits, by bisection; 0 if `lowest` does not.

    >>> _largest(lambda n: n * n < 1000)
    31
    """
    if not fits(lowest):
        return 0
    low, high = lowest, lowest + 1
    while high <= lengths.LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
