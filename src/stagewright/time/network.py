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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Self, get_args

import numpy as np

from stagewright.arrays import Int, distinct_rows
from stagewright.errors import UserError, did_you_mean, either
from stagewright.run.sections.cluster import Algorithm, Topology
from stagewright.time.constants import GemmFit
from stagewright.time.hardware import Hardware, ScaleOut, ScaleUp
from stagewright.time.inference_fits import BLOCKS, DirectAllReduce, InferenceGemmFit
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
    bandwidth_gb_s: float  # of large messages
    latency_us: float  # to start a message
    hop_us: float = 0.0  # of each further step of a collective
    bulk_us: float = 0.0  # to start a large one, beyond latency_us
    medium_gb_s: float = 0.0  # of medium messages; 0: as large ones
    medium_us: float = 0.0  # to start one, beyond latency_us
    low_latency_gb_s: float = 0.0  # of small messages; 0: as large ones
    in_network_gb_s: float = 0.0  # of all_reduce where switches add; 0: they do not
    in_network_us: float = 0.0  # to start it, for each GPU
    all_reduce_senders: int = 0  # ranks below a position that all_reduce sends from; 0: all
    shape: tuple[int, ...] = ()  # torus: of the slice that the job has
    closed: tuple[bool, ...] = ()  # torus: along which of its sides the ends are joined

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or str(self.size)
        return f"{self.topology} {size} at {self.bandwidth_gb_s:g} GB/s"

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
    an axis of the mesh has dimensions of its own, where sizes allow that (`torus`). A job takes
    equally many GPUs of each scale-up domain: 256 GPUs on racks of 72 take 64 from each of four.
    """

    hardware: Hardware
    gpus: int
    tiers: tuple[Tier, ...]
    algorithm: Algorithm = "best"
    """Of collectives; where it cannot do a collective, the fastest that can is taken."""
    direct_all_reduce: DirectAllReduce | None = None
    """The kernel of engines for small messages within a node; None: a collective library alone."""

    @property
    def network(self) -> tuple[tuple[Tier, ...], Algorithm, DirectAllReduce | None]:
        """All that determines the time of collectives, except the GPUs."""
        return self.tiers, self.algorithm, self.direct_all_reduce

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        *,
        gpus: int | None = None,
        nodes: int | None = None,
        topology: Topology = "two_tier",
        algorithm: Algorithm = "best",
        attention_kernel: str | None = None,
    ) -> Self:
        """A machine of `gpus` or `nodes`; the topology `fullflat` joins all GPUs by scale-up links.

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
        tiers = [_inner(up, inside)]
        nodes = -(-gpus // inside)
        leaf = (out.gpus_per_leaf or gpus) // inside
        if 1 < leaf < nodes and out.oversubscription > 1:
            tiers.append(_outer(out, leaf))
            nodes = -(-nodes // leaf)
        if nodes > 1:
            top = _outer(out, nodes)
            slower = out.oversubscription if gpus > (out.gpus_per_leaf or gpus) else 1.0
            tiers.append(
                top._replace(
                    bandwidth_gb_s=top.bandwidth_gb_s / slower,
                    medium_gb_s=top.medium_gb_s / slower,
                    low_latency_gb_s=top.low_latency_gb_s / slower,
                )
            )
        return cls(hardware, gpus, tuple(tiers), algorithm)

    def for_inference(
        self, *, blocks: bool = False, engine: str | None = None, cache: str = "bf16"
    ) -> Self:
        """This machine with the kernels of inference, where its hardware has constants of them.

        `blocks`, `engine` and `cache` as in the function of the same name.
        """
        fit = self.hardware.inference
        if fit is None:
            return self
        hardware = for_inference(self.hardware, blocks=blocks, engine=engine, cache=cache)
        return replace(self, hardware=hardware, direct_all_reduce=fit.all_reduce)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.hardware.name}: " + ", ".join(map(str, self.tiers))


def for_inference(
    hardware: Hardware, *, blocks: bool = False, engine: str | None = None, cache: str = "bf16"
) -> Hardware:
    """The hardware with the constants of inference, where it has any, for products.

    `blocks`: those in fp8 are of weights that are scaled by blocks. `engine`: with the constants of
    this engine's kernels, which keeps its cache in the precision `cache`.
    """
    if hardware.inference is None:
        return hardware
    engine_fit = hardware.inference.of_engine(engine, cache)

    def updated(fits: Mapping[str, InferenceGemmFit]) -> dict[str, GemmFit]:
        selected = {dtype: fit for dtype, fit in fits.items() if dtype != BLOCKS}
        if blocks and BLOCKS in fits:
            selected["fp8"] = fits[BLOCKS]
        return {
            dtype: hardware.products(dtype).model_copy(update=fit.model_dump(exclude_none=True))
            for dtype, fit in selected.items()
        }

    experts = hardware.experts
    if experts is not None:
        routing = experts.routing_us if engine_fit.routing_us is None else engine_fit.routing_us
        grouped = {**experts.gemm, **updated(engine_fit.experts_gemm)}
        experts = experts.model_copy(update={"routing_us": routing, "gemm": grouped})
    products = {**hardware.gemm, **updated(engine_fit.gemm)}
    return hardware.model_copy(
        update={"gemm": products, "experts": experts, "inference": engine_fit}
    )


def _per_domain(gpus: int, hardware: Hardware) -> int:
    """GPUs of a job in each scale-up domain: equally many, where whole nodes allow it.

    >>> from stagewright.time.hardware import resolve
    >>> [_per_domain(n, resolve("gb200-nvl72")) for n in (8, 72, 256)]
    [8, 72, 64]
    """
    domain = hardware.scale_up.gpus
    domains = -(-gpus // domain)
    even = gpus // domains
    fits = gpus % domains == 0 and even % hardware.gpus_per_node == 0
    return even if fits else min(gpus, domain)


def _inner(link: ScaleUp, size: int) -> Tier:
    """The links within a scale-up domain, of which a job has `size` GPUs."""
    tier = _tier(link, link.topology, size)
    if link.topology not in ("ring", "torus"):
        return tier
    pod = Pod(link.shape or (link.gpus,), link.cube)
    shape = pod.slice(size)
    return tier._replace(shape=shape, closed=pod.closed(shape))


def _outer(link: ScaleOut, size: int) -> Tier:
    """A level of the network between `size` scale-up domains, or between groups of them."""
    senders = link.all_reduce_adapters or 0
    return _tier(link, link.fabric, size)._replace(all_reduce_senders=senders)


def _tier(link: ScaleUp | ScaleOut, topology: str, size: int) -> Tier:
    gb_s = link.bandwidth_gb_s
    return Tier(
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
    )


class Placement(NamedTuple):
    """Number of positions of each tier over which the ranks of a group spread.

    `counts[0]` ranks in each node, `counts[1]` nodes, and so on; where nodes hold unequal parts of
    the group, the mean rounded up. `strides`: the distance between neighbours within each tier.
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
    """Distinct placements of groups of one size, and the placement of each rank's group.

    `ids`: by rank of the world the group that it is in, 0: none, for which the number is -1.
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
    """Distinct placements of groups, and the placement of each group."""
    distinct_groups, of_group = _shifted_apart(tiers, groups)
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
    first, number = distinct_rows(columns)
    rows = np.stack(columns, axis=1)[first]
    order = np.lexsort(rows.T[::-1])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    result = [
        Placement(size, tuple(int(x) for x in row[::2]), tuple(int(x) for x in row[1::2]))
        for row in rows[order]
    ]
    return result, rank[number][of_group]


def _shifted_apart(tiers: Sequence[Tier], groups: Int) -> tuple[Int, Int]:
    """Groups that are distinct up to shifts by outermost blocks, and the one of each group.

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
    """Index of the tier that joins each pair of ranks; 0: in one node."""
    tier_index = np.zeros(len(a), dtype=np.int64)
    for i, tier in enumerate(machine.tiers[:-1]):
        a, b = a // tier.size, b // tier.size
        tier_index[a != b] = i + 1
    return tier_index
