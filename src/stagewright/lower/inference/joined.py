"""Join two programs, and the messages that send a KV cache from one to the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.program.columns import Program, RankClass, TaskKind, Tasks
from stagewright.program.communicators import Communicator, Peer
from stagewright.program.shapes import ops_of

SIDES = ("prefill", "decode")
ACROSS = "cache"
"""Name of the transfer between both groups, in place of mesh axes."""


@dataclass(frozen=True, slots=True)
class Meshes(Mesh):
    """Meshes numbered one after the other: the ranks of the first, then those of the second."""

    parts: tuple[Mesh, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(part.world_size for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Joined(Program):
    """Program of several meshes; groups and peers are tables instead of mesh arithmetic."""

    group_index: tuple[Int, ...] = ()  # [communicators, ranks]: number of the group, or -1
    partners: tuple[Int, ...] = ()  # [peers, ranks]; the rank itself where it has no such peer

    def group_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Group id of each of `ranks` in communicator `slot`; 0: in none."""
        index = self.group_index[slot] if ranks is None else self.group_index[slot][ranks]
        return np.where(index < 0, 0, self.group_ids(slot, index))

    def group_count(self, slot: int) -> int:
        """Number of groups of communicator `slot`."""
        return 1 + int(self.group_index[slot].max())

    def members(self, slot: int, index: Int) -> Int:
        """Ascending ranks of the groups `index` of communicator `slot`, a row each."""
        ranks = np.argsort(self.group_index[slot], kind="stable")
        ranks = ranks[np.count_nonzero(self.group_index[slot] < 0) :]
        return ranks.reshape(self.group_count(slot), -1)[index]

    def peer_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Rank with which each of `ranks` exchanges messages as peer `slot`."""
        return self.partners[slot] if ranks is None else self.partners[slot][ranks]


Row = tuple[int, int, int]
"""Layer, slot and bytes of a message."""


class Message(NamedTuple):
    """Part of a layer's KV cache that a prefill rank sends to a decode rank."""

    layer: int
    source: int
    target: int  # ranks of either group are numbered from 0
    size: int  # bytes


Waiting = Literal["both", "sender", "nobody"]
"""Sides of a message from the first program to the second that wait.

- `both`: a message waits for the kernels that write its layer's cache, and attention of that layer
  in the second program waits for the message.
- `sender`: a message waits for these kernels; its request decodes in later steps, so the second
  program does not wait.
- `nobody`: the cache was computed in earlier steps, so a message is sent at once, and its request
  decodes in later steps.
"""


def joined(
    programs: Sequence[Program],
    across: Sequence[Message],
    dtype: str,
    *,
    waiting: Waiting = "both",
) -> Joined:
    """Join the programs of both groups, with messages from the first to the second."""
    starts = (0, programs[0].mesh.world_size)
    world = starts[1] + programs[1].mesh.world_size
    group_index: list[Int] = []
    partners: list[Int] = []
    communicators: list[Communicator] = []
    peers: list[Peer] = []
    classes: list[RankClass] = []
    here = [len(programs[0].communicators), len(programs[0].peers)]
    for name, start, program in zip(SIDES, starts, programs, strict=True):
        end = start + program.mesh.world_size
        for slot, who in enumerate(program.communicators):
            ids = program.group_of(slot)
            index = np.full(world, -1, np.int64)
            index[start:end] = np.where(
                ids > 0, np.unique(ids, return_inverse=True)[1] - bool((ids == 0).any()), -1
            )
            group_index.append(index)
            communicators.append(who._replace(axes=tuple(f"{name}.{a}" for a in who.axes)))
        for slot, peer in enumerate(program.peers):
            whom = np.arange(world)
            whom[start:end] = program.peer_of(slot) + start
            partners.append(whom)
            peers.append(peer._replace(axis=f"{name}.{peer.axis}"))
    for start, program, way in zip(starts, programs, (1, -1), strict=True):
        by_rank: dict[int, list[Message]] = {}
        for m in across:
            by_rank.setdefault(m.source if way == 1 else m.target, []).append(m)
        others = {r: sorted({m.target if way == 1 else m.source for m in some})
                  for r, some in by_rank.items()}  # fmt: skip
        slot = len(peers)
        for nth in range(max(map(len, others.values()), default=0)):
            whom = np.arange(world)
            for r, some in others.items():
                if nth < len(some):
                    whom[start + r] = some[nth] + starts[1 if way == 1 else 0]
            partners.append(whom)
            peers.append(Peer(ACROSS, way * (nth + 1)))
        for c in program.classes:
            tasks = c.tasks if way == 1 else _shifted(c.tasks, *here)
            alike: dict[tuple[Row, ...], list[int]] = {}
            for r in c.ranks.tolist():
                rows = _rows(by_rank.get(r, ()), others.get(r, []), slot, way)
                alike.setdefault(rows, []).append(r + start)
            add = _with_sends if way == 1 else _with_receives
            for rows, ranks in alike.items():
                more = add(tasks, rows, dtype, waiting) if rows else tasks
                work = c.work if more is c.tasks else c.work.with_tasks(more)
                classes.append(replace(c, ranks=np.array(ranks, np.int64), work=work))
    return Joined(
        _side_by_side([p.mesh for p in programs]),
        tuple(classes), tuple(communicators), tuple(peers), tuple(group_index), tuple(partners),
    )  # fmt: skip


def _rows(of: Iterable[Message], others: list[int], slot: int, way: int) -> tuple[Row, ...]:
    """Messages of one rank; slots of its partners begin with `slot`."""
    return tuple(
        sorted(
            (m.layer, slot + others.index(m.target if way == 1 else m.source), m.size) for m in of
        )
    )


def _side_by_side(meshes: Sequence[Mesh]) -> Meshes:
    named = list(zip(SIDES, meshes, strict=True))
    return Meshes(
        tuple((f"{name}.{axis}", n) for name, mesh in named for axis, n in mesh.axes),
        tuple(
            (f"{name} {label}", tuple(f"{name}.{a}" for a in axes))
            for name, mesh in named
            for label, axes in mesh.groups
        ),
        parts=tuple(meshes),
        stands_for=tuple(
            (f"{name} {label}", label) for name, mesh in named for label, _ in mesh.groups
        ),
    )


def _shifted(tasks: Tasks, communicators: int, peers: int) -> Tasks:
    """Tasks whose slots of communicators and peers are shifted by those of the other program."""
    more = np.where(tasks.kind == TaskKind.COLLECTIVE, communicators, peers)
    slot = np.where(tasks.slot < 0, -1, tasks.slot + more).astype(np.int16)
    return replace(tasks, slot=slot)


def _with_sends(tasks: Tasks, rows: Sequence[Row], dtype: str, waiting: Waiting) -> Tasks:
    """Insert the sends in one chain: all ranks have one order.

    Where the other step waits for them they come behind this step's collectives, each when the
    kernels that write its layer's cache have run; where it does not, behind the rows of their
    layers, or first of all if they wait for nothing.
    """
    n = len(tasks)
    layers = [layer for layer, _, _ in rows]
    at = {
        "both": lambda: [n] * len(rows),
        "sender": lambda: [1 + int(np.flatnonzero(tasks.layer == x)[-1]) for x in layers],
        "nobody": lambda: [0] * len(rows),
    }[waiting]()
    at = np.maximum.accumulate(np.array(at))
    new = at + np.arange(len(rows))
    old = np.arange(n) + np.searchsorted(at, np.arange(n), side="right")
    data = [
        (int(new[i]), int(old[row]))
        for i, layer in enumerate(layers)
        for row in (_rows_of(tasks, "cache", layer) if waiting != "nobody" else ())
    ]
    chain = new.tolist()
    if waiting == "both":
        moves = np.flatnonzero((tasks.kind == TaskKind.COLLECTIVE) | (tasks.kind == TaskKind.SEND))
        chain = [*old[moves[-1:]].tolist(), *chain]
    order = [*zip(chain[1:], chain, strict=False)]
    return _more(tasks, TaskKind.SEND, rows, dtype, at, data, order)


def _with_receives(tasks: Tasks, rows: Sequence[Row], dtype: str, waiting: Waiting) -> Tasks:
    """Prepend the receives, which wait for nothing.

    If the step waits for messages, a layer's attention waits for those of its layer.
    """
    data = [
        (len(rows) + at, i)
        for i, (layer, _, _) in enumerate(rows)
        for at in (_rows_of(tasks, "cached_attention", layer) if waiting == "both" else ())
    ]
    return _more(tasks, TaskKind.RECV, rows, dtype, np.zeros(len(rows), np.int64), data, [])


def _rows_of(tasks: Tasks, op: str, layer: int) -> list[int]:
    """Rows of a layer's kernels that contain one of the ops."""
    fused = [i for i, ops in enumerate(tasks.ops) if op in ops_of(ops)]
    return np.flatnonzero((tasks.layer == layer) & np.isin(tasks.op, fused)).tolist()


def _more(
    tasks: Tasks, kind: TaskKind, rows: Sequence[Row], dtype: str, at: Int,
    data: Iterable[tuple[int, int]], order: Iterable[tuple[int, int]],
) -> Tasks:  # fmt: skip
    """Insert messages before rows `at`; `data` and `order` are pairs of row numbers after that.

    A message's tag is its layer, since two ranks exchange one message per layer.
    """
    verb = kind.name.lower()
    layer, slot, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    labels = [f"layer{i}.cache.{verb}" for i in layer.tolist()]
    names = tuple(dict.fromkeys((*tasks.names, *labels)))
    ops = tuple(dict.fromkeys((*tasks.ops, verb)))
    place = {name: i for i, name in enumerate(names)}
    zero, none = np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    stages = dict(zip(tasks.layer.tolist(), tasks.stage.tolist(), strict=True))
    new: dict[str, Any] = {
        "kind": zero + kind, "name": np.array([place[x] for x in labels]),
        "op": zero + ops.index(verb), "phase": zero,
        "stage": np.array([stages[i] for i in layer.tolist()]), "layer": layer,
        "microbatch": none, "flops": zero, "traffic": zero, "collective": none,
        "dtype": zero + tasks.dtypes.index(dtype), "comm_bytes": size, "slot": slot, "tag": layer,
        "shape": none,
    }  # fmt: skip
    columns = {
        name: np.insert(column, at, values.astype(column.dtype))
        for name, values in new.items()
        for column in [getattr(tasks, name)]
    }
    old = np.arange(len(tasks)) + np.searchsorted(at, np.arange(len(tasks)), side="right")
    total = len(tasks) + len(rows)
    data_ptr, data_rows = _linked(tasks.data_ptr, tasks.data, old, total, data)
    order_ptr, order_rows = _linked(tasks.order_ptr, tasks.order, old, total, order)
    return replace(
        tasks, **columns, names=names, ops=ops,
        data_ptr=data_ptr, data=data_rows, order_ptr=order_ptr, order=order_rows,
    )  # fmt: skip


def _linked(
    ptr: Int, needed: Any, to: Int, total: int, more: Iterable[tuple[int, int]]
) -> tuple[Int, Any]:
    """Dependencies as CSR after each row moved `to` another one, with further dependencies."""
    pairs = np.array(list(more), np.int64).reshape(-1, 2)
    row = np.concatenate([to[np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))], pairs[:, 0]])
    on = np.concatenate([to[needed], pairs[:, 1]])
    turn = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=total)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), on[turn].astype(np.int32)
