"""Configuration files that ASTRA-sim needs in addition to traces, and the script that runs it.

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
from importlib.resources import files
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.printable import printable
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine, MessageSize, Tier
from stagewright.time.roofline import gemm_seconds

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENDPOINT_NS = 10  # per message, and once more at the end of a collective
GIB_PER_S = 2**30 / 1e9  # bytes per ns


Topology = Literal["Ring", "FullyConnected", "Switch"]
_TOPOLOGIES: Mapping[str, Topology] = {
    "fully_connected": "FullyConnected", "ring": "Ring", "torus": "Ring"
}  # fmt: skip


class Dimension(NamedTuple):
    """One level of the network: `npus` blocks of the level below, joined by a topology."""

    topology: Topology
    npus: int
    bandwidth: float
    """GiB/s, one direction."""
    latency: float
    """Nanoseconds per hop; a switch is two hops."""


@dataclass(frozen=True, slots=True)
class AstraSim:
    """A system: its network from the GPU outwards, and one roofline for all kernels."""

    dimensions: tuple[Dimension, ...]
    peak_tflops: float
    memory_gb_s: float
    implementation: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, "tuple[str, ...]"]
    )
    """Algorithm of each collective in each dimension; a ring if not named.

    `ring`, `halvingDoubling`, or `direct`, which sends to all other ranks at once, each message as
    if it had the link to itself; for all_to_all also `direct1`, which sends to one rank after the
    other, as ranks with a single link must.
    """

    @classmethod
    def of(cls, machine: Machine, precision: str = "bf16") -> Self:
        """Represent a machine; UserError where ASTRA-sim cannot.

        The peak is the rate that a product of 8192 x 8192 matrices reaches within a training step.
        ASTRA-sim knows a latency per step of a collective and none per collective: the machine's
        start-up time is spread over the steps of an all_reduce over the dimension. A torus becomes
        rings, each with both directions of its links. Through a switch, all_to_all sends one
        message after the other.
        """
        dimensions = tuple(part for tier in machine.tiers for part in _dimensions(tier))
        if machine.gpus < 2:
            raise UserError(
                "ASTRA-sim needs two ranks or more in every dimension of its network, got 1; use "
                "more ranks"
            )
        hardware = machine.hardware
        size = np.array([8192.0])
        seconds = gemm_seconds(
            size / size, size, size, size,
            traffic=3 * size * size * 2, dtype=precision, hardware=hardware.sustained(),
        )  # fmt: skip
        flops = float(2 * size[0] ** 3 / seconds[0])
        system = cls(
            dimensions,
            round(flops / 1e12, 3),
            round(hardware.memory_bandwidth_gb_s * hardware.memory_bandwidth_fraction, 3),
            {op: tuple(_implementation(op, d.topology) for d in dimensions) for op in OPS},
        )
        if system.world_size != machine.gpus:
            sizes = " x ".join(str(dimension.npus) for dimension in dimensions)
            raise UserError(
                f"ASTRA-sim's network of {sizes} has {system.world_size} places for "
                f"{machine.gpus} ranks; fill all of it"
            )
        return system

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(dimension.npus for dimension in self.dimensions)

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


def _dimensions(tier: Tier) -> list[Dimension]:
    """Dimensions of ASTRA-sim for a tier: one, or one per ring of a torus."""
    rings = [ring for ring in tier.shape or (tier.size,) if ring > 1]
    topology = _TOPOLOGIES.get(tier.topology, "Switch")
    peers = tier.links or tier.size - 1
    links = {"Ring": len(rings), "FullyConnected": peers, "Switch": 1}[topology]
    result: list[Dimension] = []
    for size in rings:
        step = 1000 * (tier.hop_us + 1e6 * tier.start(MessageSize.LARGE) / (2 * (size - 1)))
        latency = max(0.0, step - ENDPOINT_NS) / (2 if topology == "Switch" else 1)
        rate = tier.bandwidth_gb_s / links / GIB_PER_S
        result.append(Dimension(topology, size, round(rate, 3), round(latency, 1)))
    return result


def _implementation(op: str, topology: str) -> str:
    if topology == "FullyConnected":
        return "direct"
    return "direct1" if op == "all_to_all" and topology == "Switch" else "ring"


def configuration_files(run: Run, hardware: str) -> dict[str, bytes]:
    """Configurations for the traces of a run, and a script to run them, by file name.

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
        "astra-sim.sh": script_of(machine, run.world_size).encode(),
    }


def script_of(machine: Machine, ranks: int) -> str:
    """The script that runs the traces; the machine's name stands in one line, a comment."""
    text = (files("stagewright") / "data" / "astra-sim.sh").read_text("utf-8")
    return text.replace("@RANKS@", str(ranks)).replace("@MACHINE@", printable(machine))


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
"""Limits of the fastest devices. A first kernel of less than a nanosecond aborts ASTRA-sim, whose
events must be later than its time 0 (`Sys::try_register_event`)."""
MAX_RENDEZVOUS_BYTES = 2**31 - 1  # ASTRA-sim's rendezvous counts in `int`


def adapted(program: Program, hardware: str) -> tuple[Program, dict[str, Any]]:
    """Program that ASTRA-sim can run, and the entry of its manifest.

    Its first kernels take a nanosecond at least.
    """
    min_bytes = max(BYTES_PER_NS, math.ceil(1.5 * resolve(hardware).memory_bandwidth_gb_s))
    entry = {"hardware": hardware, "least_bytes": min_bytes, "notes": _notes(program)}
    return with_least_bytes(program, min_bytes), entry


def with_least_bytes(program: Program, min_bytes: int) -> Program:
    """Program in which kernels that nothing precedes move `min_bytes` or more."""
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
        count += int((sizes > MAX_RENDEZVOUS_BYTES).sum())
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
