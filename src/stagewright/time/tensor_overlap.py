"""Tensor-parallel collectives split into chunks and overlapped with the adjacent products.

Transformer Engine's user buffers (Megatron-LM's `--tp-comm-overlap`) and PyTorch's async TP cut a
product so that one piece of it is sent while the next is computed, as Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023 (doi
10.1145/3567955.3567959).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.graph.node import BYTES
from stagewright.program.columns import COLLECTIVES, PHASES, Program, TaskKind, Tasks
from stagewright.time.fused_products import Gemms, gemms_of, gemms_seconds
from stagewright.time.hardware import Hardware

Seconds = Float
_BACKWARD = PHASES.index("backward")


def with_tp_overlap(program: Program, tasks: Tasks, seconds: Seconds, on: Hardware) -> Seconds:
    """Durations when TP collectives are split and overlapped with the adjacent GEMMs.

    A product split into tp chunks takes g, longer than the whole product. Of the product and a
    collective of duration c, the longer runs through, and one chunk of the shorter is exposed:
    max(c, g) + min(c, g) / tp together, of which the collective is assigned all but g. Where this
    is no faster, nothing is split; nor is a kernel whose duration was measured.
    """
    pairs = overlap_pairs(program, tasks)
    if not len(pairs.product):
        return seconds
    rows, first, of = np.unique(pairs.product, return_index=True, return_inverse=True)
    cut = split_seconds(gemms_of(tasks, rows), tasks.dtypes, pairs.ranks[first], on)
    if tasks.duration is not None:
        cut = np.where(tasks.duration[rows] > 0, seconds[rows], cut)
    cut = cut[of.ravel()]
    moves, of = np.unique(pairs.collective, return_inverse=True)
    of = of.ravel()
    whole = np.bincount(of, seconds[pairs.product])
    g = np.bincount(of, cut)
    tp = np.ones_like(g)
    tp[of] = pairs.ranks
    c = seconds[moves]
    left = np.maximum(c - g, 0) + np.minimum(c, g) / tp
    better = left + g < c + whole
    result = seconds.copy()
    result[moves] = np.where(better, left, c)
    faster = better[of]
    result[pairs.product[faster]] = cut[faster]
    return result


class OverlapPairs(NamedTuple):
    """Pairs of a collective and the product it overlaps with, and the ranks of the group."""

    collective: Int
    product: Int
    ranks: Int


def overlap_pairs(program: Program, tasks: Tasks) -> OverlapPairs:
    """Pairs of a gather and a product it feeds (through casts too), of a product and its scatter.

    In backward a gather feeds two products and overlaps with the first. A gather of an activation
    kept by forward waits for nothing in backward, and is hidden without being split.
    """
    over_tp = [program.mesh.degrees(c.axes) == (("tp",),) for c in program.communicators]
    sizes = [program.mesh.size(*c.axes) for c in program.communicators]
    ranks = np.where(over_tp, sizes, 1) if over_tp else np.ones(1, np.int64)
    chosen = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.layer >= 0)
    ranks = np.where(chosen, ranks[np.where(chosen, tasks.slot, 0)], 1)  # by task
    chosen &= ranks > 1
    gathers = chosen & (tasks.collective == COLLECTIVES.index("all_gather"))
    scatters = chosen & (tasks.collective == COLLECTIVES.index("reduce_scatter"))
    gemm = np.array([shape.kernel == "gemm" for shape in tasks.shapes] or [False])
    product = gemm[tasks.shape] & (tasks.shape >= 0)
    converts = np.array([op == "cast" for op in tasks.ops] or [False])[tasks.op]

    owner, needed = tasks.reads
    late = np.zeros(len(tasks), bool)
    late[owner[tasks.phase[needed] == _BACKWARD]] = True
    gathers &= (tasks.phase != _BACKWARD) | late
    # A cast stands for the value it converts.
    origin = np.arange(len(tasks))
    through = converts[owner] & gathers[needed]
    origin[owner[through]] = needed[through]

    fed = product[owner] & gathers[origin[needed]]
    source, fed_by = origin[needed[fed]], owner[fed]
    order = np.lexsort((fed_by, source))
    source, fed_by = source[order], fed_by[order]
    again = np.zeros(len(source), bool)
    again[1:] = (source[1:] == source[:-1]) & (tasks.phase[source[1:]] == _BACKWARD)
    after = scatters[owner] & product[needed]
    collective = np.concatenate([source[~again], owner[after]])
    products = np.concatenate([fed_by[~again], needed[after]])
    return OverlapPairs(collective, products, ranks[collective])


def split_seconds(whole: Gemms, dtypes: tuple[str, ...], pieces: Int, on: Hardware) -> Seconds:
    """Durations of products split by rows into `pieces`; each piece reads all of the weights."""
    weights = whole.batch * whole.n * whole.k
    weights *= np.array([float(BYTES.get(d, 0)) for d in dtypes])[whole.dtype]
    traffic = np.maximum(whole.traffic - weights, 0) / pieces + weights
    piece = whole._replace(m=np.ceil(whole.m / pieces), traffic=traffic)
    return pieces * gemms_seconds(piece, dtypes, on)
