"""Issue rules: streams and dependencies of tasks, within and across units.

Streams are those of a CUDA process: one for compute, one per NCCL communicator, one per peer for
sends, one for loads from the host (H2D) and one for stores to it (D2H). Ranks that exchange both
weights or gradients and activations, as those of cp do where dp is 1, have a communicator for each
(`get_data_parallel_group(with_context_parallel=True)` of Megatron-LM, the mesh `dp_shard_cp` of
torchtitan). A task starts once the
previous task on its stream and all its dependencies have ended. A task without dependencies, such
as a weight all-gather or a posted receive, starts after the kernel issued before it. A small kernel
whose `slot` names a communicator runs on that communicator's stream. Kernels that accumulate
reduced gradients run on the communication stream (FSDP2's `foreach_reduce`), so that no kernel of
the model waits for a reduce-scatter.

The rules are applied once per distinct unit. A unit reads earlier units' times from *registers*,
such as the last end on a stream; a dependency that no register covers is *carried*. One unit per
rank needs neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.program.columns import (
    COLLECTIVE,
    COMPUTE,
    LOAD,
    RECV,
    SEND,
    STORE,
    Actions,
    Program,
    Tasks,
)
from stagewright.program.comm_axes import comm_axes
from stagewright.run.sections.execution import Execution
from stagewright.time.dispatch import exchanges_tokens
from stagewright.time.simulate.order import (
    NO_EDGES,
    Edges,
    accumulates_grads,
    deferred_past_backward,
    gather_params_before_forward,
    gathers_params,
    gathers_weights,
    issue_positions,
    microbatch_reductions,
    reduces_gradients,
)
from stagewright.time.simulate.units import CarriedDeps, Units, UnitSequence, units_of

COMPUTE_STREAM = 0
NO_STREAM = -1
"""Stream of a receive: it is posted, and occupies none."""


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
    """Time that kernels wait for once the next transfer is issued.

    That of `FREED`, or of `AWAITED` if no kernel ran since.
    """


RegisterKey = tuple[Register, int, int]
"""(register, index of the backpressure limit or 0, stream); limits: `_limit_outstanding`."""

LAUNCHED: RegisterKey = (Register.LAUNCHED, 0, 0)
KERNEL: RegisterKey = (Register.KERNEL, 0, 0)
BLOCKING: RegisterKey = (Register.BLOCKING, 0, 0)


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
    reads: Int
    """[2, reads]: positions, and numbers of the registers that they wait for."""
    writes: Int
    """[3, writes]: units, registers, and positions whose ends the registers hold after the unit."""
    moves: Int
    """[3, moves]: units, registers, and those whose values before the unit they take over."""
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
        deferred = deferred_past_backward(program, actions.tasks, execution)
        units, sequences = units_of(
            actions, [work.order for work in works], deferred,
            in_turns=execution.overlap_moe_expert_parallel_comm and execution.streams != "one",
        )  # fmt: skip
        rules = issue_rules(program, units, execution)
        tables.append(IssueTable(actions, tuple(classes), units, tuple(sequences), rules))
    return tables


def num_streams(program: Program) -> int:
    """Number of streams: compute, one per communicator and peer, loads, stores, and again
    one per communicator, for weights and gradients.
    """
    return _first_of_weights(program) + len(program.communicators)


def _first_of_weights(program: Program) -> int:
    return 1 + len(program.communicators) + len(program.peers) + 2


def issue_rules(program: Program, units: Units, execution: Execution) -> IssueRules:
    """Issue rules of distinct units.

    An execution that moves tasks to other actions (`crosses_actions`) needs units of whole ranks.
    """
    tasks = units.tasks
    on_comm_stream = np.zeros(len(tasks), dtype=bool)
    local, casts = Edges(*units.edges), NO_EDGES
    frees_memory: tuple[Bool, ...] = ()
    if execution.streams != "one":
        on_comm_stream = accumulates_grads(tasks, Edges(*tasks.reads))
        reductions = microbatch_reductions(program, tasks, on_comm_stream)
        frees_memory = reductions, tasks.kind == STORE
        if execution.overlap_param_gather and gathers_params(tasks).any():
            local, casts = gather_params_before_forward(tasks, local)
            on_comm_stream = accumulates_grads(tasks, local)
    token_exchanges = None
    if execution.overlap_moe_expert_parallel_comm:
        token_exchanges = exchanges_tokens(program, tasks)
    order = issue_positions(
        units, local, casts, on_comm_stream[units.row], token_exchanges, execution
    )
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    rows, unit = units.row[order], units.unit[order]
    size = len(rows)
    local = Edges(position[local.waiter], position[local.dep])
    carried = units.carried._replace(waiter=position[units.carried.waiter])
    on_comm_stream = on_comm_stream[rows]

    kind, slot = tasks.kind[rows], tasks.slot[rows].astype(np.int64)
    stream = _streams(program, kind, slot, of_weights(program, tasks)[rows], execution)
    is_kernel = (stream == COMPUTE_STREAM) & ~on_comm_stream
    if on_comm_stream.any():
        stream = _move_to_stream_of_collective(stream, on_comm_stream, local, rows, carried)
    has_input = np.zeros(size, dtype=bool)
    has_input[local.waiter] = True
    has_input[carried.waiter] = True
    # A load from the host starts when it is issued, although it depends on its store.
    starts_when_issued = np.flatnonzero((~has_input | (kind == LOAD)) & (kind != COMPUTE))

    registers = _Registers(unit, len(units.actions))
    blocking = _blocking(program, tasks, execution)[rows]
    registers.chain(np.flatnonzero(is_kernel), KERNEL)
    if blocking.any():
        registers.chain(np.flatnonzero(is_kernel | blocking), BLOCKING)
    for number in range(1, int(stream.max(initial=0)) + 1):
        registers.chain(np.flatnonzero(stream == number), (Register.STREAM, 0, number))
    previous = _previous_kernel(is_kernel)[starts_when_issued]
    inside = previous >= registers.begin[unit[starts_when_issued]]
    registers.edges.append(Edges(starts_when_issued[inside], previous[inside]))
    registers.read(starts_when_issued[~inside].tolist(), KERNEL)
    for limit, mask in enumerate(frees_memory):
        if mask[rows].any():
            _limit_outstanding(limit, mask[rows], is_kernel, starts_when_issued, stream, registers)
    follows_kernel, precedes_kernel = is_kernel.copy(), is_kernel.copy()
    follows_kernel[starts_when_issued] = True
    follows_kernel[local.waiter[is_kernel[local.dep]]] = True
    precedes_kernel[local.dep[is_kernel[local.waiter]]] = True
    awaited = np.unique(stream[local.waiter] * size + local.dep)
    waiter, dep = (np.concatenate(column) for column in zip(local, *registers.edges, strict=True))
    return IssueRules(
        unit, units.member[order], rows, stream, is_kernel,
        without_implied(Edges(waiter, dep), stream, is_kernel), carried, follows_kernel,
        precedes_kernel, awaited, tuple(registers.numbers), _columns(registers.reads, 2),
        _columns(registers.writes, 3), _columns(registers.moves, 3), position,
    )  # fmt: skip


# ---- streams -------------------------------------------------------------------------------------


def of_weights(program: Program, tasks: Tasks) -> Bool:
    """Mask of collectives of weights and gradients whose communicator moves activations, too."""
    moves_weights = reduces_gradients(program, tasks) | gathers_weights(tasks)
    others = (tasks.kind == COLLECTIVE) & ~moves_weights
    return moves_weights & np.isin(tasks.slot, tasks.slot[others])


def _streams(
    program: Program, kind: NDArray[np.uint8], slot: Int, weights: Bool, execution: Execution
) -> Int:
    """Stream of each task. With `streams="one"`, all communication shares stream 1."""
    is_compute = kind == COMPUTE
    if execution.streams == "one":
        stream = np.ones(len(kind), dtype=np.int64)
    else:
        stream = 1 + slot + np.where(kind == SEND, len(program.communicators), 0)
        stream[kind == LOAD] = _first_of_weights(program) - 2
        stream[kind == STORE] = _first_of_weights(program) - 1
        stream[weights] = _first_of_weights(program) + slot[weights]
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
    axes = comm_axes(program, tasks)
    return axes.of_tasks([degree in execution.no_overlap for degree in axes.degrees])


def _previous_kernel(is_kernel: Bool) -> Int:
    """Position of the last kernel before each position, -1 if there is none."""
    latest = np.maximum.accumulate(np.where(is_kernel, np.arange(len(is_kernel)), -1))
    return np.concatenate([[-1], latest[:-1]]) if len(is_kernel) else latest


# ---- dependencies --------------------------------------------------------------------------------


class _Registers:
    """Registers that units read, write and move, and edges within units."""

    def __init__(self, unit: Int, num_units: int) -> None:
        """`unit` by position."""
        self.unit, self.begin = unit, np.searchsorted(unit, np.arange(num_units + 1))
        self.numbers: dict[RegisterKey, int] = {LAUNCHED: 0, KERNEL: 1}
        self.edges: list[Edges] = []
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int, int]] = []
        self.moves: list[tuple[int, int, int]] = []

    def number(self, key: RegisterKey) -> int:
        """Number of a register."""
        return self.numbers.setdefault(key, len(self.numbers))

    def read(self, positions: Iterable[int], key: RegisterKey) -> None:
        """Make positions wait for the value of a register before their unit."""
        number = self.number(key)
        self.reads += [(position, number) for position in positions]

    def chain(self, positions: Int, key: RegisterKey) -> None:
        """Run positions one after another; the register holds the last of each unit."""
        if not len(positions):
            return
        unit = self.unit[positions]
        is_first = np.append(True, np.diff(unit) != 0)
        later = np.flatnonzero(~is_first)
        self.edges.append(Edges(positions[later], positions[later - 1]))
        self.read(positions[is_first].tolist(), key)
        is_last = np.append(is_first[1:], True)
        number = self.number(key)
        last = zip(unit[is_last].tolist(), positions[is_last].tolist(), strict=True)
        self.writes += [(u, number, position) for u, position in last]


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Int:
    """[width, rows]"""
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def _limit_outstanding(
    limit: int, frees_memory: Bool, is_kernel: Bool, starts_when_issued: Int, stream: Int,
    registers: _Registers,
) -> None:  # fmt: skip
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
    streams = sorted({*stream[frees_memory].tolist()})
    waits = is_kernel.copy()
    waits[starts_when_issued] = True
    marks = np.flatnonzero(frees_memory | waits)
    begin = np.searchsorted(marks, registers.begin)
    edges: list[tuple[int, int]] = []
    for u, (a, b) in enumerate(itertools.pairwise(begin.tolist())):
        # By stream, the register or the position that holds a time.
        freed, awaited, opened = (
            dict[int, RegisterKey | int]({s: (register, limit, s) for s in streams})
            for register in (Register.FREED, Register.AWAITED, Register.OPENED)
        )
        fresh = True  # kernels do not wait for `awaited` yet
        for position in marks[a:b].tolist():
            if frees_memory[position]:
                if awaited is not opened:
                    awaited, fresh = opened, True
                freed[int(stream[position])] = position
                continue
            if is_kernel[position]:
                opened = dict(freed)
                if not fresh:
                    continue
                fresh = False
            for source in awaited.values():
                if isinstance(source, int):
                    edges.append((position, source))
                else:
                    registers.read([position], source)
        held = (Register.FREED, freed), (Register.AWAITED, awaited), (Register.OPENED, opened)
        for register, sources in held:
            for s, source in sources.items():
                number = registers.number((register, limit, s))
                if isinstance(source, int):
                    registers.writes.append((u, number, source))
                elif source != (register, limit, s):
                    registers.moves.append((u, number, registers.number(source)))
    registers.edges.append(Edges(*_columns(edges, 2)))


def without_implied(edges: Edges, stream: Int, is_kernel: Bool) -> Edges:
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
