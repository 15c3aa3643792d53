"""Durations of the tasks of many configurations at once, from kernels whose numbers are columns.

The rows of a program of one structure are the same in all its configurations; the kernels that they
are copies of (`lower.assembly.assemble.Assembly`) have numbers that may be `Varying`. Here these go
through the functions that time a single configuration, as arrays [kernels, configurations].
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stagewright.arrays import Bool, Float, Int, digest
from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import Kernel
from stagewright.program.columns import COLLECTIVES, TaskKind, Tasks
from stagewright.program.communicators import Communicator
from stagewright.program.shapes import GEMM
from stagewright.time.collectives import collectives_seconds, messages_seconds
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.columns.row_kinds import (
    JointProduct,
    KernelNumbers,
    Known,
    RowKinds,
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
    def sustained(self) -> Hardware:
        """The hardware at the clocks of a step."""
        return self.hardware.sustained()

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
        return self.known.rows.table(self._computed.tolist())

    @cached_property
    def none(self) -> int:
        """The number of a row that takes no time."""
        return self.known.number(("none", self.count), lambda: np.zeros(self.count))

    @cached_property
    def _computed(self) -> Int:
        """The rows of `computed` as numbers of known ones."""
        alone, known = self.known.alone, self.known.found
        new = [nth for nth, k in enumerate(self.kernels) if k not in alone]
        alike: dict[tuple[str, str], dict[Hashable, int]] = {}
        for nth in new:
            k, key = self.kernels[nth], self._alone_by(nth)
            if k.kind == TaskKind.COMPUTE and key not in known:
                name = "" if k.shape is None else k.shape.kernel
                alike.setdefault((name, k.dtype), {}).setdefault(key, nth)
        for (name, dtype), mine in alike.items():
            seconds = self._alone(name, dtype, [*mine.values()])
            known.update(zip(mine, map(self.known.rows.number, seconds), strict=True))
        for nth in new:
            k = self.kernels[nth]
            alone[k] = known[self._alone_by(nth)] if k.kind == TaskKind.COMPUTE else self.none
        return np.array([alone[k] for k in self.kernels], dtype=np.int64)

    def _alone_by(self, kernel: int) -> Hashable:
        return "alone", self.count, self.each[kernel].content

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
        seconds = kernels_seconds(name, kernels, self.sustained)
        return seconds.reshape(len(mine), self.count)

    def of_rows(self, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> RowKinds:
        """Seconds of the rows of a rank class, which are copies of `kernel`."""
        took = self._computed[kernel]
        self._fuse(tasks, kernel, took)
        took[weighed_within(tasks)] = self.none
        if trains(tasks):
            took[within_products(tasks)] = self.none
            self._add(took, kernel, *biasing(tasks, self.hardware))
            if not self.routed:
                self._add_copying(took, tasks, kernel, meshes)
        self._collectives(took, tasks, kernel, meshes)
        self._messages(took, tasks, kernel, meshes)
        copies = (tasks.kind == TaskKind.LOAD) | (tasks.kind == TaskKind.STORE)
        to_host = self.hardware.host_bandwidth_gb_s * 1e9
        copied: list[int] = np.unique(kernel[copies]).tolist()
        for nth in copied:

            def copies_seconds(nth: int = nth) -> Float:
                return np.broadcast_to(self.each[nth].comm_bytes / to_host, (self.count,))

            key = "copy", self.count, self.each[nth].comm_content
            took[copies & (kernel == nth)] = self.known.number(key, copies_seconds)
        return RowKinds.made(self.known.rows, took, kernel)

    def energy(self, rows: RowKinds) -> Int:
        """Seconds at TDP in which a GPU draws as much as in rows of each kind: [kinds], as numbers
        of known rows.

        Rows that compute nothing draw nothing here.
        """
        known = self.known.found
        numbers: list[int] = rows.number.tolist()
        kernels: list[int] = rows.kernel.tolist()
        kinds = [*zip(numbers, kernels, strict=True)]
        keys = {
            n: ("drawn", took, self.each[of].content)
            for n, (took, of) in enumerate(kinds)
            if self.kernels[of].kind == TaskKind.COMPUTE
        }
        new = {key: kinds[n] for n, key in keys.items() if key not in known}
        if new:
            mine = [of for _, of in new.values()]
            rates = np.array([peak_rate(self.kernels[of].dtype, self.hardware) for of in mine])
            flops = self.stacked([self._tiled(of) for of in mine])
            traffic = self.stacked([self.each[of].traffic for of in mine])
            took = self.known.rows.table([took for took, _ in new.values()])
            found = kernels_energy(
                traffic, flops, np.where(took > 0, took, 1.0), rates[:, None], self.hardware
            )
            drawn = np.where(took > 0, found, 0.0)
            known.update(zip(new, map(self.known.rows.number, drawn), strict=True))
        drawn_by = [known[keys[n]] if n in keys else self.none for n in range(len(kinds))]
        return np.array(drawn_by, dtype=np.int64)

    def _tiled(self, kernel: int) -> Float:
        """The FLOPs of a kernel, those of a product with the tiles that it is cut into."""
        of, shape = self.each[kernel], self.kernels[kernel].shape
        if shape is None or shape.kernel != GEMM:
            return of.flops
        return of.flops * tiled(of.extents["m"], of.extents["batch"])

    # ---- kernels ---------------------------------------------------------------------------------

    def _fuse(self, tasks: Tasks, kernel: Int, took: Int) -> None:
        """Let products of one input take what they do fused (`time.fused_products`)."""
        joint = joint_rows(tasks)
        if not len(joint.rows):
            return
        # Products of equal parts are equal: each is timed once.
        order = np.argsort(joint.whole, kind="stable")
        edges = np.flatnonzero(np.diff(joint.whole[order], prepend=-1, append=-1))
        products: dict[tuple[int, ...], JointProduct] = {}
        result: dict[int, int] = {}
        for a, b in itertools.pairwise(edges.tolist()):
            rows, summed = joint.rows[order[a:b]], joint.summed[order[a:b]]
            parts: tuple[int, ...] = tuple(kernel[rows].tolist())
            if parts not in products:
                products[parts] = self._product(tasks, rows, summed, parts)
            found = products[parts]
            took[rows] = found.seconds
            result.update(zip(rows.tolist(), found.result, strict=True))
        rate = bytes_per_second(self.hardware)
        known = self.known.rows.rows
        before: list[int] = took.tolist()
        for row, part, fewer, none in needless_sums(tasks, joint).each():

            def left(row: int = row, part: int = part, fewer: int = fewer) -> Float:
                return known[before[row]] - fewer * known[result[part]] / rate

            key = "needless", before[row], result[part], fewer
            took[row] = self.none if none else self.known.number(key, left)

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
            whole, _, result = fuse(one, joint, width)
            batch, m, n, k, traffic = (column[0] for column in whole[:5])
            seconds = gemm_seconds(
                batch, m, n, k,
                traffic=traffic, dtype=tasks.dtypes[int(dtype[0])], on=self.sustained,
            )  # fmt: skip
            number = self.known.rows.number
            known[key] = JointProduct([*map(number, whole.share * seconds)], [*map(number, result)])
        return known[key]

    def _add(self, took: Int, kernel: Int, chosen: Bool, added: Added) -> None:
        """Let some rows take longer, by what follows from their extents."""
        known = self.known.rows
        longer: dict[tuple[int, int], int] = {}
        for row in np.flatnonzero(chosen).tolist():
            key = before, nth = int(took[row]), int(kernel[row])
            if key not in longer:
                more = added(self.extents(nth), self.kernels[nth].dtype)
                longer[key] = known.number(known.rows[before] + more)
            took[row] = longer[key]

    def _add_copying(self, took: Int, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        program = meshes.program
        sharing = [program.communicators[s].axes for s in slots_of_tokens(program, tasks)]
        if not sharing:
            return
        ranks = np.max([meshes.size(axes) for axes in sharing], axis=0).astype(np.float64)
        width = meshes.size(dict(program.mesh.groups).get("etp", ())).astype(np.float64)
        self._add(took, kernel, *copying(tasks, ranks, width, self.hardware))

    # ---- communication ---------------------------------------------------------------------------

    def _collectives(self, took: Int, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        moves = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
        if not len(moves):
            return
        kernels, operations = len(self.kernels), len(COLLECTIVES)
        op = tasks.collective[moves].astype(np.int64)
        keys = (tasks.slot[moves] * operations + op) * kernels + kernel[moves]
        each, of = np.unique(keys, return_inverse=True)
        rest, kernel_of = np.divmod(each, kernels)
        numbers: list[list[int]] = np.stack([*np.divmod(rest, operations), kernel_of]).T.tolist()
        tokens = COLLECTIVES.index("all_to_all")
        most = None
        if self.routed:
            exchanged = [self.each[nth].comm_bytes for _, op, nth in numbers if op == tokens]
            most = self.stacked(exchanged).max(axis=0, initial=0.0)
        alike: dict[tuple[int, int], list[int]] = {}
        for slot, op, nth in numbers:
            alike.setdefault((slot, op), []).append(nth)
        new: list[int] = []
        for (slot, op), mine in alike.items():  # in the order of their numbers
            sent = op == tokens and among_experts(meshes.program, slot)
            who = meshes.program.communicators[slot]
            new += self._moved(COLLECTIVES[op], mine, who, meshes, most if sent else None)
        took[moves] = np.array(new, dtype=np.int64)[of.ravel()]

    def _moved(
        self,
        op: str,
        kernels: Sequence[int],
        who: Communicator,
        meshes: MeshColumns,
        most: Float | None,
    ) -> list[int]:
        """Seconds of collectives; `most`: of tokens of experts, the most that are sent at once."""
        routed = None if most is None else self.routed
        where = op, self.count, who, meshes.content, routed, None if most is None else digest(most)
        asked = [(where, self.each[nth].comm_content) for nth in kernels]
        known = self.known.found
        new = {key: nth for key, nth in zip(asked, kernels, strict=True) if key not in known}
        if new:
            sizes = self.stacked([self.each[nth].comm_bytes for nth in new.values()])
            if routed is not None and most is not None:
                took = self._dispatched(routed, sizes, who, meshes)
                took[16 * sizes <= most] = 0.0  # gates, which are sent with the tokens
            else:
                took = self._among(op, sizes, who, meshes)
            known.update(zip(new, map(self.known.rows.number, took), strict=True))
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

    def _messages(self, took: Int, tasks: Tasks, kernel: Int, meshes: MeshColumns) -> None:
        """Seconds of messages along other axes than the pipeline's: those lie as groups do."""
        moves = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
        slots: list[int] = np.unique(tasks.slot[moves]).tolist()
        for slot in slots:
            axis = meshes.program.peers[slot].axis
            if axis == "pp":
                continue
            mine = moves & (tasks.slot == slot)
            sent: list[int] = np.unique(kernel[mine]).tolist()
            for nth in sent:
                key = "message", self.count, axis, meshes.content, self.each[nth].comm_content
                took[mine & (kernel == nth)] = self.known.number(
                    key, lambda axis=axis, nth=nth: self._message(axis, nth, meshes)
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
