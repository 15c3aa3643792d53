"""What batches of an inference step have in sums, and what the step's kernels take with each.

A batch enters a step by a few sums over its requests (`run.lengths`). Here these are columns, an
entry for each of many batches; the blocks of the step are lowered once with such numbers, and their
kernels timed by the functions that time a single step (`time.columns`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int, digest
from stagewright.errors import UserError
from stagewright.lower.assembly.assemble import Assembly, assemble
from stagewright.lower.assembly.lowered_block import LoweredBlock, Placed
from stagewright.lower.blocks import kernel_rules, lower_block
from stagewright.lower.inference.serving import ServingStep
from stagewright.lower.kernels.extent import Extent
from stagewright.lower.kernels.lowering import kernel_that_makes
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind, Tasks
from stagewright.run.lengths import COLUMNS, Group, attention_sums
from stagewright.run.requests import SIZES, cache_of, loads
from stagewright.run.rules import check
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.generators import forward_only
from stagewright.serving.steps.known import KnownSteps, LoweredBatches
from stagewright.time.collectives import messages_seconds
from stagewright.time.columns.durations import Columns
from stagewright.time.columns.meshes import AxisOrders, MeshColumns
from stagewright.time.columns.row_kinds import Known
from stagewright.time.experts.beside import MOST_TOKENS
from stagewright.time.experts.dispatch import Routed
from stagewright.time.mixed_steps import beside_prompts, takes_prompts_tiles
from stagewright.time.network import Machine, tier_of
from stagewright.time.roofline import DecodingBesidePrompts
from stagewright.time.served import InEngine, served_machine
from stagewright.time.simulate.host import HostWork
from stagewright.time.simulate.launches import host_work
from stagewright.time.simulate.utilization import missing_rates
from stagewright.varying import Cases


def refuse_unknown(run: Run, model: ModelConfig, how: Execution) -> None:
    """Raise UserError where batches of a step cannot be columns."""
    asked = {
        "cp": run.cp > 1,
        "dcp": (run.dcp or 1) > 1,
        "kv_cache=contiguous": run.kv_cache != "paged",
        "source_length (an encoder)": run.source_length is not None,
        "moe_flex_dispatcher": how.moe_flex_dispatcher,
    }
    if any(reach.compress > 1 for reach in model.reaches):
        raise UserError(
            f"serve: {model.name} attends to keys of several tokens, whose steps have no table of "
            "times; `stagewright simulate --mode prefill` and `--mode decode` time single steps"
        )
    for what, there in asked.items():
        if there:
            raise UserError(f"serve: steps with {what} have no table of times; leave it out")


@dataclass(frozen=True, slots=True, eq=False)
class BatchSums:
    """Sums over the requests of one replica's batch: [batches] each."""

    requests: Int
    tokens: Int
    """New ones."""
    logits: Int
    pairs: Mapping[Reach, Int]
    """Pairs of a query and a key that it sees."""
    keys: Mapping[Reach, Int]
    """Keys that any query sees."""
    routed: Int | None = None
    """Tokens of all replicas, which go to shared experts; None: all have as many."""

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def of_equal_requests(
        cls, run: Run, model: ModelConfig, count: Int, context: Int, new: Int
    ) -> Self:
        """Batches of `count` requests each, that all have so many cached and new tokens."""
        distinct, of = np.unique(np.stack([context, new]), axis=1, return_inverse=True)
        groups = [Group(1, c, n) for c, n in distinct.T.tolist()]
        verified = 1 + run.num_speculative_tokens if run.mode == "decode" else 1
        sums = {
            reach: attention_sums(groups, cache_of(run), reach, verified)[of.ravel()].T
            for reach in model.reaches
        }

        def column(name: str, reach: Reach) -> Int:
            return count * sums[reach][COLUMNS.index(name)]

        first = next(iter(model.reaches))
        return cls(
            count, column("tokens", first), column("logits", first),
            {reach: column("pairs", reach) for reach in model.reaches},
            {reach: column("keys", reach) for reach in model.reaches},
        )  # fmt: skip

    def sizes(self, run: Run, model: ModelConfig) -> dict[str, Int]:
        """The sizes that a batch decides, by the name of their dim (`run.requests.loads`).

        Requests end anywhere in a block of the cache, so that half of their last block is empty.
        """
        found: dict[str, Int] = {}
        for reach in model.reaches:
            keys = self.keys[reach]
            partly = run.kv_block_size - 1
            slots = keys + self.requests * partly // (1 if reach.kind else 2)
            columns = {
                "requests": self.requests, "tokens": self.tokens, "pairs": self.pairs[reach],
                "keys": keys, "slots": slots, "blocks": -(-slots // run.kv_block_size),
                "logits": self.logits, "stored": self.tokens,
                "prefix": np.maximum(keys - self.tokens, 0),
            }  # fmt: skip
            found |= {SIZES[name] + reach.kind: columns[name] for name in COLUMNS}
        if model.num_experts:
            found["routed"] = self.tokens * run.dp if self.routed is None else self.routed
        return found

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The batches of all parts, behind each other."""
        first = parts[0]
        routed = [part.routed for part in parts if part.routed is not None]
        assert len(routed) in (0, len(parts)), "tokens of all replicas are known of some batches"
        return cls(
            np.concatenate([part.requests for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logits for part in parts]),
            {reach: np.concatenate([part.pairs[reach] for part in parts]) for reach in first.pairs},
            {reach: np.concatenate([part.keys[reach] for part in parts]) for reach in first.keys},
            np.concatenate(routed) if routed else None,
        )

    def take(self, chosen: Int | Bool) -> Self:
        """Some of the batches."""
        return replace(
            self,
            requests=self.requests[chosen], tokens=self.tokens[chosen], logits=self.logits[chosen],
            pairs={reach: column[chosen] for reach, column in self.pairs.items()},
            keys={reach: column[chosen] for reach, column in self.keys.items()},
            routed=None if self.routed is None else self.routed[chosen],
        )  # fmt: skip


class KeptBlock(NamedTuple):
    """A block of a stage, and how many of the stage's blocks it stands for."""

    variant: BlockVariant
    layer: int
    copies: int


def kept_blocks(stage: Sequence[tuple[BlockVariant, int]]) -> list[KeptBlock]:
    """The blocks of a stage without repetitions.

    A block is like another one if both are of one variant, behind blocks of one variant. The first
    and the last of such blocks are kept; those between them are copies of the last.

    >>> [block.copies for block in kept_blocks([("a", -1), *(("b", n) for n in range(9))])]
    [1, 1, 1, 7]
    """
    found: list[KeptBlock] = []
    seen: dict[object, list[int]] = {}
    before: object = None
    for variant, layer in stage:
        places = seen.setdefault((before, variant), [])
        before = variant
        if len(places) == 2:
            found[places[1]] = found[places[1]]._replace(copies=found[places[1]].copies + 1)
        else:
            places.append(len(found))
            found.append(KeptBlock(variant, layer, 1))
    return found


class RankColumns(NamedTuple):
    """The rows of a pipeline rank's kept blocks, and what they take with each batch."""

    tasks: Tasks
    kernel: Int
    """By row, which of the assembly's kernels it is a copy of."""
    seconds: Float
    """[rows, batches]; 0 of messages."""
    host: HostWork | None
    message: Float
    """Seconds of the message to the next rank: [batches]."""

    def take(self, chosen: Int | Bool) -> RankColumns:
        """Those of some of the batches."""
        seconds = np.ascontiguousarray(self.seconds[:, chosen])
        return self._replace(seconds=seconds, message=self.message[chosen])


@dataclass(frozen=True, eq=False)
class TimedBatches:
    """The step of a run on a machine, for batches as columns."""

    step: ServingStep
    machine: Machine
    how: Execution
    known: KnownSteps = field(default_factory=KnownSteps.none)
    """Of other steps of this layout."""
    kept: Sequence[Sequence[KeptBlock]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", [kept_blocks(stage) for stage in self.step.stages])

    @classmethod
    def of(
        cls, run: Run, model: ModelConfig, machine: Machine, how: Execution, known: KnownSteps
    ) -> Self:
        """The step of a resolved run; `machine` as it is without constants of inference."""
        refuse_unknown(run, model, how)
        check(run, model)
        step = ServingStep.of(run, model, {}, loads(run, model).sizes)
        machine = served_machine(run, model, machine, how.serving_engine)
        found = cls(step, machine, how, known)
        missing = missing_rates(found.one.program.program, machine.hardware)
        if not missing:
            return found
        hardware = machine.hardware.with_rates_of_bf16(missing)
        return replace(found, machine=replace(machine, hardware=hardware))

    @cached_property
    def one(self) -> LoweredBatches:
        """The step with a single request."""
        one = (np.array([n]) for n in (1, 1, 1))
        return self.lowered(BatchSums.of_equal_requests(self.step.run, self.step.model, *one))

    @cached_property
    def durations(self) -> Known:
        """What is known of kernels on the machine."""
        return self.known.durations_on(self.machine.hardware)

    @property
    def routed(self) -> Routed | None:
        """How the engine sends tokens to experts; None: a copy for each expert."""
        return Routed.in_engine(self.step.run, self.step.model, self.how.serving_engine)

    def _extent(self, sums: BatchSums, cases: Cases) -> Extent:
        """How large dims are, with numbers of all batches."""
        sizes = sums.sizes(self.step.run, self.step.model)
        numbers: dict[str, Any] = {name: cases.varying(column) for name, column in sizes.items()}
        return self.step.extent(numbers)

    def lowered(self, sums: BatchSums) -> LoweredBatches:
        """The step with numbers of all batches."""
        step, known = self.step, self.known.lowered
        sizes = sums.sizes(step.run, step.model)
        key = self._lowered_by, digest([*sizes], *sizes.values())
        if key not in known:
            cases = Cases(len(sums))
            extent = self._extent(sums, cases)
            blocks = {
                variant: lower_block(graph, step.run, step.mesh, extent, variant)
                for variant, graph in step.graphs.items()
            }
            known[key] = LoweredBatches(blocks, self._assembly(blocks), cases)
        return known[key]

    @cached_property
    def _lowered_by(self) -> Hashable:
        """What kernels and programs of batches follow from, beside the batches and the model.

        The requests of the run and what it computes of them are in its graphs and in batches.
        """
        step = self.step
        run = step.run.model_copy(update={"mode": "decode", "requests": None})
        graphs = tuple((variant, graph.nodes) for variant, graph in step.graphs.items())
        sizes, kept = tuple(step.sizes.items()), tuple(map(tuple, self.kept))
        return run, step.plan, step.mesh, sizes, graphs, kept

    def _assembly(self, blocks: Mapping[BlockVariant, LoweredBlock]) -> Assembly:
        """The program of the kept blocks."""
        placed = [
            [Placed(blocks[b.variant], b.layer, b.variant.name_at(b.layer)) for b in stage]
            for stage in self.kept
        ]
        run = self.step.run
        return assemble(placed, forward_only(run.pp, 1), self.step.mesh, streams=run.streams)

    def rows_of(self, several: Sequence[BatchSums]) -> list[list[RankColumns]]:
        """What the rows of each pipeline rank take, of several sets of batches at once."""
        every = self.rows(BatchSums.concatenated(several))
        ends: list[int] = np.cumsum([0, *(len(sums) for sums in several)]).tolist()
        return [[rank.take(np.arange(*of)) for rank in every] for of in pairwise(ends)]

    def rows(self, sums: BatchSums) -> list[RankColumns]:
        """What the rows of each pipeline rank take."""
        parts: list[list[RankColumns]] = []
        places: list[Int] = []
        few = np.ones(len(sums), dtype=bool)
        if self.step.model.num_experts:  # shared ones run beside others where tokens are few
            few = sums.tokens <= MOST_TOKENS
        for chosen in filter(len, (np.flatnonzero(few), np.flatnonzero(~few))):
            rest = chosen
            while len(rest):
                # Kernels differ where few tokens go to some of a rank's experts only, for example.
                of = sums.take(rest)
                lowered = self.lowered(of)
                rows = self._rows(of, lowered.program)
                alike = lowered.cases.alike
                places.append(rest[alike])
                parts.append([rank.take(alike) for rank in rows])
                rest = rest[~alike]
        order = np.argsort(np.concatenate(places))
        return [
            of_rank[0]._replace(
                seconds=np.concatenate([part.seconds for part in of_rank], axis=1)[:, order],
                message=np.concatenate([part.message for part in of_rank])[order],
            )
            for of_rank in zip(*parts, strict=True)
        ]

    def _rows(self, sums: BatchSums, made: Assembly) -> list[RankColumns]:
        program, run, machine = made.program, self.step.run, self.machine
        engine = self.how.serving_engine
        columns = Columns(
            made.kernels, len(sums), machine.hardware, self.durations, routed=self.routed
        )
        axes = dict(self.step.mesh.axes)
        names = [*axes]
        meshes = MeshColumns(
            program,
            {n: np.full(len(sums), axes[n], dtype=np.int64) for n in names if n != "pp"},
            np.full(len(sums), run.pp, dtype=np.int64),
            machine,
            orders=AxisOrders.same(names, len(sums)) if "pp" in axes else None,
        )
        hosts = host_work(program, run, self.how, machine.hardware)
        in_engine = InEngine(run, self.step.model, engine, machine.hardware)
        found: list[RankColumns] = []
        for nth, rank in enumerate(made.ranks):
            tasks = rank.of.tasks
            seconds = columns.of_rows(tasks, rank.kernel, meshes).of_rows
            seconds = in_engine.seconds(tasks, seconds, columns.numbers[1][rank.kernel])
            message = np.zeros(len(sums))
            for row in np.flatnonzero(tasks.kind == TaskKind.SEND).tolist():
                peers = program.peer_of(int(tasks.slot[row]))[rank.of.ranks]
                level = int(tier_of(machine, rank.of.ranks, peers).max(initial=0))
                size = columns.numbers[2][rank.kernel[row]]
                message = message + messages_seconds(size, level, machine)
            host = None if hosts is None else hosts[nth]
            found.append(RankColumns(tasks, rank.kernel, seconds, host, message))
        return found

    def alone(self, variant: BlockVariant, place: int, sums: BatchSums) -> Float:
        """Seconds of a kernel of a block, alone: [batches]."""
        step, made = self.step, self.one.blocks[variant].tasks[place].made[0]
        rules, found = kernel_rules(step.run), np.empty(len(sums))
        rest = np.arange(len(sums))
        while len(rest):
            cases = Cases(len(rest))
            extent = self._extent(sums.take(rest), cases)
            kernel = kernel_that_makes(made, step.graphs[variant], extent, step.mesh, rules)
            columns = Columns([kernel], len(rest), self.machine.hardware, self.durations)
            seconds = columns.computed[0]
            found[rest[cases.alike]] = seconds[cases.alike]
            rest = rest[~cases.alike]
        return found

    def beside_prompts(self, variant: BlockVariant, place: int) -> DecodingBesidePrompts | None:
        """How a kernel of attention computes requests that decode beside prompts."""
        model, on = self.step.model, self.machine.hardware
        if not takes_prompts_tiles(model, on):
            return None
        shape = self.one.blocks[variant].tasks[place].shape
        sizes = {} if shape is None else shape.sizes()
        return beside_prompts({x: float(np.asarray(n).ravel()[0]) for x, n in sizes.items()}, on)
