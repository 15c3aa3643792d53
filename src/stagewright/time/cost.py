"""Isolated durations of the tasks of a program on a machine: kernels, collectives, messages.

>>> import stagewright as sw
>>> from stagewright.time.hardware import resolve
>>> program = sw.compile(sw.Run(model="gpt2", dp=8)).program
>>> (seconds,) = task_seconds(program, Machine.of(resolve("h100-sxm"), gpus=8))
>>> len(seconds) == len(program.classes[0].work.actions.tasks), bool((seconds >= 0).all())
(True, True)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, distinct_rows, sorted_values
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.graph.table import OPS, Timing, served_heads
from stagewright.lower.disaggregated import Meshes
from stagewright.program.columns import (
    BACKWARD_PHASE,
    COLLECTIVES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)
from stagewright.program.shapes import GEMM
from stagewright.time.collectives import collective_seconds, message_seconds
from stagewright.time.experts.dispatch import Routed, dispatch_seconds, slowdown_beside
from stagewright.time.experts.kernels import (
    among_experts,
    bias_seconds,
    copying_seconds,
    exchanges_tokens,
    slots_of_tokens,
    trains,
    weighed_within,
)
from stagewright.time.fused_products import (
    with_fused_products,
    within_products,
)
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, Placement, placements_by_rank, tier_of
from stagewright.time.roofline import (
    QUERIES,
    AttentionTiles,
    CachedAttentionWork,
    attention_seconds,
    cached_attention_seconds,
    copies_seconds,
    gemm_seconds,
    memory_seconds,
    routing_seconds,
)
from stagewright.time.tensor_overlap import with_tp_overlap

Seconds = Float


def task_seconds(
    program: Program,
    machine: Machine,
    *,
    tp_comm_overlap: bool = False,
    routed: Routed | None = None,
) -> list[Seconds]:
    """Seconds of each row of the actions of each rank class, in isolation.

    A collective takes as long as in the slowest group of the class; SEND and RECV both carry the
    duration of the message. With `tp_comm_overlap`, TP collectives are split into chunks and count
    only the part that the adjacent GEMMs do not hide (`tensor_overlap`). With `routed`, a token is
    sent once to each rank that has experts for it (`experts.dispatch`). Raises
    UserError where the program and the machine differ in their number of GPUs.
    """
    if program.mesh.world_size != machine.gpus:
        raise UserError(
            f"the program is for {program.mesh.world_size} ranks and the machine has "
            f"{machine.gpus} GPUs; make them equal"
        )
    timed = _Timed(Placements(program, machine), routed)
    seconds = [timed.seconds(rank_class) for rank_class in program.classes]
    if tp_comm_overlap:
        split: dict[tuple[int, bytes], Seconds] = {}
        for class_id, rank_class in enumerate(program.classes):
            tasks, isolated = rank_class.work.actions.tasks, seconds[class_id]
            key = id(tasks), isolated.tobytes()
            if key not in split:
                split[key] = with_tp_overlap(program, tasks, isolated, machine.hardware)
            seconds[class_id] = split[key]
    return seconds


class Placements:
    """Placement of communicator groups and peers of a program in the tiers of a machine."""

    def __init__(self, program: Program, machine: Machine) -> None:
        """Compute the groups of each communicator; placements are computed on request."""
        self.program = program
        self.machine = machine
        self.groups = [program.group_of(slot) for slot in range(len(program.communicators))]
        self._placed: dict[int, tuple[list[Placement], Int]] = {}

    def placements(self, slot: int, rank_class: RankClass) -> list[Placement]:
        """Placements of the groups of communicator `slot` with members in a rank class."""
        if slot not in self._placed:
            self._placed[slot] = placements_by_rank(self.machine, self.groups[slot])
        distinct, of_rank = self._placed[slot]
        indices = of_rank[rank_class.ranks]
        return [distinct[n] for n in sorted_values(indices[indices >= 0]).tolist()]

    def routed(self, rank_class: RankClass, routed: Routed | None) -> Routed | None:
        """`routed` for the ranks of a class: those that prefill send large messages."""
        mesh = self.program.mesh
        if routed and isinstance(mesh, Meshes) and rank_class.ranks[0] < mesh.parts[0].world_size:
            return routed._replace(low_latency=False)
        return routed

    def copying_seconds(self, tasks: Tasks) -> Seconds:
        """Seconds of copying rows around all-to-alls of experts, by task."""
        mesh = self.program.mesh
        token_slots = slots_of_tokens(self.program, tasks)
        if not token_slots:
            return np.zeros(len(tasks))
        ranks = max(mesh.size(*self.program.communicators[slot].axes) for slot in token_slots)
        width = mesh.size(*dict(mesh.groups).get("etp", ()))
        return copying_seconds(tasks, ranks, width, self.machine.hardware)

    def level(self, slot: int, rank_class: RankClass) -> int:
        """Outermost tier that messages of a rank class to peer `slot` cross."""
        peers = self.program.peer_of(slot)[rank_class.ranks]
        return int(tier_of(self.machine, rank_class.ranks, peers).max(initial=0))


class _Timed:
    """Durations of the rows of actions; shared tables are timed once."""

    def __init__(self, placed: Placements, routed: Routed | None) -> None:
        self.placed, self.routed = placed, routed
        self.known: dict[tuple[int, Routed | None], Seconds] = {}
        self.exchanges: dict[tuple[str, int, Placement, Routed | None], float] = {}

    def seconds(self, rank_class: RankClass) -> Seconds:
        """Seconds of the rows of the actions of a class."""
        tasks, machine = rank_class.work.actions.tasks, self.placed.machine
        routed = self.placed.routed(rank_class, self.routed)
        key = id(tasks), routed
        if key not in self.known:
            self.known[key] = self._kernels(rank_class, tasks, routed)
        seconds = self.known[key].copy()

        is_collective = tasks.kind == TaskKind.COLLECTIVE
        exchanged = exchanges_tokens(self.placed.program, tasks)
        gates = _gates(tasks, exchanged)
        columns = (tasks.collective, tasks.slot, tasks.comm_bytes, gates.astype(np.int8))
        rows, inverse = _unique(columns, is_collective)
        slots = [int(s) for s in sorted_values(tasks.slot[is_collective])]
        where = {s: self.placed.placements(s, rank_class) for s in slots}

        def duration_of(i: int, group: Placement) -> float:
            op, size = COLLECTIVES[int(tasks.collective[i])], int(tasks.comm_bytes[i])
            dispatches = None
            if op == "all_to_all" and routed:
                slot = int(tasks.slot[i])
                dispatches = routed if among_experts(self.placed.program, slot) else None
            exchange = op, size, group, dispatches
            if exchange not in self.exchanges:
                if dispatches is None:
                    duration = collective_seconds(op, size, group, machine)
                else:
                    duration = dispatch_seconds(size, group, machine, dispatches)
                self.exchanges[exchange] = duration
            return self.exchanges[exchange] if dispatches is None or not gates[i] else 0.0

        # Shared actions of other ranks may use groups that the class is not in.
        slowest = [
            max((duration_of(int(i), group) for group in where[int(tasks.slot[i])]), default=0.0)
            for i in rows
        ]
        seconds[is_collective] = np.array(slowest)[inverse] if slowest else 0.0
        if routed and routed.hidden:
            actions, order = rank_class.work.actions, rank_class.work.order
            copies = np.bincount(order.action, minlength=len(actions.begin) - 1)
            row_copies = np.repeat(copies, np.diff(actions.begin))
            overlapped = (tasks.kind == TaskKind.COMPUTE) & (tasks.microbatch >= 0)
            seconds[overlapped] *= slowdown_beside(
                seconds[overlapped], seconds[exchanged], machine.hardware,
                kernel_copies=row_copies[overlapped], dispatch_copies=row_copies[exchanged],
            )  # fmt: skip

        on_host = (tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE)
        to_host = machine.hardware.host_bandwidth_gb_s * 1e9
        seconds = np.where(on_host, tasks.comm_bytes / to_host, seconds)

        messages = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
        rows, inverse = _unique((tasks.slot, tasks.comm_bytes), messages)
        peer_slots = sorted_values(tasks.slot[messages])
        levels = {int(s): self.placed.level(int(s), rank_class) for s in peer_slots}
        sent = [
            message_seconds(int(tasks.comm_bytes[i]), levels[int(tasks.slot[i])], machine)
            for i in rows
        ]
        seconds[messages] = np.array(sent)[inverse] if sent else 0.0
        if tasks.duration is not None:  # a measured duration replaces the computed one
            seconds = np.where(tasks.duration > 0, tasks.duration * 1e-9, seconds)
        return seconds

    def _kernels(self, rank_class: RankClass, tasks: Tasks, routed: Routed | None) -> Seconds:
        """Seconds of kernels, 0 for other tasks: equal for all classes with these actions."""
        hardware = self.placed.machine.hardware
        seconds = np.zeros(len(tasks))
        computes = tasks.kind == TaskKind.COMPUTE
        columns = (tasks.shape, tasks.dtype, tasks.flops, tasks.traffic, tasks.phase)
        rows, inverse = _unique(columns, computes)
        seconds[computes] = kernel_seconds(tasks, rows, hardware)[inverse]
        seconds = with_fused_products(tasks, seconds, hardware)
        seconds[weighed_within(tasks)] = 0.0
        if trains(tasks):
            seconds[within_products(tasks)] = 0.0
            seconds += bias_seconds(tasks, hardware)
            if not routed:
                seconds += self.placed.copying_seconds(tasks)
        return seconds


def _gates(tasks: Tasks, exchanged: Bool) -> Bool:
    """Mask of exchanges of gates, one number per row, that travel with the tokens.

    Microbatches of training are equally large; batches of a served step are not.
    """
    batch = np.where(tasks.microbatch < 0, -1, 0) if trains(tasks) else tasks.microbatch
    largest = np.zeros(int(batch.max(initial=-1)) + 2, dtype=np.int64)  # the last: once per step
    np.maximum.at(largest, batch[exchanged], tasks.comm_bytes[exchanged])
    return exchanged & (16 * tasks.comm_bytes <= largest[batch])


def _unique(
    columns: tuple[NDArray[np.integer], ...], chosen: Bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First of each set of equal rows in `chosen`, and the set of each of these rows."""
    rows = np.flatnonzero(chosen)
    first, inverse = distinct_rows([column[rows] for column in columns])
    return rows[first], inverse


class Kernels(NamedTuple):
    """COMPUTE tasks of one op and data type: an array element per task."""

    extents: dict[str, Float]
    """By name, such as `q` or `heads`; 0 where a task lacks the extent."""
    flops: Float
    traffic: Float
    """Bytes."""
    dtype: str
    backward: Bool

    def select(self, mask: Bool) -> Kernels:
        """Kernels in the mask."""
        extents = {name: column[mask] for name, column in self.extents.items()}
        return Kernels(
            extents,
            self.flops[mask],
            self.traffic[mask],
            self.dtype,
            self.backward[mask],
        )


def kernel_seconds(tasks: Tasks, rows: NDArray[np.intp], hardware: Hardware) -> Seconds:
    """Seconds of COMPUTE tasks within a step, from the shapes of their kernels."""
    hardware = hardware.sustained()
    flops, traffic = tasks.flops[rows].astype(float), tasks.traffic[rows].astype(float)
    seconds = memory_seconds(traffic, flops, hardware)
    dtypes = np.array([tasks.dtypes[int(i)] for i in tasks.dtype[rows]])
    names = np.array([tasks.shapes[int(i)].kernel if i >= 0 else "" for i in tasks.shape[rows]])
    for kernel, dtype in {(str(k), str(d)) for k, d in zip(names, dtypes, strict=True)}:
        timing = timing_of(kernel)
        if timing is Timing.MEMORY:
            continue
        selected = (names == kernel) & (dtypes == dtype)
        shapes = [tasks.shapes[int(i)].sizes() for i in tasks.shape[rows[selected]]]
        # An extent that a kernel need not have is 0 where it lacks it: chunks of attention.
        extents = dict.fromkeys(name for shape in shapes for name in shape)
        size = {x: np.array([shape.get(x, 0) for shape in shapes], float) for x in extents}
        backward = tasks.phase[rows[selected]] == BACKWARD_PHASE
        kernels = Kernels(size, flops[selected], traffic[selected], dtype, backward)
        seconds[selected] = kernels_seconds(kernel, kernels, hardware)
    return seconds


def kernels_seconds(kernel: str, kernels: Kernels, hardware: Hardware) -> Seconds:
    """Seconds of kernels of one name, on `sustained` hardware: an element per kernel."""
    size, timing = kernels.extents, timing_of(kernel)
    if timing is Timing.PRODUCT:
        seconds = gemm_seconds(
            size["batch"], size["m"], size["n"], size["k"],
            traffic=kernels.traffic, dtype=kernels.dtype, on=hardware,
        )  # fmt: skip
        return np.maximum(seconds, unaligned_seconds(kernels, hardware))
    if timing in (Timing.TO_EXPERTS, Timing.FROM_EXPERTS):
        return _copies(kernels, timing, hardware)
    if timing is Timing.CACHED_ATTENTION and hardware.inference is not None:
        return _cached(kernels, hardware)
    if timing in (Timing.SERVED_ATTENTION, Timing.CACHED_ATTENTION):
        return _served(kernels, hardware)
    if timing in (Timing.ATTENTION, Timing.ATTENTION_BACKWARD):
        backward = timing is Timing.ATTENTION_BACKWARD
        return attention_shape_seconds(kernels, hardware, backward=backward)
    seconds = memory_seconds(kernels.traffic, kernels.flops, hardware)
    if timing is Timing.CHUNKED:
        # A step of decode has no chunks: it moves states.
        chunked = size.get("chunk", np.zeros_like(kernels.flops)) > 0
        if chunked.any():
            seconds[chunked] = _chunked(kernels.select(chunked), hardware)
    return seconds


ALIGNED_BYTES = 16
"""Of the rows of operands: what tensor cores are used most efficiently with (cuBLAS's manual,
"Tensor Core Usage": pointers and leading dimensions of 16 bytes)."""


def unaligned_seconds(kernels: Kernels, hardware: Hardware) -> Seconds:
    """Seconds at least of products of heads whose rows are not aligned; 0 of others.

    A head is a row of each operand of an attention that no kernel fuses: of 108 or 150 values in
    bf16, it does not begin at a multiple of `ALIGNED_BYTES`.
    """
    width = kernels.extents.get("head")
    if width is None or hardware.unaligned_heads_tflops is None:
        return np.zeros_like(kernels.flops)
    unaligned = (width * float(BYTES[kernels.dtype])) % ALIGNED_BYTES > 0
    return np.where(unaligned, kernels.flops / (hardware.unaligned_heads_tflops * 1e12), 0.0)


def timing_of(kernel: str) -> Timing:
    """Timing model of a kernel, by its name: `gemm`, or the name of an op."""
    if kernel == GEMM:
        return Timing.PRODUCT
    return OPS[kernel].timing if kernel in OPS else Timing.MEMORY


def _copies(kernels: Kernels, timing: Timing, hardware: Hardware) -> Seconds:
    """Copies of tokens to experts and back; forward copies include the sorting by expert."""
    size = kernels.extents
    copies = size["e"] * size["r"]
    if timing is Timing.FROM_EXPERTS:
        return copies_seconds(kernels.traffic, copies, hardware)
    moved = np.maximum(kernels.traffic, 2 * copies * size["m"] * float(BYTES[kernels.dtype]))
    sorting = np.where(kernels.backward, 0, routing_seconds(copies, hardware))
    return copies_seconds(moved, copies, hardware) + sorting


def _served(kernels: Kernels, hardware: Hardware) -> Seconds:
    """Attention over requests of different lengths, in tiles of queries as in training.

    Several units share the keys of one tile (flash decoding), so that the load is even. Reading the
    keys may take longer than computing: a single token has few queries for each key read.
    """
    size = kernels.extents
    width = size["d"] + size.get("v", size["d"])
    tiles = np.ceil(size["q"] / QUERIES) * math.prod(served_heads(size))
    zero = np.zeros_like(kernels.flops)
    work = AttentionTiles(tiles, zero, kernels.flops / (2 * width), 2 * width, zero)
    computed = attention_seconds(work, dtype=kernels.dtype, on=hardware)
    return np.maximum(computed, memory_seconds(kernels.traffic, zero, hardware))


def _cached(kernels: Kernels, hardware: Hardware) -> Seconds:
    """Attention over a cache, by constants that were fitted to decode kernels."""
    size = kernels.extents
    width = size["d"] + size.get("v", size["d"])
    queries = size["q"] * math.prod(served_heads(size))
    # Latents are read once for all heads, keys and values once for the heads of a group.
    sharing = size.get("r", size.get("a", np.ones_like(width)))
    # No more are read than there are pairs: an indexer chooses some of a cache's keys.
    points = kernels.flops / (2 * width)
    slots = size["k"] + size.get("j", np.zeros_like(width))
    keys = np.minimum(slots * math.prod(served_heads(size)), points) / sharing
    work = CachedAttentionWork(queries, sharing, points, keys, 2 * width, kernels.traffic)
    return cached_attention_seconds(work, dtype=kernels.dtype, on=hardware)


def _chunked(kernels: Kernels, hardware: Hardware) -> Seconds:
    """A chunked recurrence at the speed that the hardware reaches in such kernels.

    Where none has been measured: as one product of equal FLOPs per chunk and head.
    """
    if hardware.recurrence_tflops is not None:
        moved = memory_seconds(kernels.traffic, np.zeros_like(kernels.flops), hardware)
        return np.maximum(moved, kernels.flops / (hardware.recurrence_tflops * 1e12))
    hardware = hardware.model_copy(update={"experts": None})  # these are not grouped products
    size = kernels.extents
    batch = np.ceil(size["s"] / size["chunk"]) * size["b"] * size["g"] * size["h"]
    m, n = size["chunk"], size["p"]
    k = kernels.flops / (2 * m * n * batch)
    return gemm_seconds(batch, m, n, k, traffic=kernels.traffic, dtype=kernels.dtype, on=hardware)


def attention_shape_seconds(kernels: Kernels, hardware: Hardware, *, backward: bool) -> Seconds:
    """Seconds of fused attention in training.

    Forward computes two products per pair of query and key, backward five.
    """
    size = kernels.extents
    d, v = size["d"], size["v"]
    # Backward goes through the keys in tiles, each of which meets all queries.
    rows, columns = (size["k"], size["q"]) if backward else (size["q"], size["k"])
    span = np.maximum(size["window"], size.get("chunk", 0))
    visible = np.where(span > 0, np.minimum(span, columns), columns)
    heads = size["batch"] * size["heads"]
    tiles = np.ceil(rows / QUERIES) * heads
    flops_per_point = 2 * (3 * d + 2 * v) if backward else 2 * (d + v)
    # Masks act on whole tiles: those on the diagonal are computed in full.
    points = kernels.flops / flops_per_point + size["causal"] * tiles * QUERIES**2 / 2
    work = AttentionTiles(tiles, visible, points, flops_per_point, kernels.traffic)
    return attention_seconds(work, dtype=kernels.dtype, on=hardware, backward=backward)
