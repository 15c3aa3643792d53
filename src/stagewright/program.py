"""The numeric program of every rank, as columns: the seam between the graph and all its readers.

Ranks that differ only in who their partners are form a class and share one `Tasks` table. A task
names its partners by *slot*: a slot of `Program.communicators` for a collective, of `Program.peers`
for a send or receive. Which group or rank a slot means to one rank is arithmetic on the mesh, done
for all ranks at once, so that a rank costs a stamping and not a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.layout import MIRROR, Mesh

Int = NDArray[np.int64]

PHASES = ("forward", "recompute", "backward", "optimizer")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class Kind(IntEnum):
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


class Shape(NamedTuple):
    """What the duration of a kernel depends on: its kind, and the extents it has on one rank.

    `gemm` (batch, m, n, k: a result of `batch` matrices of m x n, sums over k), `attention` and
    `attention_bwd` (batch, heads, kv_heads, q, k, d, v; causal, window: 0 or what is masked), and
    whatever else by its fused ops and the letters of its index expression.

    >>> print(Shape("gemm", (("batch", 1), ("m", 4096), ("n", 14336), ("k", 8192))))
    gemm batch=1 m=4096 n=14336 k=8192
    """

    kernel: str
    extents: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={extent}" for name, extent in self.extents)])


class Peer(NamedTuple):
    """The rank `shift` further along `axis`, round the ring, with all other coordinates equal."""

    axis: str
    shift: int


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """One row per task, in issue order; every dependency points to an earlier row.

    Units: `flops` floating-point operations (2 per multiply-add), `traffic` bytes read and written
    in device memory, `comm_bytes` bytes as design section 6 counts them (all_gather: the local
    input shard; everything else: the full local input). Dependencies are CSR: the rows that row `i`
    needs are `data[data_ptr[i]:data_ptr[i + 1]]` (what it reads) and likewise `order` (what it must
    wait for so that the schedule holds: one compute stream, one or several communication streams).
    """

    kind: NDArray[np.uint8]  # Kind
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

    def __len__(self) -> int:
        return len(self.kind)


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


def _nothing() -> Values:
    none, number = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Values(none, none, none, none.astype(np.uint8), number, none, none, none, none, ())


NOTHING = _nothing()


@dataclass(frozen=True, slots=True, eq=False)
class RankClass:
    """The ranks that run one program: here, all ranks of a pipeline rank."""

    ranks: Int  # ascending
    pipeline_rank: int
    tasks: Tasks
    memory: Mapping[str, int]  # bytes per rank at the peak, by category, and their sum, `peak`
    values: Values = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What every rank of one training step does."""

    mesh: Mesh
    classes: tuple[RankClass, ...]
    # slot -> who; only those that some task uses, all of >= 2 ranks
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]  # slot -> who

    def label_of(self, slot: int) -> str:
        """What people call communicator `slot`: `tp`, `cp+dp`, `pp[0, 3]`."""
        axes, only = self.communicators[slot]
        return self.mesh.label(axes) + ("" if only is None else str(list(only)))

    def group_of(self, slot: int) -> Int:
        """Id of the group that each rank of the world is in for `slot`; 0 where it is in none."""
        who = self.communicators[slot]
        index, inside = _group_index(self.mesh, who)
        return np.where(inside, self._first_id() + self._stride() * index + slot, 0)

    def groups(self) -> dict[int, list[int]]:
        """Every group that is used: id -> its ranks, ascending ids."""
        result: dict[int, list[int]] = {}
        issued = [np.unique(c.tasks.slot[c.tasks.kind == Kind.COLLECTIVE]) for c in self.classes]
        for slot in range(len(self.communicators)):
            ids = self.group_of(slot)
            # A stage without layers has no use for what only layers use.
            users = [c.ranks for c, own in zip(self.classes, issued, strict=True) if slot in own]
            ids[~np.isin(ids, ids[np.concatenate(users)])] = 0
            ranks = np.argsort(ids, kind="stable")
            ranks = ranks[np.searchsorted(ids[ranks], 1) :]
            found, starts = np.unique(ids[ranks], return_index=True)
            for group, members in zip(found, np.split(ranks, starts[1:]), strict=True):
                result[int(group)] = [int(r) for r in members]
        return dict(sorted(result.items()))

    def peer_of(self, slot: int) -> Int:
        """The rank that each rank of the world exchanges with on peer `slot`."""
        axis, shift = self.peers[slot]
        size, stride = self.mesh.size(axis), self.mesh.stride(axis)
        ranks = np.arange(self.mesh.world_size, dtype=np.int64)
        at = ranks // stride % size
        return ranks + ((at + shift) % size - at) * stride

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
        most = 1
        for who in self.communicators:
            index, _ = _group_index(self.mesh, who)
            most = max(most, int(index.max()) + 1)
        needed, first = most * self._stride(), 1
        while first * 9 < needed:
            first *= 10
        return first


def _group_index(mesh: Mesh, who: Communicator) -> tuple[Int, NDArray[np.bool_]]:
    """For every rank: its group of the communicator, counted from 0, and whether it is in one."""
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    index = np.zeros_like(ranks)
    scale = 1
    for axis in mesh.names:
        if axis not in who.axes:
            at, size = ranks // mesh.stride(axis) % mesh.size(axis), mesh.size(axis)
            if axis == mesh.mirror and MIRROR in who.axes:
                at, size = np.minimum(at, size - 1 - at), size // 2
            index += at * scale
            scale *= size
    inside = np.ones(len(ranks), dtype=bool)
    if who.only is not None:
        (axis,) = who.axes
        inside = np.isin(ranks // mesh.stride(axis) % mesh.size(axis), who.only)
    return index, inside
