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

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import Kernel
from stagewright.program.columns import COLLECTIVES, TaskKind, Tasks
from stagewright.program.communicators import Communicator
from stagewright.program.shapes import GEMM
from stagewright.time.collectives import collectives_seconds, messages_seconds
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.columns.row_kinds import (
    GrowingKinds,
    JointProduct,
    KernelNumbers,
    Known,
    RowKinds,
    digest,
)
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
    Gemms,
    Joint,
    fuse,
    joint_rows,
    needless_sums,
    within_products,
)
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import bytes_per_second, gemm_seconds


@dataclass(frozen=True, eq=False)
class Columns:
    """Kernels with numbers of many configurations, timed on one machine."""

    kernels: Sequence[Kernel]
    count: int
    """Configurations."""
    hardware: Hardware
    known: Known = field(default_factory=Known.none)
    """Of other programs on this machine."""
    routed: Routed | None = None
    """A token is sent once to each rank that has experts for it (`experts.dispatch`)."""

    @cached_property
    def each(self) -> Sequence[KernelNumbers]:
        """The numbers of each kernel."""
        known = self.known.numbers
        for kernel in self.kernels:
            if kernel not in known:
                known[kernel] = KernelNumbers.of(kernel)
        return [known[kernel] for kernel in self.kernels]

    @cached_property
    def numbers(self) -> tuple[Float, Float, Float]:
        """FLOPs, bytes of traffic and bytes of communication: [kernels, configurations] each."""
        return (
            self.stacked([of.flops for of in self.each]),
            self.stacked([of.traffic for of in self.each]),
            self.stacked([of.comm_bytes for of in self.each]),
        )

    def stacked(self, numbers: Sequence[Float]) -> Float:
        """Numbers of kernels as a table: [kernels, configurations]."""
        found = np.empty((len(numbers), self.count))
        for row, number in zip(found, numbers, strict=True):
            row[:] = number
        return found

    def extents(self, kernel: int) -> dict[str, Float]:
        """The extents of a kernel's shape, by name: [configurations]."""
        extents = self.each[kernel].extents
        return {name: np.broadcast_to(of, (self.count,)) for name, of in extents.items()}

    @cached_property
    def computed(self) -> Float:
        """Seconds of each kernel alone, 0 of those that do not compute: [kernels, ...]."""
        return self.stacked(self._computed)

    @cached_property
    def _computed(self) -> Sequence[Float]:
        """The rows of `computed`."""
        known = self.known.seconds
        alike: dict[tuple[str, str], dict[bytes, int]] = {}
        for nth, k in enumerate(self.kernels):
            if k.kind == TaskKind.COMPUTE and self._alone_by(nth) not in known:
                name = "" if k.shape is None else k.shape.kernel
                alike.setdefault((name, k.dtype), {}).setdefault(self._alone_by(nth), nth)
        for (name, dtype), mine in alike.items():
            seconds = self._alone(name, dtype, [*mine.values()])
            known.update(zip(mine, seconds, strict=True))
        none = np.zeros(1)
        return [
            known[self._alone_by(nth)] if k.kind == TaskKind.COMPUTE else none
            for nth, k in enumerate(self.kernels)
        ]

    def _alone_by(self, kernel: int) -> bytes:
        return b"alone %d " % self.count + self.each[kernel].content

    def _alone(self, name: str, dtype: str, mine: Sequence[int]) -> Float:
        """Seconds of kernels of one name and data type: [kernels, configurations]."""
        each = [self.extents(nth) for nth in mine]
        zero = np.zeros(self.count)
        size = {
            x: np.concatenate([of.get(x, zero) for of in each])
            for x in dict.fromkeys(x for of in each for x in of)
        }
        backward = np.repeat([self.kernels[n].phase == "backward" for n in mine], self.count)
        flops = self.stacked([self.each[n].flops for n in mine])
        traffic = self.stacked([self.each[n].traffic for n in mine])
        kernels = Kernels(size, flops.ravel(), traffic.ravel(), dtype, backward)
        seconds = kernels_seconds(name, kernels, self.hardware.sustained())
        return seconds.reshape(len(mine), self.count)

    def of_rows(self, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> RowKinds:
        """Seconds of the rows of a rank class, which are copies of `kernel`."""
        kinds = GrowingKinds(kernel, self._computed)
        self._fused(tasks, kernel, kinds)
        none = kinds.number("none", lambda: np.zeros(1))
        kinds.of[weighed_within(tasks)] = none
        if trains(tasks):
            kinds.of[within_products(tasks)] = none
            self._add(kinds, kernel, "bias", *biasing(tasks, self.hardware))
            if not self.routed:
                self._add_copying(kinds, tasks, kernel, meshes)
        self._collectives(kinds, tasks, kernel, meshes)
        self._messages(kinds, tasks, kernel, meshes)
        copies = np.flatnonzero((tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE))
        to_host = self.hardware.host_bandwidth_gb_s * 1e9
        for row, nth in zip(copies.tolist(), kernel[copies].tolist(), strict=True):

            def copied(nth: int = nth) -> Float:
                return self.each[nth].comm_bytes / to_host

            kinds.of[row] = kinds.number(("copy", nth), copied)
        return kinds.made(self.count, kernel)

    def energy(self, rows: RowKinds) -> Float:
        """Seconds at TDP in which a GPU draws as much as in rows of each kind: [kinds, ...].

        Rows that compute nothing draw nothing here.
        """
        drawn = np.zeros_like(rows.seconds)
        kinds: list[int] = rows.kernel.tolist()
        computes = [n for n, of in enumerate(kinds) if self.kernels[of].kind == TaskKind.COMPUTE]
        mine = [kinds[n] for n in computes]
        rates = np.array([peak_rate(self.kernels[of].dtype, self.hardware) for of in mine])
        flops = self.stacked([self._tiled(of) for of in mine])
        traffic = self.stacked([self.each[of].traffic for of in mine])
        took = rows.seconds[computes]
        found = kernels_energy(
            traffic, flops, np.where(took > 0, took, 1.0), rates[:, None], self.hardware
        )
        drawn[computes] = np.where(took > 0, found, 0.0)
        return drawn

    def _tiled(self, kernel: int) -> Float:
        """The FLOPs of a kernel, those of a product with the tiles that it is cut into."""
        of, shape = self.each[kernel], self.kernels[kernel].shape
        if shape is None or shape.kernel != GEMM:
            return of.flops
        return of.flops * tiled(of.extents["m"], of.extents["batch"])

    # ---- kernels ---------------------------------------------------------------------------------

    def _fused(self, tasks: Tasks, kernel: Int, kinds: GrowingKinds) -> None:
        """Seconds with products of one input fused (`time.fused_products`)."""
        joint = joint_rows(tasks)
        if not len(joint.rows):
            return
        # Products of equal parts are equal: each is timed once.
        order = np.argsort(joint.whole, kind="stable")
        edges = np.flatnonzero(np.diff(joint.whole[order], prepend=-1, append=-1))
        products: dict[tuple[int, ...], JointProduct] = {}
        result: dict[int, Float] = {}
        for a, b in itertools.pairwise(edges.tolist()):
            rows, summed = joint.rows[order[a:b]], joint.summed[order[a:b]]
            parts: tuple[int, ...] = tuple(kernel[rows].tolist())
            if parts not in products:
                products[parts] = self._product(tasks, rows, summed, parts)
            found = products[parts]
            for nth, row in enumerate(rows.tolist()):
                kind = kinds.number((parts, nth), lambda of=found, nth=nth: of.seconds[nth])
                kinds.of[row], result[kind] = kind, found.result[nth]
        of_row: list[int] = kinds.of.tolist()
        rate = bytes_per_second(self.hardware)
        for row, part, fewer, none in needless_sums(tasks, joint).each():
            before, read = of_row[row], of_row[part]

            def left(before: int = before, read: int = read, fewer: int = fewer) -> Float:
                return kinds.seconds[before] - fewer * result[read] / rate

            key = ("none",) if none else (before, read, fewer)
            kinds.of[row] = kinds.number(key, (lambda: np.zeros(1)) if none else left)

    def _product(self, tasks: Tasks, rows: Int, summed: Bool, parts: Sequence[int]) -> JointProduct:
        """The product that some rows are parts of, which are copies of these kernels."""
        known = self.known.joint
        each = [self.each[n] for n in parts]
        key = digest(self.count, summed, *(of.content for of in each))
        if key not in known:
            batch, m, n, k = (
                self.stacked([of.extents[x] for of in each]) for x in ("batch", "m", "n", "k")
            )
            traffic = self.stacked([of.traffic for of in each])
            dtype = tasks.dtype[rows].astype(np.int64)
            width = np.array([float(BYTES.get(x, 0)) for x in tasks.dtypes])[dtype]
            one = Gemms(batch, m, n, k, traffic, dtype, np.ones(len(rows)))
            joint = Joint(rows, np.zeros(len(rows), dtype=np.int64), summed)
            whole, summed, result = fuse(one, joint, width)
            batch, m, n, k, traffic = (column[0] for column in whole[:5])
            took = gemm_seconds(
                batch, m, n, k,
                traffic=traffic, dtype=tasks.dtypes[int(dtype[0])], on=self.hardware.sustained(),
            )  # fmt: skip
            known[key] = JointProduct(whole.share * took, summed, result)
        return known[key]

    def _add(self, kinds: GrowingKinds, kernel: Int, what: str, chosen: Bool, added: Added) -> None:
        """Let some rows take longer, by what follows from their extents."""
        for row in np.flatnonzero(chosen).tolist():
            before, nth = int(kinds.of[row]), int(kernel[row])

            def more(before: int = before, nth: int = nth) -> Float:
                return kinds.seconds[before] + added(self.extents(nth), self.kernels[nth].dtype)

            kinds.of[row] = kinds.number((what, before, nth), more)

    def _add_copying(
        self, kinds: GrowingKinds, tasks: Tasks, kernel: Int, meshes: MeshColumns
    ) -> None:
        program = meshes.program
        sharing = [program.communicators[s].axes for s in slots_of_tokens(program, tasks)]
        if not sharing:
            return
        ranks = np.max([meshes.size(axes) for axes in sharing], axis=0).astype(np.float64)
        width = meshes.size(dict(program.mesh.groups).get("etp", ())).astype(np.float64)
        self._add(kinds, kernel, "copying", *copying(tasks, ranks, width, self.hardware))

    # ---- communication ---------------------------------------------------------------------------

    def _collectives(
        self, kinds: GrowingKinds, tasks: Tasks, kernel: Int, meshes: MeshColumns
    ) -> None:
        moves = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
        keys = np.stack([tasks.slot[moves], tasks.collective[moves], kernel[moves]])
        each, of = np.unique(keys.astype(np.int64), axis=1, return_inverse=True)
        numbers: list[list[int]] = each.T.tolist()
        tokens = COLLECTIVES.index("all_to_all")
        exchanged = [self.each[nth].comm_bytes for _, op, nth in numbers if op == tokens]
        most = self.stacked(exchanged).max(axis=0, initial=0.0)
        alike: dict[tuple[int, int], list[int]] = {}
        for slot, op, nth in numbers:
            alike.setdefault((slot, op), []).append(nth)
        took: dict[tuple[int, int, int], Float] = {}
        for (slot, op), mine in alike.items():
            sent = op == tokens and among_experts(meshes.program, slot)
            who = meshes.program.communicators[slot]
            found = self._moved(COLLECTIVES[op], mine, who, meshes, most if sent else None)
            took |= {(slot, op, nth): one for nth, one in zip(mine, found, strict=True)}
        new: list[int] = []
        for slot, op, nth in numbers:
            key = slot, op, nth
            new.append(kinds.number(("moved", key), lambda key=key: took[key]))
        kinds.of[moves] = np.array(new, dtype=np.int64)[of.ravel()]

    def _moved(
        self,
        op: str,
        kernels: Sequence[int],
        who: Communicator,
        meshes: MeshColumns,
        most: Float | None,
    ) -> list[Float]:
        """Seconds of collectives; `most`: of tokens of experts, the most that are sent at once."""
        routed = self.routed if most is not None else None
        where = digest(self.count, op, who, meshes.content, routed, most if routed else None)
        asked = [where + self.each[nth].comm_content for nth in kernels]
        known = self.known.seconds
        new = {key: nth for key, nth in zip(asked, kernels, strict=True) if key not in known}
        if new:
            sizes = self.stacked([self.each[nth].comm_bytes for nth in new.values()])
            if routed is not None and most is not None:
                took = self._dispatched(routed, sizes, who, meshes)
                took[16 * sizes <= most] = 0.0  # gates, which are sent with the tokens
            else:
                took = self._among(op, sizes, who, meshes)
            known.update(zip(new, took, strict=True))
        return [known[key] for key in asked]

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

    def _messages(
        self, kinds: GrowingKinds, tasks: Tasks, kernel: Int, meshes: MeshColumns
    ) -> None:
        """Seconds of messages along other axes than the pipeline's: those lie as groups do."""
        moves = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
        slots: list[int] = np.unique(tasks.slot[moves]).tolist()
        for slot in slots:
            axis = meshes.program.peers[slot].axis
            if axis == "pp":
                continue
            rows = np.flatnonzero(moves & (tasks.slot == slot))
            for row, nth in zip(rows.tolist(), kernel[rows].tolist(), strict=True):
                kinds.of[row] = kinds.number(
                    ("message", slot, nth),
                    lambda axis=axis, nth=nth: self._message(axis, nth, meshes),
                )

    def _message(self, axis: str, kernel: int, meshes: MeshColumns) -> Float:
        """Seconds of a message along an axis."""
        sizes = self.stacked([self.each[kernel].comm_bytes])[0]
        took = np.zeros_like(sizes)
        for tuples, places in meshes.groups_of(Communicator((axis,))):
            spread = [n for place in places for n, c in enumerate(place.counts) if c > 1]
            level = max(spread, default=0)
            took[tuples] = messages_seconds(sizes[tuples], level, meshes.machine)
        return took
