"""Bytes that each rank, or block of ranks, sends to each other in a step.

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
"""Rows of a matrix at most."""
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
    """Edges of at most `most` blocks of neighbouring ranks, of equal size.

    A block has all positions along the fastest axes of the mesh, and a part of the next axis.
    """
    world = program.mesh.world_size
    least = -(-world // most)
    size, inner = world, 1
    for _, extent in program.mesh.axes:
        fits = [inner * d for d in range(1, extent + 1) if extent % d == 0 and inner * d >= least]
        if fits:
            size = fits[0]
            break
        inner *= extent
    if world % size:  # meshes side by side
        size = least
    return np.append(np.arange(0, world, size), world).astype(np.int64)


def matrix(program: Program, axis: str | None = None, edges: Int | None = None) -> Matrix:
    """The bytes between blocks along one axis, or along all axes."""
    edges = blocks(program) if edges is None else edges
    sums = np.zeros((len(edges) - 1, len(edges) - 1))
    of_rank = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    for slot, name in enumerate(_groups(program)):
        if axis in (None, name):
            _add_groups(sums, program, slot, of_rank)
    for slot, name in enumerate(_peers(program)):
        if axis in (None, name):
            _add_messages(sums, program, slot, of_rank)
    return Matrix(axis or "all", edges, sums)


def _groups(program: Program) -> list[str]:
    return [program.label_of(slot) for slot in range(len(program.communicators))]


def _peers(program: Program) -> list[str]:
    return [peer.axis for peer in program.peers]


_TIMES = {"all_reduce": 2.0, "all_gather": 0.0, "broadcast": 1.0}


def _add_groups(sums: Float, program: Program, slot: int, of_rank: Int) -> None:
    """Add collectives: the bytes that members in one block send, times the members in another."""
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
    wide = len(sums)
    busy = np.flatnonzero(sent)
    for low in range(0, len(known), _CHUNK):
        inside = (group >= low) & (group < low + _CHUNK) & (ids > 0)
        mine = np.flatnonzero(inside & (sent > 0))
        if not len(mine):
            continue
        count = min(_CHUNK, len(known) - low)
        there = np.flatnonzero(inside)
        at = (group[there] - low) * wide + of_rank[there]
        counts = np.bincount(at, minlength=count * wide).reshape(count, wide).astype(float)
        at = (group[mine] - low) * wide + of_rank[mine]
        gives = np.bincount(at, sent[mine], count * wide).reshape(count, wide)
        sums += gives.T @ counts
    # No rank sends to itself.
    np.subtract.at(sums, (of_rank[busy], of_rank[busy]), sent[busy])


def _add_messages(sums: Float, program: Program, slot: int, of_rank: Int) -> None:
    for of in program.classes:
        tasks = of.tasks
        mine = (tasks.kind == TaskKind.SEND) & (tasks.slot == slot)
        size = float(tasks.comm_bytes[mine].sum(dtype=float))
        if size:
            peers = program.peer_of(slot, of.ranks)
            np.add.at(sums, (of_rank[of.ranks], of_rank[peers]), size)
