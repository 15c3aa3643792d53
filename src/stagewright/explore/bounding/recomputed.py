"""Plain candidates, which keep all activations on the GPU, and what recomputation adds to these.

A candidate that computes something again, or moves activations to the host and back, computes and
communicates all that its plain candidate does, and more. So the plain candidate's bound of seconds
holds for both. The two settings are put aside together: what is computed again is not moved, so a
candidate that moves activations and computes nothing again may well take longer than one that does
both.

To the bound of a candidate with recomputation comes the time in which the products and the
attention of layers run again, at the rate that no kernel exceeds. This time follows from the graphs
of blocks for one device.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from stagewright.algebra.index import parse
from stagewright.arrays import Bool, Float, Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.explore.bounding.least_compute import best_rates
from stagewright.search.candidates import HARDWARE, Candidates, Column
from stagewright.graph.cost import flops
from stagewright.graph.table import OPS, Timing
from stagewright.lower.blocks import BlockContext, build_block, recompute
from stagewright.lower.training import TrainingStep
from stagewright.lower.variants import BlockVariant
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.memory import MemorySection

_RECOMPUTATION = tuple(of.name for of in fields(MemorySection) if of.name.startswith("recompute"))
"""Settings that say what is computed again."""
_ON_HOST = "cpu_offloading_num_layers"
"""The setting that says whose activations the host keeps."""
_DECIDES = (
    "framework", "precision", "seq_length", "decoder_seq_length", "document_length", HARDWARE,
    *_RECOMPUTATION,
)  # fmt: skip


def recomputes(rows: Candidates) -> Bool:
    """Which candidates compute anything again."""
    return ~rows.column("recompute").is_one_of("none")


def is_not_plain(rows: Candidates) -> Bool:
    """Which candidates are not plain: these compute something again, or keep it on the host."""
    return recomputes(rows) | ~rows.column(_ON_HOST).is_one_of(None)


def plain(rows: Candidates) -> Candidates:
    """The plain candidates: they keep on the GPU what others compute again or move to the host."""
    names = (*_RECOMPUTATION, _ON_HOST)
    usual = {n: Column.constant(SETTINGS[n].default, len(rows)) for n in names}
    return replace(rows, columns={**rows.columns, **usual})


class Recomputed(NamedTuple):
    """What the layers of candidates compute again at least."""

    kind: Int
    """Equal for candidates of which a sequence takes as long: [candidates]."""
    seconds: Float
    """Of a layer and a microbatch, on each rank: [candidates]."""


def least_recomputed(rows: Candidates) -> Recomputed:
    """The seconds that a layer's recomputation takes at least.

    Nothing is known where only some layers are computed again, nor of experts.
    """
    kinds = rows.distinct(*_DECIDES)
    known = recomputes(rows) & rows.column("recompute_num_layers").is_one_of(None)
    first: list[int] = kinds.first.tolist()
    each = np.array([_of_sequence(rows, row) if known[row] else 0.0 for row in first])
    ranks = rows.numbers("tp") * rows.numbers("cp")
    return Recomputed(kinds.of, each[kinds.of] * rows.numbers("micro_batch_size") / ranks)


def _of_sequence(rows: Candidates, row: int) -> float:
    """Seconds on one GPU of the layer with the least to compute again, for one sequence."""
    try:
        run = rows.run(row).model_copy(update={"global_batch_size": None}).resolved(rows.model)
        step = TrainingStep.of(run, rows.model, {})
    except UserError:  # a run that is refused
        return 0.0
    rates = best_rates(rows.hardware(row), PRECISIONS[run.precision].product)
    sequences = step.sizes["B"]
    layers = {variant for stage in step.stages for variant, index in stage if index >= 0}
    work = [_products_and_attention(step, variant) for variant in layers]
    seconds = [products / rates.products + core / rates.attention for products, core in work]
    return min(seconds, default=0.0) / sequences


def _products_and_attention(step: TrainingStep, variant: BlockVariant) -> tuple[float, float]:
    """FLOPs of a block that all ranks of a stage compute again, in products and in attention."""
    block = build_block(variant, step.model, step.recipe)
    block = recompute(block, BlockContext(variant, step.run, step.plan, step.sizes))
    extent = step.extent(None)
    products = attention = 0.0
    for n in block.graph:
        if n.phase != "recompute" or n.scope.startswith("moe"):
            continue
        if n.op == "einsum" and parse(str(n["spec"])).contracted:
            products += float(flops(n, extent))
        elif n.op in OPS and OPS[n.op].timing is Timing.ATTENTION:
            attention += float(flops(n, extent))
    return products, attention
