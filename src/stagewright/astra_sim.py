"""ASTRA-sim: the configuration files it wants beside traces, and its own times for their tasks.

`AstraSim` describes a system as the analytical, congestion-unaware backend of ASTRA-sim sees it. It
writes the files, and `task_seconds` says how long that backend takes for each task, so that our
simulator and ASTRA-sim can be compared under equal assumptions: run the durations with
`Execution(streams="one")`.

>>> node = Dimension("Switch", 8, 400.0, 936.25)
>>> system = AstraSim((node,), peak_tflops=900, memory_gb_s=3350)
>>> system.collective_ns("all_reduce", 2**20, np.array([[0, 1, 2, 3]]))
15664
>>> print(system.network_yml(), end="")
topology: [ Switch ]
npus_count: [ 8 ]
bandwidth: [ 400.0 ]  # GiB/s
latency: [ 936.25 ]  # ns per hop
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UserError, either
from stagewright.program import COLLECTIVES, Int, Kind, Program, RankClass

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
IMPLEMENTATIONS = ("ring", "direct", "halvingDoubling")
ENDPOINT_NS = 10  # per message, and once more at the end of a collective
_GIB_PER_S = 2**30 / 1e9  # bytes per ns

Seconds = NDArray[np.float64]


class Dimension(NamedTuple):
    """One level of the network: how many blocks of the level below it joins, and how."""

    topology: str  # of TOPOLOGIES
    npus: int
    bandwidth: float  # GiB/s, one direction
    latency: float  # ns per hop; a switch is two hops

    def hops(self, one: Int, other: Int) -> Int:
        """Links between positions of this dimension."""
        if self.topology == "Ring":
            away = np.abs(one - other)
            return np.minimum(away, self.npus - away)
        return np.full(np.shape(one), 2 if self.topology == "Switch" else 1)

    def message_ns(self, size: int, hops: int) -> int:
        """Duration of a message."""
        return int(hops * self.latency + size / (self.bandwidth * _GIB_PER_S))


_RING: Mapping[str, str] = {
    "all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "ring",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AstraSim:
    """A system: its network from the GPU outwards, and one roofline for all kernels."""

    dimensions: tuple[Dimension, ...]
    peak_tflops: float
    memory_gb_s: float
    implementation: Mapping[str, str] = field(default_factory=lambda: dict(_RING))
    """Of each collective, the same in every dimension; of IMPLEMENTATIONS."""

    def __post_init__(self) -> None:
        if self.world_size < 2 or any(d.npus < 2 for d in self.dimensions):
            raise UserError(
                "ASTRA-sim needs two ranks in every dimension of its network, got "
                f"{' x '.join(str(d.npus) for d in self.dimensions) or '1'}; use more ranks"
            )
        for dimension in self.dimensions:
            if dimension.topology not in TOPOLOGIES:
                raise UserError(
                    f"ASTRA-sim has no topology {dimension.topology!r}; use {either(TOPOLOGIES)}"
                )
        for op, name in self.implementation.items():
            if name not in IMPLEMENTATIONS or (op, name) == ("all_to_all", "halvingDoubling"):
                raise UserError(f"ASTRA-sim: {op} cannot be {name!r} here; use ring or direct")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(np.prod([d.npus for d in self.dimensions]))

    # ---- files -----------------------------------------------------------------------------------

    def network_yml(self) -> str:
        """The network configuration."""
        columns: dict[str, list[object]] = {
            "topology": [d.topology for d in self.dimensions],
            "npus_count": [d.npus for d in self.dimensions],
            "bandwidth": [d.bandwidth for d in self.dimensions],
            "latency": [d.latency for d in self.dimensions],
        }
        units = {"bandwidth": "  # GiB/s", "latency": "  # ns per hop"}
        return "".join(
            f"{name}: [ {', '.join(map(str, values))} ]{units.get(name, '')}\n"
            for name, values in columns.items()
        )

    def system_json(self) -> str:
        """The system configuration; each key that is there has no default that works."""
        lists = {
            f"{op.replace('_', '-')}-implementation": [name] * len(self.dimensions)
            for op, name in self.implementation.items()
        }
        settings = {
            "scheduling-policy": "LIFO",
            "endpoint-delay": ENDPOINT_NS,
            "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": 1,
            **lists,
            "collective-optimization": "localBWAware",
            "local-mem-bw": self.memory_gb_s,
            "peak-perf": self.peak_tflops,
            "roofline-enabled": 1,
        }
        return json.dumps(settings, indent=2) + "\n"

    # ---- times -----------------------------------------------------------------------------------

    def kernel_ns(self, flops: Int, traffic: Int) -> Int:
        """Durations of kernels: the roofline, in whole ns."""
        work, moved = np.maximum(flops, 1).astype(float), np.maximum(traffic, 1).astype(float)
        peak = np.minimum(self.memory_gb_s * 1e9 * (work / moved), self.peak_tflops * 1e12)
        return (work / peak * 1e9).astype(np.int64)

    def message_ns(self, size: int, source: Int, target: Int) -> int:
        """Duration of a message, for the pair that it takes longest."""
        dimension, hops = self._way(source, target)
        ways = {(int(d), int(h)) for d, h in zip(dimension, hops, strict=True)}
        return max(self.dimensions[d].message_ns(size, h) for d, h in ways)

    def _way(self, source: Int, target: Int) -> tuple[Int, Int]:
        """The dimension and the hops that a message between pairs of ranks is charged.

        One dimension: the innermost in which the two differ, though others may differ as well.
        """
        dimension = np.full(source.shape, -1)
        hops = np.zeros(source.shape, dtype=np.int64)
        stride = 1
        for nth, each in enumerate(self.dimensions):
            one, other = source // stride % each.npus, target // stride % each.npus
            here = (dimension < 0) & (one != other)
            dimension[here] = nth
            hops[here] = each.hops(one[here], other[here])
            stride *= each.npus
        return dimension, hops

    def collective_ns(self, op: str, size: int, groups: Int) -> int:
        """Duration of a collective, for the group (a row of ranks) that it takes longest.

        `size` as in `Tasks.comm_bytes`. A group of all ranks goes through the dimensions one by
        one; any other is one flat ring, or what is configured if there is one dimension only.
        """
        ranks = groups.shape[1]
        if len(self.dimensions) > 1 and ranks == self.world_size:
            return self._by_dimension(op, size)
        if len(self.dimensions) > 1 or self.implementation[op] == "ring":
            dimension, hops = self._way(groups, np.roll(groups, -1, axis=1))
            ways = np.unique(np.stack([dimension, hops], axis=2), axis=0)
            return self._ring(op, size, [[(int(d), int(h)) for d, h in way] for way in ways])
        return self._flat(op, size, groups, 0, whole=ranks == self.world_size)

    def _by_dimension(self, op: str, size: int) -> int:
        phases = [(op, d) for d in range(len(self.dimensions))]
        if op == "all_gather":
            phases.reverse()
        if op == "all_reduce":
            inner = phases[:-1]
            phases = [("reduce_scatter", d) for _, d in inner] + phases[-1:]
            phases += [("all_gather", d) for _, d in reversed(inner)]
        total = 0
        for each, nth in phases:
            dimension = self.dimensions[nth]
            positions = np.arange(dimension.npus)
            if self.implementation[each] == "ring":
                hops = dimension.hops(positions, np.roll(positions, -1))
                total += self._ring(each, size, [[(nth, int(h)) for h in hops]])
            else:
                total += self._flat(each, size, positions[None], nth, whole=True)
            if each == "reduce_scatter":
                size //= dimension.npus
            elif each == "all_gather":
                size *= dimension.npus
        return total

    def _add_ns(self, size: int) -> int:
        """To add what has come: two reads and a write, each in whole ns."""
        return 3 * int(size / self.memory_gb_s)

    def _ring(self, op: str, size: int, ways: list[list[tuple[int, int]]]) -> int:
        """Rings whose links go the given (dimension, hops).

        What a rank gets last has passed as many links as there are steps, the last into this rank.
        """
        ranks = len(ways[0])
        message = size if op == "all_gather" else size // ranks
        steps = {"all_reduce": 2 * (ranks - 1), "all_to_all": ranks * (ranks - 1) // 2}
        rounds, rest = divmod(steps.get(op, ranks - 1), ranks)
        longest = 0
        for way in ways:
            link = np.array([self.dimensions[d].message_ns(message, h) for d, h in way])
            sums = np.cumsum([0, *link, *link])
            some = sums[rest : rest + ranks] - sums[:ranks]
            longest = max(longest, int(rounds * link.sum() + some.max()))
        adds = ranks - 1 if op in ("all_reduce", "reduce_scatter") else 0
        sent = rounds * ranks + rest
        return longest + (sent + 1) * ENDPOINT_NS + adds * self._add_ns(message)

    def _flat(self, op: str, size: int, groups: Int, nth: int, *, whole: bool) -> int:
        """Direct, or by halves, within one dimension; `groups`: rows of positions in it.

        `whole`: of all ranks of the world.
        """
        ranks, dimension = groups.shape[1], self.dimensions[nth]
        if self.implementation[op] == "direct":
            apart = [dimension.hops(groups, np.roll(groups, -n, axis=1)) for n in range(1, ranks)]
            hops = int(np.max(apart))
            message = size if op == "all_gather" else size // ranks
            once, end = dimension.message_ns(message, hops), ENDPOINT_NS
            if op == "all_reduce":
                # Groups of less than all ranks are charged the sums of what is only gathered, too.
                adds = 2 if ranks > 2 and not whole else 1
                return 2 * once + 3 * end + adds * self._add_ns(message)
            return once + 2 * end + (self._add_ns(message) if op == "reduce_scatter" else 0)
        halvings = ranks.bit_length() - 1
        if ranks != 1 << halvings:
            raise UserError(
                f"ASTRA-sim: halvingDoubling of {ranks} ranks never ends; "
                "take a power of two, or ring"
            )
        if op != "all_gather" and size < 2 * ranks:
            raise UserError(
                f"ASTRA-sim: halvingDoubling of {size} bytes over {ranks} ranks aborts; use ring, "
                "or leave out what is so small (the norm of the gradients: clip_grad)"
            )
        # The n-th halving exchanges size / 2^n with the rank 2^(n - 1) away, doubling goes back.
        sizes = [size >> n for n in range(1, halvings + 1)]
        way = [(part, 1 << n) for n, part in enumerate(sizes)]
        adds = sum(self._add_ns(part) for part in sizes[1:])
        if op == "all_reduce":
            way += way[::-1]
        elif op == "all_gather":
            way = [(size << n, ranks >> (n + 1)) for n in range(halvings)]
            adds = 0
        total = 0
        for part, away in way:
            other = groups[:, np.arange(ranks) ^ away]
            total += dimension.message_ns(part, int(dimension.hops(groups, other).max()))
        return total + (len(way) + 1) * ENDPOINT_NS + adds


def task_seconds(program: Program, system: AstraSim) -> list[Seconds]:
    """Per rank class the duration of each of its tasks, as ASTRA-sim's backend has them."""
    if program.mesh.world_size != system.world_size:
        raise UserError(
            f"the program is for {program.mesh.world_size} ranks and the network has "
            f"{system.world_size}; make them equal"
        )
    groups = [program.group_of(slot) for slot in range(len(program.communicators))]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    return [_class_seconds(of, system, groups, peers) for of in program.classes]


def _class_seconds(of: RankClass, system: AstraSim, groups: list[Int], peers: list[Int]) -> Seconds:
    tasks = of.tasks
    ns = np.zeros(len(tasks), dtype=np.int64)
    kernel = tasks.kind == Kind.COMPUTE
    ns[kernel] = system.kernel_ns(tasks.flops[kernel], tasks.traffic[kernel])
    rows = np.flatnonzero(~kernel)
    columns = (tasks.kind, tasks.collective, tasks.slot, tasks.comm_bytes)
    table = np.stack([c[rows].astype(np.int64) for c in columns], axis=1)
    found, which = np.unique(table, axis=0, return_inverse=True)
    each: list[int] = []
    for kind, collective, slot, size in ((int(x) for x in row) for row in found):
        if kind == Kind.COLLECTIVE:
            ids = groups[slot]
            ranks = np.flatnonzero(np.isin(ids, ids[of.ranks]))
            ranks = ranks[np.argsort(ids[ranks], kind="stable")]
            members = ranks.reshape(len(np.unique(ids[of.ranks])), -1)
            each.append(system.collective_ns(COLLECTIVES[collective], size, members))
        elif kind == Kind.SEND:
            each.append(system.message_ns(size, of.ranks, peers[slot][of.ranks]))
        else:
            each.append(system.message_ns(size, peers[slot][of.ranks], of.ranks))
    if each:
        ns[rows] = np.array(each)[which.ravel()]
    return ns.astype(np.float64) * 1e-9
