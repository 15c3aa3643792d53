"""What Megatron-LM runs around experts besides products and what the graph says, and what it fuses.

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

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.graph.node import BYTES, LOW
from stagewright.graph.table import OPS, Timing
from stagewright.program.columns import COLLECTIVES, PHASES, Program, TaskKind, Tasks
from stagewright.program.shapes import GEMM, ops_of
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import bytes_per_second, copies_seconds, memory_seconds

_BIAS = 20.0
"""Bytes per value: product written in 4, sum of 2 and 4 in 4, copied from 4 to 4, rounded from 4 to
2, less the 8 that the graph counts."""
_BIAS_BACK = 32.0
"""Bytes per value: gradient from 2 to 4, of the results from 4 to 2; for bias and gates a product
written in 4 and added up, each; less the 4 that the graph counts."""
_ACTIVATIONS = {"glu", "glu_bwd", "act", "act_bwd"}
_WEIGHS = {"weigh", "weigh_bwd"}
_COPIES = (Timing.TO_EXPERTS, Timing.FROM_EXPERTS)


def among_experts(program: Program, slot: int) -> bool:
    """Whether a communicator belongs to expert parallelism."""
    degree_of = program.mesh.degree_of
    return any("ep" in map(degree_of, names) for names in program.degrees_of(slot))


def slots_of_tokens(program: Program, tasks: Tasks) -> list[int]:
    """The communicators over which tasks exchange experts' tokens."""
    exchanges = np.unique(tasks.slot[tasks.collective == COLLECTIVES.index("all_to_all")])
    return [int(slot) for slot in exchanges if among_experts(program, int(slot))]


def copying_seconds(tasks: Tasks, ranks: int, width: int, on: Hardware) -> Float:
    """By task the seconds of copying rows once more, between an all-to-all and the experts.

    `ranks` share the experts, and `width` ranks share each one: these gather its rows. The time is
    added to that of the copies of tokens to experts and back, 0 elsewhere.
    """
    return _each(tasks, *copying(tasks, ranks, width, on))


def copying(tasks: Tasks, ranks: Amount, width: Amount, on: Hardware) -> tuple[Bool, Added]:
    """Which tasks copy rows once more, and how long they take; see `copying_seconds`."""
    copies = [OPS[s.kernel].timing in _COPIES if s.kernel in OPS else False for s in tasks.shapes]
    padded = _quantized(tasks)

    def seconds(size: Mapping[str, Float], dtype: str) -> Float:
        moved = 2.0 * size["e"] * size["r"] * width * size["m"] * float(BYTES[dtype])
        none = np.zeros_like(moved)
        sorted_ = np.where(size["e"] > ranks, copies_seconds(moved, none, on), 0.0)
        return sorted_ + (memory_seconds(moved, none, on) if padded else 0.0)

    return np.array([*copies, False])[tasks.shape], seconds


Added: TypeAlias = Callable[[Mapping[str, Float], str], Float]
"""Seconds that are added to kernels, from their extents and data type: an element per kernel."""
Amount: TypeAlias = "int | Float"


def _each(tasks: Tasks, chosen: Bool, seconds: Added) -> Float:
    """By task the seconds of its extents and data type, 0 where it is not chosen."""
    found = np.zeros(len(tasks))
    if not chosen.any():
        return found
    kinds, kind = np.unique(
        np.stack([tasks.shape[chosen], tasks.dtype[chosen]]).astype(np.int64),
        axis=1, return_inverse=True,
    )  # fmt: skip
    pairs: list[list[int]] = kinds.T.tolist()

    def one(shape: int, dtype: int) -> float:
        extents = {name: np.array([float(n)]) for name, n in tasks.shapes[shape].extents}
        return float(seconds(extents, tasks.dtypes[dtype])[0])

    each = [one(s, d) for s, d in pairs]
    found[chosen] = np.array([*each, 0.0])[kind.ravel()]
    return found


def _quantized(tasks: Tasks) -> bool:
    """Whether products of experts are in few bits."""
    few = np.array([dtype in LOW for dtype in tasks.dtypes])[tasks.dtype]
    return bool((few & _products(tasks, lambda of: of["batch"] > 1)).any())


def bias_seconds(tasks: Tasks, on: Hardware) -> Float:
    """By task the seconds of adding the biases of experts, beyond those of the bytes at least."""
    return _each(tasks, *biasing(tasks, on))


def biasing(tasks: Tasks, on: Hardware) -> tuple[Bool, Added]:
    """Which tasks add the biases of experts, and how long they take; see `bias_seconds`."""
    forward = tasks.phase == PHASES.index("forward")

    def seconds(size: Mapping[str, Float], _: str) -> Float:
        outer = size["k"] == 1
        values = size["batch"] * size["m"] * np.where(outer, size["n"], size["k"])
        # Backward has two products, whose other values are those of the rows.
        return np.where(outer, _BIAS, _BIAS_BACK / 2) * values / bytes_per_second(on)

    outer = forward & _products(tasks, lambda of: of["k"] == 1)
    sums = ~forward & _products(tasks, lambda of: of["n"] == 1)
    return outer | sums, seconds


def _products(tasks: Tasks, which: Callable[[Mapping[str, int]], bool]) -> Bool:
    """Which tasks are products of a group whose extents are such."""
    shapes = [dict(shape.extents) if shape.kernel == GEMM else {} for shape in tasks.shapes]
    chosen = [bool(of) and of["batch"] > 1 and which(of) for of in shapes]
    return np.array([*chosen, False])[tasks.shape]


def weighed_within(tasks: Tasks) -> Bool:
    """Which tasks multiply an activation of experts, or its gradient, by the gates of its rows."""
    names = [frozenset(ops_of(name)) for name in tasks.ops]
    # Where experts have biases, the gradients of their gates are added here.
    weigh = [bool(ops & _WEIGHS) and ops <= {*_WEIGHS, "add"} for ops in names]
    if not any(weigh):
        return np.zeros(len(tasks), dtype=bool)
    weighs = np.array(weigh)[tasks.op]
    of_rows = [{"e", "r"} <= dict(shape.extents).keys() for shape in tasks.shapes]
    weighs &= np.array([*of_rows, False])[tasks.shape] & (tasks.kind == TaskKind.COMPUTE)
    within = np.zeros(len(tasks), dtype=bool)
    if not weighs.any():
        return within
    gated = np.array([bool(ops & _ACTIVATIONS) for ops in names])[tasks.op]
    owner, needed = tasks.reads
    within[owner[weighs[owner] & gated[needed]]] = True  # forward: reads the activation
    within[needed[weighs[needed] & gated[owner]]] = True  # backward: the activation's reads it
    return within


def trains(tasks: Tasks) -> bool:
    """Whether tasks are of a training step."""
    return bool((tasks.phase == PHASES.index("backward")).any())
