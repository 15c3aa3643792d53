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
    """Whether one kernel computes prompts and requests that decode, with the tiles of prompts.

    Latent attention and layers with windows or states are other kernels.
    """
    fit = on.inference.mixed_attention if on.inference else None
    plain = not model.kv_lora_rank and model.state_space is None
    return fit is not None and plain and [*model.reaches] == [Reach()]


def beside_prompts(sizes: Mapping[str, float], on: Hardware) -> DecodingBesidePrompts | None:
    """How a kernel of attention with such extents computes requests that decode beside prompts."""
    width = sizes["d"] + sizes.get("v", sizes["d"])
    sharing = sizes.get("r", sizes.get("a", 1.0))
    return DecodingBesidePrompts.of(on, math.prod(served_heads(sizes)), sharing, width)


class _Decoding(NamedTuple):
    """Sums over the requests of a batch that decode, and how many prompts are beside them."""

    requests: float
    tokens: float
    pairs: float
    keys: float
    slots: float
    prompts: float


def with_prompts_tiles(
    run: Run, model: ModelConfig, tasks: Tasks, seconds: Float, on: Hardware
) -> Float:
    """Durations of a served step's tasks, where one kernel has prompts and requests that decode."""
    if run.mode != "decode" or not takes_prompts_tiles(model, on):
        return seconds
    new = 1 + run.num_speculative_tokens
    every = _batches(run)
    batches = {at: of for at, of in every.items() if of.requests and (of.prompts or new > 1)}
    if not batches:
        return seconds
    assert on.inference is not None
    launch = on.inference.cached_attention.launch_us * 1e-6
    kernels = [n for n, s in enumerate(tasks.shapes) if timing_of(s.kernel) in _CACHED]
    found = seconds.copy()
    for row in np.flatnonzero(np.isin(tasks.shape, kernels)).tolist():
        shape = tasks.shapes[int(tasks.shape[row])]
        sizes = shape.sizes()
        of, beside = batches.get((sizes["q"], sizes["k"])), beside_prompts(sizes, on)
        if of is None or beside is None:
            continue
        if not of.prompts:
            found[row] = launch + beside(of.requests, of.keys, new)
            continue
        heads, width = math.prod(served_heads(sizes)), sizes["d"] + sizes.get("v", sizes["d"])
        moved = of.tokens * heads + of.keys * heads / sizes.get("r", sizes.get("a", 1.0))
        extents = {x: np.array([float(n)]) for x, n in sizes.items()}
        extents["q"], extents["k"] = extents["q"] - of.tokens, extents["k"] - of.slots
        flops = np.array([float(tasks.flops[row])]) - 2 * width * heads * of.pairs
        traffic = np.array([float(tasks.traffic[row])]) - 2 * width * moved
        dtype = tasks.dtypes[int(tasks.dtype[row])]
        prompts = Kernels(extents, flops, traffic, dtype, np.zeros(1, dtype=bool))
        alone = float(kernels_seconds(shape.kernel, prompts, on.sustained())[0])
        queries = (sizes["q"] - of.tokens) / of.prompts
        found[row] = alone + beside(of.requests, of.keys, queries)
    return found


def _batches(run: Run) -> dict[tuple[int, int], _Decoding]:
    """By new tokens and places of the cache, what a rank's microbatch has."""
    every = groups(run)
    new = 1 + run.num_speculative_tokens
    decodes = np.array([bool(g.context_length) and (g.new_tokens or 0) <= new for g in every])
    sums = attention_sums(every, cache_of(run), multiple=padding(run))
    places = run.dp * microbatches(run)
    whole = deal(every, sums, places)
    decoding = deal(every, sums * decodes[:, None], places).astype(float)
    names = ("requests", "tokens", "pairs", "keys", "slots")
    chosen = [COLUMNS.index(name) for name in names]
    tokens, slots, requests = (whole[:, COLUMNS.index(x)] for x in ("tokens", "slots", "requests"))
    rows = zip(tokens.tolist(), slots.tolist(), requests.tolist(), decoding.tolist(), strict=True)
    return {
        (new_tokens, held): _Decoding._make([*(row[n] for n in chosen), count - row[chosen[0]]])
        for new_tokens, held, count, row in rows
    }
