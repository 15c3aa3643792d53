"""Kernels of Megatron-LM around experts that the graph lacks, and those that it fuses.

- Ranks that hold several experts get rows by sender and sort them by expert: every row is copied
  once more on either side of the experts (`MoEAlltoAllTokenDispatcher`, "Permutation 2"). DeepEP
  and HybridEP need no such copy: the rows that arrive are those that are copied for each expert.
- Products in fp8 and less want the rows of an expert in multiples of 16 or 32: `Fp8Padding` copies
  them, and `Fp8Unpadding` the results, where the dispatcher does not pad by itself (HybridEP does).
- The biases of experts are multiplied with the gates and added one expert after the other, in fp32
  as the gates are, and the results joined and rounded (`TEGroupedMLP._apply_bias`).
- The gates multiply the experts' inner values within the kernel of the gated activation
  (`weighted_swiglu`), forward and backward, and travel with the tokens where those are sent once.
"""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.graph.node import BYTES, LOW
from stagewright.graph.table import Timing
from stagewright.program.columns import BACKWARD_PHASE, FORWARD_PHASE, Shape, Tasks
from stagewright.program.shapes import GEMM, op_mask, shape_mask
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import (
    bytes_per_second,
    copies_seconds,
    memory_seconds,
    timing_of,
)

_BIAS_FORWARD = 20.0
"""Bytes per value: product written in 4, sum of 2 and 4 in 4, copied from 4 to 4, rounded from 4 to
2, less the 8 that the graph counts."""
_BIAS_BACKWARD = 32.0
"""Bytes per value: gradient from 2 to 4, of the results from 4 to 2; for bias and gates a product
written in 4 and added up, each; less the 4 that the graph counts."""
_ACTIVATIONS = {"glu", "glu_bwd", "act", "act_bwd"}
_WEIGHS = {"weigh", "weigh_bwd"}
_COPIES = (Timing.TO_EXPERTS, Timing.FROM_EXPERTS)


def copying_seconds(tasks: Tasks, ranks: int, width: int, hardware: Hardware) -> Float:
    """Seconds of each task for copies of rows between an all-to-all and the experts.

    `ranks` share the experts, and `width` ranks share each one: these gather its rows. The time is
    added to that of the copies of tokens to experts and back, 0 elsewhere.
    """
    seconds = np.zeros(len(tasks))
    copies = shape_mask(tasks, lambda shape: timing_of(shape.kernel) in _COPIES)
    rows_copied = np.flatnonzero(copies)
    if not len(rows_copied):
        return seconds
    experts, rows, values = _extents(tasks, rows_copied, "e", "r", "m")
    width_of_value = np.array([float(BYTES.get(dtype, 0)) for dtype in tasks.dtypes])
    moved = 2.0 * experts * rows * width * values * width_of_value[tasks.dtype[rows_copied]]
    none = np.zeros_like(moved)
    seconds[rows_copied] = np.where(experts > ranks, copies_seconds(moved, none, hardware), 0.0)
    if _quantized(tasks):
        seconds[rows_copied] += memory_seconds(moved, none, hardware)
    return seconds


def _extents(tasks: Tasks, rows: Int, *names: str) -> list[Float]:
    """Extents of the shapes of some tasks."""
    sizes = [shape.sizes() for shape in tasks.shapes]
    shape = tasks.shape[rows]
    return [np.array([float(extents.get(name, 0)) for extents in sizes])[shape] for name in names]


def _quantized(tasks: Tasks) -> bool:
    """True if products of experts are in few bits."""
    is_low = np.array([dtype in LOW for dtype in tasks.dtypes])[tasks.dtype]
    return bool((is_low & _grouped_products(tasks)).any())


def bias_seconds(tasks: Tasks, hardware: Hardware) -> Float:
    """Seconds of each task for biases of experts, beyond those of its bytes."""
    seconds = np.zeros(len(tasks))
    forward = tasks.phase == FORWARD_PHASE
    outer = forward & _grouped_products(tasks, k=1)
    sums = ~forward & _grouped_products(tasks, n=1)
    products = np.flatnonzero(outer | sums)
    if not len(products):
        return seconds
    batch, m, n, k = _extents(tasks, products, "batch", "m", "n", "k")
    values = batch * m * np.where(k == 1, n, k)
    # Backward has two products, whose other values are those of the rows.
    seconds[products] = (
        np.where(k == 1, _BIAS_FORWARD, _BIAS_BACKWARD / 2) * values / bytes_per_second(hardware)
    )
    return seconds


def _grouped_products(tasks: Tasks, **extents: int) -> Bool:
    """Mask of products of a group with these extents."""

    def matches(shape: Shape) -> bool:
        sizes = dict(shape.extents)
        return shape.kernel == GEMM and sizes["batch"] > 1 and sizes.items() >= extents.items()

    return shape_mask(tasks, matches)


def weighed_within(tasks: Tasks) -> Bool:
    """Mask of tasks that multiply an activation of experts, or its gradient, by gates."""
    # Where experts have biases, the gradients of their gates are added here.
    weighs = op_mask(tasks, lambda ops: bool(ops & _WEIGHS) and ops <= {*_WEIGHS, "add"})
    weighs &= shape_mask(tasks, lambda shape: {"e", "r"} <= dict(shape.extents).keys())
    fused = np.zeros(len(tasks), dtype=bool)
    if not weighs.any():
        return fused
    gated = op_mask(tasks, lambda ops: bool(ops & _ACTIVATIONS))
    waiter, dep = tasks.reads
    fused[waiter[weighs[waiter] & gated[dep]]] = True  # forward: reads the activation
    fused[dep[weighs[dep] & gated[waiter]]] = True  # backward: the activation's reads it
    return fused


def trains(tasks: Tasks) -> bool:
    """True for tasks of a training step."""
    return bool((tasks.phase == BACKWARD_PHASE).any())
