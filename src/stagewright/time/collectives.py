"""Time of collectives and messages on a machine: models of their algorithms.

>>> import numpy as np
>>> from stagewright.time.hardware import resolve
>>> from stagewright.time.network import placements
>>> machine = Machine.of(resolve("h100-sxm"), gpus=32)
>>> group = placements(machine, np.arange(32).reshape(2, 16))[0]
>>> 0.7e-3 < collective_seconds("all_gather", 2**24, group, machine) < 1.2e-3
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stagewright.arrays import Float
from stagewright.time.hardware import DirectAllReduce
from stagewright.time.network import Machine, MessageSize, Placement, Tier
from stagewright.time.torus import Ring, rings

Amount = TypeVar("Amount", float, Float)
"""Bytes or seconds of one collective, or an array of many at one placement."""


def collective_seconds(op: str, comm_bytes: Amount, group: Placement, machine: Machine) -> Amount:
    """Seconds of a collective by the fastest algorithm; `comm_bytes`: `Tasks.comm_bytes`."""
    options = seconds_by_algorithm(op, comm_bytes, group, machine)
    if not options:
        return comm_bytes * 0.0
    return _minimum(options.values()) * (comm_bytes != 0)  # pyright: ignore[reportReturnType]


def seconds_by_algorithm(
    op: str, comm_bytes: Amount, group: Placement, machine: Machine
) -> dict[str, Amount]:
    """Seconds by algorithm: only the machine's where it applies, else all that do.

    Empty where a group of one rank exchanges nothing.
    """
    if group.ranks < 2:
        return {}
    total = comm_bytes * (group.ranks if op == "all_gather" else 1.0)
    uses = tiers_used(group, machine)
    # NCCL's algorithms are ring, tree, CollNet, NVLS and PAT (src/include/nccl_tuner.h), and RCCL
    # has fewer: none goes tier after tier.
    vendor_lacks = "hierarchical" if machine.hardware.vendor in ("NVIDIA", "AMD") else ""
    options: dict[str, Amount] = {}
    for name, model in _ALGORITHMS.items():
        if name == vendor_lacks and name != machine.algorithm:
            continue
        times = [s for size in MessageSize if (s := model(op, total, uses, size)) is not None]
        if times:
            options[name] = _minimum(times)
    if machine.algorithm in options:
        return {machine.algorithm: options[machine.algorithm]}
    fit = machine.direct_all_reduce
    if op == "all_reduce" and fit and len(uses) == 1 and group.counts[0] == group.ranks:
        link = machine.hardware.scale_up.bandwidth_gb_s * uses[0].share
        options["one_kernel"] = direct_all_reduce(total, group.ranks, link, fit)
    return options


def _minimum(times: Iterable[Amount]) -> Amount:
    smallest: Any = reduce(np.minimum, times)
    return smallest if isinstance(smallest, np.ndarray) else float(smallest)  # pyright: ignore


def _maximum(a: Amount, b: Amount) -> Amount:
    return np.maximum(a, b)  # pyright: ignore[reportReturnType]


def direct_all_reduce(total: Amount, ranks: int, link_gb_s: float, fit: DirectAllReduce) -> Amount:
    """Seconds of an all-reduce of `total` bytes by one kernel within a node.

    Every GPU reads the vectors of all others and adds them up; or each adds up one part, and then
    all read the parts (vLLM's csrc/custom_all_reduce.cuh, TensorRT-LLM's one-shot and two-shot).
    """
    rate = link_gb_s * 1e9 * fit.bandwidth_fraction
    one_shot = (ranks - 1) * total / rate
    two_shot = fit.second_us * 1e-6 + 2 * (ranks - 1) / ranks * total / rate
    return (fit.latency_us + fit.gpu_us * ranks) * 1e-6 + _minimum((one_shot, two_shot))


def message_seconds(bytes_: Amount, tier_index: int, machine: Machine) -> Amount:
    """Seconds of a message between GPUs that meet in tier `tier_index` of the machine."""
    tier = machine.tiers[tier_index]
    share = 1.0
    if tier.topology == "fully_connected":  # the one link to the peer
        share = tier.share_to(1)
    elif tier.topology in ("ring", "torus"):
        share = 1 / (2 * max(1, len(tier.shape)))
    return _minimum(tier.start(size) + bytes_ / (tier.rate(size) * share) for size in MessageSize)


# ---- algorithms: seconds for `total` bytes; None where they do not apply -------------------------


class TierUse(NamedTuple):
    """Use of a tier by one group."""

    tier: Tier
    positions: int
    """Positions of the tier over which the group spreads."""
    below: int
    """Ranks of the group below one position."""
    ranks: int
    """Ranks of the group."""
    share: float
    """Share of the tier's bandwidth that the group can use."""
    level: int = 0
    """Index of the tier, from the GPU outwards."""
    rings: tuple[Ring, ...] = ()
    """Torus: rings of the group."""

    @property
    def ring_steps(self) -> int:
        """Number of steps through all positions, ring after ring in a torus."""
        return sum(ring.size - 1 for ring in self.rings) or self.positions - 1

    def senders(self, op: str) -> int:
        """Ranks below a position that a collective sends from, each by its adapter."""
        few = self.tier.all_reduce_senders if op == "all_reduce" else 0
        return min(self.below, few) if few else self.below


def tiers_used(group: Placement, machine: Machine) -> list[TierUse]:
    """The tiers over which a group spreads, with their use."""
    below = 1
    result: list[TierUse] = []
    levels = zip(machine.tiers, group.counts, group.strides, strict=True)
    for level, (tier, count, stride) in enumerate(levels):
        if count > 1:
            tier_rings = _rings(tier, count, stride)
            share = _share(tier, count, tier_rings)
            result.append(TierUse(tier, count, below, group.ranks, share, level, tier_rings))
        below *= count
    return result


def _rings(tier: Tier, count: int, stride: int) -> tuple[Ring, ...]:
    """The rings of a group in a torus, or in a ring; none elsewhere."""
    if tier.topology not in ("ring", "torus"):
        return ()
    shape = tier.shape or (tier.size,)
    return rings(shape, tier.closed or (True,) * len(shape), count, stride)


def _share(tier: Tier, count: int, group_rings: tuple[Ring, ...]) -> float:
    """The share of a GPU's links that a group of `count` positions can use.

    Fully connected: the links to its members. Torus: those along the dimensions of its rings.
    """
    if tier.topology == "fully_connected":
        return tier.share_to(count - 1)
    if tier.topology not in ("ring", "torus"):
        return 1.0
    return (sum(ring.share for ring in group_rings) or 0.5) / max(1, len(tier.shape))


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


def _ring(op: str, total: Amount, uses: list[TierUse], size: MessageSize) -> Amount | None:
    """A ring through all ranks: one per member of a node, each with its NIC."""
    if op not in PASSES:
        return None
    ranks = uses[0].ranks
    rate = min(use.tier.rate(size) * use.share * use.senders(op) for use in uses)
    hops = sum(
        use.tier.hop_us * use.ring_steps * (ranks // (use.below * use.positions)) for use in uses
    )
    outer = uses[-1]
    if outer.level and outer.below > 1:
        # A part crosses all links but one. The one skipped is mostly inside a node, so the network
        # link that closes the ring counts instead.
        hops += outer.tier.hop_us - uses[0].tier.hop_us
    start = max(use.tier.start(size) for use in uses)
    moved = total * (ranks - 1) / ranks
    return start + PASSES[op] * (hops * 1e-6 + moved / rate)


def _tree(op: str, total: Amount, uses: list[TierUse], size: MessageSize) -> Amount | None:
    """Two binary trees over nodes, chains within nodes (NCCL): an all_reduce of few steps."""
    if op != "all_reduce" or not uses[-1].level:
        return None
    rate = min(use.tier.rate(size) * use.share * use.senders(op) for use in uses)
    hops = sum(
        use.tier.hop_us * (math.ceil(math.log2(use.positions)) if use.level else use.ring_steps)
        for use in uses
    )
    start = max(use.tier.start(size) for use in uses)
    return start + 2 * (hops * 1e-6 + total / rate)


def _hierarchical(op: str, total: Amount, uses: list[TierUse], size: MessageSize) -> Amount | None:
    """Tier after tier: the parts scattered within a node are what nodes exchange."""
    if op not in PASSES or op == "broadcast" or len(uses) < 2:
        return None
    seconds = 0.0 * total
    part = 1.0 * total
    for use in uses:
        moved = part * (use.positions - 1) / use.positions
        transfer = use.tier.hop_us * 1e-6 * use.ring_steps
        parts_per_sender = use.below / use.senders(op)
        transfer = transfer + parts_per_sender * moved / (use.tier.rate(size) * use.share)
        seconds = seconds + (use.tier.start(size) + PASSES[op] * transfer)
        part = part / use.positions
    return seconds


def _direct(op: str, total: Amount, uses: list[TierUse], size: MessageSize) -> Amount | None:
    """All-to-all: every rank sends to every other at once; the slowest tier decides."""
    if op != "all_to_all":
        return None
    slowest = 0.0 * total
    for use in uses:
        # All bytes that leave a block of this tier pass it, whichever tier they meet in.
        leaving = total * (use.ranks - use.below) / use.ranks
        seconds = leaving * detour(use) / (use.tier.rate(size) * use.share)
        slowest = _maximum(slowest, seconds)
    last = max(uses, key=lambda use: use.tier.start(size)).tier
    return last.start(size) + last.hop_us * 1e-6 + slowest


def detour(use: TierUse) -> float:
    """Slowdown of an all-to-all by a torus's detours; 1 elsewhere.

    A byte to a random member passes a quarter of each ring's links. The longest ring decides, while
    the others wait.
    """
    if not use.rings:
        return 1.0
    longest = max(ring.size / ring.share for ring in use.rings)
    return max(1.0, longest / 4 * sum(ring.share for ring in use.rings))


def _in_network(op: str, total: Amount, uses: list[TierUse], size: MessageSize) -> Amount | None:
    """Switches reduce and multicast: every byte goes up once and comes down once.

    Where only the switches within nodes reduce, a ring of nodes exchanges the partial results.
    """
    inner = uses[0]
    if op != "all_reduce" or size != MessageSize.LARGE or not inner.tier.in_network_gb_s:
        return None
    if inner.positions < 3 or inner.below > 1:
        return None
    if any(use.tier.all_reduce_senders and use.positions > 2 for use in uses[1:]):
        return None  # measured over two racks, and not over twenty
    # Each GPU also sends its own part: n + 1 of n parts (NCCL's NVLS).
    moved = total * (inner.positions + 1) / inner.positions
    begin = (inner.tier.latency_us + inner.tier.in_network_us * inner.positions) * 1e-6
    seconds = begin + moved / (inner.tier.in_network_gb_s * 1e9)
    part = total / inner.positions
    for use in uses[1:]:
        tier = use.tier
        if tier.in_network_gb_s:
            outside = part / (tier.in_network_gb_s * 1e9) + 2e-6 * tier.hop_us
        else:
            few = use.below / use.senders(op)
            outside = 2 * few * part * (use.positions - 1) / use.positions / tier.rate(size)
            outside = outside + 2e-6 * tier.hop_us * (use.positions - 1)
        # Nodes forward one part while they reduce the next: the slower of the two decides.
        seconds = _maximum(seconds, tier.start(size) + outside)
        part = part / use.positions
    return seconds


_ALGORITHMS = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "direct": _direct,
    "in_network": _in_network,
}
