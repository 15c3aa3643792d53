"""How long the tasks of a program take on a machine, each alone: kernels, collectives, messages.

>>> import stagewright as sw
>>> from stagewright.time.hardware import resolve
>>> program = sw.compile(sw.Run(model="gpt2", dp=8)).program
>>> (seconds,) = task_seconds(program, Machine.of(resolve("h100-sxm"), gpus=8))
>>> len(seconds) == len(program.classes[0].tasks), bool((seconds >= 0).all())
(True, True)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.graph.table import OPS, Timing, served_heads
from stagewright.program.columns import COLLECTIVES, PHASES, Program, RankClass, TaskKind, Tasks
from stagewright.program.shapes import GEMM
from stagewright.time.collectives import collective_seconds, dispatch_seconds, message_seconds
from stagewright.time.fused_products import with_fused_products
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, Placement, placements, tier_of
from stagewright.time.roofline import (
    QUERIES,
    attention_seconds,
    copies_seconds,
    gemm_seconds,
    memory_seconds,
    routing_seconds,
)
from stagewright.time.tensor_overlap import with_tp_overlap

Seconds = Float


class Routed(NamedTuple):
    """The number of experts, and how many of them each token is routed to."""

    experts: int
    top_k: int


def task_seconds(
    program: Program,
    machine: Machine,
    *,
    tp_comm_overlap: bool = False,
    routed: Routed | None = None,
) -> list[Seconds]:
    """Per rank class the duration of each of its tasks in seconds, alone on its GPU and links.

    A collective takes as long as the group of the class that where worst; SEND and RECV both carry
    the duration of the message. `tp_comm_overlap`: what tensor parallelism gathers and scatters is
    cut, and takes only what the products beside it leave of it (`tensor_overlap`). `routed`: a
    token goes once to each rank that has experts for it (`collectives.dispatch_seconds`).
    """
    if program.mesh.world_size != machine.gpus:
        raise UserError(
            f"the program is for {program.mesh.world_size} ranks and the machine has "
            f"{machine.gpus} GPUs; make them equal"
        )
    placed = Placements(program, machine)
    found = [_class_seconds(placed, which, routed) for which in program.classes]
    if tp_comm_overlap:
        each = zip(program.classes, found, strict=True)
        found = [with_tp_overlap(program, of.tasks, given, machine.hardware) for of, given in each]
    return found


class Placements:
    """Maps communicator groups and peers of a program onto the tiers of a machine, on request."""

    def __init__(self, program: Program, machine: Machine) -> None:
        """Compute the groups of each communicator; all else is computed on request."""
        self.program = program
        self.machine = machine
        self.groups = [program.group_of(slot) for slot in range(len(program.communicators))]

    def placements(self, slot: int, which: RankClass) -> list[Placement]:
        """The placements of the groups that have members in a class."""
        ids = self.groups[slot]
        wanted = np.unique(ids[which.ranks])
        ranks = np.flatnonzero(np.isin(ids, wanted[wanted > 0]))
        ranks = ranks[np.argsort(ids[ranks], kind="stable")]
        groups = len(wanted[wanted > 0])
        return placements(self.machine, ranks.reshape(groups, -1).astype(np.int64))

    def of_experts(self, slot: int) -> bool:
        """Whether a communicator belongs to expert parallelism."""
        return any("ep" in names for names in self.program.degrees_of(slot))

    def level(self, slot: int, which: RankClass) -> int:
        """The outermost dimension that a message of the class passes."""
        peers = self.program.peer_of(slot)[which.ranks]
        return int(tier_of(self.machine, which.ranks, peers).max(initial=0))


def _class_seconds(placed: Placements, which: RankClass, routed: Routed | None = None) -> Seconds:
    tasks, machine = which.tasks, placed.machine
    seconds = np.zeros(len(tasks))
    computes = tasks.kind == TaskKind.COMPUTE
    columns = (tasks.shape, tasks.dtype, tasks.flops, tasks.traffic, tasks.phase)
    rows, back = _unique(columns, computes)
    seconds[computes] = kernel_seconds(tasks, rows, machine.hardware)[back]
    seconds = with_fused_products(tasks, seconds, machine.hardware)
    if tasks.duration is not None:  # what was measured wins
        seconds = np.where(tasks.duration > 0, tasks.duration * 1e-9, seconds)

    moves = tasks.kind == TaskKind.COLLECTIVE
    rows, back = _unique((tasks.collective, tasks.slot, tasks.comm_bytes), moves)
    where = {int(s): placed.placements(int(s), which) for s in np.unique(tasks.slot[moves])}

    def moved(i: int, group: Placement) -> float:
        op, size = COLLECTIVES[int(tasks.collective[i])], int(tasks.comm_bytes[i])
        if routed and op == "all_to_all" and placed.of_experts(int(tasks.slot[i])):
            return dispatch_seconds(size, group, machine, *routed)
        return collective_seconds(op, size, group, machine)[0]

    each = [max(moved(int(i), group) for group in where[int(tasks.slot[i])]) for i in rows]
    seconds[moves] = np.array(each)[back] if each else 0.0

    copies = (tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE)
    to_host = machine.hardware.host_bandwidth_gb_s * 1e9
    seconds = np.where(copies, tasks.comm_bytes / to_host, seconds)

    messages = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
    rows, back = _unique((tasks.slot, tasks.comm_bytes), messages)
    levels = {int(s): placed.level(int(s), which) for s in np.unique(tasks.slot[messages])}
    each = [
        message_seconds(int(tasks.comm_bytes[i]), levels[int(tasks.slot[i])], machine) for i in rows
    ]
    seconds[messages] = np.array(each)[back] if each else 0.0
    return seconds


def _unique(
    columns: tuple[NDArray[np.integer], ...], chosen: Bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first of each set of equal chosen rows, and for each chosen row the index of its set."""
    where = np.flatnonzero(chosen)
    table = np.stack([c[where].astype(np.int64) for c in columns], axis=1)
    if not len(where):
        return where, where
    _, first, back = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return where[first], back.reshape(-1)


def kernel_seconds(tasks: Tasks, rows: NDArray[np.intp], hardware: Hardware) -> Seconds:
    """Durations of some COMPUTE rows, from the shapes of their kernels."""
    flops, traffic = tasks.flops[rows].astype(float), tasks.traffic[rows].astype(float)
    seconds = memory_seconds(traffic, flops, hardware)
    dtypes = np.array([tasks.dtypes[int(i)] for i in tasks.dtype[rows]])
    kernels = np.array([tasks.shapes[int(i)].kernel if i >= 0 else "" for i in tasks.shape[rows]])
    for kernel, dtype in {(str(k), str(d)) for k, d in zip(kernels, dtypes, strict=True)}:
        timing = timing_of(kernel)
        if timing is Timing.MEMORY:
            continue
        here = (kernels == kernel) & (dtypes == dtype)
        shapes = [dict(tasks.shapes[int(i)].extents) for i in tasks.shape[rows[here]]]
        # An extent that a kernel need not have is 0 where it lacks it: chunks of attention.
        names = dict.fromkeys(x for s in shapes for x in s)
        size = {x: np.array([s.get(x, 0) for s in shapes], dtype=float) for x in names}
        if timing is Timing.PRODUCT:
            seconds[here] = gemm_seconds(
                size["batch"], size["m"], size["n"], size["k"],
                traffic=traffic[here], dtype=dtype, on=hardware,
            )  # fmt: skip
        elif timing in (Timing.TO_EXPERTS, Timing.FROM_EXPERTS):
            again = tasks.phase[rows[here]] == PHASES.index("backward")
            seconds[here] = _copies(size, timing, traffic[here], again, dtype, hardware)
        elif timing is Timing.SERVED_ATTENTION:
            seconds[here] = _served(size, flops[here], traffic[here], dtype, hardware)
        elif timing is Timing.CHUNKED:
            # A step of decode has no chunks: it moves states.
            here[here] = whole = size.get("chunk", np.zeros(len(shapes))) > 0
            size = {x: column[whole] for x, column in size.items()}
            if whole.any():
                seconds[here] = _chunked(size, flops[here], traffic[here], dtype, hardware)
        else:
            seconds[here] = attention_shape_seconds(
                size, flops[here], traffic[here], dtype, hardware,
                timing is Timing.ATTENTION_BACKWARD,
            )  # fmt: skip
    return seconds / hardware.sustained_fraction


def timing_of(kernel: str) -> Timing:
    """Which model times a kernel, by what its shape calls it: matrix products, or an op alone."""
    if kernel == GEMM:
        return Timing.PRODUCT
    return OPS[kernel].timing if kernel in OPS else Timing.MEMORY


def _copies(
    size: dict[str, Float],
    timing: Timing,
    traffic: Float,
    again: Bool,
    dtype: str,
    hardware: Hardware,
) -> Seconds:
    """Copies of tokens; in forward they include the sorting of tokens by expert."""
    copies = size["e"] * size["r"]
    if timing is Timing.FROM_EXPERTS:
        return copies_seconds(traffic, copies, hardware)
    moved = np.maximum(traffic, 2 * copies * size["m"] * float(BYTES[dtype]))
    sorting = np.where(again, 0, routing_seconds(copies, hardware))
    return copies_seconds(moved, copies, hardware) + sorting


def _served(
    size: dict[str, Float],
    flops: Float,
    traffic: Float,
    dtype: str,
    hardware: Hardware,
) -> Seconds:
    """Attention over requests with lengths of their own, in tiles of queries as in training.

    Several units share the keys of one tile (flash decoding), so that the load is even. Reading the
    keys may take longer than computing: a single token has few queries for each key read.
    """
    width = size["d"] + size.get("v", size["d"])
    heads = math.prod(served_heads(size))
    tiles = np.ceil(size["q"] / QUERIES) * heads
    none = np.zeros_like(flops)
    work = attention_seconds(
        tiles, none, flops / (2 * width), 2 * width, traffic=none, dtype=dtype, on=hardware
    )
    return np.maximum(work, memory_seconds(traffic, none, hardware))


def _chunked(
    size: dict[str, Float],
    flops: Float,
    traffic: Float,
    dtype: str,
    hardware: Hardware,
) -> Seconds:
    """A chunked recurrence as one product of equal FLOPs per chunk and head; not fitted."""
    batch = np.ceil(size["s"] / size["chunk"]) * size["b"] * size["g"] * size["h"]
    m, n = size["chunk"], size["p"]
    k = flops / (2 * m * n * batch)
    return gemm_seconds(batch, m, n, k, traffic=traffic, dtype=dtype, on=hardware)


def attention_shape_seconds(
    size: dict[str, Float],
    flops: Float,
    traffic: Float,
    dtype: str,
    hardware: Hardware,
    backward: bool,
) -> Seconds:
    """Fused attention by its extents, an array each.

    Forward does two products per pair of query and key, backward five.
    """
    d, v = size["d"], size["v"]
    # Backward goes through the keys in tiles, each of which meets all queries.
    rows, columns = (size["k"], size["q"]) if backward else (size["q"], size["k"])
    reach = np.maximum(size["window"], size.get("chunk", 0))
    seen = np.where(reach > 0, np.minimum(reach, columns), columns)
    heads = size["batch"] * size["heads"]
    tiles = np.ceil(rows / QUERIES) * heads
    each = 2 * (3 * d + 2 * v) if backward else 2 * (d + v)
    # Masks are by tile: those on the diagonal are computed whole.
    points = flops / each + size["causal"] * tiles * QUERIES**2 / 2
    return attention_seconds(
        tiles, seen, points, each, traffic=traffic, dtype=dtype, on=hardware, backward=backward
    )
