"""Ordering dependencies: streams in which a device runs a rank's tasks one after the other.

Kernels of a rank form one chain (one compute stream), collectives and sends another one, or one per
communicator and one for all sends (communication streams). A task without data dependencies (a
receive, a gather of weights) waits for the previous kernel. A kernel with a communicator runs on
that communicator's stream, where there is one. With these, any simulator that runs whatever is
ready keeps the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, offsets
from stagewright.program.columns import TaskKind


def order_by_streams(
    columns: Mapping[str, NDArray[np.generic]], num_deps: Int, streams: str
) -> tuple[Int, NDArray[np.int32]]:
    """Rows that each row waits for, as CSR; `num_deps`: data dependencies per row."""
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
    previous_kernel = np.concatenate([[-1], latest[:-1]])
    chain = np.full(n, -1, dtype=np.int64)
    for s in np.unique(stream[moves]):
        in_stream = np.flatnonzero(moves & (stream == s))
        chain[in_stream[1:]] = in_stream[:-1]
    no_deps = (num_deps == 0) | (kind == TaskKind.LOAD)
    previous_kernel = np.where((compute & ~moves) | no_deps, previous_kernel, -1)
    pairs = np.stack([previous_kernel, chain], axis=1)
    present = pairs >= 0
    return offsets(present.sum(axis=1)), pairs[present].astype(np.int32)
