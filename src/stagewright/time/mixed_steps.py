"""Attention of steps that have prompts beside requests that decode, where both are one kernel.

Requests that decode with drafts have several queries each, so that they are computed as beside
prompts in steps without any, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.graph.table import Timing, served_heads
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import Tasks
from stagewright.run.lengths import COLUMNS, attention_sums, deal
from stagewright.run.requests import cache_of, groups, microbatches, padding
from stagewright.run.settings import Run
from stagewright.time.cost import Kernels, kernels_seconds, timing_of
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import DecodingBesidePrompts

_CACHED = (Timing.CACHED_ATTENTION, Timing.SERVED_ATTENTION)


def takes_prompts_tiles(model: ModelConfig, on: Hardware) -> bool:
    """True if one kernel computes prompts and decoding requests, in the tiles of prompts.

    Latent attention and layers with windows or states are other kernels.
    """
    fit = on.inference.mixed_attention if on.inference else None
    is_standard = not model.kv_lora_rank and model.state_space is None
    return fit is not None and is_standard and [*model.reaches] == [Reach()]


def beside_prompts(sizes: Mapping[str, float], on: Hardware) -> DecodingBesidePrompts | None:
    """Model of decoding requests in an attention kernel with prompts, by its extents."""
    width = sizes["d"] + sizes.get("v", sizes["d"])
    sharing = sizes.get("r", sizes.get("a", 1.0))
    return DecodingBesidePrompts.of(on, math.prod(served_heads(sizes)), sharing, width)


class _Decoding(NamedTuple):
    """Sums over the decoding requests of a batch, and its number of prompts."""

    requests: float
    tokens: float
    pairs: float
    keys: float
    slots: float
    prompts: float


def with_prompts_tiles(
    run: Run, model: ModelConfig, tasks: Tasks, seconds: Float, on: Hardware
) -> Float:
    """Durations of a served step's tasks, with attention of prompts and decoding requests fused."""
    if run.mode != "decode" or not takes_prompts_tiles(model, on):
        return seconds
    new_tokens = 1 + run.num_speculative_tokens
    batches = _batches(run).items()
    batches = {k: b for k, b in batches if b.requests and (b.prompts or new_tokens > 1)}
    if not batches:
        return seconds
    assert on.inference is not None
    launch = on.inference.cached_attention.launch_us * 1e-6
    kernels = [n for n, s in enumerate(tasks.shapes) if timing_of(s.kernel) in _CACHED]
    result = seconds.copy()
    for row in np.flatnonzero(np.isin(tasks.shape, kernels)).tolist():
        shape = tasks.shapes[int(tasks.shape[row])]
        sizes = shape.sizes()
        batch, decode_model = batches.get((sizes["q"], sizes["k"])), beside_prompts(sizes, on)
        if batch is None or decode_model is None:
            continue
        if not batch.prompts:
            result[row] = launch + decode_model(batch.requests, batch.keys, new_tokens)
            continue
        heads, width = math.prod(served_heads(sizes)), sizes["d"] + sizes.get("v", sizes["d"])
        moved = batch.tokens * heads + batch.keys * heads / sizes.get("r", sizes.get("a", 1.0))
        extents = {x: np.array([float(n)]) for x, n in sizes.items()}
        extents["q"], extents["k"] = extents["q"] - batch.tokens, extents["k"] - batch.slots
        flops = np.array([float(tasks.flops[row])]) - 2 * width * heads * batch.pairs
        traffic = np.array([float(tasks.traffic[row])]) - 2 * width * moved
        dtype = tasks.dtypes[int(tasks.dtype[row])]
        prompts = Kernels(extents, flops, traffic, dtype, np.zeros(1, dtype=bool))
        prompt_seconds = float(kernels_seconds(shape.kernel, prompts, on.sustained())[0])
        queries = (sizes["q"] - batch.tokens) / batch.prompts
        result[row] = prompt_seconds + decode_model(batch.requests, batch.keys, queries)
    return result


def _batches(run: Run) -> dict[tuple[int, int], _Decoding]:
    """Contents of a rank's microbatches, by new tokens and cache slots."""
    workload = groups(run)
    new = 1 + run.num_speculative_tokens
    decodes = np.array([bool(g.context_length) and (g.new_tokens or 0) <= new for g in workload])
    sums = attention_sums(workload, cache_of(run), multiple=padding(run))
    parts = run.dp * microbatches(run)
    total = deal(workload, sums, parts)
    decoding = deal(workload, sums * decodes[:, None], parts).astype(float)
    names = ("requests", "tokens", "pairs", "keys", "slots")
    columns = [COLUMNS.index(name) for name in names]
    tokens, slots, requests = (total[:, COLUMNS.index(x)] for x in ("tokens", "slots", "requests"))
    rows = zip(tokens.tolist(), slots.tolist(), requests.tolist(), decoding.tolist(), strict=True)
    return {
        (new_tokens, cache_slots): _Decoding._make(
            [*(row[n] for n in columns), count - row[columns[0]]]
        )
        for new_tokens, cache_slots, count, row in rows
    }
