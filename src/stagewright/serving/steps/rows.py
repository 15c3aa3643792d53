"""Seconds of the rows of a serving step, for many batches at once.

A batch enters a step by a few sums over its requests (`run.lengths`). What a kernel needs is linear
in these, and for experts a smooth function of the number of tokens. So the exact lowering is asked
for a few batches; between them FLOPs, bytes and extents of each row are interpolated, and
`time.durations` times all batches as the microbatches of one program.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.graph.table import Timing
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import Placed
from stagewright.lower.blocks import kernel_rules
from stagewright.lower.kernels.lowering import kernels
from stagewright.lower.serving_step import ServingStep
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import Program, RankClass, Shape, TaskKind, Tasks
from stagewright.run.lengths import COLUMNS
from stagewright.run.requests import SIZES, loads
from stagewright.run.rules import check
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.generators import forward_only
from stagewright.time.dispatch import Routed
from stagewright.time.durations import task_seconds
from stagewright.time.engines import (
    decoding_beside_prompts,
    engine_seconds,
    has_mixed_attention,
    served_machine,
)
from stagewright.time.network import Machine
from stagewright.time.roofline import DecodingBesidePrompts, Kernels, kernels_seconds, timing_of
from stagewright.time.simulate.launches import host_work
from stagewright.time.simulate.timeline import table_rows
from stagewright.time.simulate.utilization import missing_rates

Sizes = Mapping[str, Int]
"""The sizes of many batches, by dim (`run.requests.SIZES`)."""
_Lowered = Mapping[str, int]
"""The sizes of one batch that is lowered."""

TILE = 32
"""Products change their tiles at multiples of so many rows (`time.roofline.TILES`)."""
FEW = 64
"""Tokens up to which every number is timed."""
MOST_KEYS = 1 << 23
"""Keys of a batch up to which kernels over cached keys are timed."""

_NUMBERS, _COMMUNICATION, _EXTENTS = 16, 2, 3
"""Numbers of a row: FLOPs, bytes, bytes of communication, then extents."""
_BY_EXTENTS = (Timing.PRODUCT, Timing.TO_EXPERTS, Timing.FROM_EXPERTS)
"""Kernels whose time follows from their extents, and not from their bytes."""


class KeptBlock(NamedTuple):
    """Block of a stage, and number of the stage's blocks that it represents."""

    variant: BlockVariant
    layer: int
    copies: int


def kept_blocks(stage: Sequence[tuple[BlockVariant, int]]) -> list[KeptBlock]:
    """The blocks of a stage without repetitions.

    Two blocks are equal if both are of one variant, after blocks of one variant. The first and the
    last of equal blocks are kept; those between them are copies of the last.

    >>> [block.copies for block in kept_blocks([("a", -1), *(("b", n) for n in range(9))])]
    [1, 1, 1, 7]
    """
    kept: list[KeptBlock] = []
    seen: dict[object, list[int]] = {}
    before: object = None
    for variant, layer in stage:
        places = seen.setdefault((before, variant), [])
        before = variant
        if len(places) == 2:
            kept[places[1]] = kept[places[1]]._replace(copies=kept[places[1]].copies + 1)
        else:
            places.append(len(kept))
            kept.append(KeptBlock(variant, layer, 1))
    return kept


def tokens_timed(most: int) -> Int:
    """Numbers of tokens at which rows are timed: those that are lowered, and where tiles change.

    >>> tokens_timed(100)[62:].tolist()
    [63, 64, 65, 72, 80, 88, 96, 97, 104, 112, 120, 128, 129]
    >>> tokens_timed(8)[62:].tolist()
    [63, 64, 65]
    """
    ends = np.arange(FEW, max(most, FEW) + TILE, TILE)
    lowered = [n for n in _tokens_lowered(most) if n <= ends[-1]]
    return np.unique(np.concatenate([lowered, ends, ends + 1]))


def _tokens_lowered(most: int) -> list[int]:
    """Numbers of tokens for which blocks with experts are lowered: many where they decide how many
    experts have any."""
    steps = (1, FEW + 1, 1), (72, 129, 8), (160, 513, 32)
    more = [512 << n for n in range(1, most.bit_length() - 8)]
    return [*(n for step in steps for n in range(*step)), *more]


class RankRows(NamedTuple):
    """The rows of a pipeline rank, and how what they need follows from a batch."""

    tasks: Tasks
    block: Int
    """Kept block of each row; -1: a message of the pipeline."""
    tokens: Int
    """Numbers of tokens of the lowered batches."""
    needs: Float
    """FLOPs, bytes, bytes of communication and extents with these: [rows, numbers, tokens]."""
    base: Mapping[str, int]
    """The other sizes of these batches, as far as they do not follow from tokens."""
    slopes: Float
    """Increase per unit of each of these: [rows, numbers, sizes]."""

    def at(self, sizes: Sizes, rows: slice = slice(None)) -> Float:
        """Numbers of some rows with batches of such sizes: [rows, numbers, batches]."""
        last = len(self.tokens) - 2
        at = np.clip(np.searchsorted(self.tokens, sizes["S"], "right") - 1, 0, last)
        share = (sizes["S"] - self.tokens[at]) / (self.tokens[at + 1] - self.tokens[at])
        needs, slopes = self.needs[rows], self.slopes[rows]
        more = np.stack([sizes[name] - number for name, number in self.base.items()])
        return needs[:, :, at] * (1 - share) + needs[:, :, at + 1] * share + slopes @ more

    def depends(self, row: int) -> frozenset[str]:
        """The sizes beside the number of tokens that a row's seconds depend on."""
        shape = int(self.tasks.shape[row])
        by_bytes = shape < 0 or timing_of(self.tasks.shapes[shape].kernel) is Timing.MEMORY
        varies = np.any(self.slopes[row, : _EXTENTS if by_bytes else None] != 0, axis=0)
        names = [*self.base]
        return frozenset(names[n] for n in np.flatnonzero(varies).tolist())


class TimedRows(NamedTuple):
    """The rows of a step's ranks, and their seconds for the batches of a grid."""

    ranks: Sequence[RankRows]
    program: Program
    """Program with all batches of the grid, each a microbatch."""
    alone: Sequence[Float]
    """Seconds of kernels by rank, without an engine: [rows, batches]."""
    in_engine: dict[str, Sequence[Float]]
    """Seconds of kernels in an engine, by the mode of the run."""


Known = dict[Hashable, TimedRows]
"""Timed rows of one layout: steps that decode and steps of prompts may have the same."""


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step of inference on a machine, timed for batches as arrays."""

    step: ServingStep
    machine: Machine
    how: Execution
    kept: Sequence[Sequence[KeptBlock]]
    grid: Int
    """Numbers of tokens, and of logits, for which rows are timed."""
    known: Known

    @classmethod
    def of(
        cls, run: Run, model: ModelConfig, machine: Machine, how: Execution, most: int, known: Known
    ) -> Self:
        """The step of a resolved run, for up to `most` tokens; `machine` without an engine."""
        _refuse_unknown(run, model, how)
        check(run, model)
        step = ServingStep.of(run, model, {}, loads(run, model).sizes)
        machine = served_machine(run, model, machine, how.serving_engine)
        kept = [kept_blocks(stage) for stage in step.stages]
        found = cls(step, machine, how, kept, tokens_timed(most), known)
        missing = missing_rates(found.one, machine.hardware)
        hardware = machine.hardware.with_rates_of_bf16(missing) if missing else machine.hardware
        return replace(found, machine=replace(machine, hardware=hardware))

    def sizes(self, tokens: Int, requests: Int, logits: Int, pairs: Int, keys: Int) -> Sizes:
        """Sizes of batches with such sums; pairs and keys of whichever reach is asked for.

        Requests end anywhere in a block of the cache, so that half of their last block is empty.
        """
        block = self.step.run.kv_block_size
        found: dict[str, Int] = {}
        for reach in self.step.model.reaches:
            slots = keys + (requests * unfilled(reach, block)).astype(np.int64)
            columns = {
                "requests": requests, "tokens": tokens, "pairs": pairs, "keys": keys,
                "slots": slots, "blocks": -(-slots // block), "logits": logits, "stored": tokens,
                "prefix": keys,
            }  # fmt: skip
            found |= {SIZES[name] + reach.kind: columns[name] for name in COLUMNS}
        return found

    def _batch(self, tokens: int, routed: int | None = None) -> _Lowered:
        """The sizes of a batch to be lowered; `routed`: tokens of all replicas."""
        sums = np.array([[tokens], [8], [8], [1 << 16], [1 << 12]])
        found = {name: int(of[0]) for name, of in self.sizes(*sums).items()}
        if self.step.model.num_experts:
            found["routed"] = tokens * self.step.run.dp if routed is None else routed
        return found

    # ---- rows ------------------------------------------------------------------------------------

    def _program(self, sizes: _Lowered) -> Program:
        """The program of the kept blocks with one batch."""
        step, blocks = self.step, self.step.lower_blocks(sizes)
        placed = [
            [Placed(blocks[b.variant], b.layer, b.variant.name_at(b.layer)) for b in stage]
            for stage in self.kept
        ]
        order = forward_only(step.run.pp, 1)
        return assemble(placed, order, step.mesh, streams=step.run.streams)

    @cached_property
    def one(self) -> Program:
        """The step with a batch of one token."""
        return self._program(self._batch(1))

    def _kernels(self, variant: BlockVariant, sizes: _Lowered) -> Float:
        """Numbers of the kernels of a block with a batch: [kernels, numbers]."""
        step = self.step
        rules, extent = kernel_rules(step.run), step.extent(sizes)
        tasks, _ = kernels(step.graphs[variant], extent, step.mesh, rules)
        needs = np.zeros((len(tasks), _NUMBERS))
        for row, of in zip(needs, tasks, strict=True):
            extents = () if of.shape is None else of.shape.extents
            row[:_EXTENTS] = of.flops, of.traffic, of.comm_bytes
            row[_EXTENTS : _EXTENTS + len(extents)] = [n for _, n in extents]
        return needs

    def _kernels_at(self, tokens: Int, batches: Sequence[_Lowered]) -> dict[BlockVariant, Float]:
        """The same by block, for batches of so many tokens: on a line, unless it has experts."""
        share, middle = (tokens - tokens[0]) / (tokens[-1] - tokens[0]), len(tokens) // 2
        found: dict[BlockVariant, Float] = {}
        for variant in self.step.graphs:
            low, mid, high = (self._kernels(variant, batches[at]) for at in (0, middle, -1))
            line = low[:, :, None] * (1 - share) + high[:, :, None] * share
            if not np.allclose(line[:, :, middle], mid, rtol=1e-3):
                line = np.stack([self._kernels(variant, sizes) for sizes in batches], axis=2)
            found[variant] = line
        return found

    def _of_rank(self, of: RankClass, needs: Mapping[BlockVariant, Float]) -> Float:
        """Numbers of the rows of a rank, except messages, from those of its blocks."""
        every = np.concatenate([needs[b.variant] for b in self.kept[of.pipeline_rank]])
        rows = np.zeros((len(of.tasks), *every.shape[1:]))
        rows[~_messages(of.tasks)] = every
        return rows

    def _ranks(self) -> list[RankRows]:
        tokens = np.array(_tokens_lowered(int(self.grid[-1])))
        first, last = self._batch(1), self._batch(int(tokens[-1]))
        base = {name: number for name, number in first.items() if last[name] == number}
        needs = self._kernels_at(tokens, [self._batch(n) for n in tokens.tolist()])

        def slopes(variant: BlockVariant) -> Float:
            at = needs[variant][:, :, -1]
            more = (
                (name, self._kernels(variant, {**last, name: 2 * n})) for name, n in base.items()
            )
            return np.stack([(probed - at) / base[name] for name, probed in more], axis=2)

        of_kernels = {variant: slopes(variant) for variant in needs}
        share = (tokens - 1) / (tokens[-1] - 1)
        ranks: list[RankRows] = []
        for low, high in zip(self.one.classes, self._program(last).classes, strict=True):
            kept, sent = self.kept[low.pipeline_rank], _messages(low.tasks)
            rows = self._of_rank(low, needs)
            few, many = (of.tasks.comm_bytes[sent, None] for of in (low, high))
            rows[sent, _COMMUNICATION] = few * (1 - share) + many * share
            block = np.full(len(rows), -1)
            block[~sent] = np.repeat(np.arange(len(kept)), [len(needs[b.variant]) for b in kept])
            of_rows = self._of_rank(low, of_kernels)
            ranks.append(RankRows(low.tasks, block, tokens, rows, base, of_rows))
        return ranks

    # ---- seconds ---------------------------------------------------------------------------------

    @cached_property
    def timed(self) -> TimedRows:
        """The rows, timed for all batches of the grid, with as many logits as tokens.

        Kernels over cached keys are timed for `keys_timed`.
        """
        step = self.step
        run = step.run.model_copy(update={"mode": "decode", "requests": None})
        graphs = tuple((variant, graph.nodes) for variant, graph in step.graphs.items())
        kept = tuple(map(tuple, self.kept))
        key = run, step.plan, step.mesh, tuple(step.sizes.items()), graphs, kept, len(self.grid)
        if key not in self.known:
            ranks, keys = self._ranks(), self.keys_timed
            sizes = self.sizes(self.grid, np.ones_like(keys), self.grid, keys, keys)
            program = _repeated(self.one, [rank.at(sizes) for rank in ranks])
            alone = self._alone(program, len(self.grid))
            self.known[key] = TimedRows(ranks, program, alone, {})
        return self.known[key]

    @property
    def keys_timed(self) -> Int:
        """Numbers of keys, as many as the grid has of tokens."""
        return np.rint(np.geomspace(1, MOST_KEYS, len(self.grid))).astype(np.int64)

    @property
    def _routed(self) -> Routed | None:
        """Dispatch of tokens to experts in the engine; None: a copy for each expert."""
        return Routed.in_engine(self.step.run, self.step.model, self.how.serving_engine)

    @property
    def gathers(self) -> bool:
        """True if experts' ranks gather the tokens of all replicas."""
        return self._routed is not None and self._routed.gathered

    def _alone(self, program: Program, batches: int) -> list[Float]:
        every = task_seconds(program, self.machine, routed=self._routed)
        return [of.reshape(batches, -1).T for of in every]

    def _in_engine(self, program: Program, alone: Sequence[Float]) -> list[Float]:
        step, on = self.step, self.machine.hardware
        engine = self.how.serving_engine
        return [
            engine_seconds(of.tasks, seconds.T.ravel(), step.run, step.model, engine, on)
            .reshape(-1, len(seconds))
            .T
            for of, seconds in zip(program.classes, alone, strict=True)
        ]

    @cached_property
    def seconds(self) -> Sequence[Float]:
        """Seconds of rows by rank with each batch of the grid: [rows, batches]."""
        timed, mode = self.timed, self.step.run.mode
        if mode not in timed.in_engine:
            timed.in_engine[mode] = self._in_engine(timed.program, timed.alone)
        return timed.in_engine[mode]

    @cached_property
    def launches(self) -> list[Float]:
        """Seconds of the host to launch each row, by rank."""
        hosts = host_work(self.one, self.step.run, self.how, self.machine.hardware)
        if hosts is None:
            return [np.zeros(len(of.tasks)) for of in self.one.classes]
        pairs = zip(self.one.classes, hosts, strict=True)
        return [host.seconds[table_rows(of.work)] for of, host in pairs]

    def with_routed(self, tokens: Int) -> list[Float]:
        """Like `seconds`, of batches of one token whose experts serve other replicas, too."""
        batches = [self._batch(1, n * self.step.run.dp) for n in tokens.tolist()]
        needs = self._kernels_at(tokens, batches)
        program = _repeated(self.one, [self._of_rank(of, needs) for of in self.one.classes])
        return self._in_engine(program, self._alone(program, len(tokens)))

    # ---- single kernels --------------------------------------------------------------------------

    def kernel_seconds(self, rank: int, row: int, sizes: Sizes) -> Float:
        """Seconds of one kernel alone with many batches."""
        rows = self.timed.ranks[rank]
        tasks, (needs,) = rows.tasks, rows.at(sizes, slice(row, row + 1))
        shape = tasks.shapes[int(tasks.shape[row])]
        ones = np.ones(needs.shape[1])
        extents = {name: of * ones for name, of in shape.sizes().items()}
        extents |= dict(zip((name for name, _ in shape.extents), needs[_EXTENTS:], strict=False))
        dtype = tasks.dtypes[int(tasks.dtype[row])]
        kernel = Kernels(extents, needs[0], needs[1], dtype, ones > 1)
        return kernels_seconds(shape.kernel, kernel, self.machine.hardware.sustained())

    def beside_prompts(self, rank: int, row: int) -> DecodingBesidePrompts | None:
        """Computation of decoding requests by an attention kernel that has prompts, too."""
        tasks, on = self.timed.ranks[rank].tasks, self.machine.hardware
        if not has_mixed_attention(self.step.model, on):
            return None
        return decoding_beside_prompts(tasks.shapes[int(tasks.shape[row])].sizes(), on)


def unfilled(reach: Reach, block: int) -> float:
    """Places of the cache that a request has beyond its tokens, in the mean."""
    return (block - 1) / (1 if reach.kind else 2)


def _refuse_unknown(run: Run, model: ModelConfig, how: Execution) -> None:
    """Raise UserError where steps have no table of times."""
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


def _messages(tasks: Tasks) -> Bool:
    return (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)


# ---- one program of many batches -----------------------------------------------------------------


def _repeated(program: Program, needs: Sequence[Float]) -> Program:
    """Repeat a program for many batches, each a microbatch."""
    classes = [
        replace(of, work=of.work.with_tasks(_repeated_tasks(of.tasks, needed)))
        for of, needed in zip(program.classes, needs, strict=True)
    ]
    return replace(program, classes=tuple(classes))


def _repeated_tasks(tasks: Tasks, needs: Float) -> Tasks:
    rows, count = len(tasks), int(needs.shape[2])
    whole: Int = np.ceil(needs - 1e-6).astype(np.int64)  # as lowering rounds rows of experts
    equal = "kind", "name", "op", "phase", "stage", "layer", "collective", "dtype", "slot", "tag"
    columns: dict[str, Any] = {name: np.tile(getattr(tasks, name), count) for name in equal}
    for nth, name in enumerate(("flops", "traffic", "comm_bytes")):
        columns[name] = whole[:, nth].T.ravel()
    columns["microbatch"] = np.repeat(np.arange(count, dtype=np.int32), rows)
    first = np.arange(count, dtype=np.int64) * rows
    graphs = {"data": (tasks.data_ptr, tasks.data), "order": (tasks.order_ptr, tasks.order)}
    for name, (edges, read) in graphs.items():
        begins = np.repeat(first, len(read))
        columns[name] = (np.tile(read, count) + begins).astype(np.int32)
        columns[f"{name}_ptr"] = np.append(0, np.cumsum(np.tile(np.diff(edges), count)))
    shapes = [*tasks.shapes]
    shape = np.repeat(tasks.shape[:, None], count, axis=1)
    known: dict[tuple[int, bytes], Int] = {}
    for row in np.flatnonzero(tasks.shape >= 0).tolist():
        number = int(tasks.shape[row])
        of = tasks.shapes[number]
        if timing_of(of.kernel) not in _BY_EXTENTS:
            continue
        key = number, whole[row].tobytes()
        if key not in known:
            known[key] = np.arange(len(shapes), len(shapes) + count)
            letters = [name for name, _ in of.extents]
            for extents in whole[row, _EXTENTS:].T.tolist():
                every = tuple(zip(letters, extents, strict=False))
                shapes.append(Shape(of.kernel, every, of.joint, of.head))
        shape[row] = known[key]
    return replace(tasks, **columns, shape=shape.T.ravel(), shapes=tuple(shapes))
