"""Durations of the tasks of a serving step (kernels, collectives, messages), for many batches.

A batch enters a step by a few sums over its requests (`run.lengths`). The FLOPs, bytes and extents
of a kernel are linear in these, except for experts, where they are a smooth function of the number
of tokens. So the exact lowering runs for a few batches, the numbers of each row are interpolated
between them, and `time.durations` times all batches as the microbatches of one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.graph.table import Timing
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import StageBlock
from stagewright.lower.blocks import kernel_rules
from stagewright.lower.kernels.lowering import tasks_of
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
from stagewright.time.dispatch import DispatchKernels
from stagewright.time.durations import task_seconds
from stagewright.time.engines import engine_seconds, served_machine
from stagewright.time.network import Machine
from stagewright.time.roofline import Kernels, kernels_seconds, timing_of
from stagewright.time.simulate.launches import MAX_GRAPH_TOKENS, host_work
from stagewright.time.simulate.timeline import table_rows
from stagewright.time.simulate.utilization import missing_rates

Sizes = Mapping[str, Int]
"""Sizes of many batches, by dim (`run.requests.SIZES`)."""

TILE = 32
"""Products change their tiles at multiples of this number of rows (`time.roofline.TILES`)."""
EXACT_TOKENS = 64
"""Tokens up to which every number is timed."""
MAX_KEYS = 1 << 23
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
    """Blocks of a stage without repetitions.

    Two blocks are equal if both are of one variant, after blocks of one variant. The first and the
    last of equal blocks are kept; those between them are copies of the last.

    >>> [block.copies for block in kept_blocks([("a", -1), *(("b", n) for n in range(9))])]
    [1, 1, 1, 7]
    """
    kept: list[KeptBlock] = []
    positions: dict[object, list[int]] = {}
    previous: object = None
    for variant, layer in stage:
        equal = positions.setdefault((previous, variant), [])
        previous = variant
        if len(equal) == 2:
            kept[equal[1]] = kept[equal[1]]._replace(copies=kept[equal[1]].copies + 1)
        else:
            equal.append(len(kept))
            kept.append(KeptBlock(variant, layer, 1))
    return kept


def tokens_timed(max_tokens: int) -> Int:
    """Numbers of tokens at which rows are timed: those that are lowered, and where tiles change.

    >>> tokens_timed(100)[62:].tolist()
    [63, 64, 65, 72, 80, 88, 96, 97, 104, 112, 120, 128, 129]
    """
    ends = np.arange(EXACT_TOKENS, max(max_tokens, EXACT_TOKENS) + TILE, TILE)
    lowered = [n for n in _tokens_lowered(max_tokens) if n <= ends[-1]]
    return np.unique(np.concatenate([lowered, ends, ends + 1]))


def _tokens_lowered(max_tokens: int) -> list[int]:
    """Numbers of tokens for which blocks with experts are lowered.

    Few tokens have many of these numbers: they decide how many experts get any.
    """
    steps = (1, EXACT_TOKENS + 1, 1), (72, 129, 8), (160, 513, 32)
    octaves = [512 << n for n in range(1, max_tokens.bit_length() - 8)]
    return [*(n for step in steps for n in range(*step)), *octaves]


class RankRows(NamedTuple):
    """Tasks of a pipeline rank, and their FLOPs, bytes and extents as functions of a batch."""

    tasks: Tasks
    block: Int
    """Kept block of each row; -1: a message of the pipeline."""
    numbers: Float
    """FLOPs, bytes, bytes of communication and extents: [rows, numbers, lowered tokens]."""
    slopes: Float
    """Increase per unit of each size that does not follow from tokens: [rows, numbers, sizes]."""


class StepRows:
    """Tasks (rows) of a step of inference on a machine, timed for batches as arrays."""

    def __init__(
        self,
        run: Run,
        model: ModelConfig,
        machine: Machine,
        execution: Execution,
        max_tokens: int,
    ) -> None:
        """Time the step of a resolved run for up to `max_tokens`.

        `machine`: bare hardware; `time.engines.served_machine` adapts it here to the kernels of
        vLLM or another program. Raises UserError for steps that have no table.
        """
        _refuse_unknown(run, model, execution)
        self.step, self.execution = _serving_step(run, model), execution
        self.kept = [kept_blocks(stage) for stage in self.step.stages]
        self.grid = tokens_timed(max_tokens)
        """Numbers of tokens, and of logits, for which rows are timed."""
        self.keys_timed = np.rint(np.geomspace(1, MAX_KEYS, len(self.grid))).astype(np.int64)
        """Keys of the batches of the grid."""
        self.program = self._program(self._batch(1))
        """Step with a batch of one token."""
        machine = served_machine(run, model, machine, execution.serving_engine)
        if missing := missing_rates(self.program, machine.hardware):
            machine = replace(machine, hardware=machine.hardware.with_rates_of_bf16(missing))
        self.machine = machine
        self.lowered = np.array(_tokens_lowered(int(self.grid[-1])))
        first, last = self._batch(1), self._batch(int(self.lowered[-1]))
        self.base = {name: number for name, number in first.items() if last[name] == number}
        """Sizes of the lowered batches that do not follow from tokens."""
        self.ranks = self._rank_rows(last)
        ones = np.ones_like(self.grid)
        batches = self.sizes(self.grid, ones, self.grid, self.keys_timed, self.keys_timed)
        self._timed = _repeat(
            self.program, [self._numbers_at(rows, batches) for rows in self.ranks]
        )
        self._isolated = self._isolated_seconds(self._timed, len(self.grid))

    def of_run(self, run: Run) -> Self | None:
        """Rows of another run of the model that has the same blocks; None if they differ."""
        step = _serving_step(run, self.step.model)
        graphs, others = ({v: g.nodes for v, g in x.graphs.items()} for x in (self.step, step))
        if graphs != others or [*map(kept_blocks, step.stages)] != self.kept:
            return None
        rows = copy(self)
        rows.step = step
        return rows

    def sizes(self, tokens: Int, requests: Int, logits: Int, pairs: Int, keys: Int) -> Sizes:
        """Sizes of batches with these sums; pairs and keys are those of each attention span.

        Requests end anywhere in a block of the cache, so that half of their last block is empty.
        """
        block = self.step.run.kv_block_size
        sizes: dict[str, Int] = {}
        for reach in self.step.model.reaches:
            slots = keys + (requests * unfilled(reach, block)).astype(np.int64)
            columns = {
                "requests": requests, "tokens": tokens, "pairs": pairs, "keys": keys,
                "slots": slots, "blocks": -(-slots // block), "logits": logits, "stored": tokens,
                "prefix": keys,
            }  # fmt: skip
            sizes |= {SIZES[name] + reach.kind: columns[name] for name in COLUMNS}
        return sizes

    def _batch(self, tokens: int, routed: int | None = None) -> dict[str, int]:
        """Sizes of a batch to lower; `routed`: tokens of all replicas."""
        # Lowered batches differ in tokens alone; `RankRows.slopes` are for the other sums.
        sums = {"tokens": tokens, "requests": 8, "logits": 8, "pairs": 1 << 16, "keys": 1 << 12}
        columns = self.sizes(**{name: np.array([number]) for name, number in sums.items()})
        sizes = {name: int(column[0]) for name, column in columns.items()}
        if self.step.model.num_experts:
            sizes["routed"] = tokens * self.step.run.dp if routed is None else routed
        return sizes

    # ---- numbers ---------------------------------------------------------------------------------

    def _program(self, batch: Mapping[str, int]) -> Program:
        """Program of the kept blocks with one batch."""
        step, blocks = self.step, self.step.lower_blocks(batch)
        placed = [
            [StageBlock(blocks[b.variant], b.layer, b.variant.name_at(b.layer)) for b in stage]
            for stage in self.kept
        ]
        return assemble(placed, forward_only(step.run.pp, 1), step.mesh, streams=step.run.streams)

    def _numbers_of_block(self, variant: BlockVariant, batch: Mapping[str, int]) -> Float:
        """Numbers of the tasks of a block with a batch: [tasks, numbers]."""
        step = self.step
        tasks, _ = tasks_of(
            step.graphs[variant], step.extent(batch), step.mesh, kernel_rules(step.run)
        )
        numbers = np.zeros((len(tasks), _NUMBERS))
        for row, task in zip(numbers, tasks, strict=True):
            extents = () if task.shape is None else task.shape.extents
            row[:_EXTENTS] = task.flops, task.traffic, task.comm_bytes
            row[_EXTENTS : _EXTENTS + len(extents)] = [n for _, n in extents]
        return numbers

    def _numbers_of_blocks(
        self, tokens: Int, batches: Sequence[Mapping[str, int]]
    ) -> dict[BlockVariant, Float]:
        """Numbers of all blocks with batches of these tokens: [tasks, numbers, batches].

        They lie on a line, unless a block has experts.
        """
        share, middle = (tokens - tokens[0]) / (tokens[-1] - tokens[0]), len(tokens) // 2
        numbers: dict[BlockVariant, Float] = {}
        for variant in self.step.graphs:
            low, mid, high = (self._numbers_of_block(variant, batches[n]) for n in (0, middle, -1))
            line = low[:, :, None] * (1 - share) + high[:, :, None] * share
            if not np.allclose(line[:, :, middle], mid, rtol=1e-3):
                line = np.stack(
                    [self._numbers_of_block(variant, batch) for batch in batches], axis=2
                )
            numbers[variant] = line
        return numbers

    def _of_rank(self, rank: RankClass, numbers: Mapping[BlockVariant, Float]) -> Float:
        """Numbers of the rows of a rank from those of its blocks; those of messages are 0."""
        of_blocks = np.concatenate([numbers[b.variant] for b in self.kept[rank.pipeline_rank]])
        rows = np.zeros((len(rank.tasks), *of_blocks.shape[1:]))
        rows[~_messages(rank.tasks)] = of_blocks
        return rows

    def _rank_rows(self, last: Mapping[str, int]) -> list[RankRows]:
        """Rows of each rank; `last` is the largest batch that is lowered."""
        tokens = self.lowered
        numbers = self._numbers_of_blocks(tokens, [self._batch(n) for n in tokens.tolist()])
        slopes = {
            variant: np.stack(
                [
                    (self._numbers_of_block(variant, {**last, name: 2 * n}) - at[:, :, -1]) / n
                    for name, n in self.base.items()
                ],
                axis=2,
            )
            for variant, at in numbers.items()
        }
        share = (tokens - 1) / (tokens[-1] - 1)
        ranks: list[RankRows] = []
        largest = self._program(last)
        for low, high in zip(self.program.classes, largest.classes, strict=True):
            kept, sent = self.kept[low.pipeline_rank], _messages(low.tasks)
            rows = self._of_rank(low, numbers)
            few, many = (rank.tasks.comm_bytes[sent, None] for rank in (low, high))
            rows[sent, _COMMUNICATION] = few * (1 - share) + many * share
            block = np.full(len(rows), -1)
            counts = [len(numbers[b.variant]) for b in kept]
            block[~sent] = np.repeat(np.arange(len(kept)), counts)
            ranks.append(RankRows(low.tasks, block, rows, self._of_rank(low, slopes)))
        return ranks

    def _numbers_at(self, rows: RankRows, batches: Sizes) -> Float:
        """Numbers of rows with batches of any sizes: [rows, numbers, batches]."""
        at = np.searchsorted(self.lowered, batches["S"], "right") - 1
        at = np.clip(at, 0, len(self.lowered) - 2)
        low, high = self.lowered[at], self.lowered[at + 1]
        share = (batches["S"] - low) / (high - low)
        beyond = np.stack([batches[name] - number for name, number in self.base.items()])
        line = rows.numbers[:, :, at] * (1 - share) + rows.numbers[:, :, at + 1] * share
        return line + rows.slopes @ beyond

    # ---- seconds ---------------------------------------------------------------------------------

    @property
    def _dispatch(self) -> DispatchKernels | None:
        """Dispatch of tokens to experts in the serving engine; None: a copy for each expert."""
        return DispatchKernels.in_engine(
            self.step.run, self.step.model, self.execution.serving_engine
        )

    @property
    def gathers(self) -> bool:
        """True if experts' ranks gather the tokens of all replicas."""
        return self._dispatch is not None and self._dispatch.gathered

    def _isolated_seconds(self, program: Program, batches: int) -> list[Float]:
        seconds = task_seconds(program, self.machine, dispatch=self._dispatch)
        return [column.reshape(batches, -1).T for column in seconds]

    def _seconds_in_engine(self, program: Program, isolated: Sequence[Float]) -> list[Float]:
        """Seconds of tasks as the serving engine (vLLM, ...) runs them, from those alone."""
        step, hardware = self.step, self.machine.hardware
        serving_engine = self.execution.serving_engine
        return [
            engine_seconds(
                rank.tasks, seconds.T.ravel(), step.run, step.model, serving_engine, hardware
            )
            .reshape(-1, len(seconds))
            .T
            for rank, seconds in zip(program.classes, isolated, strict=True)
        ]

    def seconds(self) -> list[Float]:
        """Seconds of rows by rank with each batch of the grid: [rows, batches]."""
        return self._seconds_in_engine(self._timed, self._isolated)

    def seconds_with_routed(self, tokens: Int) -> list[Float]:
        """Seconds of batches of one token whose experts get `tokens` of each replica."""
        batches = [self._batch(1, n * self.step.run.dp) for n in tokens.tolist()]
        numbers = self._numbers_of_blocks(tokens, batches)
        ranks = [self._of_rank(rank, numbers) for rank in self.program.classes]
        program = _repeat(self.program, ranks)
        return self._seconds_in_engine(program, self._isolated_seconds(program, len(tokens)))

    def kernel_seconds(self, rank: int, row: int, batches: Sizes) -> Float:
        """Seconds of one isolated kernel with many batches."""
        rows = self.ranks[rank]
        tasks, shape = rows.tasks, rows.tasks.shapes[int(rows.tasks.shape[row])]
        row_only = rows._replace(
            numbers=rows.numbers[row : row + 1], slopes=rows.slopes[row : row + 1]
        )
        (numbers,) = self._numbers_at(row_only, batches)
        ones = np.ones(numbers.shape[1])
        extents = {name: size * ones for name, size in shape.sizes().items()}
        extents |= dict(zip((name for name, _ in shape.extents), numbers[_EXTENTS:], strict=False))
        dtype = tasks.dtypes[int(tasks.dtype[row])]
        kernel = Kernels(extents, numbers[0], numbers[1], dtype, ones > 1)
        return kernels_seconds(shape.kernel, kernel, self.machine.hardware.sustained())

    def depends(self, rank: int, row: int) -> frozenset[str]:
        """Sizes besides the number of tokens that a row's seconds depend on."""
        tasks, slopes = self.ranks[rank].tasks, self.ranks[rank].slopes
        shape = int(tasks.shape[row])
        by_bytes = shape < 0 or timing_of(tasks.shapes[shape].kernel) is Timing.MEMORY
        varies = np.any(slopes[row, : _EXTENTS if by_bytes else None] != 0, axis=0)
        return frozenset(name for name, is_used in zip(self.base, varies, strict=True) if is_used)

    def launches(self, run: Run) -> list[Float]:
        """Seconds of the host to launch each row in steps like `run`, by rank: [rows, batches]."""
        few, many = (
            host_work(
                self.program, run, self.step.model, self.execution, self.machine.hardware, tokens
            )
            for tokens in (1, MAX_GRAPH_TOKENS + 1)
        )
        if few is None or many is None:
            return [np.zeros((len(rank.tasks), 1)) for rank in self.program.classes]
        exceeds = self.grid > MAX_GRAPH_TOKENS
        return [
            np.where(exceeds, large.seconds[rows, None], small.seconds[rows, None])
            for rank, small, large in zip(self.program.classes, few, many, strict=True)
            for rows in (table_rows(rank.work),)
        ]


def unfilled(reach: Reach, block: int) -> float:
    """Mean cache positions of a request beyond its tokens."""
    return (block - 1) / (1 if reach.kind else 2)


def _serving_step(run: Run, model: ModelConfig) -> ServingStep:
    check(run, model)
    return ServingStep.of(run, model, {}, loads(run, model).sizes)


def _refuse_unknown(run: Run, model: ModelConfig, execution: Execution) -> None:
    """Raise UserError where steps have no table of times."""
    unknown = {
        "cp": run.cp > 1,
        "dcp": (run.dcp or 1) > 1,
        "kv_cache=contiguous": run.kv_cache != "paged",
        "source_length (an encoder)": run.source_length is not None,
        "moe_flex_dispatcher": execution.moe_flex_dispatcher,
    }
    if any(reach.compress > 1 for reach in model.reaches):
        raise UserError(
            f"serve: {model.name} attends to keys of several tokens, whose steps have no table of "
            "times; `stagewright simulate --mode prefill` and `--mode decode` time single steps"
        )
    for setting, is_set in unknown.items():
        if is_set:
            raise UserError(f"serve: steps with {setting} have no table of times; leave it out")


def _messages(tasks: Tasks) -> Bool:
    return (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)


# ---- one program of many batches -----------------------------------------------------------------


def _repeat(program: Program, numbers: Sequence[Float]) -> Program:
    """Repeat a program for many batches, each a microbatch."""
    classes = [
        replace(rank, work=rank.work.with_tasks(_repeat_tasks(rank.tasks, of_rank)))
        for rank, of_rank in zip(program.classes, numbers, strict=True)
    ]
    return replace(program, classes=tuple(classes))


def _repeat_tasks(tasks: Tasks, numbers: Float) -> Tasks:
    rows, count = len(tasks), int(numbers.shape[2])
    rounded: Int = np.ceil(numbers - 1e-6).astype(np.int64)  # as lowering rounds rows of experts
    equal = "kind", "name", "op", "phase", "stage", "layer", "collective", "dtype", "slot", "tag"
    columns: dict[str, Any] = {name: np.tile(getattr(tasks, name), count) for name in equal}
    for index, name in enumerate(("flops", "traffic", "comm_bytes")):
        columns[name] = rounded[:, index].T.ravel()
    columns["microbatch"] = np.repeat(np.arange(count, dtype=np.int32), rows)
    first = np.arange(count, dtype=np.int64) * rows
    graphs = {"data": (tasks.data_ptr, tasks.data), "order": (tasks.order_ptr, tasks.order)}
    for name, (edges, reads) in graphs.items():
        columns[name] = (np.tile(reads, count) + np.repeat(first, len(reads))).astype(np.int32)
        columns[f"{name}_ptr"] = np.append(0, np.cumsum(np.tile(np.diff(edges), count)))
    shapes = [*tasks.shapes]
    shape = np.repeat(tasks.shape[:, None], count, axis=1)
    repeated_shapes: dict[tuple[int, bytes], Int] = {}
    for row in np.flatnonzero(tasks.shape >= 0).tolist():
        template = tasks.shapes[int(tasks.shape[row])]
        if timing_of(template.kernel) not in _BY_EXTENTS:
            continue
        key = int(tasks.shape[row]), rounded[row].tobytes()
        if key not in repeated_shapes:
            repeated_shapes[key] = np.arange(len(shapes), len(shapes) + count)
            letters = [name for name, _ in template.extents]
            for sizes in rounded[row, _EXTENTS:].T.tolist():
                extents = tuple(zip(letters, sizes, strict=False))
                shapes.append(Shape(template.kernel, extents, template.joint, template.head))
        shape[row] = repeated_shapes[key]
    return replace(tasks, **columns, shape=shape.T.ravel(), shapes=tuple(shapes))
