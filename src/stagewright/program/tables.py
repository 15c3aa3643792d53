"""Tables of a rank: tasks and values as columns, one row each.

Columns index tuples of names, shapes and the like; partners are slots, which `communicators`
resolves for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.graph.node import PHASES

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
    """One row per task, in issue order; every dependency points to an earlier row.

    Units: `flops` floating-point operations (2 per multiply-add); `traffic` bytes read and written
    in device memory; `comm_bytes` bytes of the local input of a collective (of an all_gather: the
    shard of this rank; of an all_reduce, reduce_scatter or all_to_all: the full tensor on this
    rank), or of a message. All members of a group have the same `comm_bytes`. Uneven: bytes of the
    even collective of equal duration; `local_bytes` has those of the rank.

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
