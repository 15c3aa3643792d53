"""Tensor-parallel collectives split into chunks and overlapped with the adjacent products.

Transformer Engine's user buffers (Megatron-LM's `--tp-comm-overlap`) and PyTorch's async TP cut a
product so that one chunk of it is sent while the next is computed, as Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023 (doi
10.1145/3567955.3567959).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.graph.node import BYTES
from stagewright.program.columns import BACKWARD_PHASE, COLLECTIVES, Program, TaskKind, Tasks
from stagewright.program.shapes import GEMM, op_mask, shape_mask
from stagewright.time.fused_gemms import Gemms, gemms_of, gemms_seconds
from stagewright.time.hardware import Hardware


def with_tp_overlap(program: Program, tasks: Tasks, seconds: Float, hardware: Hardware) -> Float:
    """Durations with TP collectives split and overlapped with adjacent GEMMs.

    A product split into tp chunks takes g, longer than the whole product. Of the product and a
    collective of duration c, the longer runs through, and one chunk of the shorter is exposed:
    max(c, g) + min(c, g) / tp together, of which the collective is assigned all but g. Where this
    is no faster, nothing is split; nor is a kernel whose duration was measured.
    """
    pairs = overlap_pairs(program, tasks)
    if not len(pairs.product):
        return seconds
    rows, first, inverse = np.unique(pairs.product, return_index=True, return_inverse=True)
    split = split_seconds(gemms_of(tasks, rows), tasks.dtypes, pairs.ranks[first], hardware)
    if tasks.duration is not None:
        split = np.where(tasks.duration[rows] > 0, seconds[rows], split)
    split = split[inverse.ravel()]
    collectives, inverse = np.unique(pairs.collective, return_inverse=True)
    inverse = inverse.ravel()
    unsplit = np.bincount(inverse, seconds[pairs.product])
    product_seconds = np.bincount(inverse, split)
    tp = np.ones_like(product_seconds)
    tp[inverse] = pairs.ranks
    collective_seconds = seconds[collectives]
    exposed = (
        np.maximum(collective_seconds - product_seconds, 0)
        + np.minimum(collective_seconds, product_seconds) / tp
    )
    better = exposed + product_seconds < collective_seconds + unsplit
    result = seconds.copy()
    result[collectives] = np.where(better, exposed, collective_seconds)
    faster = better[inverse]
    result[pairs.product[faster]] = split[faster]
    return result


class OverlapPairs(NamedTuple):
    """Pairs of a collective and a product that overlap, and the ranks of the group."""

    collective: Int
    product: Int
    ranks: Int


def overlap_pairs(program: Program, tasks: Tasks) -> OverlapPairs:
    """Pairs of a gather and a product that reads it, and of a product and its scatter.

    In backward a gather feeds two products and overlaps with the first. A gather of an activation
    kept by forward waits for nothing in backward, and is hidden without being split.
    """
    over_tp = [program.mesh.degrees(c.axes) == (("tp",),) for c in program.communicators]
    sizes = [program.mesh.size(*c.axes) for c in program.communicators]
    ranks = np.where(over_tp, sizes, 1) if over_tp else np.ones(1, np.int64)
    over_group = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.layer >= 0)
    ranks = np.where(over_group, ranks[np.where(over_group, tasks.slot, 0)], 1)  # by task
    over_group &= ranks > 1
    gathers = over_group & (tasks.collective == COLLECTIVES.index("all_gather"))
    scatters = over_group & (tasks.collective == COLLECTIVES.index("reduce_scatter"))
    product = shape_mask(tasks, lambda shape: shape.kernel == GEMM)
    converts = op_mask(tasks, lambda ops: ops == {"cast"})

    waiter, dep = tasks.reads
    reads_backward = np.zeros(len(tasks), bool)
    reads_backward[waiter[tasks.phase[dep] == BACKWARD_PHASE]] = True
    gathers &= (tasks.phase != BACKWARD_PHASE) | reads_backward
    # A cast stands for the value it converts.
    origin = np.arange(len(tasks))
    converts_gather = converts[waiter] & gathers[dep]
    origin[waiter[converts_gather]] = dep[converts_gather]

    fed = product[waiter] & gathers[origin[dep]]
    source, fed_by = origin[dep[fed]], waiter[fed]
    order = np.lexsort((fed_by, source))
    source, fed_by = source[order], fed_by[order]
    is_second = np.zeros(len(source), bool)
    is_second[1:] = (source[1:] == source[:-1]) & (tasks.phase[source[1:]] == BACKWARD_PHASE)
    feeds_scatter = scatters[waiter] & product[dep]
    collective = np.concatenate([source[~is_second], waiter[feeds_scatter]])
    products = np.concatenate([fed_by[~is_second], dep[feeds_scatter]])
    return OverlapPairs(collective, products, ranks[collective])


def split_seconds(gemms: Gemms, dtypes: tuple[str, ...], chunks: Int, hardware: Hardware) -> Float:
    """Durations of products split by rows into `chunks`; each chunk reads all of the weights.

    Chunks run on several streams, so the last wave of tiles of one is filled by the next
    (`_stream_compute` in Transformer Engine's comm_gemm_overlap.cpp; the backend stream of
    PyTorch's `_fused_all_gather_matmul`).
    """
    weights = gemms.batch * gemms.n * gemms.k
    weights *= np.array([float(BYTES.get(d, 0)) for d in dtypes])[gemms.dtype]
    again = (chunks - 1) * weights
    return gemms_seconds(gemms._replace(traffic=gemms.traffic + again), dtypes, hardware)
