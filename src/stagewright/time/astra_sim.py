"""The configuration files that ASTRA-sim needs beside traces, and the script that runs it.

`AstraSim` describes a system as the analytical, congestion-unaware backend of ASTRA-sim sees it: a
machine's network as dimensions, and one roofline for all kernels.

>>> node = Dimension("Switch", 8, 400.0, 936.25)
>>> system = AstraSim((node,), peak_tflops=900, memory_gb_s=3350)
>>> print(system.network_yml(), end="")
topology: [ Switch ]
npus_count: [ 8 ]
bandwidth: [ 400.0 ]  # GiB/s
latency: [ 936.25 ]  # ns per hop
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError, either
from stagewright.printable import printable
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind
from stagewright.run.settings import Run
from stagewright.time import network
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import gemm_seconds

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
IMPLEMENTATIONS = ("ring", "direct", "halvingDoubling", "direct1")
"""The algorithm of a collective in one dimension. `direct` sends to all other ranks at once, each
message as if it had the link to itself; `direct1`, for all_to_all only, sends to one rank after the
other, as ranks behind a single link must."""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENDPOINT_NS = 10  # per message, and once more at the end of a collective
GIB_PER_S = 2**30 / 1e9  # bytes per ns


class Dimension(NamedTuple):
    """One level of the network: `npus` blocks of the level below, joined by a topology."""

    topology: str  # of TOPOLOGIES
    npus: int
    bandwidth: float  # GiB/s, one direction
    latency: float  # ns per hop; a switch is two hops


@dataclass(frozen=True, slots=True)
class AstraSim:
    """A system: its network from the GPU outwards, and one roofline for all kernels."""

    dimensions: tuple[Dimension, ...]
    peak_tflops: float
    memory_gb_s: float
    implementation: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, "tuple[str, ...]"]
    )
    """Collective -> its algorithm in each dimension, of IMPLEMENTATIONS; a ring if not named."""

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
        """Represent a machine; UserError where ASTRA-sim cannot.

        The peak is the rate that a product of 8192 x 8192 matrices reaches within a training step.
        ASTRA-sim knows a latency per step of a collective and none per collective: the machine's
        start-up time is spread over the steps of an all_reduce over the dimension. A torus becomes
        rings, each with both directions of its links; behind a switch, all_to_all sends one message
        after the other.
        """
        dimensions: list[Dimension] = []
        for dimension in machine.tiers:
            dimensions += _dimensions(dimension)
        hardware = machine.hardware
        size = np.array([8192.0])
        traffic = 3 * size * size * 2
        seconds = gemm_seconds(
            size / size, size, size, size, traffic=traffic, dtype=precision, on=hardware.sustained()
        )
        flops = float(2 * size[0] ** 3 / seconds[0])
        system = cls(
            tuple(dimensions),
            round(flops / 1e12, 3),
            round(hardware.memory_bandwidth_gb_s * hardware.memory_bandwidth_fraction, 3),
            {op: tuple(_implementation(op, d.topology) for d in dimensions) for op in OPS},
        )
        if system.world_size != machine.gpus:
            raise UserError(
                f"ASTRA-sim's network of {' x '.join(str(d.npus) for d in dimensions)} has "
                f"{system.world_size} places for {machine.gpus} ranks; fill all of it"
            )
        return system

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(np.prod([d.npus for d in self.dimensions]))

    def implementation_of(self, op: str, dimension: int) -> str:
        """The algorithm of a collective in a dimension."""
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
        """The system configuration: the keys for which ASTRA-sim has no default that works."""
        lists = {
            f"{op.replace('_', '-')}-implementation": [
                self.implementation_of(op, i) for i in range(len(self.dimensions))
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


def _dimensions(tier: network.Tier) -> list[Dimension]:
    """Dimensions of ASTRA-sim for a tier: one, or one per ring of a torus."""
    rings = [ring for ring in tier.shape if ring > 1] or [tier.size]
    topology = _TOPOLOGY.get(tier.topology, "Switch")
    links = len(rings) if topology == "Ring" else tier.size - 1 if topology != "Switch" else 1
    result: list[Dimension] = []
    for size in rings:
        if size < 2:
            continue
        step = 1000 * (tier.hop_us + 1e6 * tier.start(network.MessageSize.LARGE) / (2 * (size - 1)))
        latency = max(0.0, step - ENDPOINT_NS) / (2 if topology == "Switch" else 1)
        rate = tier.bandwidth_gb_s / links / GIB_PER_S
        result.append(Dimension(topology, size, round(rate, 3), round(latency, 1)))
    return result


_TOPOLOGY = {"fully_connected": "FullyConnected", "ring": "Ring", "torus": "Ring"}


def _implementation(op: str, topology: str) -> str:
    if topology == "FullyConnected":
        return "direct"
    return "direct1" if op == "all_to_all" and topology == "Switch" else "ring"


def beside(run: Run, hardware: str) -> dict[str, bytes]:
    """Configurations next to the traces of a run, and a script to run them, by name.

    `hardware` is a name or a file, as `stagewright.time.hardware.resolve` takes it. Raises
    UserError where ASTRA-sim cannot run this run or represent the hardware.
    """
    if run.streams != "one":
        raise UserError(
            "ASTRA-sim carries out one communication of a rank at a time: with streams=separate "
            "timing would decide which is first; use streams=one"
        )
    machine = Machine.of(resolve(hardware), gpus=run.world_size)
    system = AstraSim.of(machine, PRECISIONS[run.precision].product)
    return {
        "system.json": system.system_json().encode(),
        "network.yml": system.network_yml().encode(),
        "remote_memory.json": _remote_memory(machine).encode(),
        "astra-sim.sh": script_of(machine, system.world_size).encode(),
    }


def script_of(machine: Machine, ranks: int) -> str:
    """The script that runs the traces; the machine's name stands in one line, a comment."""
    return _SCRIPT.format(ranks=ranks, machine=printable(machine))


def _remote_memory(machine: Machine) -> str:
    """Host memory for offloaded tensors: a private link for every GPU.

    The unit is GB/s, that is bytes in a nanosecond (`get_remote_mem_runtime` of
    astra-memory-analytical, AnalyticalRemoteMemory.cc). The latency keeps a transfer from taking no
    time at all, at which ASTRA-sim aborts.
    """
    settings = {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": 1,
        "remote-mem-bw": max(1, round(machine.hardware.host_bandwidth_gb_s)),
    }
    return json.dumps(settings) + "\n"


# ---- programs ------------------------------------------------------------------------------------

FLOPS_PER_NS, BYTES_PER_NS = 2_500_000, 8000
"""What the fastest devices do in a nanosecond. A first kernel that takes less aborts ASTRA-sim,
whose events must be later than its time 0 (`Sys::try_register_event`)."""
MOST_COUNTED = 2**31 - 1  # bytes that ASTRA-sim's rendezvous counts (`int` of its callers)


class Adapted(NamedTuple):
    """A program that ASTRA-sim can run, and what its manifest says of that."""

    program: Program
    entry: dict[str, Any]


def adapted(program: Program, hardware: str) -> Adapted:
    """A program for ASTRA-sim on a hardware; its first kernels take a nanosecond at least."""
    min_bytes = max(BYTES_PER_NS, math.ceil(1.5 * resolve(hardware).memory_bandwidth_gb_s))
    entry = {"hardware": hardware, "least_bytes": min_bytes, "notes": _notes(program)}
    return Adapted(with_least_bytes(program, min_bytes), entry)


def with_least_bytes(program: Program, min_bytes: int) -> Program:
    """The program, in which kernels that nothing precedes move so many bytes or more."""
    classes: list[RankClass] = []
    for rank_class in program.classes:
        tasks = rank_class.tasks
        first = (np.diff(tasks.data_ptr) == 0) & (np.diff(tasks.order_ptr) == 0)
        first &= (tasks.kind == TaskKind.COMPUTE) & (tasks.flops < FLOPS_PER_NS)
        traffic = np.where(first, np.maximum(tasks.traffic, min_bytes), tasks.traffic)
        work = rank_class.work.with_tasks(replace(tasks, traffic=traffic))
        classes.append(replace(rank_class, work=work))
    return replace(program, classes=tuple(classes))


def _notes(program: Program) -> list[str]:
    """Warnings about the communication of a program in ASTRA-sim."""
    large = 0
    count = 0
    broadcasts = 0  # of a rank that has most of them
    for rank_class in program.classes:
        tasks = rank_class.tasks
        collective = tasks.kind == TaskKind.COLLECTIVE
        sizes = tasks.comm_bytes[collective]
        large = max(large, int(sizes.max(initial=0)))
        count += int((sizes > MOST_COUNTED).sum())
        is_broadcast = tasks.collective[collective] == COLLECTIVES.index("broadcast")
        broadcasts = max(broadcasts, int(is_broadcast.sum()))
    notes: list[str] = []
    if broadcasts:
        notes.append(
            f"ASTRA-sim does not simulate broadcasts: up to {broadcasts} of a rank take no time "
            "there and wait for no other rank"
        )
    if count:
        notes.append(
            f"ASTRA-sim's --rendezvous-protocol counts bytes in 32 bits and stops in {count} "
            f"collectives of up to {large:,} bytes; its default, eager sends, runs these traces"
        )
    return notes


_SCRIPT = """\
#!/bin/sh
# Runs the traces of this directory in ASTRA-sim, for {machine}.
#   sh astra-sim.sh [AstraSim_Analytical_Congestion_Unaware [more options]]
# ASTRA-sim exits with 0 whether or not its ranks finish: here 1 if any does not, 2 if it crashed
# before all had said so, which may be after they finished.
sim=${{1:-AstraSim_Analytical_Congestion_Unaware}}
[ $# -gt 0 ] && shift
case "$sim" in /*) ;; */*) sim=$PWD/$sim ;; esac
case "$0" in */*) CDPATH= cd -- "${{0%/*}}" || exit 1 ;; esac
command -v "$sim" > /dev/null || {{ echo "astra-sim.sh: no program $sim" >&2; exit 127; }}
chmod u+w workload.*.et
"$sim" \\
  --workload-configuration=workload \\
  --comm-group-configuration=comm_group.json \\
  --system-configuration=system.json \\
  --network-configuration=network.yml \\
  --remote-memory-configuration=remote_memory.json \\
  "$@" > astra-sim.log 2>&1
ended=$?
grep 'finished, ' astra-sim.log
finished=$(grep -o 'sys\\[[0-9]*\\] finished, ' astra-sim.log | sort -u | grep -c .)
[ "$finished" -eq {ranks} ] && ! grep -q 'unreleased\\|callable is removed' astra-sim.log && exit 0
if [ "$finished" -lt {ranks} ] && [ "$ended" -ge 128 ]; then
  echo "astra-sim.sh: ASTRA-sim crashed ($ended) when $finished of {ranks} ranks had said that" \\
    "they finished; lines may be lost: run it again, or the congestion-unaware backend" >&2
  exit 2
fi
echo "astra-sim.sh: $finished of {ranks} ranks finished; see astra-sim.log" >&2
exit 1
"""
