"""The program of every rank, as columns: the seam between the graph and all its readers.

A rank's step is a list of distinct *actions* and their order. An action is what a rank does in one
step of its schedule: a forward, a backward or half of one, of one stage for one microbatch; two
that overlap (`Overlap`) are one action of two parts. The last action of a rank is the *optimizer
action*: norms and updates, once per step. Copies of an action differ in microbatch and stage only,
so rows, durations, issue rules and changes of memory are needed once per action. Explicit tables (a
bundle, an import, joined programs) are one action with all their rows.

Ranks that differ only in their partners form a class and share the work of their pipeline rank. A
task names its partners by *slot*: an index into `Program.communicators` for a collective, into
`Program.peers` for a send or receive. Which group or rank a slot means to one rank is arithmetic on
the mesh (`communicators`), so one more rank costs a row of arithmetic and not a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Bool, Int, offsets, sorted_values
from stagewright.graph.node import PHASES
from stagewright.program.communicators import Communication, Communicator, Peer, Users

# ---- tables --------------------------------------------------------------------------------------

FORWARD_PHASE, RECOMPUTE_PHASE, BACKWARD_PHASE, OPTIMIZER_PHASE = range(len(PHASES))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class TaskKind(IntEnum):
    """Compute, or move bytes between ranks, or to and from the host."""

    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3
    LOAD = 4  # from the memory of the host
    STORE = 5  # to it


# Plain ints: enum lookup is slow in columns.
COMPUTE, COLLECTIVE, SEND, RECV, LOAD, STORE = map(int, TaskKind)


@dataclass(frozen=True, slots=True)
class Shape:
    """Kind of a kernel and its extents on one rank, from which its duration follows.

    The kind is `gemm` (batch, m, n, k: `batch` matrices of m x n, each a sum over k), `attention`
    or `attention_bwd` (batch, heads, kv_heads, q, k, d, v; causal; window: 0, or the keys that a
    query sees), or else the names of the fused ops, with the letters of their index expression.

    >>> print(Shape("gemm", (("batch", 1), ("m", 4096), ("n", 14336), ("k", 8192))))
    gemm batch=1 m=4096 n=14336 k=8192
    """

    kernel: str
    extents: tuple[tuple[str, int], ...]
    joint: tuple[str, ...] = ()
    """(fused GEMM, output) if part of a fused GEMM."""
    head: int = 0
    """Head width of an unfused product of attention; 0: another kernel."""

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={extent}" for name, extent in self.extents)])

    def sizes(self) -> dict[str, int]:
        """Extents by name, and `head` if there is one."""
        return dict(self.extents) | ({"head": self.head} if self.head else {})

    def fields(self) -> dict[str, Any]:
        """Fields for JSON; `joint` only if it is set."""
        fields: dict[str, Any] = {"kernel": self.kernel, "extents": self.extents}
        return fields | ({"joint": self.joint} if self.joint else {})


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """One row per task, in program order; every dependency points to an earlier row.

    `lower.assembly.distinct_actions` makes those of a compiled run; `time.simulate.order` lists
    where issue order departs from program order.

    Units: `flops` floating-point operations (2 per multiply-add); `traffic` bytes read and written
    in device memory; `comm_bytes` bytes of the local input of a collective (of an all_gather: the
    shard of this rank; of an all_reduce, reduce_scatter or all_to_all: the full tensor on this
    rank), or of a message, or of a copy to or from the host. All members of a group have the same
    `comm_bytes`: in an uneven collective, the bytes of an even collective that takes as long;
    `local_bytes` has those of the rank.

    Kernels run on one stream, slot -1. Small kernels between the collectives of a communicator
    have its slot and run on its stream.

    Dependencies are CSR: row `i` reads the results of rows `data[data_ptr[i]:data_ptr[i + 1]]`, and
    likewise waits for the rows in `order` so that the schedule holds: one compute stream, one or
    several communication streams.
    """

    kind: NDArray[np.uint8]  # TaskKind
    name: NDArray[np.int32]  # index into names
    op: NDArray[np.int32]  # index into ops
    phase: NDArray[np.uint8]  # index into PHASES
    stage: NDArray[np.int32]  # virtual pipeline stage
    layer: NDArray[np.int32]  # -1: outside the layers
    microbatch: NDArray[np.int32]  # -1: once per step
    flops: Int  # 0 unless COMPUTE
    traffic: Int  # 0 unless COMPUTE
    collective: NDArray[np.int8]  # index into COLLECTIVES, -1 unless COLLECTIVE
    dtype: NDArray[np.int8]  # index into dtypes: of the computation, or of what is sent
    comm_bytes: Int  # 0 for COMPUTE
    slot: NDArray[np.int16]  # COLLECTIVE: communicator; SEND, RECV: peer; COMPUTE: see above
    tag: NDArray[np.int32]  # SEND, RECV: equal on both ends; else -1
    shape: NDArray[np.int32]  # COMPUTE: index into shapes; -1: has none
    data_ptr: Int
    data: NDArray[np.int32]
    order_ptr: Int
    order: NDArray[np.int32]
    names: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    duration: Int | None = None  # measured ns, 0: not measured; None: no durations
    uneven_bytes: Int | None = None  # `local_bytes` where these are not `comm_bytes`

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        return f"<{len(self)} tasks>"

    @property
    def reads(self) -> tuple[Int, Int]:
        """Data dependencies as two columns: the reading row, and the row it reads from."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.data_ptr))
        return owner, self.data.astype(np.int64)

    @property
    def local_bytes(self) -> Int:
        """Bytes of the local input of each collective, or of each message, on these ranks."""
        return self.comm_bytes if self.uneven_bytes is None else self.uneven_bytes


CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered_parameters",
    "activations",
    "communication",
    "workspace",
)
"""Categories of memory. `activations` are made in forward, or recomputed, and saved for backward;
`gathered_parameters` are weights gathered or cast for a use; `communication` are receive buffers;
`workspace` are other values of one action, gradients of activations included."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Values of a rank in a step, with the live range of each.

    The columns up to `size` have a row per value of a stage; those from `value` on have a row per
    value and microbatch. A value is live from before task row `first` (-1: from the start) until
    after task row `last` (the number of rows: to the end).
    """

    name: NDArray[np.int32]  # index into names
    stage: NDArray[np.int32]
    layer: NDArray[np.int32]  # -1: outside the layers
    category: NDArray[np.uint8]  # index into CATEGORIES
    size: Int  # bytes
    value: NDArray[np.int32]  # a row of the columns above
    microbatch: NDArray[np.int32]  # -1: once per step
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<{len(self.value)} values of a step>"


def _no_values() -> Values:
    none, number = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Values(none, none, none, none.astype(np.uint8), number, none, none, none, none, ())


NO_VALUES = _no_values()


# ---- changes of memory ---------------------------------------------------------------------------


class MemoryChanges(NamedTuple):
    """Changes of the bytes in use by category, in the order of `CATEGORIES`.

    With the times at which rows start and end, these changes give memory over time.
    """

    start: Int
    """[categories]"""
    allocated: Int
    """[categories, rows]: before the row."""
    freed: Int
    """[categories, rows]: after the row."""

    @classmethod
    def of(cls, values: Values, rows: int) -> MemoryChanges:
        """Bytes that each row of a table allocates and frees."""
        category, size = values.category[values.value].astype(np.int64), values.size[values.value]

        def per_row(row: NDArray[np.integer[Any]], mask: Bool) -> Int:
            cell = (category * rows + row)[mask]
            return _sums(cell, size[mask], len(CATEGORIES) * rows).reshape(len(CATEGORIES), rows)

        before = values.first < 0
        start = _sums(category[before], size[before], len(CATEGORIES))
        return cls(start, per_row(values.first, ~before), per_row(values.last, values.last < rows))

    @property
    def in_use(self) -> Int:
        """Bytes in use while each row runs: [categories, rows]."""
        in_use = self.allocated.cumsum(axis=1) + self.start[:, None]
        in_use[:, 1:] -= self.freed[:, :-1].cumsum(axis=1)
        return in_use

    @property
    def peak_row(self) -> int:
        """First row, in program order, during which the most bytes are in use."""
        return int(np.argmax(self.in_use.sum(axis=0)))

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at `peak_row`, and their sum, `peak`."""
        in_use, at = self.in_use, self.start
        if in_use.size:
            at = in_use[:, int(np.argmax(in_use.sum(axis=0)))]
        by_category = {name: int(size) for name, size in zip(CATEGORIES, at, strict=True)}
        return by_category | {"peak": sum(by_category.values())}


def _sums(index: NDArray[np.integer[Any]], size: Int, length: int) -> Int:
    """Sum of the sizes with each index below `length`."""
    # Sums of bytes of one rank are exact in double precision: they are far below 2**53.
    return np.bincount(index, weights=size, minlength=length).astype(np.int64)


# ---- actions -------------------------------------------------------------------------------------

KINDS = "FBIWU"
"""Kinds of the parts of an action: those of the schedule, and `U`, which gathers weights ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """Distinct actions of a program: row `i` of action `a` is row `begin[a] + i` of `tasks`.

    Columns of `tasks` are those of an example copy: its stage, layers and names. `microbatch` is a
    distinct placeholder per part, -1 for rows once per step; `tag` numbers the messages of a part.
    Rows of an action are in program order.
    """

    tasks: Tasks
    begin: Int
    """[actions + 1]"""
    part: Int
    """[rows]: 0, or 1 for rows of the second of two actions that overlap."""
    carried: Bool
    """Loop-carried dependencies, by entry of `Tasks.data`.

    True: the source is a row of another copy. `data` then holds some action's row that stands for
    it; `ActionOrder.sources` finds the real one.
    """

    def rows(self, action: int) -> Int:
        """Rows of an action."""
        return np.arange(int(self.begin[action]), int(self.begin[action + 1]))

    def dep_entries(self, action: int) -> Int:
        """Entries of `Tasks.data` of the rows of an action."""
        pointer = self.tasks.data_ptr[self.begin]
        return np.arange(int(pointer[action]), int(pointer[action + 1]))


class ActionOrder(Protocol):
    """Copies of actions that one pipeline rank executes, in program order.

    The optimizer action is the last copy, if there is one; its microbatch and stage are -1.
    """

    action: Int
    """[copies]: index into `Actions`."""
    begin: Int
    """[copies + 1]: first row of each copy among the rank's tasks."""
    kind: Int
    """[copies, 2]: by part, index into `KINDS`; -1: no such part, or the optimizer action."""
    stage: Int
    """[copies, 2]: by part, the virtual stage."""
    microbatch: Int
    """[copies, 2]"""

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """Copies and rows that dependencies of an action refer to, each [copies of it, entries].

        `entries` are entries of `Tasks.data` of rows of the action. Rows are those of
        `Actions.tasks`, in the action that the source copy is of.
        """
        ...

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers, equal on both ends, of rows of an action: [copies of it, rows]."""
        ...


# ---- work of a rank ------------------------------------------------------------------------------


def numbers_among_copies(order: ActionOrder, action: int, copies: Int) -> Int:
    """Index of each of `copies` among all copies of their action, as in `sources`."""
    return np.searchsorted(np.flatnonzero(order.action == action), copies).astype(np.int64)


class RankWork:
    """Work of a pipeline rank in a step, by action; rows are built when they are read.

    Subclasses set each attribute, or compute it when it is first read.
    """

    @cached_property
    def actions(self) -> Actions:
        """Distinct actions: of this rank, and of others where ranks share them."""
        raise NotImplementedError

    @cached_property
    def order(self) -> ActionOrder:
        """Copies of the actions."""
        raise NotImplementedError

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all copies, in program order."""
        raise NotImplementedError

    @cached_property
    def values(self) -> Values:
        """Values in memory, with the live range of each."""
        raise NotImplementedError

    @cached_property
    def changes(self) -> MemoryChanges:
        """Bytes that the rows allocate and free."""
        return MemoryChanges.of(self.values, int(self.order.begin[-1]))

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes at the peak in program order, by category, and their sum, `peak`."""
        return self.changes.at_peak()

    def with_tasks(self, tasks: Tasks) -> RankWork:
        """Replace the rows; values and memory stay."""
        return _TableWork(tasks, self)

    @staticmethod
    def from_tables(
        tasks: Tasks, memory: Mapping[str, int] | None = None, values: Values = NO_VALUES
    ) -> RankWork:
        """Work of explicit tables: one action. By default, memory follows from `values`."""
        return _TableWork(tasks, values, memory)


class _TableWork(RankWork):
    """Work of explicit tables."""

    def __init__(
        self, tasks: Tasks, source: Values | RankWork, memory: Mapping[str, int] | None = None
    ) -> None:
        """`source`: the values, or other work that has the same."""
        self._source = source
        if memory is not None:
            self.memory = memory
        self.tasks = tasks
        self.actions = table_actions(tasks, np.array([0, len(tasks)]))
        self.order = TableOrder(np.zeros(1, dtype=np.int64), self.actions)

    @cached_property
    def values(self) -> Values:
        return self._source.values if isinstance(self._source, RankWork) else self._source

    @cached_property
    def memory(self) -> Mapping[str, int]:
        source = self._source
        return source.memory if isinstance(source, RankWork) else self.changes.at_peak()


def table_actions(tasks: Tasks, begin: Int) -> Actions:
    """Actions of explicit tables: no dependency is loop-carried, none overlap."""
    return Actions(
        tasks, begin, np.zeros(len(tasks), np.int64), np.zeros(len(tasks.data), dtype=bool)
    )


class TableOrder:
    """Copies of the actions of explicit tables; each row depends on rows of its own copy."""

    def __init__(self, action: Int, actions: Actions) -> None:
        """`action`: [copies], index into `actions`."""
        self._tasks = actions.tasks
        self.action = action
        self.begin = offsets(np.diff(actions.begin)[action])
        self.kind, self.stage, self.microbatch = (np.full((len(action), 2), -1) for _ in range(3))

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """Copies and rows that dependencies refer to: those of the same copy."""
        copies = np.flatnonzero(self.action == action)
        rows = np.tile(self._tasks.data[entries].astype(np.int64), (len(copies), 1))
        return np.broadcast_to(copies[:, None], rows.shape), rows

    def tags(self, action: int, rows: Int) -> Int:
        """Tags of the table, equal in all copies."""
        return np.tile(self._tasks.tag[rows].astype(np.int64), ((self.action == action).sum(), 1))


# ---- all ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RankClass:
    """Ranks of one pipeline rank whose tasks have equal sizes.

    Ranks of a pipeline rank differ in sizes by loads of experts (`lower.routing`), by uneven shards
    of FSDP (`lower.fsdp.by_rows`) or by their requests (`lower.serving_step`).
    """

    ranks: Int  # ascending
    pipeline_rank: int
    work: RankWork
    allowance: int = 0
    """Bytes reserved on each rank in addition to its tensors (`memory_allowance`)."""

    def __repr__(self) -> str:
        tasks = int(self.work.order.begin[-1])
        return f"<pipeline rank {self.pipeline_rank}: {len(self.ranks)} ranks, {tasks} tasks>"

    @property
    def tasks(self) -> Tasks:
        """Rows of all copies of the actions, in program order."""
        return self.work.tasks

    @property
    def values(self) -> Values:
        """Values in memory, with their live ranges."""
        return self.work.values

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes per rank at the peak in program order, by category; `peak`; `allowance`."""
        memory = self.work.memory
        return {**memory, "allowance": self.allowance} if self.allowance else memory

    @property
    def users(self) -> Users:
        """Ranks of the class, and the communicators they use."""
        slots = np.unique(self.tasks.slot[self.tasks.kind == TaskKind.COLLECTIVE])
        return Users(self.ranks, tuple(slots.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Program(Communication):
    """Work of every rank in one step."""

    mesh: Mesh
    classes: tuple[RankClass, ...]
    communicators: tuple[Communicator, ...]
    """By slot; all are used by some task and have at least two ranks."""
    peers: tuple[Peer, ...]
    """By slot."""

    def __repr__(self) -> str:
        classes, world = len(self.classes), self.mesh.world_size
        return f"<program of {world} ranks in {classes} classes, mesh {dict(self.mesh.axes)}>"

    def group_chunks(
        self, users: Sequence[Users] | None = None, size: int = 4096
    ) -> Iterator[tuple[Int, list[Int]]]:
        """Groups that some rank uses, in chunks of ascending ids: ids, and the ranks of each.

        `users`: users of all classes, where this program has only some of the classes. `size`:
        groups of each communicator in a chunk.
        """
        users = [c.users for c in self.classes] if users is None else users
        slots = range(len(self.communicators))
        used = [self.used_groups(slot, users) for slot in slots]
        max_groups = max((self.group_count(slot) for slot in slots), default=0)
        for begin in range(0, max_groups, size):
            ids: list[Int] = []
            ranks: list[Int] = []
            for slot in slots:
                end = min(begin + size, self.group_count(slot))
                index = np.arange(begin, end, dtype=np.int64)[used[slot][begin : begin + size]]
                ids.append(self.group_ids(slot, index))
                ranks.extend(self.members(slot, index))
            chunk = np.concatenate(ids)
            order = np.argsort(chunk)
            yield chunk[order], [ranks[i] for i in order]

    def groups(self) -> dict[int, list[int]]:
        """Ranks of every group that some rank uses, by ascending group id."""
        return {
            int(group): members.tolist()
            for ids, ranks in self.group_chunks()
            for group, members in zip(ids, ranks, strict=True)
        }


def groups_of_ranks(ids: Int, ranks: Int) -> Int:
    """Members of each group that some of the ranks belong to: [groups, ranks].

    `ids`: group of each rank of the world, 0: none. All groups have one size.

    >>> groups_of_ranks(np.array([7, 9, 7, 9, 0]), np.array([1, 4]))
    array([[1, 3]])
    """
    members = ranks[ids[ranks] > 0]
    groups = sorted_values(ids[members])
    if len(members) < len(groups) * np.count_nonzero(ids == groups[0]):  # of other ranks, too
        members = np.flatnonzero(np.isin(ids, groups))
    members = members[np.argsort(ids[members], kind="stable")]
    return members.reshape(len(groups), -1).astype(np.int64)


def intersect(ranks: Int, selected: Int) -> Int:
    """Ranks in both arrays; both ascend.

    >>> intersect(np.array([1, 2, 5]), np.array([2, 3, 5, 8]))
    array([2, 5])
    """
    if not len(selected):
        return selected
    index = np.minimum(np.searchsorted(selected, ranks), len(selected) - 1)
    return ranks[selected[index] == ranks]
