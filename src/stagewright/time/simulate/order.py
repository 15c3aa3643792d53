"""Issue order: streams and dependencies of tasks, within and across units.

Streams are those of a CUDA training process: one for compute, one per NCCL communicator, one per
pipeline peer for sends, one for loads from the host (H2D) and one for stores to it (D2H). A task
starts once the previous task on its stream and all its dependencies have ended. A task without
dependencies, such as a weight all-gather or a posted receive, starts after the kernel issued before
it. A small kernel whose `slot` names a communicator runs on that communicator's stream.

A *unit* is issued without a break: a copy of an action, or several that take turns. The rules are
applied once per distinct unit. Loop-carried state: *registers* (last end per stream) and *carried*
deps beyond them. A rank whose rows are one unit carries none.

Tasks are issued in program order, with these exceptions:

- Weight all-gathers are prefetched, `Execution.prefetch` blocks ahead of their first reader.
- With `overlap_param_gather`, blocks wait for their updated parameters in the next step's forward
  pass, and once-per-step casts of weights are issued at the first forward of their block.
- Kernels that accumulate reduced gradients run on the communication stream (FSDP2's
  `foreach_reduce`), so that no kernel of the model waits for a reduce-scatter.
- A gradient that is reduced a second time (layer norms over tp, with sequence parallelism) is
  reduced after the backward pass (Megatron-LM's `finalize_model_grads`). Without data-parallel
  overlap, all once-per-step reductions are.
- With `overlap_moe_expert_parallel_comm`, two microbatches take turns (`ep_overlap`).

Outstanding transfers are limited to two groups, as frameworks do (`_limit_outstanding`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, is_any
from stagewright.program.along import along
from stagewright.program.columns import (
    BACKWARD_PHASE,
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    FORWARD_PHASE,
    LOAD,
    OPTIMIZER_PHASE,
    RECV,
    SEND,
    STORE,
    Program,
    Tasks,
)
from stagewright.program.rank_work import Actions
from stagewright.run.sections.execution import Execution
from stagewright.time.dispatch import exchanges_tokens
from stagewright.time.simulate import ep_overlap
from stagewright.time.simulate.units import CarriedDeps, Units, UnitSequence, units_of

COMPUTE_STREAM = 0
NO_STREAM = -1
"""Stream of a receive: it is posted, and occupies none."""

_ALL_GATHER = COLLECTIVES.index("all_gather")
_REDUCTIONS = (COLLECTIVES.index("reduce_scatter"), COLLECTIVES.index("all_reduce"))


class Edges(NamedTuple):
    """Dependencies: task `waiter[i]` starts after task `dep[i]` has ended."""

    waiter: Int
    dep: Int


_NO_EDGES = Edges(np.zeros(0, np.int64), np.zeros(0, np.int64))


class Register(IntEnum):
    """Times that a register can hold, in ticks."""

    LAUNCHED = 0
    """End of the host's launches so far, and of its waits."""
    KERNEL = 1
    """The last kernel of the compute stream."""
    BLOCKING = 2
    """The last kernel or blocking transfer."""
    STREAM = 3
    """The last task on a stream."""
    FREED = 4
    """The last transfer on a stream that frees memory."""
    AWAITED = 5
    """The last transfer of the group before, for which kernels wait."""
    OPENED = 6
    """`AWAITED` if a group of transfers is open as the unit begins, else `FREED`: an input only."""


RegisterKey = tuple[Register, int, int]
"""A register, the limit that it is for (`_limit_outstanding`), and the stream."""

LAUNCHED: RegisterKey = (Register.LAUNCHED, 0, 0)
KERNEL: RegisterKey = (Register.KERNEL, 0, 0)
BLOCKING: RegisterKey = (Register.BLOCKING, 0, 0)


class Limits(NamedTuple):
    """Groups of memory-freeing transfers that units leave open."""

    limit: int
    """Number of the limit, of `RegisterKey`."""
    open_at_end: Int
    """[units]: 1 if a transfer is issued after the last kernel of the unit, 0 if none is; -1: the
    unit has neither kernels nor such transfers."""


@dataclass(frozen=True, slots=True, eq=False)
class IssueRules:
    """Rows of distinct units in issue order, and their dependencies.

    Position `i` holds row `rows[i]` of the tasks. `edges` are between positions of one unit.
    """

    unit: Int
    """[positions], ascending."""
    member: Int
    """[positions]: copy of the unit that the row is of."""
    rows: Int
    stream: Int
    is_kernel: Bool
    """Kernels of the compute stream."""
    edges: Edges
    carried: CarriedDeps
    """Deps on rows of other units; `waiter` are positions."""
    follows_kernel: Bool
    """Mask: runs after all kernels of earlier units."""
    precedes_kernel: Bool
    """Mask: kernel, or awaited by a kernel of the unit."""
    awaited: Int
    """Streams and positions that their tasks wait for, as stream * len(rows) + position."""
    registers: tuple[RegisterKey, ...]
    reads: tuple[Int, Int]
    """Positions, and numbers of the registers that they wait for."""
    writes: tuple[Int, Int, Int]
    """Units, registers, and positions whose ends the registers hold after the unit."""
    moves: tuple[Int, Int, Int]
    """Units, registers, and registers whose values before the unit they hold after it."""
    limits: tuple[Limits, ...]
    position: Int
    """Position of each row of `Units`."""

    def register(self, key: RegisterKey) -> int:
        """Number of a register; -1: no unit uses it."""
        return self.registers.index(key) if key in self.registers else -1

    def implied(self, waiter: Int, dep: Int) -> Bool:
        """Mask of deps on earlier units that registers imply.

        The waiter follows a kernel, and a kernel has waited for the dep; or both are ordered by the
        waiter's stream.
        """
        stream = self.stream
        on_stream = stream[waiter] > COMPUTE_STREAM
        ordered_by_stream = (stream[waiter] == stream[dep]) | np.isin(
            stream[waiter] * len(stream) + dep, self.awaited
        )
        by_kernels = self.follows_kernel[waiter] & self.precedes_kernel[dep]
        return by_kernels | (on_stream & ordered_by_stream)


@dataclass(frozen=True, slots=True, eq=False)
class IssueOrder:
    """Tasks of a rank in issue order, with streams and dependencies.

    Issue index `i` holds row `rows[i]` of the rank's `Tasks`. It waits for the issue indices
    `deps[pointer[i]:pointer[i + 1]]` (CSR), all of them earlier; dependencies that follow from
    others are omitted. `stream[i]` is `COMPUTE_STREAM`, a positive number, or `NO_STREAM`.
    """

    rows: Int
    stream: Int
    pointer: Int
    deps: Int

    def __len__(self) -> int:
        return len(self.rows)


def ordered(rows: Int, stream: Int, is_kernel: Bool, waiter: Int, dep: Int) -> IssueOrder:
    """Issue order of rows, with dependencies that others imply left out."""
    waiter, dep = _without_implied(Edges(waiter, dep), stream, is_kernel)
    counts = np.bincount(waiter, minlength=len(rows))
    return IssueOrder(rows, stream, np.concatenate([[0], np.cumsum(counts)]), dep)


def num_streams(program: Program) -> int:
    """Number of streams: compute, one per communicator, one per peer, loads, stores."""
    return 1 + len(program.communicators) + len(program.peers) + 2


def issue_rules(program: Program, units: Units, execution: Execution) -> IssueRules:
    """Issue rules of distinct units.

    An execution that moves tasks to other actions (`crosses_actions`) needs units of whole ranks.
    """
    tasks = units.tasks
    on_comm_stream = np.zeros(len(tasks), dtype=bool)
    local, casts = Edges(*units.edges), _NO_EDGES
    frees_memory: tuple[Bool, ...] = ()
    if execution.streams != "one":
        on_comm_stream = _accumulates_grads(tasks, Edges(*tasks.reads))
        reductions = _microbatch_reductions(program, tasks, on_comm_stream)
        frees_memory = reductions, tasks.kind == STORE
        if execution.overlap_param_gather and _gathers_params(tasks).any():
            local, casts = _gather_params_before_forward(tasks, local)
            on_comm_stream = _accumulates_grads(tasks, local)
    exchanges = None
    if execution.overlap_moe_expert_parallel_comm:
        exchanges = exchanges_tokens(program, tasks)
    order = _issue_positions(units, local, casts, on_comm_stream[units.row], exchanges, execution)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    rows, unit = units.row[order], units.unit[order]
    size = len(rows)
    local = Edges(position[local.waiter], position[local.dep])
    carried = units.carried._replace(waiter=position[units.carried.waiter])
    on_comm_stream = on_comm_stream[rows]

    kind, slot = tasks.kind[rows], tasks.slot[rows].astype(np.int64)
    stream = _streams(program, kind, slot, execution)
    is_kernel = (stream == COMPUTE_STREAM) & ~on_comm_stream
    if on_comm_stream.any():
        stream = _move_to_stream_of_collective(stream, on_comm_stream, local, rows, carried)
    has_input = np.zeros(size, dtype=bool)
    has_input[local.waiter] = True
    has_input[carried.waiter] = True
    # A load from the host starts when it is issued, although it depends on its store.
    starts_when_issued = np.flatnonzero((~has_input | (kind == LOAD)) & (kind != COMPUTE))

    state = _RegisterUse(unit, len(units.actions))
    blocking = _blocking(program, tasks, execution)[rows]
    state.chain(np.flatnonzero(is_kernel), KERNEL)
    if blocking.any():
        state.chain(np.flatnonzero(is_kernel | blocking), BLOCKING)
    for number in range(1, int(stream.max(initial=0)) + 1):
        state.chain(np.flatnonzero(stream == number), (Register.STREAM, 0, number))
    previous = _previous_kernel(is_kernel)[starts_when_issued]
    inside = previous >= state.begin[unit[starts_when_issued]]
    state.edges.append(Edges(starts_when_issued[inside], previous[inside]))
    state.read(starts_when_issued[~inside], KERNEL)
    limits = tuple(
        _limit_outstanding(limit, mask[rows], is_kernel, starts_when_issued, stream, state)
        for limit, mask in enumerate(frees_memory)
        if mask[rows].any()
    )
    follows_kernel, precedes_kernel = is_kernel.copy(), is_kernel.copy()
    follows_kernel[starts_when_issued] = True
    follows_kernel[local.waiter[is_kernel[local.dep]]] = True
    precedes_kernel[local.dep[is_kernel[local.waiter]]] = True
    awaited = np.unique(stream[local.waiter] * size + local.dep)
    waiter, dep = (np.concatenate(column) for column in zip(local, *state.edges, strict=True))
    return IssueRules(
        unit, units.member[order], rows, stream, is_kernel,
        _without_implied(Edges(waiter, dep), stream, is_kernel), carried, follows_kernel,
        precedes_kernel, awaited, tuple(state.registers), *state.columns(), limits, position,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class IssueTable:
    """Issue rules of classes that share actions, and the units that each class issues."""

    actions: Actions
    classes: tuple[int, ...]
    units: Units
    sequences: tuple[UnitSequence, ...]
    """By class of `classes`."""
    rules: IssueRules


def tables_of(program: Program, execution: Execution) -> list[IssueTable]:
    """Issue tables of all classes of a program; classes that share actions share a table."""
    sharing: dict[int, list[int]] = {}
    for class_id, rank_class in enumerate(program.classes):
        sharing.setdefault(id(rank_class.work.actions.begin), []).append(class_id)
    tables: list[IssueTable] = []
    for classes in sharing.values():
        works = [program.classes[class_id].work for class_id in classes]
        actions = works[0].actions
        deferred = deferred_past_backward(actions.tasks, execution)
        units, sequences = units_of(
            actions, [work.order for work in works], deferred,
            in_turns=execution.overlap_moe_expert_parallel_comm and execution.streams != "one",
        )  # fmt: skip
        rules = issue_rules(program, units, execution)
        tables.append(IssueTable(actions, tuple(classes), units, tuple(sequences), rules))
    return tables


def crosses_actions(tasks: Tasks, execution: Execution) -> bool:
    """True if gathers move to other actions: a rank's rows are then one unit."""
    if execution.streams == "one":
        return False
    if execution.overlap_param_gather and _gathers_params(tasks).any():
        return True
    gathers = _gathers(tasks) & (np.diff(tasks.data_ptr) == 0)
    return execution.prefetch != 1 and bool(gathers.any())


# ---- order ---------------------------------------------------------------------------------------


def _issue_positions(
    units: Units, local: Edges, casts: Edges, on_comm_stream: Bool, exchanges: Bool | None,
    execution: Execution,
) -> Int:  # fmt: skip
    """Rows of units in issue order, by sort keys that start as the program order.

    `casts`: kernels that move to just before another kernel. `exchanges`: tasks that exchange
    experts' tokens, where two microbatches take turns.
    """
    size = len(units.row)
    if execution.streams == "one":
        return np.arange(size)
    tasks, row = units.tasks, units.row
    sort_key = np.arange(size, dtype=np.float64)
    if exchanges is not None:
        turns = ep_overlap.order(tasks, row, units.unit, units.member, exchanges)
        sort_key[turns] = np.arange(size)
    sort_key[casts.waiter] = sort_key[casts.dep] - 0.25
    has_input = np.zeros(size, dtype=bool)
    has_input[local.waiter] = True
    has_input[units.carried.waiter] = True
    gathers = _gathers(tasks)[row] & ~has_input
    if execution.prefetch == 1:
        # The program has all other gathers one block ahead already.
        gathers &= tasks.phase[row] == OPTIMIZER_PHASE
    if gathers.any():
        is_kernel = (tasks.kind[row] == COMPUTE) & ~on_comm_stream
        is_kernel[casts.waiter] = False
        _prefetch(units, local, is_kernel, gathers, execution.prefetch, sort_key)
    deferred = units.deferred[row]
    optimizer = np.flatnonzero(tasks.phase[row] == OPTIMIZER_PHASE)
    begin = np.searchsorted(units.unit, np.arange(int(units.unit.max(initial=0)) + 2))
    for u in np.unique(units.unit[deferred]).tolist():
        first = optimizer[np.searchsorted(optimizer, begin[u]) :][:1]
        before = sort_key[first[0]] if len(first) and first[0] < begin[u + 1] else begin[u + 1]
        sort_key[deferred & (units.unit == u)] = before - 0.5
    return np.argsort(sort_key, kind="stable")


def _prefetch(
    units: Units, local: Edges, is_kernel: Bool, gathers: Bool, depth: int, sort_key: Float
) -> None:
    """Move all-gathers `depth` blocks ahead of their first reader, within its action.

    Writes `sort_key`.
    """
    size = len(units.row)
    kernels = np.flatnonzero(is_kernel)
    starts_action, starts_block = _action_and_block_starts(units.tasks, units.row[kernels])
    first_kernel_of_block = kernels[starts_block]
    block = np.cumsum(starts_block) - 1  # of each kernel
    first_block_of_action = np.maximum.accumulate(np.where(starts_action, block, 0))

    first_reader = np.full(size, size, dtype=np.int64)
    np.minimum.at(first_reader, local.dep, np.where(is_kernel[local.waiter], local.waiter, size))
    moved = np.flatnonzero(gathers & (first_reader < size))
    reader = np.searchsorted(kernels, first_reader[moved])
    target_block = np.maximum(block[reader] - depth, first_block_of_action[reader])
    sort_key[moved] = sort_key[first_kernel_of_block[target_block]] - 0.5


def deferred_past_backward(tasks: Tasks, execution: Execution) -> Bool:
    """Mask of once-per-step backward tasks that are issued just before the optimizer.

    All of them without data-parallel overlap; otherwise second reductions, of gradients that are
    reduced once already, and what follows them.
    """
    size = len(tasks)
    once_per_step = (tasks.microbatch < 0) & (tasks.phase == BACKWARD_PHASE)
    if execution.streams == "one":
        return np.zeros(size, dtype=bool)
    if "dp" in execution.no_overlap:
        return once_per_step
    reads = Edges(*tasks.reads)
    once_reduced = _reduces_once_per_step(tasks) | _accumulates_grads(tasks, reads)
    of_microbatch = _reduces(tasks) & (tasks.microbatch >= 0)
    once_reduced |= of_microbatch & ~_read_before_optimizer(tasks, reads, ignored=once_reduced)
    deferred = once_per_step & _has_dependency_in(once_reduced, reads, size)
    while True:
        more = deferred | (once_per_step & _has_dependency_in(deferred, reads, size))
        if np.array_equal(more, deferred):
            return deferred
        deferred = more


def _gathers(tasks: Tasks) -> Bool:
    """Mask of all-gathers."""
    return (tasks.kind == COLLECTIVE) & (tasks.collective == _ALL_GATHER)


def _gathers_params(tasks: Tasks) -> Bool:
    """Mask of all-gathers of updated parameters."""
    return _gathers(tasks) & (tasks.phase == OPTIMIZER_PHASE)


def _gather_params_before_forward(tasks: Tasks, reads: Edges) -> tuple[Edges, Edges]:
    """Move parameter all-gathers from the optimizer to the forward pass (overlap_param_gather).

    They no longer wait for the optimizer: in a steady state they gather what the previous step
    has updated. The first forward kernel of a block waits for the block's all-gather. Kernels and
    all-gathers visit the blocks of a stage in the same order, so one pass matches them.

    Casts of weights, once per step with fp8, wait for the all-gathers of their block, too. They
    move to its first forward (Transformer Engine's `is_first_microbatch`). Returns dependencies,
    and each cast with the kernel that it precedes.
    """
    forward = (tasks.kind == COMPUTE) & (tasks.phase == FORWARD_PHASE)
    kernels = np.flatnonzero(forward & (tasks.microbatch >= 0))
    _, starts_block = _action_and_block_starts(tasks, kernels)
    block_starts: dict[int, list[int]] = {}  # by stage: block starts of its first forward action
    for row in kernels[starts_block].tolist():
        starts = block_starts.setdefault(int(tasks.stage[row]), [])
        if not starts or tasks.microbatch[starts[0]] == tasks.microbatch[row]:
            starts.append(row)
    casts = _casts_before(kernels, starts_block, forward & (tasks.microbatch < 0), reads)

    gathers = _gathers_params(tasks)
    moved: list[tuple[int, int]] = []  # (kernel, all-gather)
    for stage, starts in block_starts.items():
        block = 0
        for gather in np.flatnonzero(gathers & (tasks.stage == stage)).tolist():
            same_layer = tasks.layer[starts[block:]] == tasks.layer[gather]
            if same_layer.any():
                block += int(same_layer.argmax())
                readers = [starts[block], *casts.waiter[casts.dep == starts[block]].tolist()]
                moved += [(reader, gather) for reader in readers]
    waiters, moved_gathers = np.array(moved, dtype=np.int64).reshape(-1, 2).T
    unmoved = ~np.isin(reads.waiter, moved_gathers)
    return Edges(
        np.concatenate([reads.waiter[unmoved], waiters]),
        np.concatenate([reads.dep[unmoved], moved_gathers]),
    ), casts


def _casts_before(kernels: Int, starts_block: Bool, is_cast: Bool, reads: Edges) -> Edges:
    """Each cast, and the first of the kernels of the block that reads it first."""
    first_reader = np.full(len(is_cast), len(is_cast), dtype=np.int64)
    by_kernel = np.isin(reads.waiter, kernels)
    np.minimum.at(first_reader, reads.dep[by_kernel], reads.waiter[by_kernel])
    casts = np.flatnonzero(is_cast & (first_reader < len(is_cast)))
    starts = kernels[starts_block]
    block = np.searchsorted(starts, first_reader[casts], side="right") - 1
    return Edges(casts, starts[block])


def _action_and_block_starts(tasks: Tasks, kernels: Int) -> tuple[Bool, Bool]:
    """Masks over kernels: first of an action, and first of a block within one."""
    backward = tasks.phase[kernels] != FORWARD_PHASE
    action = np.stack([tasks.stage[kernels], tasks.microbatch[kernels], backward.astype(np.int32)])
    starts_action = np.append(True, (np.diff(action, axis=1) != 0).any(axis=0))
    return starts_action, starts_action | np.append(True, np.diff(tasks.layer[kernels]) != 0)


# ---- gradients -----------------------------------------------------------------------------------


def _microbatch_reductions(program: Program, tasks: Tasks, accumulates_grads: Bool) -> Bool:
    """Mask of per-microbatch gradient reductions over dp, or over cp where dp is 1.

    Each frees the unreduced gradient when it ends. Reductions over cp of key and value gradients
    are not among them: kernels of the backward pass read their results.
    """
    reductions = _reduces(tasks) & (tasks.microbatch >= 0)
    if not reductions.any():
        return reductions
    axes = along(program, tasks)
    over_dp, over_cp = (
        reductions & axes.of_tasks([degree == axis for degree in axes.degrees])
        for axis in ("dp", "cp")
    )
    if over_cp.any():
        reads = Edges(*tasks.reads)
        over_cp &= ~_read_before_optimizer(tasks, reads, ignored=accumulates_grads)
    return over_dp | over_cp


def _accumulates_grads(tasks: Tasks, reads: Edges) -> Bool:
    """Mask of kernels that only add reduced gradients to each other.

    Greatest fixed point: kernels of the backward pass that read only reductions or each other,
    and that nothing but each other, second reductions and the optimizer reads.
    """
    size = len(tasks)
    reductions, second = _reduces(tasks), _reduces_once_per_step(tasks)
    accumulates = (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COMPUTE)
    accumulates &= np.diff(tasks.data_ptr) > 0
    while True:
        reads_others = _has_dependency_in(~(reductions | accumulates), reads, size)
        is_read = _read_before_optimizer(tasks, reads, ignored=accumulates | second)
        fewer = accumulates & ~reads_others & ~is_read
        if np.array_equal(fewer, accumulates):
            return accumulates
        accumulates = fewer


def _reduces(tasks: Tasks) -> Bool:
    """Mask of reduce-scatters and all-reduces of the backward pass."""
    collective = (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COLLECTIVE)
    return collective & is_any(tasks.collective, _REDUCTIONS)


def _reduces_once_per_step(tasks: Tasks) -> Bool:
    """Mask of collectives of gradients after their last microbatch."""
    return (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COLLECTIVE) & (tasks.microbatch < 0)


def _read_before_optimizer(tasks: Tasks, reads: Edges, ignored: Bool) -> Bool:
    """Mask of tasks whose result is read outside the optimizer, by a task not `ignored`."""
    counts = ~ignored[reads.waiter] & (tasks.phase[reads.waiter] != OPTIMIZER_PHASE)
    is_read = np.zeros(len(tasks), dtype=bool)
    is_read[reads.dep[counts]] = True
    return is_read


def _has_dependency_in(mask: Bool, reads: Edges, size: int) -> Bool:
    """Mask of tasks with at least one dependency in `mask`."""
    result = np.zeros(size, dtype=bool)
    result[reads.waiter[mask[reads.dep]]] = True
    return result


# ---- streams -------------------------------------------------------------------------------------


def _streams(program: Program, kind: NDArray[np.uint8], slot: Int, execution: Execution) -> Int:
    """Stream of each task. With `streams="one"`, all communication shares stream 1."""
    is_compute = kind == COMPUTE
    if execution.streams == "one":
        stream = np.ones(len(kind), dtype=np.int64)
    else:
        stream = 1 + slot + np.where(kind == SEND, len(program.communicators), 0)
        stream[kind == LOAD] = num_streams(program) - 2
        stream[kind == STORE] = num_streams(program) - 1
        is_compute &= slot < 0
    stream[is_compute] = COMPUTE_STREAM
    stream[kind == RECV] = NO_STREAM
    return stream


def _move_to_stream_of_collective(
    stream: Int, moved: Bool, local: Edges, rows: Int, carried: CarriedDeps
) -> Int:
    """Streams with the `moved` kernels on the stream of the first collective that they read.

    Accumulations of accumulated gradients follow the first that they read.
    """
    stream = stream.copy()
    example = np.full(int(rows.max(initial=0)) + 1, -1)
    example[rows] = np.arange(len(rows))
    elsewhere = example[np.where(carried.row < len(example), carried.row, 0)]
    waiter = np.concatenate([carried.waiter, local.waiter])
    dep = np.concatenate([elsewhere, local.dep])
    # Deps on other units come before those of the same unit, which are in program order.
    rank = np.concatenate([np.full(len(elsewhere), -1), rows[local.dep]])
    edge = np.flatnonzero(moved[waiter] & (dep >= 0))
    edge = edge[np.lexsort((rank[edge], waiter[edge]))]
    edge = edge[np.diff(waiter[edge], prepend=-1) > 0]
    for target, source in zip(waiter[edge].tolist(), dep[edge].tolist(), strict=True):
        stream[target] = stream[source]
    return stream


def _blocking(program: Program, tasks: Tasks, execution: Execution) -> Bool:
    """Mask of communication that blocks the compute stream (`no_overlap`)."""
    if not execution.no_overlap or execution.streams == "one":
        return np.zeros(len(tasks), dtype=bool)
    axes = along(program, tasks)
    return axes.of_tasks([degree in execution.no_overlap for degree in axes.degrees])


def _previous_kernel(is_kernel: Bool) -> Int:
    """Position of the last kernel before each position, -1 if there is none."""
    latest = np.maximum.accumulate(np.where(is_kernel, np.arange(len(is_kernel)), -1))
    return np.concatenate([[-1], latest[:-1]]) if len(is_kernel) else latest


# ---- dependencies --------------------------------------------------------------------------------


class _RegisterUse:
    """Edges within units, and registers that units read, write and move."""

    def __init__(self, unit: Int, count: int) -> None:
        """`unit` by position; `count` units."""
        self.unit, self.count = unit, count
        self.begin = np.searchsorted(unit, np.arange(count + 1))
        self.registers: dict[RegisterKey, int] = {LAUNCHED: 0, KERNEL: 1}
        self.edges: list[Edges] = []
        self._reads: list[Int] = []
        self._writes: list[Int] = []
        self._moves: list[Int] = []

    def register(self, key: RegisterKey) -> int:
        """The number of a register."""
        return self.registers.setdefault(key, len(self.registers))

    def read(self, positions: Int, key: RegisterKey) -> None:
        """Make positions wait for the value of a register before their unit."""
        number = np.full(len(positions), self.register(key))
        self._reads.append(np.stack([positions, number]))

    def write(self, unit: int, key: RegisterKey, position: int) -> None:
        """Let a unit write the end of a position to a register."""
        self._writes.append(np.array([[unit], [self.register(key)], [position]]))

    def move(self, unit: int, key: RegisterKey, source: RegisterKey) -> None:
        """Let a unit write the value of another register before it to a register."""
        numbers = [[unit], [self.register(key)], [self.register(source)]]
        self._moves.append(np.array(numbers))

    def chain(self, positions: Int, key: RegisterKey) -> None:
        """Run positions one after another; the register holds the last of each unit."""
        if not len(positions):
            return
        unit = self.unit[positions]
        first = np.append(True, np.diff(unit) != 0)
        later = np.flatnonzero(~first)
        self.edges.append(Edges(positions[later], positions[later - 1]))
        self.read(positions[first], key)
        last = np.append(first[1:], True)
        number = np.full(int(last.sum()), self.register(key))
        self._writes.append(np.stack([unit[last], number, positions[last]]))

    def columns(self) -> tuple[tuple[Int, Int], tuple[Int, Int, Int], tuple[Int, Int, Int]]:
        """Reads, writes and moves, as columns."""
        reads = np.concatenate([np.zeros((2, 0), np.int64), *self._reads], axis=1)
        writes = np.concatenate([np.zeros((3, 0), np.int64), *self._writes], axis=1)
        moves = np.concatenate([np.zeros((3, 0), np.int64), *self._moves], axis=1)
        return (reads[0], reads[1]), (writes[0], writes[1], writes[2]), (
            moves[0], moves[1], moves[2]
        )  # fmt: skip


def _limit_outstanding(
    limit: int, frees_memory: Bool, is_kernel: Bool, starts_when_issued: Int, stream: Int,
    state: _RegisterUse,
) -> Limits:  # fmt: skip
    """Backpressure: at most two groups of memory-freeing transfers are outstanding.

    A group is a run of such transfers without a kernel between them. Once a group is issued, the
    next kernel waits for all earlier groups, so that buffers cannot pile up behind a slow network:

    - gradient reductions: FSDP2's `post_backward` makes kernels wait for the event of
      `reduce_scatter_state` before each `foreach_reduce` (torch 2.13, `_fsdp_param_group.py`).
      DeepSpeed's `average_tensor` waits for its reduction stream, since it fills two buckets in
      turn (`stage_1_and_2.py`). Megatron-FSDP calls `wait_for_previous_grad_reduce` before
      `mark_bucket_ready` (`param_and_grad_buffer.py`);
    - activation offload: Transformer Engine's `synchronize_on_group_commit_forward` makes kernels
      wait for `d2h_stream` before it stores another group (`cpu_offload.py`).

    Tasks in `starts_when_issued` inherit the wait of the kernel that they follow. The units before
    decide whether the first transfer of a unit opens a group: `Register.OPENED`.
    """
    streams = tuple(sorted({*stream[frees_memory].tolist()}))
    for s in streams:
        state.register((Register.FREED, limit, s))
        state.register((Register.AWAITED, limit, s))
    waits = is_kernel.copy()
    waits[starts_when_issued] = True
    marks = np.flatnonzero(frees_memory | waits)
    ends = np.searchsorted(marks, state.begin)
    open_at_end = np.full(state.count, -1)
    edges: list[tuple[int, int]] = []
    for u in range(state.count):
        freed: dict[int, RegisterKey | int] = {s: (Register.FREED, limit, s) for s in streams}
        awaited: dict[int, RegisterKey | int] = {s: (Register.AWAITED, limit, s) for s in streams}
        fresh = True  # kernels do not wait for `awaited` yet
        opens = True  # the next transfer opens a group
        for position in marks[ends[u] : ends[u + 1]].tolist():
            if frees_memory[position]:
                if opens:
                    first = open_at_end[u] < 0
                    awaited = {
                        s: (Register.OPENED, limit, s) if first else freed[s] for s in streams
                    }
                    opens, fresh = False, True
                freed[int(stream[position])] = position
                open_at_end[u] = 1
                continue
            if is_kernel[position]:
                opens = True
                open_at_end[u] = 0
                if not fresh:
                    continue
                fresh = False
            for source in awaited.values():
                if isinstance(source, int):
                    edges.append((position, source))
                else:
                    state.read(np.array([position]), source)
        for s in streams:
            for register, source in ((Register.FREED, freed[s]), (Register.AWAITED, awaited[s])):
                key = (register, limit, s)
                if isinstance(source, int):
                    state.write(u, key, source)
                elif source != key:
                    state.move(u, key, source)
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    state.edges.append(Edges(pairs[:, 0], pairs[:, 1]))
    return Limits(limit, open_at_end)


def _without_implied(edges: Edges, stream: Int, is_kernel: Bool) -> Edges:
    """Transitive reduction with respect to the compute stream; distinct edges in order.

    Kernels run in order. A task that waits for kernel k therefore waits for every kernel before
    k, and for everything that those waited for.
    """
    waiter, dep = edges
    size = len(stream)
    positions = np.arange(size)
    first_kernel_after = np.full(size, size, dtype=np.int64)  # first that waits for a position
    np.minimum.at(first_kernel_after, dep, np.where(is_kernel[waiter], waiter, size))
    first_kernel_after[is_kernel] = positions[is_kernel]
    last_kernel_before = np.full(size, -1, dtype=np.int64)  # last that a position waits for
    np.maximum.at(last_kernel_before, waiter, np.where(is_kernel[dep], dep, -1))
    for number in range(1, int(stream.max(initial=0)) + 1):
        on_stream = np.flatnonzero(stream == number)
        last_kernel_before[on_stream] = np.maximum.accumulate(last_kernel_before[on_stream])
    np.maximum.at(last_kernel_before, waiter, last_kernel_before[dep])
    needed = first_kernel_after[dep] > last_kernel_before[waiter]
    needed |= dep == last_kernel_before[waiter]
    keys = np.sort(waiter[needed] * size + dep[needed])
    keys = keys[np.diff(keys, prepend=-1) > 0]
    waiter = keys // max(size, 1)
    return Edges(waiter, keys - waiter * size)
