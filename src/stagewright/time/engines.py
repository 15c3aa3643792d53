"""Durations of a served step in an engine: what engines fuse and run at the same time.

A program has a kernel for each group of element-wise operators that its graph joins within a block
of the model. Engines differ from that in three ways (`engine_seconds`).

Attention of a mixed batch (`with_mixed_attention`): FlashAttention 2 has one kernel for prompts and
decoding requests. Requests that decode with drafts have several queries each, so that they are
computed as in a mixed batch in steps without prompts, too.

Launches that are fused away (`without_fused_launches`), also since the tables to which the
constants of attention and of products were fitted contain kernels that a program has by themselves:

- keys and values are written to the cache within attention's rows of all engines' tables, the keys
  rotated with the queries by one kernel (`collect_attn.py` of vLLM, SGLang and TensorRT-LLM in
  github.com/ai-dynamo/aiconfigurator@095f58a5);
- biases of experts are added within the products (`w1_bias` and `w2_bias` of vLLM's fused experts,
  `gemm1_bias` and `gemm2_bias` of FlashInfer's), of which the gate's joins the activation;
- operands of products are cast within rows of products in few bits, or by the kernel before;
- the sum that ends a layer and the norm that begins the next one are one kernel
  (`fused_add_rms_norm` of vLLM and of SGLang's kernels, FlashInfer's in TensorRT-LLM);
- TensorRT-LLM rotates queries and keys within attention (`support_fused_rope` of its backends), and
  has one kernel for an all_reduce, the sum, the norm and the cast after it
  (`AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8`, tensorrt_llm/_torch/distributed/ops.py): its
  decoder layers of Llama, DeepSeek-V3 and Qwen3's experts ask for that, those of dense Qwen3, whose
  queries have a norm, do not (tensorrt_llm/_torch/models/modeling_qwen3.py@010bb95f). Without an
  all_reduce its cast to one scale per tensor is a kernel after the norm.

Shared experts on a second stream (`with_shared_expert_stream`): SGLang
(`forward_normal_dual_stream` of its DeepSeek models), vLLM (`shared_experts_stream`) and
TensorRT-LLM do so in steps that are captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.graph.table import Timing, served_heads
from stagewright.lower.weight_storage import expert_weights, in_blocks
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import COLLECTIVES, Shape, TaskKind, Tasks
from stagewright.program.shapes import op_mask, shape_mask
from stagewright.run.lengths import COLUMNS, attention_sums, deal
from stagewright.run.requests import cache_of, groups, microbatches, padding
from stagewright.run.settings import Run
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.roofline import (
    DecodeInPromptKernel,
    Kernels,
    bytes_per_second,
    kernels_seconds,
    timing_of,
)

MAX_SHARED_STREAM_TOKENS = 1024
"""Tokens of a step up to which shared experts have a separate stream.

SGLang's `DUAL_STREAM_TOKEN_THRESHOLD`, which is taken for all engines."""


def served_machine(run: Run, model: ModelConfig, machine: Machine, engine: str | None) -> Machine:
    """The machine with the kernels of an engine, for a step of inference."""
    blocks, cache = in_blocks(run, model), run.kv_cache_dtype or "bf16"
    weights = expert_weights(run, model)
    return machine.for_inference(blocks=blocks, weights=weights, engine=engine, cache=cache)


def engine_seconds(
    tasks: Tasks,
    isolated: Float,
    run: Run,
    model: ModelConfig,
    engine: str | None,
    hardware: Hardware,
) -> Float:
    """Durations of a rank's tasks in an engine, given isolated ones; for steps of inference.

    `engine`: as `Execution.serving_engine`; None: what all engines do. `hardware`: hardware of
    `served_machine`.
    """
    seconds = with_mixed_attention(tasks, isolated, run, model, hardware)
    blocks = in_blocks(run, model)
    seconds = without_fused_launches(tasks, seconds, engine, hardware, blocks=blocks)
    return with_shared_expert_stream(tasks, seconds, hardware) if run.mode == "decode" else seconds


# ---- attention of mixed batches ------------------------------------------------------------------


def has_mixed_attention(model: ModelConfig, hardware: Hardware) -> bool:
    """True if one kernel computes prompts and decoding requests, in the tiles of prompts.

    Latent attention and layers with windows or states are other kernels.
    """
    fit = hardware.inference.mixed_attention if hardware.inference else None
    is_standard = not model.kv_lora_rank and model.state_space is None
    return fit is not None and is_standard and [*model.reaches] == [Reach()]


def decode_in_prompt_kernel(
    sizes: Mapping[str, float], hardware: Hardware
) -> DecodeInPromptKernel | None:
    """Model of decoding requests in an attention kernel of prompts, by its extents."""
    width = sizes["d"] + sizes.get("v", sizes["d"])
    sharing = sizes.get("r", sizes.get("a", 1.0))
    return DecodeInPromptKernel.of(hardware, math.prod(served_heads(sizes)), sharing, width)


class _Decoding(NamedTuple):
    """Sums over the decoding requests of a batch, and its number of prompts."""

    requests: float
    tokens: float
    pairs: float
    keys: float
    slots: float
    prompts: float


def with_mixed_attention(
    tasks: Tasks, seconds: Float, run: Run, model: ModelConfig, hardware: Hardware
) -> Float:
    """Durations of a served step's tasks, with attention of prompts and decoding requests fused."""
    if run.mode != "decode" or not has_mixed_attention(model, hardware):
        return seconds
    new_tokens = 1 + run.num_speculative_tokens
    batches = {
        sizes: batch
        for sizes, batch in _decoding_by_batch(run).items()
        if batch.requests and (batch.prompts or new_tokens > 1)
    }
    if not batches:
        return seconds
    assert hardware.inference is not None
    assert hardware.inference.cached_attention is not None
    launch = hardware.inference.cached_attention.launch_us * 1e-6
    cached = (Timing.CACHED_ATTENTION, Timing.SERVED_ATTENTION)
    attention = shape_mask(tasks, lambda shape: timing_of(shape.kernel) in cached)
    result = seconds.copy()
    for row in np.flatnonzero(attention).tolist():
        shape = tasks.shapes[int(tasks.shape[row])]
        sizes = shape.sizes()
        batch, decoding = (
            batches.get((sizes["q"], sizes["k"])),
            decode_in_prompt_kernel(sizes, hardware),
        )
        if batch is None or decoding is None:
            continue
        if not batch.prompts:
            result[row] = launch + decoding(batch.requests, batch.keys, new_tokens)
            continue
        heads, width = math.prod(served_heads(sizes)), sizes["d"] + sizes.get("v", sizes["d"])
        moved = batch.tokens * heads + batch.keys * heads / sizes.get("r", sizes.get("a", 1.0))
        extents = {x: np.array([float(n)]) for x, n in sizes.items()}
        extents["q"], extents["k"] = extents["q"] - batch.tokens, extents["k"] - batch.slots
        flops = np.array([float(tasks.flops[row])]) - 2 * width * heads * batch.pairs
        traffic = np.array([float(tasks.traffic[row])]) - 2 * width * moved
        dtype = tasks.dtypes[int(tasks.dtype[row])]
        prompts = Kernels(extents, flops, traffic, dtype, np.zeros(1, dtype=bool))
        prompt_seconds = float(kernels_seconds(shape.kernel, prompts, hardware.sustained())[0])
        queries = (sizes["q"] - batch.tokens) / batch.prompts
        result[row] = prompt_seconds + decoding(batch.requests, batch.keys, queries)
    return result


def _decoding_by_batch(run: Run) -> dict[tuple[int, int], _Decoding]:
    """Decoding requests of a rank's microbatches, by new tokens and cache slots of all requests."""
    workload = groups(run)
    new_tokens = 1 + run.num_speculative_tokens
    decodes = [bool(g.context_length) and (g.new_tokens or 0) <= new_tokens for g in workload]
    sums = attention_sums(workload, cache_of(run), multiple=padding(run))
    ranks = run.dp * microbatches(run)
    total = deal(workload, sums, ranks)
    decoding = deal(workload, sums * np.array(decodes)[:, None], ranks).astype(float)
    columns = [COLUMNS.index(name) for name in ("requests", "tokens", "pairs", "keys", "slots")]
    tokens, slots, requests = (
        total[:, COLUMNS.index(name)].tolist() for name in ("tokens", "slots", "requests")
    )
    rows = zip(tokens, slots, requests, decoding[:, columns].tolist(), strict=True)
    return {
        (new, cached): _Decoding._make([*sums, count - sums[0]])
        for new, cached, count, sums in rows
    }


# ---- fused launches ------------------------------------------------------------------------------


def without_fused_launches(
    tasks: Tasks, seconds: Float, engine: str | None, hardware: Hardware, *, blocks: bool = False
) -> Float:
    """Durations of a served step's tasks, in which fused kernels are not launched.

    `blocks`: products in fp8 are of weights that are scaled by blocks; their rows contain the cast.
    """
    if hardware.inference is None:
        return seconds
    mask = partial(op_mask, tasks)
    writes = mask(lambda ops: "cache" in ops and ops <= {"bias", "norm", "rope", "cache"})
    writes &= hardware.inference.cached_attention is not None  # else attention's time lacks them
    casts = mask(lambda ops: ops <= {"cast"})
    sums = mask(lambda ops: "add" in ops and ops <= {"bias", "add"})
    norms = mask(lambda ops: "norm" in ops and ops <= {"bias", "add", "norm", "cast"})
    fused = writes | casts | (sums & _before(tasks, norms))
    launch = hardware.kernel_launch_us * 1e-6
    of_experts = shape_mask(tasks, lambda shape: {"e", "r"} <= shape.sizes().keys())
    seconds = np.where(mask(lambda ops: ops == {"bias"}) & of_experts, 0.0, seconds)
    if engine == "trtllm":
        fused |= mask(lambda ops: "rope" in ops and ops <= {"bias", "rope"})
        after_all_reduce = (sums | norms) & _after_all_reduce(tasks, sums)
        norm_of_queries = mask(lambda ops: ops >= {"norm", "rope"}).any()
        if norm_of_queries and not mask(lambda ops: "topk" in ops).any():
            after_all_reduce[:] = False
        fused |= after_all_reduce
        unfused_casts = norms & ~after_all_reduce & mask(lambda ops: "cast" in ops)
        if not blocks:
            seconds = seconds + launch * unfused_casts
    return np.maximum(seconds - launch * fused, 0.0)


def _before(tasks: Tasks, following: Bool) -> Bool:
    """Mask of kernels whose next kernel of the microbatch and stage is in `following`."""
    result = np.zeros(len(tasks), dtype=bool)
    kernels = np.flatnonzero(tasks.kind == TaskKind.COMPUTE)
    row, after = kernels[:-1], kernels[1:]
    same = tasks.microbatch[row] == tasks.microbatch[after]
    same &= tasks.stage[row] == tasks.stage[after]
    result[row] = following[after] & same
    return result


def _after_all_reduce(tasks: Tasks, sums: Bool) -> Bool:
    """Mask of rows after an all-reduce, or after a sum that is after one."""
    reduces = (tasks.kind == TaskKind.COLLECTIVE) & (
        tasks.collective == COLLECTIVES.index("all_reduce")
    )
    follows = np.append(False, reduces[:-1])
    return follows | np.append(False, (follows & sums)[:-1])


# ---- shared experts ------------------------------------------------------------------------------


def with_shared_expert_stream(tasks: Tasks, seconds: Float, hardware: Hardware) -> Float:
    """Durations of a decode step's tasks, with shared experts on a separate stream.

    The program keeps one stream of kernels; the shared kernels keep the part of their time that the
    routed ones do not hide, and both together take no less than their bytes. A block's routed part
    begins where tokens are copied to experts. What follows in the block, does not depend on these
    copies, and is added to what does, is the shared part.
    """
    begins = shape_mask(tasks, _copies_few_tokens)
    if not begins.any():
        return seconds
    blocks = np.stack([tasks.stage, tasks.layer, tasks.microbatch]).astype(np.int64)
    _, block = np.unique(blocks, axis=1, return_inverse=True)
    block = block.ravel()
    count = int(block.max()) + 1
    row = np.arange(len(tasks))
    first = np.full(count, len(tasks))
    np.minimum.at(first, block[begins], row[begins])
    after_copies = row >= first[block]

    waiter, dep = tasks.reads
    inside = after_copies[waiter] & after_copies[dep] & (block[waiter] == block[dep])
    waiter, dep = waiter[inside], dep[inside]
    routed = begins.copy()
    num_routed = -1
    while num_routed < routed.sum():
        num_routed = routed.sum()
        routed[waiter[routed[dep]]] = True

    computes = tasks.kind == TaskKind.COMPUTE
    joins = routed[waiter] & ~routed[dep] & computes[waiter]
    join = np.full(count, -1)
    np.maximum.at(join, block[waiter[joins]], waiter[joins])
    candidates = after_copies & (row < join[block]) & computes
    is_shared, is_routed = candidates & ~routed, candidates & routed

    def total(values: Float, mask: Bool) -> Float:
        return np.bincount(block[mask], values[mask], count).astype(float)

    shared, routed_seconds = total(seconds, is_shared), total(seconds, is_routed)
    memory_seconds = total(tasks.traffic.astype(float), candidates) / bytes_per_second(hardware)
    exposed = np.clip(np.maximum(shared, memory_seconds) - routed_seconds, 0.0, shared)
    exposed_share = np.divide(exposed, shared, out=np.ones_like(shared), where=shared > 0)
    return np.where(is_shared, seconds * exposed_share[block], seconds)


def _copies_few_tokens(shape: Shape) -> bool:
    """True for copies of at most `MAX_SHARED_STREAM_TOKENS` tokens to their experts."""
    sizes = shape.sizes()
    copies = timing_of(shape.kernel) is Timing.TO_EXPERTS
    return copies and sizes["b"] * sizes["s"] <= MAX_SHARED_STREAM_TOKENS
