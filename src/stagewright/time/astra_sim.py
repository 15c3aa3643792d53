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
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.errors import UserError, either
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind
from stagewright.run.settings import Run
from stagewright.time import network
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import gemm_seconds

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
IMPLEMENTATIONS = ("ring", "direct", "halvingDoubling", "direct1")
"""How a dimension does a collective: `direct` sends to all others at once, each message as if it
were alone; `direct1` to one after the other, for all_to_all only, as behind one link it must."""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENDPOINT_NS = 10  # per message, and once more at the end of a collective
_GIB_PER_S = 2**30 / 1e9  # bytes per ns

Seconds = Float


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

    def furthest(self, groups: Int) -> list[int]:
        """Most hops to the n-th next of a group, for all n; `groups`: rows of positions."""
        ranks = groups.shape[1]
        return [int(self.hops(groups, np.roll(groups, -n, axis=1)).max()) for n in range(1, ranks)]

    def message_ns(self, size: int, hops: int) -> int:
        """Duration of a message."""
        return int(hops * self.latency + size / (self.bandwidth * _GIB_PER_S))


@dataclass(frozen=True, slots=True)
class AstraSim:
    """A system: its network from the GPU outwards, and one roofline for all kernels."""

    dimensions: tuple[Dimension, ...]
    peak_tflops: float
    memory_gb_s: float
    implementation: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, "tuple[str, ...]"]
    )
    """Of collectives, by dimension; of IMPLEMENTATIONS. One that is not named is a ring."""

    def __post_init__(self) -> None:
        if self.world_size < 2 or any(d.npus < 2 for d in self.dimensions):
            raise UserError(
                "ASTRA-sim needs two ranks or more in every dimension of its network, got "
                f"{' x '.join(str(d.npus) for d in self.dimensions) or '1'}; use more ranks"
            )
        for dimension in self.dimensions:
            if dimension.topology not in TOPOLOGIES:
                raise UserError(
                    f"ASTRA-sim has no topology {dimension.topology!r}; use {either(TOPOLOGIES)}"
                )
        for op, names in self.implementation.items():
            if op not in OPS or len(names) != len(self.dimensions):
                raise UserError(
                    f"ASTRA-sim: {op} has {len(names)} implementations, wanted one of "
                    f"{either(OPS)} with one for each of {len(self.dimensions)} dimensions"
                )
            for name in names:
                exchange = op == "all_to_all"
                known = [
                    n
                    for n in IMPLEMENTATIONS
                    if n != ("halvingDoubling" if exchange else "direct1")
                ]
                if name not in known:
                    raise UserError(f"ASTRA-sim: {op} cannot be {name!r}; use {either(known)}")

    @classmethod
    def of(cls, machine: Machine, precision: str = "bf16") -> Self:
        """A machine as far as ASTRA-sim can have it.

        The peak is what a product of 8192 x 8192 matrices reaches within a training step. A step's
        latency is such that an all_reduce over a dimension starts up as long as on the machine:
        what starts once is spread over its steps. A torus is rings, each with both directions of
        its links; behind a switch, all_to_all sends one message after the other.
        """
        dimensions: list[Dimension] = []
        for each in machine.tiers:
            dimensions += _dimensions(each)
        hardware = machine.hardware
        side = np.array([8192.0])
        moved = 3 * side * side * 2
        took = gemm_seconds(
            side / side, side, side, side, traffic=moved, dtype=precision, on=hardware
        )
        reached = float(2 * side[0] ** 3 / took[0]) * hardware.sustained_fraction
        names = {op: tuple(_how(op, d.topology) for d in dimensions) for op in OPS}
        found = cls(
            tuple(dimensions),
            round(reached / 1e12, 3),
            round(hardware.memory_bandwidth_gb_s * hardware.memory_bandwidth_fraction, 3),
            names,
        )
        if found.world_size != machine.gpus:
            raise UserError(
                f"ASTRA-sim's network of {' x '.join(str(d.npus) for d in dimensions)} has "
                f"{found.world_size} places for {machine.gpus} ranks; fill all of it"
            )
        return found

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(np.prod([d.npus for d in self.dimensions]))

    def how(self, op: str, dimension: int) -> str:
        """The implementation of a collective in a dimension."""
        names = self.implementation.get(op)
        return "ring" if names is None else names[dimension]

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
            f"{op.replace('_', '-')}-implementation": [
                self.how(op, nth) for nth in range(len(self.dimensions))
            ]
            for op in OPS
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
        if len(self.dimensions) > 1 or self.how(op, 0) == "ring":
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
            if self.how(each, nth) == "ring":
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
        if self.how(op, nth) == "direct1":
            return ENDPOINT_NS + sum(
                ENDPOINT_NS + dimension.message_ns(size // ranks, h)
                for h in dimension.furthest(groups)
            )
        if self.how(op, nth) == "direct":
            message = size if op == "all_gather" else size // ranks
            once = dimension.message_ns(message, max(dimension.furthest(groups)))
            end = ENDPOINT_NS
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


def _dimensions(of: network.Tier) -> list[Dimension]:
    """A dimension of a machine as one of ASTRA-sim's, or as many as it has rings."""
    rings = [ring for ring in of.shape if ring > 1] or [of.size]
    topology = _TOPOLOGY.get(of.topology, "Switch")
    links = len(rings) if topology == "Ring" else of.size - 1 if topology != "Switch" else 1
    found: list[Dimension] = []
    for size in rings:
        if size < 2:
            continue
        step = 1000 * (of.hop_us + 1e6 * of.start(network.MessageSize.LARGE) / (2 * (size - 1)))
        latency = max(0.0, step - ENDPOINT_NS) / (2 if topology == "Switch" else 1)
        rate = of.bandwidth_gb_s / links / _GIB_PER_S
        found.append(Dimension(topology, size, round(rate, 3), round(latency, 1)))
    return found


_TOPOLOGY = {"fully_connected": "FullyConnected", "ring": "Ring", "torus": "Ring"}


def _how(op: str, topology: str) -> str:
    if topology == "FullyConnected":
        return "direct"
    return "direct1" if op == "all_to_all" and topology == "Switch" else "ring"


def beside(run: Run, hardware: str) -> dict[str, bytes]:
    """What is written beside the traces of a run: configurations, and a script that runs them.

    `hardware` is a name or a file, as `stagewright.time.hardware.resolve` takes it.
    """
    if run.streams != "one":
        raise UserError(
            "ASTRA-sim has one place for all communication of a rank: streams=separate would leave "
            "to timing who takes it; use streams=one"
        )
    machine = Machine.of(resolve(hardware), gpus=run.world_size)
    system = AstraSim.of(machine, run.precision)
    return {
        "system.json": system.system_json().encode(),
        "network.yml": system.network_yml().encode(),
        "remote_memory.json": b'{"memory-type": "NO_MEMORY_EXPANSION"}\n',
        "astra-sim.sh": _SCRIPT.format(ranks=system.world_size, machine=machine).encode(),
    }


_SCRIPT = """\
#!/bin/sh
# Runs the traces of this directory in ASTRA-sim, for {machine}.
#   sh astra-sim.sh [AstraSim_Analytical_Congestion_Unaware [more options]]
# ASTRA-sim exits with 0 whether or not its ranks finish: here 1 if any does not.
sim=${{1:-AstraSim_Analytical_Congestion_Unaware}}
[ $# -gt 0 ] && shift
case "$sim" in */*) sim=$(cd "$(dirname "$sim")" && pwd)/$(basename "$sim") ;; esac
cd "$(dirname "$0")" || exit 1
command -v "$sim" > /dev/null || {{ echo "astra-sim.sh: no program $sim" >&2; exit 127; }}
chmod u+w workload.*.et
"$sim" \\
  --workload-configuration=workload \\
  --comm-group-configuration=comm_group.json \\
  --system-configuration=system.json \\
  --network-configuration=network.yml \\
  --remote-memory-configuration=remote_memory.json \\
  "$@" > astra-sim.log 2>&1
grep 'finished, ' astra-sim.log
finished=$(grep -c 'sys\\[[0-9]*\\] finished, ' astra-sim.log)
[ "$finished" -eq {ranks} ] && ! grep -q 'unreleased\\|callable is removed' astra-sim.log && exit 0
echo "astra-sim.sh: $finished of {ranks} ranks finished; see astra-sim.log" >&2
exit 1
"""


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
    kernel = tasks.kind == TaskKind.COMPUTE
    ns[kernel] = system.kernel_ns(tasks.flops[kernel], tasks.traffic[kernel])
    rows = np.flatnonzero(~kernel)
    columns = (tasks.kind, tasks.collective, tasks.slot, tasks.comm_bytes)
    table = np.stack([c[rows].astype(np.int64) for c in columns], axis=1)
    found, which = np.unique(table, axis=0, return_inverse=True)
    each: list[int] = []
    for kind, collective, slot, size in ((int(x) for x in row) for row in found):
        if kind == TaskKind.COLLECTIVE:
            ids = groups[slot]
            ranks = np.flatnonzero(np.isin(ids, ids[of.ranks]))
            ranks = ranks[np.argsort(ids[ranks], kind="stable")]
            members = ranks.reshape(len(np.unique(ids[of.ranks])), -1)
            each.append(system.collective_ns(COLLECTIVES[collective], size, members))
        elif kind in (TaskKind.LOAD, TaskKind.STORE):
            raise UserError(
                "copies to the host are remote memory in ASTRA-sim, whose configuration is not "
                "read here; drop cpu_offloading_num_layers and optimizer_cpu_offload"
            )
        elif kind == TaskKind.SEND:
            each.append(system.message_ns(size, of.ranks, peers[slot][of.ranks]))
        else:
            each.append(system.message_ns(size, peers[slot][of.ranks], of.ranks))
    if each:
        ns[rows] = np.array(each)[which.ravel()]
    return ns.astype(np.float64) * 1e-9
