"""How long messages take: machines as stacks of dimensions, where groups lie in them, collectives.

>>> from stagewright.hardware import resolve
>>> machine = Machine.of(resolve("h100-sxm"), gpus=32)
>>> print(machine)
32 x h100-sxm: switch 8 at 360 GB/s, rail_optimized 4 at 42.5 GB/s
>>> group = placements(machine, np.arange(32).reshape(2, 16))[0]
>>> print(group)
16 ranks: 8 x 2
>>> ring, name = collective_seconds("all_gather", 2**24, group, machine)
>>> name, round(ring * 1e3, 2)
('ring', 0.79)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UserError, either
from stagewright.hardware import Hardware

Int = NDArray[np.int64]
Algorithm = Literal["best", "ring", "tree", "hierarchical", "direct", "in_network"]


class Dimension(NamedTuple):
    """One level of the network: `size` blocks of the level below, or GPUs, joined alike."""

    topology: str
    size: int
    bandwidth_gb_s: float  # of one GPU, one direction, as large messages reach it
    latency_us: float  # of one step
    in_network_reduction: bool = False
    shape: tuple[int, ...] = ()  # torus

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or str(self.size)
        return f"{self.topology} {size} at {self.bandwidth_gb_s:g} GB/s"


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs and what joins them: `dimensions` from the GPU outwards, their sizes multiply to `gpus`.

    Rank r of a program sits on GPU r, and consecutive GPUs are neighbours: ranks 0 to 7 fill the
    first node of eight. Which ranks these are is the order of the program's mesh.
    """

    hardware: Hardware
    gpus: int
    dimensions: tuple[Dimension, ...]
    algorithm: Algorithm = "best"
    """Of collectives; one that cannot do a collective gives way to the best that can."""

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        *,
        gpus: int | None = None,
        nodes: int | None = None,
        topology: Literal["two_tier", "fullflat"] = "two_tier",
        algorithm: Algorithm = "best",
    ) -> Self:
        """`gpus` or `nodes` of some hardware; `fullflat` joins all by the scale-up links."""
        if (gpus is None) == (nodes is None):
            raise UserError("a machine needs its number of gpus or of nodes: give one of the two")
        if gpus is None:
            gpus = (nodes or 0) * hardware.gpus_per_node
        if gpus < 1:
            raise UserError(f"a machine of {gpus} GPUs; wanted 1 or more")
        if algorithm not in get_args(Algorithm):
            raise UserError(f"algorithm is {algorithm!r}, wanted {either(get_args(Algorithm))}")
        up, out = hardware.scale_up, hardware.scale_out
        fast = Dimension(
            up.topology,
            min(gpus, up.gpus) if topology == "two_tier" else gpus,
            up.bandwidth_gb_s * up.bandwidth_fraction,
            up.latency_us,
            up.in_network_reduction,
            up.shape if gpus >= up.gpus else (),
        )
        slow = Dimension(
            out.fabric,
            -(-gpus // fast.size),
            out.bandwidth_gb_s * out.bandwidth_fraction,
            out.latency_us,
            out.in_network_reduction,
        )
        found = [fast, slow] if slow.size > 1 else [fast]
        return cls(hardware, gpus, tuple(found), algorithm)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.hardware.name}: " + ", ".join(map(str, self.dimensions))


class Placement(NamedTuple):
    """Where the ranks of a group lie: per dimension, among how many of its positions they spread.

    `counts[0]` ranks in a node, `counts[1]` nodes, ...; where groups are cut unevenly, the average
    rounded up. `strides`: the distance between neighbours within a dimension.
    """

    ranks: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.ranks} ranks: " + " x ".join(map(str, self.counts))


def placements(machine: Machine, groups: Int) -> list[Placement]:
    """The distinct ways in which equal groups lie in a machine; `groups`: (groups, ranks)."""
    blocks = np.sort(groups, axis=1)
    size = blocks.shape[1]
    distinct = np.full(len(blocks), size, dtype=np.int64)
    columns: list[Int] = []
    for dimension in machine.dimensions:
        at = blocks % dimension.size
        apart = np.where(np.diff(blocks, axis=1) > 0, np.diff(at, axis=1), 0)
        gaps = np.where(apart > 0, apart, dimension.size).min(axis=1, initial=dimension.size)
        blocks = blocks // dimension.size
        above = (np.diff(blocks, axis=1) > 0).sum(axis=1) + 1
        count = -(-distinct // above)
        columns += [count, np.where(count > 1, gaps, 1)]
        distinct = above
    rows = np.unique(np.stack(columns, axis=1), axis=0)
    return [
        Placement(size, tuple(int(x) for x in row[::2]), tuple(int(x) for x in row[1::2]))
        for row in rows
    ]


def collective_seconds(
    op: str, local_bytes: int, group: Placement, machine: Machine
) -> tuple[float, str]:
    """Duration of a collective and the algorithm that gives it; bytes as `Tasks.comm_bytes`."""
    whole = local_bytes * group.ranks if op == "all_gather" else local_bytes
    if group.ranks < 2 or whole == 0:
        return 0.0, "none"
    options = {
        name: seconds
        for name, model in _ALGORITHMS.items()
        if (seconds := model(op, whole, group, machine)) is not None
    }
    if machine.algorithm in options:
        return options[machine.algorithm], machine.algorithm
    best = min(options, key=options.__getitem__)
    return options[best], best


def message_seconds(size: int, level: int, machine: Machine) -> float:
    """Duration of one message between GPUs that meet in dimension `level`."""
    dimension = machine.dimensions[level]
    return dimension.latency_us * 1e-6 + size / (dimension.bandwidth_gb_s * 1e9)


def level_of(machine: Machine, a: Int, b: Int) -> Int:
    """The dimension in which pairs of ranks meet, 0 for those in one node."""
    level = np.zeros(len(a), dtype=np.int64)
    for i, dimension in enumerate(machine.dimensions[:-1]):
        a, b = a // dimension.size, b // dimension.size
        level[a != b] = i + 1
    return level


# ---- algorithms: seconds for `whole` bytes, None where they cannot do it -------------------------

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


def _ring(op: str, whole: int, group: Placement, machine: Machine) -> float | None:
    """One ring through all ranks, or as many as a node has members, each leaving by another NIC."""
    if op not in PASSES:
        return None
    below, bandwidth, latency = 1, math.inf, 0.0
    for dimension, count, blocks in _levels(group, machine):
        if count > 1:
            bandwidth = min(bandwidth, dimension.bandwidth_gb_s * below)
            latency += dimension.latency_us * (blocks - blocks // count)
        below *= count
    share = (group.ranks - 1) / group.ranks
    return PASSES[op] * (latency * 1e-6 + whole * share / (bandwidth * 1e9))


def _tree(op: str, whole: int, group: Placement, machine: Machine) -> float | None:
    """Two binary trees of nodes, chains inside them (NCCL): all_reduce with few steps."""
    if op != "all_reduce" or len([c for c in group.counts if c > 1]) < 2:
        return None
    below, bandwidth, latency = 1, math.inf, 0.0
    for level, (dimension, count, _) in enumerate(_levels(group, machine)):
        if count > 1:
            bandwidth = min(bandwidth, dimension.bandwidth_gb_s * below)
            latency += dimension.latency_us * (math.log2(count) if level else count - 1)
        below *= count
    return 2 * (latency * 1e-6 + whole / (bandwidth * 1e9))


def _hierarchical(op: str, whole: int, group: Placement, machine: Machine) -> float | None:
    """Dimension after dimension: what is scattered within a node goes out in parts."""
    if op not in PASSES or op == "broadcast":
        return None
    seconds, part = 0.0, float(whole)
    for dimension, count, _ in _levels(group, machine):
        if count > 1:
            moved = part * (count - 1) / count
            seconds += dimension.latency_us * 1e-6 * (count - 1)
            seconds += moved / (dimension.bandwidth_gb_s * 1e9)
            part /= count
    return PASSES[op] * seconds


def _direct(op: str, whole: int, group: Placement, machine: Machine) -> float | None:
    """Every rank sends to every other at once: all_to_all."""
    if op != "all_to_all":
        return None
    slowest, inside = 0.0, 1
    latency = 0.0
    for dimension, count, _ in _levels(group, machine):
        if count > 1:
            leaves = whole * (group.ranks - inside) / group.ranks
            slowest = max(slowest, leaves / (dimension.bandwidth_gb_s * 1e9))
            latency = max(latency, dimension.latency_us)
        inside *= count
    return latency * 1e-6 + slowest


def _in_network(op: str, whole: int, group: Placement, machine: Machine) -> float | None:
    """The switch adds and multicasts: every byte goes up once and comes down once."""
    dimension = machine.dimensions[0]
    if op != "all_reduce" or group.counts[0] < 2 or any(c > 1 for c in group.counts[1:]):
        return None
    if not dimension.in_network_reduction:
        return None
    return (2 * dimension.latency_us * 1e-6) + whole / (dimension.bandwidth_gb_s * 1e9)


def _levels(group: Placement, machine: Machine) -> list[tuple[Dimension, int, int]]:
    """Per dimension: itself, positions used, and how many blocks of the level below in all."""
    left = group.ranks
    result: list[tuple[Dimension, int, int]] = []
    for dimension, count in zip(machine.dimensions, group.counts, strict=True):
        result.append((dimension, count, left))
        left = -(-left // count)
    return result


_ALGORITHMS = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "direct": _direct,
    "in_network": _in_network,
}
