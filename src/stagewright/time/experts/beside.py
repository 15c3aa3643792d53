"""Shared experts of a served step, which run beside the routed ones on a stream of their own.

SGLang (`forward_normal_dual_stream` of its DeepSeek models), vLLM (`shared_experts_stream`) and
TensorRT-LLM do so in steps that are captured in a CUDA graph; SGLang up to 1,024 tokens
(`DUAL_STREAM_TOKEN_THRESHOLD`), which is taken for all. The program keeps one stream of kernels;
here the shared kernels keep the part of their time that the routed ones do not hide, and both
together take no less than their bytes.
"""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.graph.table import OPS, Timing
from stagewright.program.columns import TaskKind, Tasks
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import bytes_per_second

MOST_TOKENS = 1024
"""Tokens of a step up to which shared experts have a stream of their own."""


def beside_routed(tasks: Tasks, seconds: Float, on: Hardware) -> Float:
    """Durations of a served step's tasks, with those of shared experts that are not hidden.

    A block's routed part begins where tokens are copied to experts. What follows in the block, does
    not depend on these copies, and is added to what does, is the shared part.
    """
    begins = _few_tokens_to_experts(tasks)
    if not begins.any():
        return seconds
    blocks = np.stack([tasks.stage, tasks.layer, tasks.microbatch]).astype(np.int64)
    _, block = np.unique(blocks, axis=1, return_inverse=True)
    block = block.ravel()
    count = int(block.max()) + 1
    row = np.arange(len(tasks))
    first = np.full(count, len(tasks))
    np.minimum.at(first, block[begins], row[begins])
    behind = row >= first[block]

    owner, needed = tasks.reads
    inside = behind[owner] & behind[needed] & (block[owner] == block[needed])
    owner, needed = owner[inside], needed[inside]
    routed = begins.copy()
    known = 0
    while known != (known := int(routed.sum())):
        routed[owner[routed[needed]]] = True

    computes = tasks.kind == TaskKind.COMPUTE
    joins = routed[owner] & ~routed[needed] & computes[owner]
    joined = np.full(count, -1)
    np.maximum.at(joined, block[owner[joins]], owner[joins])
    part = behind & (row < joined[block]) & computes
    ours, theirs = part & ~routed, part & routed

    def total(values: Float, chosen: Bool) -> Float:
        return np.bincount(block[chosen], values[chosen], count).astype(float)

    shared, beside = total(seconds, ours), total(seconds, theirs)
    moved = total(tasks.traffic.astype(float), part) / bytes_per_second(on)
    shown = np.clip(np.maximum(shared, moved) - beside, 0.0, shared)
    kept = np.divide(shown, shared, out=np.ones_like(shared), where=shared > 0)
    return np.where(ours, seconds * kept[block], seconds)


def _few_tokens_to_experts(tasks: Tasks) -> Bool:
    """Which tasks copy at most `MOST_TOKENS` tokens to their experts."""
    chosen = [
        shape.kernel in OPS
        and OPS[shape.kernel].timing is Timing.TO_EXPERTS
        and dict(shape.extents)["b"] * dict(shape.extents)["s"] <= MOST_TOKENS
        for shape in tasks.shapes
    ]
    return np.array([*chosen, False])[tasks.shape]
