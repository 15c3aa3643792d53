"""Who sends how many bytes to whom in a step: ranks, or blocks of them, by ranks or blocks.

A message goes from its sender to its receiver. Of a collective, each rank sends every other member
of its group the same part, as if all exchanged directly: an all_gather its shard; a reduce_scatter
or all_to_all one part of its input for each member; an all_reduce twice that. A ring or a tree
sends as much in all, but between other pairs.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> run = Run(model="llama3-8b", pp=2, layers=2, seq_length=8, global_batch_size=1)
>>> found = matrix(compile(run).program, "pp")
>>> found.bytes.astype(int).tolist()  # 8 x 4096 in bf16 and back, 4 bytes of a norm each way
[[0, 65540], [65540, 0]]
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.program.columns import COLLECTIVES, Program, TaskKind

MOST = 64
"""Rows of a matrix."""
_CHUNK = 1 << 16  # groups at a time


class Matrix(NamedTuple):
    """Bytes from the ranks of each row to those of each column."""

    axis: str
    edges: Int  # block i holds the ranks from edges[i] to edges[i + 1] - 1
    bytes: Float


def axes(program: Program) -> list[str]:
    """The axes along which a program communicates, the busiest first."""
    sums: dict[str, float] = defaultdict(float)
    for of in program.classes:
        tasks = of.tasks
        for kind, names in (
            (TaskKind.COLLECTIVE, _groups(program)),
            (TaskKind.SEND, _peers(program)),
        ):
            for slot, axis in enumerate(names):
                mine = (tasks.kind == kind) & (tasks.slot == slot)
                sums[axis] += float(tasks.comm_bytes[mine].sum()) * len(of.ranks)
    return sorted((axis for axis, size in sums.items() if size), key=lambda a: (-sums[a], a))


def blocks(program: Program, most: int = MOST) -> Int:
    """Edges of at most so many blocks of neighbouring ranks, alike in number.

    Blocks are whole in the mesh: all positions along the fastest axes, and a part of the next.
    """
    world = program.mesh.world_size
    least = -(-world // most)
    size, whole = world, 1
    for _, extent in program.mesh.axes:
        fits = [whole * d for d in range(1, extent + 1) if extent % d == 0 and whole * d >= least]
        if fits:
            size = fits[0]
            break
        whole *= extent
    if world % size:  # meshes side by side
        size = least
    return np.append(np.arange(0, world, size), world).astype(np.int64)


def matrix(program: Program, axis: str | None = None, edges: Int | None = None) -> Matrix:
    """Bytes along one axis, or along all."""
    edges = blocks(program) if edges is None else edges
    found = np.zeros((len(edges) - 1, len(edges) - 1))
    of_rank = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    for slot, name in enumerate(_groups(program)):
        if axis in (None, name):
            _add_groups(found, program, slot, of_rank)
    for slot, name in enumerate(_peers(program)):
        if axis in (None, name):
            _add_messages(found, program, slot, of_rank)
    return Matrix(axis or "all", edges, found)


def _groups(program: Program) -> list[str]:
    return [program.label_of(slot) for slot in range(len(program.communicators))]


def _peers(program: Program) -> list[str]:
    return [peer.axis for peer in program.peers]


_TIMES = {"all_reduce": 2.0, "all_gather": 0.0, "broadcast": 1.0}


def _add_groups(found: Float, program: Program, slot: int, of_rank: Int) -> None:
    """Groups meet blocks: what members in one block send, times how many are in another."""
    ids = program.group_of(slot)
    known, group = np.unique(ids, return_inverse=True)
    members = np.bincount(group)
    sent = np.zeros(len(ids))  # to each other member of the group
    for of in program.classes:
        tasks = of.tasks
        mine = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.slot == slot)
        for number, kind in enumerate(COLLECTIVES):
            size = float(tasks.local_bytes[mine & (tasks.collective == number)].sum(dtype=float))
            if size:
                ranks = members[group[of.ranks]]
                parts = 1.0 if kind == "all_gather" else _TIMES.get(kind, 1.0) / ranks
                sent[of.ranks] += size * parts
    sent[ids == 0] = 0
    wide = len(found)
    busy = np.flatnonzero(sent)
    for low in range(0, len(known), _CHUNK):
        some = (group >= low) & (group < low + _CHUNK) & (ids > 0)
        mine = np.flatnonzero(some & (sent > 0))
        if not len(mine):
            continue
        count = min(_CHUNK, len(known) - low)
        there = np.flatnonzero(some)
        at = (group[there] - low) * wide + of_rank[there]
        counts = np.bincount(at, minlength=count * wide).reshape(count, wide).astype(float)
        at = (group[mine] - low) * wide + of_rank[mine]
        gives = np.bincount(at, sent[mine], count * wide).reshape(count, wide)
        found += gives.T @ counts
    # None sends to itself.
    np.subtract.at(found, (of_rank[busy], of_rank[busy]), sent[busy])


def _add_messages(found: Float, program: Program, slot: int, of_rank: Int) -> None:
    for of in program.classes:
        tasks = of.tasks
        mine = (tasks.kind == TaskKind.SEND) & (tasks.slot == slot)
        size = float(tasks.comm_bytes[mine].sum(dtype=float))
        if size:
            peers = program.peer_of(slot, of.ranks)
            np.add.at(found, (of_rank[of.ranks], of_rank[peers]), size)
