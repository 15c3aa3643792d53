"""Time of token dispatch by libraries of expert parallelism: DeepEP, HybridEP.

Their kernels send a token once to each node and once to each rank that has experts for it, where an
all-to-all sends a copy for each expert. For the few tokens of a decode step they have low-latency
kernels, which send each copy straight to its expert and can be part of a CUDA graph.

>>> import numpy as np
>>> from stagewright.time.hardware import resolve
>>> from stagewright.time.network import placements
>>> machine = Machine.of(resolve("h100-sxm"), gpus=64)
>>> (group,) = placements(machine, np.arange(64).reshape(1, -1))
>>> deepseek = DispatchKernels(experts=256, top_k=8, groups=8, top_groups=4)
>>> size = 4096 * 8 * 7168 * 2  # copies of 4096 tokens in bf16
>>> 4e-3 < dispatch_seconds(size, group, machine, deepseek) < 4.7e-3  # HybridEP: 4.6 ms measured
True
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.program.columns import COLLECTIVES, Program, TaskKind, Tasks
from stagewright.run.settings import Run
from stagewright.time.collectives import TierUse, collective_seconds, detour, tiers_used
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, MessageSize, Placement

# Shares of the bandwidth that large messages of collectives reach. Sources: the tables of DeepEP's
# README, versions 1 and 2, and of UCCL-EP (github.com/deepseek-ai/DeepEP; github.com/aws-samples/
# awsome-distributed-training), and of HybridEP (NVIDIA's blog on hybrid expert parallelism).
LINKS = 0.94
"""Within a node, counting what stays on a rank: 0.71 to 0.88 of the links on H800, H200, B200 and
GB200, 0.77 in the median. All pass through the same buffers."""
NETWORK = 0.95
"""Between nodes, counting what leaves a node: 39 to 46 GB/s of 50, 43.8 in the median."""
LOW_LATENCY_LINKS = 0.98
LOW_LATENCY_NETWORK = 0.91
"""Of low-latency kernels, whose rows grow by a byte per 42 GB/s between nodes."""
LOW_LATENCY_START_US = 30.0
"""Time of a low-latency kernel beyond that of its bytes: 24 to 36 us."""
MULTIPROCESSORS = 16
"""Multiprocessors that a dispatch takes from kernels that run at the same time.

Megatron-LM's moe_hybridep_num_sms; DeepEP takes 20 there (moe_deepep_num_sms)."""


class DispatchKernels(NamedTuple):
    """Kernels that dispatch tokens, and the routing that they serve."""

    experts: int
    top_k: int
    groups: int = 1
    """Number of expert groups."""
    top_groups: int = 1
    """Groups that the experts of a token may be in (DeepSeek-V3's node-limited routing)."""
    low_latency: bool = False
    """Ranks that decode send by low-latency kernels."""
    overlapped: bool = False
    """Dispatches overlap with kernels of another microbatch, and take multiprocessors from them."""
    gathered: bool = False
    """Every rank gathers the tokens of all, and results are summed and scattered."""

    @classmethod
    def of(cls, run: Run, model: ModelConfig, *, overlapped: bool = False) -> DispatchKernels:
        """Kernels for the routing of a run; UserError where no all-to-all sends tokens."""
        prefill = run.prefill_ranks
        if max(run.ep, prefill.ep if prefill else 1) == 1:
            raise UserError("moe_flex_dispatcher needs experts on several ranks; ep is 1")
        if run.moe_token_dispatcher_type != "alltoall":
            got = run.moe_token_dispatcher_type
            raise UserError(
                f"moe_flex_dispatcher and moe_token_dispatcher_type={got} exclude each other"
            )
        return cls(
            model.num_experts + run.num_redundant_experts,
            model.top_k,
            model.num_expert_groups,
            model.topk_groups,
            low_latency=run.mode == "decode",
            overlapped=overlapped,
        )

    @classmethod
    def in_engine(cls, run: Run, model: ModelConfig, engine: str | None) -> DispatchKernels | None:
        """Kernels of a serving engine with attention data parallelism; None: a copy per expert.

        By default engines gather them: vLLM's `all2all_backend` is `allgather_reducescatter`
        (vllm/config/parallel.py), and SGLang's `moe_a2a_backend` is `none`. TensorRT-LLM gathers
        where it has no all-to-all (`AllGatherReduceScatter`, the last choice of its
        communication_factory.py); newer versions first try all-to-alls over NVLink, which are not
        modelled.
        """
        if engine is None or run.dp == 1 or run.ep == 1:
            return None
        return cls(model.num_experts, model.top_k, gathered=True)


def is_expert_communicator(program: Program, slot: int) -> bool:
    """True if a communicator belongs to expert parallelism."""
    degree_of = program.mesh.degree_of
    return any("ep" in map(degree_of, names) for names in program.degrees_of(slot))


def exchanges_tokens(program: Program, tasks: Tasks) -> Bool:
    """Mask of all-to-alls among experts; those of attention along cp are none."""
    all_to_all = (tasks.kind == TaskKind.COLLECTIVE) & (
        tasks.collective == COLLECTIVES.index("all_to_all")
    )
    slots = np.unique(tasks.slot[all_to_all]).tolist()
    return all_to_all & np.isin(
        tasks.slot, [s for s in slots if is_expert_communicator(program, s)]
    )


def sent_with_tokens(tasks: Tasks, token_exchanges: Bool, *, by_batch: bool) -> Bool:
    """Mask of exchanges of gates, one number per row, which dispatchers send with the tokens.

    `token_exchanges`: mask of all-to-alls among experts. `by_batch`: batches of a served step
    differ in size, as microbatches of training do not.
    """
    batch = np.where(tasks.microbatch < 0, -1, tasks.microbatch if by_batch else 0)
    largest = np.zeros(int(batch.max(initial=-1)) + 2, dtype=np.int64)  # the last: once per step
    np.maximum.at(largest, batch[token_exchanges], tasks.comm_bytes[token_exchanges])
    return token_exchanges & (16 * tasks.comm_bytes <= largest[batch])


def destinations(dispatch: DispatchKernels, parts: int) -> float:
    """Mean number of destinations of a token among `parts` with equally many experts.

    The token's experts are different, and all equally likely.

    >>> round(destinations(DispatchKernels(256, 8), 8), 2)  # of the 8 ranks of a node
    5.29
    >>> round(destinations(DispatchKernels(256, 8, 8, 4), 8), 2)  # of 8 nodes, a group each
    3.63
    """
    experts, top_k, groups, top_groups = dispatch[:4]
    per_part, per_group = experts // parts, experts // groups
    if experts % groups or (per_part % per_group and per_group % per_part):
        groups = top_groups = 1
        per_group = experts
    pool = top_groups * per_group  # experts of the chosen groups

    def hit(among: int) -> float:
        """Probability that some of the top k experts are `among` some experts of the pool."""
        return 1 - math.comb(pool - among, top_k) / math.comb(pool, top_k)

    if per_part <= per_group:
        return parts * top_groups / groups * hit(per_part)
    local = per_part // per_group  # groups of a part
    combinations = {  # by number of chosen groups that are in the part
        chosen: math.comb(local, chosen) * math.comb(groups - local, top_groups - chosen)
        for chosen in range(max(0, top_groups - groups + local), min(local, top_groups) + 1)
    }
    hits = sum(count * hit(chosen * per_group) for chosen, count in combinations.items())
    return parts * hits / math.comb(groups, top_groups)


def dispatch_seconds(
    comm_bytes: int, group: Placement, machine: Machine, dispatch: DispatchKernels
) -> float:
    """Seconds of a dispatch; the combine of as many bytes takes as long.

    One copy of a token goes to each node and is forwarded there, overlapped. `comm_bytes` count
    one copy for each of the token's experts.
    """
    if group.ranks < 2 or not comm_bytes:
        return 0.0
    size = float(comm_bytes)
    if dispatch.gathered:
        return collective_seconds("all_gather", size / dispatch.top_k, group, machine)
    uses = tiers_used(group, machine)
    if dispatch.low_latency:
        start = LOW_LATENCY_START_US
    else:
        # Such kernels send by themselves, without NCCL's protocols.
        start = max(use.tier.latency_us + use.tier.hop_us for use in uses)
    links = machine.tiers[0]
    times = (_tier_seconds(size, use, dispatch, inside=use.tier is links) for use in uses)
    return start * 1e-6 + max(times)


def _tier_seconds(
    comm_bytes: float, use: TierUse, dispatch: DispatchKernels, *, inside: bool
) -> float:
    """Seconds of a dispatch in one tier; `inside`: the links within a node.

    A copy of each token goes to each block with experts for it, or, by low-latency kernels, to each
    of its experts.
    """
    if dispatch.low_latency:
        sent = comm_bytes * (use.ranks - use.below) / use.ranks
        share = LOW_LATENCY_LINKS if inside else LOW_LATENCY_NETWORK
    else:
        copies = destinations(dispatch, use.ranks // use.below)
        if not inside:
            copies *= 1 - 1 / use.positions  # what stays in a block does not travel
        sent = comm_bytes / dispatch.top_k * copies
        share = LINKS if inside else NETWORK
    rate = use.tier.rate(MessageSize.LARGE) * use.share * share
    return sent * detour(use) / rate


def slowdown_by_dispatch(
    kernels: Float,
    dispatches: Float,
    hardware: Hardware,
    *,
    kernel_copies: Int | None = None,
    dispatch_copies: Int | None = None,
) -> float:
    """Factor by which kernels of a step slow down, since dispatches run at the same time.

    Dispatches take multiprocessors, and all of them overlap with kernels. Seconds are by row;
    `copies` are how often each row runs in the step, None: once. The factor is that of the step as
    a whole, and equal to the bit whether rows are repeated or counted.
    """
    busy = _total(kernels, kernel_copies)
    if busy == 0:
        return 1.0
    lost = _total(dispatches, dispatch_copies) * MULTIPROCESSORS / hardware.compute_units
    return 1 + lost / busy


def _total(seconds: Float, copies: Int | None) -> float:
    """Sum of the seconds of all copies, added up by distinct duration."""
    distinct, inverse = np.unique(seconds, return_inverse=True)
    return float((distinct * np.bincount(inverse, copies, len(distinct))).sum())
