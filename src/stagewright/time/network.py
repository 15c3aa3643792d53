"""How long messages take: machines as stacks of dimensions, where groups lie in them, collectives.

>>> from stagewright.time.hardware import resolve
>>> machine = Machine.of(resolve("h100-sxm"), gpus=32)
>>> print(machine)
32 x h100-sxm: switch 8 at 369 GB/s, rail_optimized 4 at 46 GB/s
>>> group = placements(machine, np.arange(32).reshape(2, 16))[0]
>>> print(group)
16 ranks: 8 x 2
>>> seconds, algorithm = collective_seconds("all_gather", 2**24, group, machine)
>>> algorithm, 0.7e-3 < seconds < 1.2e-3
('ring', True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple, Self, get_args

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError, did_you_mean, either
from stagewright.time.hardware import Hardware, ScaleOut, ScaleUp

Algorithm = Literal["best", "ring", "tree", "hierarchical", "direct", "in_network"]


class Size(IntEnum):
    """How a message is sent: soon and slowly, or later and fast."""

    SMALL = 0
    MEDIUM = 1
    LARGE = 2


class Dimension(NamedTuple):
    """One level of the network: `size` blocks of the level below, or GPUs, joined alike.

    Bandwidths are of one GPU, one direction, all its links together, as messages reach them.
    """

    topology: str
    size: int
    bandwidth_gb_s: float  # of large messages
    latency_us: float  # to start a message
    hop_us: float = 0.0  # of each further step of a collective
    bulk_us: float = 0.0  # to start a large one, beyond latency_us
    medium_gb_s: float = 0.0  # of medium messages; 0: as large ones
    medium_us: float = 0.0  # to start one, beyond latency_us
    low_latency_gb_s: float = 0.0  # of small messages; 0: as large ones
    in_network_gb_s: float = 0.0  # of all_reduce where switches add; 0: they do not
    in_network_us: float = 0.0  # to start it, for each GPU
    shape: tuple[int, ...] = ()  # torus: its rings, the first joins neighbours

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or str(self.size)
        return f"{self.topology} {size} at {self.bandwidth_gb_s:g} GB/s"

    def rate(self, size: Size) -> float:
        """Bytes per second of a message that is sent as one of this size."""
        rates = (self.low_latency_gb_s, self.medium_gb_s, self.bandwidth_gb_s)
        return (rates[size] or self.bandwidth_gb_s) * 1e9

    def start(self, size: Size) -> float:
        """Seconds before the first byte."""
        return (self.latency_us + (0.0, self.medium_us, self.bulk_us)[size]) * 1e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs and what joins them: `dimensions` from the GPU outwards, their sizes multiply to `gpus`.

    Rank r of a program sits on GPU r, and consecutive GPUs are neighbours: ranks 0 to 7 fill the
    first node of eight. Which ranks these are is the order of the program's mesh. A job takes as
    many GPUs of each scale-up domain: 256 on racks of 72 are four times 64.
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
        attention_kernel: str | None = None,
    ) -> Self:
        """`gpus` or `nodes` of some hardware; `fullflat` joins all by the scale-up links.

        `attention_kernel` is one of the hardware's `attention_kernels`, None its default.
        """
        if (gpus is None) == (nodes is None):
            raise UserError("a machine needs its number of gpus or of nodes: give one of the two")
        if gpus is None:
            gpus = (nodes or 0) * hardware.gpus_per_node
        if gpus < 1:
            raise UserError(f"a machine of {gpus} GPUs; wanted 1 or more")
        if algorithm not in get_args(Algorithm):
            known = get_args(Algorithm)
            hint = did_you_mean(algorithm, known)
            raise UserError(f"algorithm is {algorithm!r}, wanted {either(known)}{hint}")
        if attention_kernel is not None:
            hardware = hardware.with_attention(attention_kernel)
        up, out = hardware.scale_up, hardware.scale_out
        inside = gpus if topology == "fullflat" else _per_domain(gpus, hardware)
        shape = up.shape if inside == math.prod(up.shape) else ()
        found = [_dimension(up, up.topology, inside, shape)]
        nodes = -(-gpus // inside)
        leaf = (out.gpus_per_leaf or gpus) // inside
        if 1 < leaf < nodes and out.oversubscription > 1:
            found.append(_dimension(out, out.fabric, leaf))
            nodes = -(-nodes // leaf)
        if nodes > 1:
            top = _dimension(out, out.fabric, nodes)
            slower = out.oversubscription if gpus > (out.gpus_per_leaf or gpus) else 1.0
            found.append(
                top._replace(
                    bandwidth_gb_s=top.bandwidth_gb_s / slower,
                    medium_gb_s=top.medium_gb_s / slower,
                    low_latency_gb_s=top.low_latency_gb_s / slower,
                )
            )
        return cls(hardware, gpus, tuple(found), algorithm)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.hardware.name}: " + ", ".join(map(str, self.dimensions))


def _per_domain(gpus: int, hardware: Hardware) -> int:
    """GPUs of a job in each scale-up domain: as many in each, where whole nodes allow it.

    >>> from stagewright.time.hardware import resolve
    >>> [_per_domain(n, resolve("gb200-nvl72")) for n in (8, 72, 256)]
    [8, 72, 64]
    """
    domain = hardware.scale_up.gpus
    domains = -(-gpus // domain)
    even = gpus // domains
    fits = gpus % domains == 0 and even % hardware.gpus_per_node == 0
    return even if fits else min(gpus, domain)


def _dimension(
    link: ScaleUp | ScaleOut, topology: str, size: int, shape: tuple[int, ...] = ()
) -> Dimension:
    gb_s = link.bandwidth_gb_s
    return Dimension(
        topology,
        size,
        gb_s * link.bandwidth_fraction,
        link.latency_us,
        link.hop_us,
        link.bulk_us,
        gb_s * link.medium_fraction,
        link.medium_us,
        gb_s * link.low_latency_fraction,
        gb_s * link.in_network_fraction if link.in_network_reduction else 0.0,
        link.in_network_us,
        shape,
    )


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
    levels = _levels(group, machine)
    options: dict[str, float] = {}
    for name, model in _ALGORITHMS.items():
        found = [s for size in Size if (s := model(op, whole, levels, size)) is not None]
        if found:
            options[name] = min(found)
    if machine.algorithm in options:
        return options[machine.algorithm], machine.algorithm
    best = min(options, key=options.__getitem__)
    return options[best], best


def distinct(experts: int, parts: int, top_k: int) -> float:
    """How many of `parts` that hold equally many experts a token goes to, which has `top_k`
    different ones, each as likely as any other.

    >>> round(distinct(256, 8, 8), 2)  # of the 8 ranks of a node
    5.29
    """
    others = experts - experts // parts
    missed = math.comb(others, top_k) / math.comb(experts, top_k)
    return parts * (1 - missed)


def dispatch_seconds(
    local_bytes: int, group: Placement, machine: Machine, experts: int, top_k: int
) -> float:
    """Duration of an exchange with experts that sends a token once to each rank that needs it.

    A copy leaves for each node, and is handed on there, all at once (DeepEP, HybridEP);
    `local_bytes` are those of a copy for each of `top_k` experts. The way back is the same.
    """
    if group.ranks < 2 or local_bytes == 0:
        return 0.0
    levels = _levels(group, machine)
    slowest = 0.0
    for level in levels:
        copies = distinct(experts, level.ranks // level.below, top_k)
        away = copies * (1 - 1 / level.used)  # but for those of the same position
        rate = level.dimension.rate(Size.LARGE) * level.share
        slowest = max(slowest, local_bytes / top_k * away * _detour(level) / rate)
    # Its kernels send by themselves: they have none of NCCL's protocols.
    start = max(level.dimension.latency_us + level.dimension.hop_us for level in levels)
    return start * 1e-6 + slowest


def message_seconds(bytes_: int, level: int, machine: Machine) -> float:
    """Duration of one message between GPUs that meet in dimension `level`."""
    dimension = machine.dimensions[level]
    # A message to one peer takes the one link to it.
    share = 1 / max(1, dimension.size - 1) if dimension.topology == "fully_connected" else 1.0
    if dimension.topology in ("ring", "torus"):
        share = 1 / (2 * max(1, len(dimension.shape)))
    return min(dimension.start(size) + bytes_ / (dimension.rate(size) * share) for size in Size)


def level_of(machine: Machine, a: Int, b: Int) -> Int:
    """The dimension in which pairs of ranks meet, 0 for those in one node."""
    level = np.zeros(len(a), dtype=np.int64)
    for i, dimension in enumerate(machine.dimensions[:-1]):
        a, b = a // dimension.size, b // dimension.size
        level[a != b] = i + 1
    return level


# ---- algorithms: seconds for `whole` bytes, None where they cannot do it -------------------------


class _Level(NamedTuple):
    """A dimension as one group uses it."""

    dimension: Dimension
    used: int  # positions of it that the group spreads over
    below: int  # ranks of the group below one position
    ranks: int  # of the whole group
    share: float  # of the bandwidth that the group can use


def _levels(group: Placement, machine: Machine) -> list[_Level]:
    """The dimensions that a group spreads over."""
    below = 1
    result: list[_Level] = []
    for dimension, count, stride in zip(
        machine.dimensions, group.counts, group.strides, strict=True
    ):
        if count > 1:
            share = _share(dimension, count, stride)
            result.append(_Level(dimension, count, below, group.ranks, share))
        below *= count
    return result


def _share(dimension: Dimension, count: int, stride: int) -> float:
    """The part of a GPU's links that a group of `count` positions, `stride` apart, has to itself.

    Fully connected: those to its members. Rings: the rings it lies in; groups that are interleaved
    share their links, and part of a ring is a line, which lacks the way back.
    """
    if dimension.topology == "fully_connected":
        return (count - 1) / (dimension.size - 1)
    if dimension.topology not in ("ring", "torus"):
        return 1.0
    shape = dimension.shape or (dimension.size,)
    shares: list[float] = []
    step, left = stride, count
    for ring in shape:
        if left > 1 and step < ring:
            used = min(left, -(-ring // step))
            closed = used * step >= ring
            shares.append((1.0 if closed else 0.5) / step)
            left, step = -(-left // used), 1
        else:
            step = max(1, step // ring)
    return sum(shares) / len(shape) if shares else 0.5 / len(shape)


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


def _ring(op: str, whole: int, levels: list[_Level], size: Size) -> float | None:
    """One ring through all ranks, or as many as a node has members, each leaving by another NIC."""
    if op not in PASSES:
        return None
    ranks = levels[0].ranks
    rate = min(level.dimension.rate(size) * level.share * level.below for level in levels)
    hops = sum(
        level.dimension.hop_us * (ranks // level.below - ranks // (level.below * level.used))
        for level in levels
    )
    start = max(level.dimension.start(size) for level in levels)
    moved = whole * (ranks - 1) / ranks
    return start + PASSES[op] * (hops * 1e-6 + moved / rate)


def _tree(op: str, whole: int, levels: list[_Level], size: Size) -> float | None:
    """Two binary trees of nodes, chains inside them (NCCL): all_reduce in few steps."""
    if op != "all_reduce" or len(levels) < 2:
        return None
    rate = min(level.dimension.rate(size) * level.share * level.below for level in levels)
    hops = sum(
        level.dimension.hop_us * (math.ceil(math.log2(level.used)) if i else level.used - 1)
        for i, level in enumerate(levels)
    )
    start = max(level.dimension.start(size) for level in levels)
    return start + 2 * (hops * 1e-6 + whole / rate)


def _hierarchical(op: str, whole: int, levels: list[_Level], size: Size) -> float | None:
    """Dimension after dimension: what is scattered within a node goes out in parts."""
    if op not in PASSES or op == "broadcast" or len(levels) < 2:
        return None
    seconds, part = 0.0, float(whole)
    for level in levels:
        moved = part * (level.used - 1) / level.used
        one = level.dimension.hop_us * 1e-6 * (level.used - 1)
        one += moved / (level.dimension.rate(size) * level.share)
        seconds += level.dimension.start(size) + PASSES[op] * one
        part /= level.used
    return seconds


def _direct(op: str, whole: int, levels: list[_Level], size: Size) -> float | None:
    """Every rank sends to every other at once: all_to_all; the narrowest level decides."""
    if op != "all_to_all":
        return None
    slowest = 0.0
    for level in levels:
        # What leaves a block of this level passes it, wherever it goes beyond.
        leaves = whole * (level.ranks - level.below) / level.ranks
        slowest = max(slowest, leaves * _detour(level) / (level.dimension.rate(size) * level.share))
    last = max(levels, key=lambda level: level.dimension.start(size)).dimension
    return last.start(size) + last.hop_us * 1e-6 + slowest


def _detour(level: _Level) -> float:
    """Links that a byte to a random member passes: a quarter of a ring, one elsewhere."""
    if level.dimension.topology not in ("ring", "torus"):
        return 1.0
    shape = level.dimension.shape or (level.dimension.size,)
    longest = max(min(ring, level.used) for ring in shape)
    return max(1.0, longest / 4)


def _in_network(op: str, whole: int, levels: list[_Level], size: Size) -> float | None:
    """Switches add and send the sum to all: every byte goes up once and comes down once.

    Where only the inner switches add, their sums go round a ring of nodes, a part each.
    """
    inner = levels[0]
    if op != "all_reduce" or size != Size.LARGE or not inner.dimension.in_network_gb_s:
        return None
    if inner.used < 3 or inner.below > 1:
        return None
    # Each GPU sends its own part too: n + 1 of n parts (NCCL's NVLS).
    moved = whole * (inner.used + 1) / inner.used
    begin = (inner.dimension.latency_us + inner.dimension.in_network_us * inner.used) * 1e-6
    seconds = begin + moved / (inner.dimension.in_network_gb_s * 1e9)
    part = whole / inner.used
    for level in levels[1:]:
        dimension = level.dimension
        if dimension.in_network_gb_s:
            outside = part / (dimension.in_network_gb_s * 1e9) + 2e-6 * dimension.hop_us
        else:
            outside = 2 * part * (level.used - 1) / level.used / dimension.rate(size)
            outside += 2e-6 * dimension.hop_us * (level.used - 1)
        # Nodes pass parts on while they add the next: the slower of the two decides.
        seconds = max(seconds, dimension.start(size) + outside)
        part /= level.used
    return seconds


_ALGORITHMS = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "direct": _direct,
    "in_network": _in_network,
}
