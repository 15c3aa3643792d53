"""Ordering dependencies: the streams in which a device runs a rank's tasks one after the other.

Kernels of a rank form one chain (one compute stream), collectives and sends another one or one per
kind of group (communication streams), and what needs no data (a receive, a gather of weights) waits
for the kernel before it. A kernel that names a group runs on that group's stream, where there is
one. With these, any simulator that runs whatever is ready keeps the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import TaskKind


def order_by_streams(
    columns: Mapping[str, NDArray[np.generic]], dependencies: Int, streams: str
) -> tuple[Int, NDArray[np.int32]]:
    """The rows that each row waits for, as CSR; `dependencies`: how many data each row needs."""
    kind = columns["kind"]
    n = len(kind)
    rows = np.arange(n)
    compute = kind == TaskKind.COMPUTE
    copies = (kind == TaskKind.LOAD) | (kind == TaskKind.STORE)
    moves = (kind == TaskKind.COLLECTIVE) | (kind == TaskKind.SEND) | copies
    stream = np.zeros(n, dtype=np.int64)
    if streams == "separate":
        slot = np.asarray(columns["slot"], dtype=np.int64)
        moves |= compute & (slot >= 0)
        stream = np.where(kind == TaskKind.SEND, -1, slot)
        # Copies to the host and back have an engine for each direction.
        stream = np.where(copies, -2 - kind.astype(np.int64), stream)
    latest = np.maximum.accumulate(np.where(compute & ~moves, rows, -1)) if n else rows
    kernel_before = np.concatenate([[-1], latest[:-1]])
    chain = np.full(n, -1, dtype=np.int64)
    for s in np.unique(stream[moves]):
        in_stream = np.flatnonzero(moves & (stream == s))
        chain[in_stream[1:]] = in_stream[:-1]
    ahead = (dependencies == 0) | (kind == TaskKind.LOAD)
    waits = np.where((compute & ~moves) | ahead, kernel_before, -1)
    pairs = np.stack([waits, chain], axis=1)
    there = pairs >= 0
    pointer = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
    return pointer, pairs[there].astype(np.int32)
