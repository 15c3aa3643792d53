"""Durations of the tasks of a program on a machine.

>>> import stagewright as sw
>>> from stagewright.time.hardware import resolve
>>> program = sw.compile(sw.Run(model="gpt2", dp=8)).program
>>> (seconds,) = task_seconds(program, Machine.of(resolve("h100-sxm"), gpus=8))
>>> len(seconds) == len(program.classes[0].work.actions.tasks), bool((seconds >= 0).all())
(True, True)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, distinct_rows, sorted_values
from stagewright.errors import UserError
from stagewright.graph.table import Timing
from stagewright.lower.disaggregated import Meshes
from stagewright.program.columns import (
    BACKWARD_PHASE,
    COLLECTIVES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)
from stagewright.time.collectives import collective_seconds, message_seconds
from stagewright.time.dispatch import (
    DispatchKernels,
    dispatch_seconds,
    exchanges_tokens,
    is_expert_communicator,
    sent_with_tokens,
    slowdown_by_dispatch,
)
from stagewright.time.expert_kernels import (
    bias_seconds,
    copying_seconds,
    trains,
    weighed_within,
)
from stagewright.time.fused_gemms import with_fused_gemms, within_products
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, Placement, placements_by_rank, tier_of
from stagewright.time.roofline import Kernels, kernels_seconds, memory_seconds, timing_of
from stagewright.time.tp_overlap import with_tp_overlap


def task_seconds(
    program: Program,
    machine: Machine,
    *,
    tp_comm_overlap: bool = False,
    dispatch: DispatchKernels | None = None,
) -> list[Float]:
    """Seconds of each row of the actions of each rank class.

    They are those in isolation, unless `tp_comm_overlap` or overlapped dispatches change them.
    A collective takes as long as in the slowest group of the class; SEND and RECV both carry the
    duration of the message. With `tp_comm_overlap`, TP collectives are split into chunks and count
    only the part that the adjacent GEMMs do not hide (`tp_overlap`). With `dispatch`, a token is
    sent once to each rank that has experts for it (`time.dispatch`). Raises UserError where the
    program and the machine differ in their number of GPUs.
    """
    if program.mesh.world_size != machine.gpus:
        raise UserError(
            f"the program is for {program.mesh.world_size} ranks and the machine has "
            f"{machine.gpus} GPUs; make them equal"
        )
    timer = _Timer(program, machine, dispatch)
    seconds = [timer.seconds(rank_class) for rank_class in program.classes]
    if not tp_comm_overlap:
        return seconds
    return [
        with_tp_overlap(program, rank_class.work.actions.tasks, isolated, machine.hardware)
        for rank_class, isolated in zip(program.classes, seconds, strict=True)
    ]


class _Timer:
    """Durations of a program's tasks; what rank classes share is timed once."""

    def __init__(
        self, program: Program, machine: Machine, dispatch: DispatchKernels | None
    ) -> None:
        self.program, self.machine, self.dispatch = program, machine, dispatch
        self._kernels: dict[tuple[int, DispatchKernels | None], Float] = {}
        self._placements_by_slot: dict[int, tuple[list[Placement], Int]] = {}
        self._collectives: dict[tuple[str, int, Placement, DispatchKernels | None], float] = {}

    def seconds(self, rank_class: RankClass) -> Float:
        """Seconds of the rows of the actions of a class."""
        tasks = rank_class.work.actions.tasks
        dispatch = self._dispatch_of(rank_class)
        key = id(tasks), dispatch
        if key not in self._kernels:
            self._kernels[key] = self._kernel_seconds(tasks, dispatch)
        seconds = self._kernels[key].copy()

        token_exchanges = exchanges_tokens(self.program, tasks)
        self._set_collectives(seconds, rank_class, token_exchanges, dispatch)
        if dispatch and dispatch.overlapped:
            _slow_down_by_dispatch(seconds, rank_class, token_exchanges, self.machine.hardware)

        on_host = (tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE)
        to_host = self.machine.hardware.host_bandwidth_gb_s * 1e9
        seconds = np.where(on_host, tasks.comm_bytes / to_host, seconds)

        self._set_messages(seconds, rank_class)
        if tasks.duration is not None:  # a measured duration replaces the computed one
            seconds = np.where(tasks.duration > 0, tasks.duration * 1e-9, seconds)
        return seconds

    def _dispatch_of(self, rank_class: RankClass) -> DispatchKernels | None:
        """Kernels of dispatch of a class: ranks that prefill send large messages."""
        dispatch, mesh = self.dispatch, self.program.mesh
        if dispatch and isinstance(mesh, Meshes) and rank_class.ranks[0] < mesh.parts[0].world_size:
            return dispatch._replace(low_latency=False)
        return dispatch

    def _kernel_seconds(self, tasks: Tasks, dispatch: DispatchKernels | None) -> Float:
        """Seconds of kernels, 0 for other tasks: equal for all classes with these actions."""
        hardware = self.machine.hardware
        seconds = np.zeros(len(tasks))
        computes = tasks.kind == TaskKind.COMPUTE
        columns = (tasks.shape, tasks.dtype, tasks.flops, tasks.traffic, tasks.phase)
        rows, inverse = _distinct(columns, computes)
        seconds[computes] = kernel_seconds(tasks, rows, hardware)[inverse]
        seconds = with_fused_gemms(tasks, seconds, hardware)
        seconds[weighed_within(tasks)] = 0.0
        if trains(tasks):
            seconds[within_products(tasks)] = 0.0
            seconds += bias_seconds(tasks, hardware)
            if not dispatch:
                seconds += self._copying_seconds(tasks)
        return seconds

    def _copying_seconds(self, tasks: Tasks) -> Float:
        """Seconds of each task for copies of rows around the all-to-alls of experts."""
        program, mesh = self.program, self.program.mesh
        slots: list[int] = np.unique(tasks.slot[exchanges_tokens(program, tasks)]).tolist()
        if not slots:
            return np.zeros(len(tasks))
        ranks = max(mesh.size(*program.communicators[slot].axes) for slot in slots)
        width = mesh.size(*dict(mesh.groups).get("etp", ()))
        return copying_seconds(tasks, ranks, width, self.machine.hardware)

    def _set_collectives(
        self,
        seconds: Float,
        rank_class: RankClass,
        token_exchanges: Bool,
        dispatch: DispatchKernels | None,
    ) -> None:
        """Set the seconds of collectives: of the slowest group with ranks of the class."""
        tasks = rank_class.work.actions.tasks
        is_collective = tasks.kind == TaskKind.COLLECTIVE
        with_tokens = sent_with_tokens(tasks, token_exchanges, by_batch=not trains(tasks))
        columns = (tasks.collective, tasks.slot, tasks.comm_bytes, with_tokens.astype(np.int8))
        rows, inverse = _distinct(columns, is_collective)
        slots = sorted_values(tasks.slot[is_collective]).tolist()
        groups = {slot: self._placements(slot, rank_class) for slot in slots}
        experts = {slot for slot in slots if is_expert_communicator(self.program, slot)}

        def slowest(row: int) -> float:
            op, slot = COLLECTIVES[int(tasks.collective[row])], int(tasks.slot[row])
            by_dispatch = dispatch if op == "all_to_all" and slot in experts else None
            if by_dispatch and with_tokens[row]:
                return 0.0
            size = int(tasks.comm_bytes[row])
            # Shared actions of other ranks may use groups that the class is not in.
            times = [self._collective_seconds(op, size, g, by_dispatch) for g in groups[slot]]
            return max(times, default=0.0)

        if len(rows):
            seconds[is_collective] = np.array([slowest(row) for row in rows.tolist()])[inverse]

    def _collective_seconds(
        self, op: str, size: int, group: Placement, dispatch: DispatchKernels | None
    ) -> float:
        key = op, size, group, dispatch
        if key not in self._collectives:
            if dispatch is None:
                self._collectives[key] = collective_seconds(op, size, group, self.machine)
            else:
                self._collectives[key] = dispatch_seconds(size, group, self.machine, dispatch)
        return self._collectives[key]

    def _placements(self, slot: int, rank_class: RankClass) -> list[Placement]:
        """Placements of the groups of communicator `slot` with members in a rank class."""
        if slot not in self._placements_by_slot:
            self._placements_by_slot[slot] = placements_by_rank(
                self.machine, self.program.group_of(slot)
            )
        distinct, index_of_rank = self._placements_by_slot[slot]
        indices = index_of_rank[rank_class.ranks]
        return [distinct[index] for index in sorted_values(indices[indices >= 0]).tolist()]

    def _set_messages(self, seconds: Float, rank_class: RankClass) -> None:
        """Set the seconds of messages to peers: by the outermost tier that they cross."""
        tasks, ranks = rank_class.work.actions.tasks, rank_class.ranks
        messages = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
        rows, inverse = _distinct((tasks.slot, tasks.comm_bytes), messages)
        tiers: dict[int, int] = {}
        for slot in sorted_values(tasks.slot[messages]).tolist():
            peers = self.program.peer_of(slot)[ranks]
            tiers[slot] = int(tier_of(self.machine, ranks, peers).max(initial=0))
        durations = [
            message_seconds(int(tasks.comm_bytes[row]), tiers[int(tasks.slot[row])], self.machine)
            for row in rows
        ]
        if durations:
            seconds[messages] = np.array(durations)[inverse]


def kernel_seconds(tasks: Tasks, rows: NDArray[np.intp], hardware: Hardware) -> Float:
    """Seconds of COMPUTE tasks within a step, from the shapes of their kernels."""
    hardware = hardware.sustained()
    flops, traffic = tasks.flops[rows].astype(float), tasks.traffic[rows].astype(float)
    seconds = memory_seconds(traffic, flops, hardware)
    dtypes = np.array([tasks.dtypes[int(i)] for i in tasks.dtype[rows]])
    names = np.array([tasks.shapes[int(i)].kernel if i >= 0 else "" for i in tasks.shape[rows]])
    for kernel, dtype in {(str(k), str(d)) for k, d in zip(names, dtypes, strict=True)}:
        if timing_of(kernel) is Timing.MEMORY:
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


def _slow_down_by_dispatch(
    seconds: Float, rank_class: RankClass, token_exchanges: Bool, hardware: Hardware
) -> None:
    """Slow down the kernels of a step whose dispatches run at the same time."""
    actions = rank_class.work.actions
    tasks = actions.tasks
    copies = np.bincount(rank_class.work.order.action, minlength=len(actions.begin) - 1)
    row_copies = np.repeat(copies, np.diff(actions.begin))
    overlapped = (tasks.kind == TaskKind.COMPUTE) & (tasks.microbatch >= 0)
    seconds[overlapped] *= slowdown_by_dispatch(
        seconds[overlapped], seconds[token_exchanges], hardware,
        kernel_copies=row_copies[overlapped], dispatch_copies=row_copies[token_exchanges],
    )  # fmt: skip


def _distinct(
    columns: tuple[NDArray[np.integer], ...], chosen: Bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First of each set of equal rows in `chosen`, and the set of each of these rows."""
    rows = np.flatnonzero(chosen)
    first, inverse = distinct_rows([column[rows] for column in columns])
    return rows[first], inverse
