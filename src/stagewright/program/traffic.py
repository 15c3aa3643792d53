"""Bytes that each rank, or block of ranks, sends to each other in a step.

A message goes from its sender to its receiver. Of a collective, each rank sends every other member
of its group the same part, as if all exchanged directly: an all_gather its shard; a reduce_scatter
or all_to_all one part of its input for each member; an all_reduce twice that. A ring or a tree
sends as much in all, but between other pairs.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> run = Run(model="llama3-8b", pp=2, layers=2, seq_length=8, global_batch_size=1)
>>> traffic = matrix(compile(run).program, "pp")
>>> traffic.bytes.astype(int).tolist()  # 8 x 4096 in bf16 and back, 4 bytes of a norm each way
[[0, 65540], [65540, 0]]
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.program.columns import COLLECTIVES, Program, TaskKind

MAX_BLOCKS = 64
"""Limit of the rows of a matrix."""
_CHUNK = 1 << 16  # groups at a time


class Matrix(NamedTuple):
    """Bytes from the ranks of each row to those of each column."""

    axis: str
    edges: Int  # block i holds the ranks from edges[i] to edges[i + 1] - 1
    bytes: Float


def axes(program: Program) -> list[str]:
    """The axes along which a program communicates, the busiest first."""
    sums: dict[str, float] = defaultdict(float)
    for rank_class in program.classes:
        tasks = rank_class.tasks
        for kind, names in (
            (TaskKind.COLLECTIVE, _groups(program)),
            (TaskKind.SEND, _peers(program)),
        ):
            for slot, axis in enumerate(names):
                selected = (tasks.kind == kind) & (tasks.slot == slot)
                sums[axis] += float(tasks.comm_bytes[selected].sum()) * len(rank_class.ranks)
    return sorted((axis for axis, size in sums.items() if size), key=lambda a: (-sums[a], a))


def blocks(program: Program, limit: int = MAX_BLOCKS) -> Int:
    """Edges of at most `limit` blocks of neighbouring ranks, of equal size.

    A block has all positions along the fastest axes of the mesh, and a part of the next axis.
    """
    world_size = program.mesh.world_size
    min_size = -(-world_size // limit)
    size, inner = world_size, 1
    for _, extent in program.mesh.axes:
        sizes = [inner * d for d in range(1, extent + 1) if extent % d == 0]
        fits = [block for block in sizes if block >= min_size]
        if fits:
            size = fits[0]
            break
        inner *= extent
    if world_size % size:  # meshes side by side
        size = min_size
    return np.append(np.arange(0, world_size, size), world_size).astype(np.int64)


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
    groups, group = np.unique(ids, return_inverse=True)
    members = np.bincount(group)
    sent = np.zeros(len(ids))  # to each other member of the group
    for rank_class in program.classes:
        tasks = rank_class.tasks
        selected = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.slot == slot)
        for number, op in enumerate(COLLECTIVES):
            rows = selected & (tasks.collective == number)
            size = float(tasks.local_bytes[rows].sum(dtype=float))
            if size:
                ranks = members[group[rank_class.ranks]]
                parts = 1.0 if op == "all_gather" else _TIMES.get(op, 1.0) / ranks
                sent[rank_class.ranks] += size * parts
    sent[ids == 0] = 0
    width = len(sums)
    senders = np.flatnonzero(sent)
    for low in range(0, len(groups), _CHUNK):
        inside = (group >= low) & (group < low + _CHUNK) & (ids > 0)
        selected = np.flatnonzero(inside & (sent > 0))
        if not len(selected):
            continue
        count = min(_CHUNK, len(groups) - low)
        cell = (group - low) * width + of_rank
        counts = np.bincount(cell[inside], minlength=count * width).astype(float)
        sent_bytes = np.bincount(cell[selected], sent[selected], count * width)
        sums += sent_bytes.reshape(count, width).T @ counts.reshape(count, width)
    # No rank sends to itself.
    np.subtract.at(sums, (of_rank[senders], of_rank[senders]), sent[senders])


def _add_messages(sums: Float, program: Program, slot: int, of_rank: Int) -> None:
    for rank_class in program.classes:
        tasks = rank_class.tasks
        sends = (tasks.kind == TaskKind.SEND) & (tasks.slot == slot)
        size = float(tasks.comm_bytes[sends].sum(dtype=float))
        if size:
            peers = program.peer_of(slot, rank_class.ranks)
            np.add.at(sums, (of_rank[rank_class.ranks], of_rank[peers]), size)
