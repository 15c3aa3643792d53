"""Durations of the tasks of many configurations at once, from kernels whose numbers are columns.

The rows of a program of one structure are the same in all its configurations; the kernels that they
are copies of (`lower.assembly.assemble.Assembly`) have numbers that may be `Varying`. Here these go
through the functions that time a single configuration, as arrays [kernels, configurations].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import Kernel
from stagewright.program.columns import COLLECTIVES, TaskKind, Tasks
from stagewright.program.communicators import Communicator
from stagewright.program.shapes import GEMM
from stagewright.time.collectives import collectives_seconds, messages_seconds
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.cost import Kernels, kernels_seconds
from stagewright.time.expense.power import kernels_energy, peak_rate, tiled
from stagewright.time.experts.dispatch import Routed, dispatches_seconds
from stagewright.time.experts.kernels import (
    Added,
    among_experts,
    biasing,
    copying,
    slots_of_tokens,
    trains,
    weighed_within,
)
from stagewright.time.fused_products import (
    FusedGemms,
    Gemms,
    Joint,
    fuse,
    joint_rows,
    within_products,
    without_sums,
)
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import gemm_seconds
from stagewright.time.tensor_overlap import overlap_pairs, overlapped, split_seconds

_NONE = np.zeros(0)
NO_GEMMS = Gemms(_NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0, dtype=np.int64), _NONE)


class Known(NamedTuple):
    """Durations that several programs of a structure have in common: [configurations] each."""

    alone: dict[Kernel, Float]
    """Seconds of a kernel alone."""
    joint: dict[tuple[Kernel, ...], tuple[Float, Bool, Float]]
    """By the parts of a product: seconds of each, whether the product is a sum, its bytes."""
    moved: dict[tuple[Kernel, Communicator], Float]
    """Seconds of a collective among ranks of the meshes of these programs, which are the same."""

    @classmethod
    def none(cls) -> Self:
        """Nothing is known."""
        return cls({}, {}, {})


@dataclass(frozen=True, eq=False)
class Columns:
    """Kernels with numbers of many configurations, timed on one machine."""

    kernels: Sequence[Kernel]
    count: int
    """Configurations."""
    hardware: Hardware
    known: Known = field(default_factory=Known.none)
    """Of other programs of the same structure on this hardware."""
    routed: Routed | None = None
    """A token is sent once to each rank that has experts for it (`experts.dispatch`)."""

    @cached_property
    def numbers(self) -> tuple[Float, Float, Float]:
        """FLOPs, bytes of traffic and bytes of communication: [kernels, configurations] each."""
        every = self.kernels
        return (
            self._stacked([k.flops for k in every]),
            self._stacked([k.traffic for k in every]),
            self._stacked([k.comm_bytes for k in every]),
        )

    def _stacked(self, numbers: Sequence[object]) -> Float:
        found = np.empty((len(numbers), self.count))
        for row, number in zip(found, numbers, strict=True):
            row[:] = np.asarray(number, dtype=np.float64)
        return found

    def extents(self, kernel: int) -> dict[str, Float]:
        """The extents of a kernel's shape, by name: [configurations]."""
        shape = self.kernels[kernel].shape
        names = {} if shape is None else shape.sizes()
        return {
            name: np.broadcast_to(np.asarray(n, dtype=np.float64), (self.count,))
            for name, n in names.items()
        }

    @cached_property
    def computed(self) -> Float:
        """Seconds of each kernel alone, 0 of those that do not compute: [kernels, ...]."""
        alike: dict[tuple[str, str], list[int]] = {}
        for nth, k in enumerate(self.kernels):
            if k.kind == TaskKind.COMPUTE and k not in self.known.alone:
                name = "" if k.shape is None else k.shape.kernel
                alike.setdefault((name, k.dtype), []).append(nth)
        for (name, dtype), mine in alike.items():
            seconds = self._alone(name, dtype, mine)
            self.known.alone.update(zip([self.kernels[n] for n in mine], seconds, strict=True))
        none = np.zeros(self.count)
        return np.stack([self.known.alone.get(k, none) for k in self.kernels])

    def _alone(self, name: str, dtype: str, mine: Sequence[int]) -> Float:
        """Seconds of kernels of one name and data type: [kernels, configurations]."""
        flops, traffic, _ = self.numbers
        each = [self.extents(nth) for nth in mine]
        zero = np.zeros(self.count)
        size = {
            x: np.concatenate([of.get(x, zero) for of in each])
            for x in dict.fromkeys(x for of in each for x in of)
        }
        backward = np.repeat([self.kernels[n].phase == "backward" for n in mine], self.count)
        kernels = Kernels(size, flops[mine].ravel(), traffic[mine].ravel(), dtype, backward)
        seconds = kernels_seconds(name, kernels, self.hardware.sustained())
        return seconds.reshape(len(mine), self.count)

    def of_rows(self, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> Float:
        """Seconds of the rows of a rank class, which are copies of `kernel`: [rows, ...]."""
        seconds = self.computed[kernel]
        seconds = self._fused(tasks, kernel, seconds)
        seconds[weighed_within(tasks)] = 0.0
        if trains(tasks):
            seconds[within_products(tasks)] = 0.0
            self._add(seconds, kernel, *biasing(tasks, self.hardware))
            if not self.routed:
                self._add_copying(seconds, tasks, kernel, meshes)
        self._collectives(seconds, tasks, kernel, meshes)
        self._messages(seconds, tasks, kernel, meshes)
        copies = (tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE)
        to_host = self.hardware.host_bandwidth_gb_s * 1e9
        seconds[copies] = self.numbers[2][kernel[copies]] / to_host
        return seconds

    def overlapped(self, tasks: Tasks, kernel: Int, seconds: Float, meshes: MeshColumns) -> Float:
        """Seconds of rows whose collectives along tp overlap in chunks with products
        (`time.tensor_overlap`)."""
        program = meshes.program
        pairs = overlap_pairs(program, tasks)
        if not len(pairs.product):
            return seconds
        slots: list[int] = tasks.slot[pairs.collective].tolist()
        sizes = {slot: meshes.size(program.communicators[slot].axes) for slot in {*slots}}
        ranks = np.stack([sizes[slot] for slot in slots])
        rows, first, of = np.unique(pairs.product, return_index=True, return_inverse=True)
        each = [self.extents(int(n)) for n in kernel[rows]]
        batch, m, n, k = (np.concatenate([of[x] for of in each]) for x in ("batch", "m", "n", "k"))
        dtype = np.repeat(tasks.dtype[rows].astype(np.int64), self.count)
        traffic = self.numbers[1][kernel[rows]].ravel()
        whole = Gemms(batch, m, n, k, traffic, dtype, np.ones(len(batch)))
        pieces = ranks[first].ravel()
        cut = split_seconds(whole, tasks.dtypes, pieces, self.hardware).reshape(-1, self.count)
        return overlapped(pairs, seconds, cut[of.ravel()], ranks)

    def energy(self, tasks: Tasks, kernel: Int, seconds: Float) -> Float:
        """Seconds at TDP in which a GPU draws as much as in rows that take `seconds`: [rows, ...].

        Rows that compute nothing draw nothing here.
        """
        flops, traffic, _ = self.numbers
        drawn = np.zeros_like(seconds)
        computes = np.flatnonzero(tasks.kind == TaskKind.COMPUTE)
        rates = np.array([peak_rate(dtype, self.hardware) for dtype in tasks.dtypes])
        tiles = np.ones((len(self.kernels), self.count))
        numbers: list[int] = np.unique(kernel[computes]).tolist()
        for nth in numbers:
            shape = self.kernels[nth].shape
            if shape is not None and shape.kernel == GEMM:
                of = self.extents(nth)
                tiles[nth] = tiled(of["m"], of["batch"])
        mine, took = kernel[computes], seconds[computes]
        found = kernels_energy(
            traffic[mine], tiles[mine] * flops[mine], np.where(took > 0, took, 1.0),
            rates[tasks.dtype[computes]][:, None], self.hardware,
        )  # fmt: skip
        drawn[computes] = np.where(took > 0, found, 0.0)
        return drawn

    # ---- kernels ---------------------------------------------------------------------------------

    def _fused(self, tasks: Tasks, kernel: Int, seconds: Float) -> Float:
        """Seconds with products of one input fused (`time.fused_products`)."""
        joint = joint_rows(tasks)
        if not len(joint.rows):
            return seconds
        # Products of equal parts are equal: each is timed once.
        order = np.argsort(joint.whole, kind="stable")
        edges = np.flatnonzero(np.diff(joint.whole[order], prepend=-1, append=-1))
        wholes = [order[a:b] for a, b in itertools.pairwise(edges)]
        numbers: list[list[int]] = [kernel[joint.rows[of]].tolist() for of in wholes]
        parts = [tuple(self.kernels[n] for n in of) for of in numbers]
        known = self.known.joint
        new = {key: of for key, of in zip(parts, wholes, strict=True) if key not in known}
        if new:
            chosen = np.concatenate([*new.values()])
            number = np.repeat(np.arange(len(new)), [len(of) for of in new.values()])
            small = Joint(joint.rows[chosen], number, joint.summed[chosen])
            products, summed, result = self._products(tasks, kernel, small)
            took = self._product_seconds(tasks, products, small)
            for nth, key in enumerate(new):
                mine = number == nth
                known[key] = took[mine], summed[mine], result[mine]
        took = np.empty((len(joint.rows), self.count))
        result, summed = np.empty_like(took), np.empty(len(joint.rows), dtype=bool)
        for key, of in zip(parts, wholes, strict=True):
            took[of], summed[of], result[of] = known[key]
        seconds = seconds.copy()
        seconds[joint.rows] = took
        every = FusedGemms(joint.rows, joint.whole, NO_GEMMS, summed, result)
        return without_sums(tasks, every, seconds, self.hardware)

    def _products(self, tasks: Tasks, kernel: Int, joint: Joint) -> tuple[Gemms, Bool, Float]:
        mine = kernel[joint.rows]
        each = [self.extents(int(n)) for n in mine]
        batch, m, n, k = (np.stack([of[x] for of in each]) for x in ("batch", "m", "n", "k"))
        dtype = tasks.dtype[joint.rows].astype(np.int64)
        width = np.array([float(BYTES.get(x, 0)) for x in tasks.dtypes])[dtype]
        one = Gemms(batch, m, n, k, self.numbers[1][mine], dtype, np.ones(len(mine)))
        return fuse(one, joint, width)

    def _product_seconds(self, tasks: Tasks, products: Gemms, joint: Joint) -> Float:
        """Seconds of each part: its share of the seconds of the product."""
        on = self.hardware.sustained()
        _, first = np.unique(joint.whole, return_index=True)
        whole = np.zeros((len(first), self.count))
        dtypes: list[int] = products.dtype[first].tolist()
        for dtype in sorted({*dtypes}):
            mine = np.flatnonzero(np.array(dtypes) == dtype)
            batch, m, n, k, traffic = (column[first[mine]].ravel() for column in products[:5])
            took = gemm_seconds(batch, m, n, k, traffic=traffic, dtype=tasks.dtypes[dtype], on=on)
            whole[mine] = took.reshape(len(mine), self.count)
        return products.share * whole[joint.whole]

    def _add(self, seconds: Float, kernel: Int, chosen: Bool, added: Added) -> None:
        mine: list[int] = np.unique(kernel[chosen]).tolist()
        for nth in mine:
            rows = chosen & (kernel == nth)
            seconds[rows] += added(self.extents(nth), self.kernels[nth].dtype)

    def _add_copying(self, seconds: Float, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        program = meshes.program
        sharing = [program.communicators[s].axes for s in slots_of_tokens(program, tasks)]
        if not sharing:
            return
        ranks = np.max([meshes.size(axes) for axes in sharing], axis=0).astype(np.float64)
        width = meshes.size(dict(program.mesh.groups).get("etp", ())).astype(np.float64)
        self._add(seconds, kernel, *copying(tasks, ranks, width, self.hardware))

    # ---- communication ---------------------------------------------------------------------------

    def _collectives(self, seconds: Float, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        moves = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
        keys = np.stack([tasks.slot[moves], tasks.collective[moves]]).astype(np.int64)
        pairs: list[list[int]] = np.unique(keys, axis=1).T.tolist()
        exchanged = kernel[moves[keys[1] == COLLECTIVES.index("all_to_all")]]
        most = self.numbers[2][exchanged].max(axis=0, initial=0.0)
        for slot, op in pairs:
            rows = moves[(keys[0] == slot) & (keys[1] == op)]
            mine, back = np.unique(kernel[rows], return_inverse=True)
            who = meshes.program.communicators[slot]
            numbers: list[int] = mine.tolist()
            asked = [(self.kernels[n], who) for n in numbers]
            new = [nth for nth, key in enumerate(asked) if key not in self.known.moved]
            if new:
                sizes = self.numbers[2][mine[new]]
                of_tokens = COLLECTIVES[op] == "all_to_all" and among_experts(meshes.program, slot)
                if self.routed and of_tokens:
                    took = self._dispatched(self.routed, sizes, who, meshes)
                    took[16 * sizes <= most] = 0.0  # gates, which are sent with the tokens
                else:
                    took = self._among(COLLECTIVES[op], sizes, who, meshes)
                self.known.moved.update(zip([asked[nth] for nth in new], took, strict=True))
            seconds[rows] = np.stack([self.known.moved[key] for key in asked])[back.ravel()]

    def _among(self, op: str, sizes: Float, who: Communicator, meshes: MeshColumns) -> Float:
        """Seconds of collectives of some sizes [collectives, configurations]."""
        took = np.zeros_like(sizes)
        for tuples, places in meshes.groups_of(who):
            for place in places:
                found = collectives_seconds(op, sizes[:, tuples], place, meshes.machine)
                took[:, tuples] = np.maximum(took[:, tuples], found)
        return took

    def _dispatched(
        self, routed: Routed, sizes: Float, who: Communicator, meshes: MeshColumns
    ) -> Float:
        """Seconds of dispatches of some sizes [dispatches, configurations]."""
        took = np.zeros_like(sizes)
        for tuples, places in meshes.groups_of(who):
            for place in places:
                found = dispatches_seconds(sizes[:, tuples], place, meshes.machine, routed)
                took[:, tuples] = np.maximum(took[:, tuples], found)
        return took

    def _messages(self, seconds: Float, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        """Seconds of messages along other axes than the pipeline's: those lie as groups do."""
        moves = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
        slots: list[int] = np.unique(tasks.slot[moves]).tolist()
        for slot in slots:
            axis = meshes.program.peers[slot].axis
            if axis == "pp":
                continue
            rows = np.flatnonzero(moves & (tasks.slot == slot))
            sizes = self.numbers[2][kernel[rows]]
            took = np.zeros_like(sizes)
            for tuples, places in meshes.groups_of(Communicator((axis,))):
                spread = [n for place in places for n, c in enumerate(place.counts) if c > 1]
                level = max(spread, default=0)
                took[:, tuples] = messages_seconds(sizes[:, tuples], level, meshes.machine)
            seconds[rows] = took
