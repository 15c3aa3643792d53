"""The numeric program of every rank, as columns: the seam between the graph and all its readers.

Ranks that differ only in who their partners are form a class and share one `Tasks` table. A task
names its partners by *slot*: a slot of `Program.communicators` for a collective, of `Program.peers`
for a send or receive. Which group or rank a slot means to one rank is arithmetic on the mesh, done
for all ranks at once, so that a rank costs a stamping and not a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.arrays import Bool, Int
from stagewright.graph.node import PHASES as PHASES

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class TaskKind(IntEnum):
    """What a task does: computes, or moves bytes between ranks, or to and from the host."""

    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3
    LOAD = 4  # from the memory of the host
    STORE = 5  # to it


class Communicator(NamedTuple):
    """The ranks that share all coordinates but those of `axes`, where `MIRROR` joins two replicas.

    `only` keeps some positions of a single axis, as the group of the first and the last pipeline
    stage that share a tied embedding does.
    """

    axes: tuple[str, ...]
    only: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "+".join(self.axes) + ("" if self.only is None else f"{list(self.only)}")


class _Shape(NamedTuple):
    kernel: str
    extents: tuple[tuple[str, int], ...]
    joint: tuple[str, ...] = ()  # a product that is run as part of one: its name, and what it makes


class Shape(_Shape):
    """What the duration of a kernel depends on: its kind, and the extents it has on one rank.

    `gemm` (batch, m, n, k: a result of `batch` matrices of m x n, sums over k), `attention` and
    `attention_bwd` (batch, heads, kv_heads, q, k, d, v; causal, window: 0 or what is masked), and
    whatever else by its fused ops and the letters of its index expression. It unpacks as kernel and
    extents, by which durations that were measured are found.

    >>> print(Shape("gemm", (("batch", 1), ("m", 4096), ("n", 14336), ("k", 8192))))
    gemm batch=1 m=4096 n=14336 k=8192
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        """Kernel and extents."""
        return iter((self.kernel, self.extents))

    def __getnewargs__(self) -> tuple[Any, ...]:
        """All of it, for copies."""
        return self.kernel, self.extents, self.joint

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={extent}" for name, extent in self.extents)])

    def fields(self) -> dict[str, Any]:
        """As JSON has it: `joint` where there is one."""
        found: dict[str, Any] = {"kernel": self.kernel, "extents": self.extents}
        return found | ({"joint": self.joint} if self.joint else {})


class Peer(NamedTuple):
    """The rank `shift` further along `axis`, round the ring, with all other coordinates equal."""

    axis: str
    shift: int


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """One row per task, in issue order; every dependency points to an earlier row.

    Units: `flops` floating-point operations (2 per multiply-add), `traffic` bytes read and written
    in device memory, `comm_bytes` bytes as design section 6 counts them (all_gather: the local
    input shard; everything else: the full local input). All members of a group name one size, that
    of the even exchange which takes as long where one is uneven (see `local_bytes`). Dependencies
    are CSR: the rows that row `i`
    needs are `data[data_ptr[i]:data_ptr[i + 1]]` (what it reads) and likewise `order` (what it must
    wait for so that the schedule holds: one compute stream, one or several communication streams).
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
    dtype: NDArray[np.int8]  # index into dtypes: what is computed in or sent
    comm_bytes: Int  # 0 for COMPUTE
    slot: NDArray[np.int16]  # COLLECTIVE: communicator; SEND, RECV: peer; else -1
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
    duration: Int | None = None  # COMPUTE: ns as measured, 0: not measured; None: nothing is
    uneven_bytes: Int | None = None  # `local_bytes` where these are not `comm_bytes`

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        return f"<{len(self)} tasks>"

    @property
    def reads(self) -> tuple[Int, Int]:
        """Of all that rows read: the row that reads, and the row that makes it."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.data_ptr))
        return owner, self.data.astype(np.int64)

    @property
    def local_bytes(self) -> Int:
        """Bytes of each collective's local input, or message, on these ranks."""
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
"""What bytes are held for. `activations` are made in forward, or made again, and wait for backward;
`gathered_parameters` are weights gathered or cast for their use; `communication` has just been
received; `workspace` is what else one action makes and uses up, gradients of activations too."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """What a rank holds in a step: values, and the rows between which each is there.

    The first columns have a row per value of a stage, the second per microbatch of it: there from
    before row `first` (-1: from the start) until after row `last` (the number of rows: to the end).
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


class Users(NamedTuple):
    """Ranks, and the communicators, by slot, on which they issue collectives."""

    ranks: Int
    communicators: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankClass:
    """The ranks that run one program: those of a pipeline rank whose experts have equal loads."""

    ranks: Int  # ascending
    pipeline_rank: int
    tasks: Tasks
    memory: Mapping[str, int]  # bytes per rank at the peak, by category, and their sum, `peak`
    values: Values = NO_VALUES

    def __repr__(self) -> str:
        return f"<stage {self.pipeline_rank}: {len(self.ranks)} ranks, {len(self.tasks)} tasks>"

    @property
    def users(self) -> Users:
        """Its ranks and what they communicate on."""
        slots = np.unique(self.tasks.slot[self.tasks.kind == TaskKind.COLLECTIVE])
        return Users(self.ranks, tuple(slots.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What every rank of one training step does."""

    mesh: Mesh
    classes: tuple[RankClass, ...]
    # slot -> who; only those that some task uses, all of >= 2 ranks
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]  # slot -> who

    def __repr__(self) -> str:
        classes, world = len(self.classes), self.mesh.world_size
        return f"<program of {world} ranks in {classes} classes, mesh {dict(self.mesh.axes)}>"

    def label_of(self, slot: int) -> str:
        """What people call communicator `slot`: `tp`, `cp+dp`, `pp[0, 3]`."""
        axes, only = self.communicators[slot]
        return self.mesh.label(axes) + ("" if only is None else str(list(only)))

    def group_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Id of the group that each of `ranks` is in for `slot`; 0 where it is in none.

        Here and in `peer_of`, `ranks` are by default all of the world.
        """
        who, mesh = self.communicators[slot], self.mesh
        ranks = self._all() if ranks is None else ranks
        index, scale = np.zeros_like(ranks), 1
        for axis, size, paired in self._others(who):
            at = ranks // mesh.stride(axis) % mesh.size(axis)
            index += (np.minimum(at, mesh.size(axis) - 1 - at) if paired else at) * scale
            scale *= size
        ids = self._ids(slot, index)
        if who.only is None:
            return ids
        (axis,) = who.axes
        return np.where(np.isin(ranks // mesh.stride(axis) % mesh.size(axis), who.only), ids, 0)

    def group_count(self, slot: int) -> int:
        """How many groups communicator `slot` has."""
        return math.prod(size for _, size, _ in self._others(self.communicators[slot]))

    def members(self, slot: int, index: Int) -> Int:
        """Ranks of the groups number `index` of communicator `slot`: a row each, ascending."""
        who, mesh = self.communicators[slot], self.mesh
        first, steps = np.zeros_like(index)[:, None], np.zeros(1, np.int64)
        for axis in mesh.names:
            if axis in who.axes:
                places = np.array(range(mesh.size(axis)) if who.only is None else who.only)
                steps = (steps + places[:, None] * mesh.stride(axis)).ravel()
        for axis, size, paired in self._others(who):
            at = index[:, None] % size
            if paired:
                at = np.concatenate((at, mesh.size(axis) - 1 - at), axis=1)
            first, index = first + at * mesh.stride(axis), index // size
        ranks = first[:, :, None] + np.sort(steps)
        return np.sort(ranks.reshape(len(index), first.shape[1] * len(steps)), axis=1)

    def blocks_of_groups(
        self, users: Sequence[Users] | None = None, block: int = 4096
    ) -> Iterator[tuple[Int, list[Int]]]:
        """All groups that are used by ascending id, some at a time: ids and their ranks.

        `users`: of all classes, where the program has not all of them.
        """
        users = [of.users for of in self.classes] if users is None else users
        slots = range(len(self.communicators))
        used = [self._used(slot, users) for slot in slots]
        most = max((self.group_count(slot) for slot in slots), default=0)
        for at in range(0, most, block):
            ids: list[Int] = []
            ranks: list[Int] = []
            for slot in slots:
                index = np.arange(at, min(at + block, self.group_count(slot)), dtype=np.int64)
                index = index[used[slot][at : at + block]]
                ids.append(self._ids(slot, index))
                ranks.extend(self.members(slot, index))
            some = np.concatenate(ids)
            order = np.argsort(some)
            yield some[order], [ranks[nth] for nth in order]

    def groups(self) -> dict[int, list[int]]:
        """Every group that is used: id -> its ranks, ascending ids."""
        return {
            int(group): members.tolist()
            for ids, ranks in self.blocks_of_groups()
            for group, members in zip(ids, ranks, strict=True)
        }

    def peer_of(self, slot: int, ranks: Int | None = None) -> Int:
        """The rank that each of `ranks` exchanges with on peer `slot`."""
        axis, shift = self.peers[slot]
        size, stride = self.mesh.size(axis), self.mesh.stride(axis)
        ranks = self._all() if ranks is None else ranks
        at = ranks // stride % size
        return ranks + ((at + shift) % size - at) * stride

    def _others(self, who: Communicator) -> Iterator[tuple[str, int, bool]]:
        """What tells groups apart: axes, their positions, and whether two of these are one."""
        for axis, size in self.mesh.axes:
            if axis not in who.axes:
                paired = axis == self.mesh.mirror and MIRROR in who.axes
                yield axis, size // 2 if paired else size, paired

    def _all(self) -> Int:
        return np.arange(self.mesh.world_size, dtype=np.int64)

    def _used(self, slot: int, users: Sequence[Users]) -> Bool:
        """Which groups of a communicator some rank uses.

        A stage without layers has no use for what only layers use.
        """
        mine = [of.ranks for of in users if slot in of.communicators]
        found = np.ones(self.group_count(slot), bool)
        if len(mine) < len(users):
            ids = self.group_of(slot, np.concatenate((*mine, np.zeros(0, np.int64))))
            found[:] = False
            found[(ids[ids > 0] - self._ids(slot, np.zeros(1, np.int64))) // self._stride()] = True
        return found

    def _ids(self, slot: int, index: Int) -> Int:
        return self._first_id() + self._stride() * index + slot

    def _stride(self) -> int:
        # ASTRA-sim derives message tags from 1e6 * group id mod 5e8: ids of overlapping groups must
        # differ mod 500. Groups of one communicator are disjoint; different communicators differ
        # mod a divisor of 500.
        return next(
            k
            for k in (1, 2, 4, 5, 10, 20, 25, 50, 100, 125, 250, 500)
            if k >= len(self.communicators)
        )

    def _first_id(self) -> int:
        # All ids have the same number of digits, so that a rank's group names are patched in place.
        slots = range(len(self.communicators))
        needed = max((self.group_count(slot) for slot in slots), default=1) * self._stride()
        first = 1
        while first * 9 < needed:
            first *= 10
        return first


def among(ranks: Int, wanted: Int) -> Int:
    """Those ranks that are among some others; both ascend.

    >>> among(np.array([1, 2, 5]), np.array([2, 3, 5, 8]))
    array([2, 5])
    """
    if not len(wanted):
        return wanted
    at = np.minimum(np.searchsorted(wanted, ranks), len(wanted) - 1)
    return ranks[wanted[at] == ranks]


def folded(program: Program) -> Program:
    """The same classes on the fewest ranks that meet each other in all the same ways.

    Along an axis that every class spans whole, what ranks do and whom they meet is the same at all
    positions. So two positions show all that many do; where ranks send to others along the axis,
    one more than twice the longest way is needed, for different ways to lead to different ranks.
    What holds for the groups, messages and the run of the one program then holds for the other's.
    """
    mesh, ways = program.mesh, dict[str, int]()
    for axis, shift in program.peers:
        size = mesh.size(axis)
        ways[axis] = max(ways.get(axis, 0), min(shift % size, -shift % size))
    whole = {axis for who in program.communicators if who.only is not None for axis in who.axes}
    whole.add(mesh.mirror)
    owner = np.full(mesh.world_size, -1, np.int32)
    for nth, of in enumerate(program.classes):
        owner[of.ranks] = nth
    if math.prod(size for _, size in mesh.axes) != mesh.world_size:  # meshes side by side
        return program
    grid = owner.reshape([size for _, size in reversed(mesh.axes)])
    axes: list[tuple[str, int]] = []
    for nth, (axis, size) in enumerate(mesh.axes):
        at = grid.ndim - 1 - nth
        if axis not in whole and (grid == grid.take([0], at)).all():
            size = min(size, max(2, 2 * ways.get(axis, 0) + 1))
            grid = grid.take(range(size), at)
        axes.append((axis, size))
    ranks = [np.flatnonzero(grid.ravel() == nth) for nth in range(len(program.classes))]
    return replace(
        program,
        mesh=replace(mesh, axes=tuple(axes)),
        classes=tuple(
            replace(of, ranks=mine) for of, mine in zip(program.classes, ranks, strict=True)
        ),
    )
