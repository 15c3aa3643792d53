"""Shared experts of a served step, on a separate stream from the routed ones.

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

MAX_TOKENS = 1024
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
    after_copies = row >= first[block]

    waiter, dep = tasks.reads
    inside = after_copies[waiter] & after_copies[dep] & (block[waiter] == block[dep])
    waiter, dep = waiter[inside], dep[inside]
    routed = begins.copy()
    num_routed = 0
    while num_routed != (num_routed := int(routed.sum())):
        routed[waiter[routed[dep]]] = True

    computes = tasks.kind == TaskKind.COMPUTE
    joins = routed[waiter] & ~routed[dep] & computes[waiter]
    join = np.full(count, -1)
    np.maximum.at(join, block[waiter[joins]], waiter[joins])
    candidates = after_copies & (row < join[block]) & computes
    is_shared, is_routed = candidates & ~routed, candidates & routed

    def total(values: Float, chosen: Bool) -> Float:
        return np.bincount(block[chosen], values[chosen], count).astype(float)

    shared, routed_seconds = total(seconds, is_shared), total(seconds, is_routed)
    memory_seconds = total(tasks.traffic.astype(float), candidates) / bytes_per_second(on)
    exposed = np.clip(np.maximum(shared, memory_seconds) - routed_seconds, 0.0, shared)
    exposed_share = np.divide(exposed, shared, out=np.ones_like(shared), where=shared > 0)
    return np.where(is_shared, seconds * exposed_share[block], seconds)


def _few_tokens_to_experts(tasks: Tasks) -> Bool:
    """Mask of tasks that copy at most `MAX_TOKENS` tokens to their experts."""
    matches = [
        shape.kernel in OPS
        and OPS[shape.kernel].timing is Timing.TO_EXPERTS
        and dict(shape.extents)["b"] * dict(shape.extents)["s"] <= MAX_TOKENS
        for shape in tasks.shapes
    ]
    return np.array([*matches, False])[tasks.shape]
