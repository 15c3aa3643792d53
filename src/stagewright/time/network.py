"""A machine as a stack of network tiers, and the placement of groups of ranks.

>>> from stagewright.time.hardware import resolve
>>> machine = Machine.of(resolve("h100-sxm"), gpus=32)
>>> print(machine)
32 x h100-sxm: switch 8 at 369 GB/s, rail_optimized 4 at 46 GB/s
>>> print(placements(machine, np.arange(32).reshape(2, 16))[0])
16 ranks: 8 x 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Self, get_args

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError, did_you_mean, either
from stagewright.run.sections.cluster import Algorithm, Topology
from stagewright.time.hardware import DirectAllReduce, Hardware, ScaleOut, ScaleUp
from stagewright.time.torus import Pod


class MessageSize(IntEnum):
    """The protocol of a message: small ones start sooner, large ones reach more bandwidth.

    NCCL calls the three LL, LL128 and Simple.
    """

    SMALL = 0
    MEDIUM = 1
    LARGE = 2


class Tier(NamedTuple):
    """One tier of the network: it joins `size` blocks of the tier below, or GPUs.

    Bandwidths are per GPU in one direction, over all its links, as measured messages reach them.
    """

    topology: str
    size: int
    bandwidth_gb_s: float
    """Of large messages."""
    latency_us: float
    """Time to start a small message."""
    hop_us: float = 0.0
    """Time of each further step of a collective."""
    bulk_us: float = 0.0
    """Time to start a large message, beyond `latency_us`."""
    medium_gb_s: float = 0.0
    """Of medium messages; 0: as large ones."""
    medium_us: float = 0.0
    """Time to start a medium message, beyond `latency_us`."""
    low_latency_gb_s: float = 0.0
    """Of small messages; 0: as large ones."""
    in_network_gb_s: float = 0.0
    """Of an all_reduce that switches add up; 0: they do not."""
    in_network_us: float = 0.0
    """Time for each GPU to start such an all_reduce."""
    all_reduce_senders: int = 0
    """Ranks per position that send in an all_reduce; 0: all."""
    shape: tuple[int, ...] = ()
    """Torus: GPUs of the slice that the job has, along each dimension."""
    closed: tuple[bool, ...] = ()
    """Torus: for each dimension, True if its ends are joined."""
    links: int = 0
    """Fully connected: links of a GPU, each to one peer, whether or not the job has it; 0: one to
    each of `size`."""

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or str(self.size)
        return f"{self.topology} {size} at {self.bandwidth_gb_s:g} GB/s"

    def share_to(self, peers: int) -> float:
        """Fully connected: the share of a GPU's bandwidth that leads to some of its peers."""
        return peers / max(1, self.links or self.size - 1)

    def rate(self, size: MessageSize) -> float:
        """Bytes per second of a message sent by the protocol for this size."""
        rates = (self.low_latency_gb_s, self.medium_gb_s, self.bandwidth_gb_s)
        return (rates[size] or self.bandwidth_gb_s) * 1e9

    def start(self, size: MessageSize) -> float:
        """Seconds before the first byte of a message sent by the protocol for this size."""
        return (self.latency_us + (0.0, self.medium_us, self.bulk_us)[size]) * 1e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs and their network tiers, from the GPU outwards; sizes multiply to `gpus`.

    Rank r of a program sits on GPU r, and consecutive GPUs are neighbours: ranks 0 to 7 fill the
    first node of eight. The order of the program's mesh decides which ranks these are. In a torus
    an axis of the mesh has separate dimensions, where sizes allow that (`torus`). A job takes
    equally many GPUs of each scale-up domain: 256 GPUs on racks of 72 take 64 from each of four.
    """

    hardware: Hardware
    gpus: int
    tiers: tuple[Tier, ...]
    algorithm: Algorithm = "best"
    """Algorithm of collectives; the fastest applicable one where it does not apply."""
    direct_all_reduce: DirectAllReduce | None = None
    """The kernel of engines for small messages within a node; None: a collective library only."""

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        *,
        gpus: int,
        topology: Topology = "two_tier",
        algorithm: Algorithm = "best",
    ) -> Self:
        """A machine of `gpus`; the topology `fullflat` joins all GPUs by scale-up links."""
        if gpus < 1:
            raise UserError(f"a machine of {gpus} GPUs; wanted 1 or more")
        if algorithm not in get_args(Algorithm):
            known = get_args(Algorithm)
            hint = did_you_mean(algorithm, known)
            raise UserError(f"algorithm is {algorithm!r}, wanted {either(known)}{hint}")
        out = hardware.scale_out
        inside = gpus if topology == "fullflat" else _gpus_per_domain(gpus, hardware)
        tiers = [_scale_up_tier(hardware.scale_up, inside)]
        nodes = -(-gpus // inside)
        leaf = (out.gpus_per_leaf or gpus) // inside
        if 1 < leaf < nodes and out.oversubscription > 1:
            tiers.append(_scale_out_tier(out, leaf))
            nodes = -(-nodes // leaf)
        if nodes > 1:
            slower = out.oversubscription if gpus > (out.gpus_per_leaf or gpus) else 1.0
            tiers.append(_scale_out_tier(out, nodes, slower))
        return cls(hardware, gpus, tuple(tiers), algorithm)

    def for_inference(
        self,
        *,
        blocks: bool = False,
        weights: str = "",
        engine: str | None = None,
        cache: str = "bf16",
    ) -> Self:
        """This machine with the kernels of inference, where its hardware has constants of them.

        Arguments as in `Hardware.for_inference`.
        """
        fit = self.hardware.inference
        if fit is None:
            return self
        hardware = self.hardware.for_inference(
            blocks=blocks, weights=weights, engine=engine, cache=cache
        )
        return replace(self, hardware=hardware, direct_all_reduce=fit.all_reduce)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.hardware.name}: " + ", ".join(map(str, self.tiers))


def _gpus_per_domain(gpus: int, hardware: Hardware) -> int:
    """GPUs of a job in each scale-up domain: equally many, where whole nodes allow it.

    >>> from stagewright.time.hardware import resolve
    >>> [_gpus_per_domain(n, resolve("gb200-nvl72")) for n in (8, 72, 256)]
    [8, 72, 64]
    """
    domain = hardware.scale_up.gpus
    domains = -(-gpus // domain)
    even = gpus // domains
    fits = gpus % domains == 0 and even % hardware.gpus_per_node == 0
    return even if fits else min(gpus, domain)


def _scale_up_tier(link: ScaleUp, size: int) -> Tier:
    """The links within a scale-up domain, of which a job has `size` GPUs."""
    tier = _tier(link, link.topology, size)
    if link.topology == "fully_connected":
        return tier._replace(links=max(size, link.gpus) - 1)
    if link.topology not in ("ring", "torus"):
        return tier
    pod = Pod(link.shape or (link.gpus,), link.cube)
    shape = pod.slice(size)
    return tier._replace(shape=shape, closed=pod.closed(shape))


def _scale_out_tier(link: ScaleOut, size: int, oversubscription: float = 1.0) -> Tier:
    """A level of the network between `size` scale-up domains, or between groups of them."""
    tier = _tier(link, link.fabric, size)
    return tier._replace(
        bandwidth_gb_s=tier.bandwidth_gb_s / oversubscription,
        medium_gb_s=tier.medium_gb_s / oversubscription,
        low_latency_gb_s=tier.low_latency_gb_s / oversubscription,
        all_reduce_senders=link.all_reduce_adapters or 0,
    )


def _tier(link: ScaleUp | ScaleOut, topology: str, size: int) -> Tier:
    gb_s = link.bandwidth_gb_s
    return Tier(
        topology,
        size,
        bandwidth_gb_s=gb_s * link.bandwidth_fraction,
        latency_us=link.latency_us,
        hop_us=link.hop_us,
        bulk_us=link.bulk_us,
        medium_gb_s=gb_s * link.medium_fraction,
        medium_us=link.medium_us,
        low_latency_gb_s=gb_s * link.low_latency_fraction,
        in_network_gb_s=gb_s * link.in_network_fraction if link.in_network_reduction else 0.0,
        in_network_us=link.in_network_us,
    )


class Placement(NamedTuple):
    """Number of positions of each tier over which the ranks of a group spread.

    `counts[0]` ranks in each scale-up domain, `counts[1]` domains, and so on; where domains hold
    unequal parts of the group, the mean rounded up. `strides`: the distance between neighbours
    within each tier.
    """

    ranks: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.ranks} ranks: " + " x ".join(map(str, self.counts))


def placements(machine: Machine, groups: Int) -> list[Placement]:
    """The distinct placements of groups of one size; `groups` has shape (groups, ranks)."""
    return _placed(machine.tiers, groups)[0]


def placements_by_rank(machine: Machine, ids: Int) -> tuple[list[Placement], Int]:
    """Distinct placements of groups of one size; and by rank, the index of its group's.

    `ids`: the group of each rank of the world; 0: none, whose index is -1.
    """
    inside = np.flatnonzero(ids > 0)
    order = inside[np.argsort(ids[inside], kind="stable")]
    size = int((ids == ids[order[0]]).sum())
    groups = order.reshape(-1, size)
    distinct, of_group = _placed(machine.tiers, groups)
    of_rank = np.full(len(ids), -1)
    of_rank[groups] = of_group[:, None]
    return distinct, of_rank


def _placed(tiers: Sequence[Tier], groups: Int) -> tuple[list[Placement], Int]:
    """Distinct placements; and by group, the index of its own."""
    distinct_groups, of_group = _distinct_up_to_shifts(tiers, groups)
    blocks = np.sort(distinct_groups, axis=1)
    size = blocks.shape[1]
    distinct = np.full(len(blocks), size, dtype=np.int64)
    columns: list[Int] = []
    for tier in tiers:
        position = blocks % tier.size
        moved = np.diff(blocks, axis=1) > 0
        steps = np.where(moved, np.diff(position, axis=1), 0)
        gaps = np.where(steps > 0, steps, tier.size).min(axis=1, initial=tier.size)
        blocks = blocks // tier.size
        above = (np.diff(blocks, axis=1) > 0).sum(axis=1) + 1
        count = -(-distinct // above)
        columns += [count, np.where(count > 1, gaps, 1)]
        distinct = above
    rows, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    result = [Placement(size, tuple(row[::2]), tuple(row[1::2])) for row in rows.tolist()]
    return result, index.ravel()[of_group]


def _distinct_up_to_shifts(tiers: Sequence[Tier], groups: Int) -> tuple[Int, Int]:
    """Groups without those that outermost blocks shift, and for each group its representative.

    Groups of most communicators differ by shifts only.
    """
    first_ranks = groups[:, :1]
    if not (groups - first_ranks == groups[0] - groups[0, 0]).all():
        return groups, np.arange(len(groups))
    block = math.prod(tier.size for tier in tiers[:-1])
    _, index, of_group = np.unique(
        first_ranks[:, 0] % block, return_index=True, return_inverse=True
    )
    return groups[index], of_group.ravel()


def tier_of(machine: Machine, a: Int, b: Int) -> Int:
    """Index of the tier that joins each pair of ranks; 0: within one scale-up domain."""
    tier_index = np.zeros(len(a), dtype=np.int64)
    for i, tier in enumerate(machine.tiers[:-1]):
        a, b = a // tier.size, b // tier.size
        tier_index[a != b] = i + 1
    return tier_index
