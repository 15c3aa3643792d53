"""What recomputation adds at least to the time of candidates that have it.

A candidate without recomputation computes everything else that the same candidate with it does. So
its bound of seconds holds for both. To that of the other comes the time in which the products and
the attention of layers run again, at the rate that no kernel exceeds; it follows from the graphs of
blocks for one device.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from stagewright.algebra.index import parse
from stagewright.arrays import Bool, Float, Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.explore.bounding.roofline import best_rates
from stagewright.explore.candidates import HARDWARE, Candidates, Column
from stagewright.graph.cost import flops
from stagewright.graph.table import OPS, Timing
from stagewright.lower.blocks import BlockContext, build_block, recompute
from stagewright.lower.training import TrainingStep
from stagewright.lower.variants import BlockVariant
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.memory import MemorySection

_RECOMPUTATION = tuple(of.name for of in fields(MemorySection) if of.name.startswith("recompute"))
"""Settings that say what is computed again."""
_DECIDES = (
    "framework", "precision", "seq_length", "decoder_seq_length", "document_length", HARDWARE,
    *_RECOMPUTATION,
)  # fmt: skip


def recomputes(rows: Candidates) -> Bool:
    """Which candidates compute anything again."""
    return ~rows.column("recompute").is_one_of("none")


def without_recomputation(rows: Candidates) -> Candidates:
    """Candidates that keep what others compute again."""
    usual = {n: Column.constant(SETTINGS[n].default, len(rows)) for n in _RECOMPUTATION}
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
