"""Lower bounds of step times: no candidate is faster, whatever is hidden behind what.

The products and the attention of the model, forward and backward, at the rate that the largest
tiles reach (`roofline.gemm_seconds`, `attention_seconds`), spread evenly over all GPUs: the rank
with most work takes no less than the mean. With one forward and one backward of a microbatch more
for each other stage, where the schedule has to fill and drain the pipeline and all layers are
alike. Communication, memory, launches, recomputation and padding only add to that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.blocks.recipe import PRECISIONS
from stagewright.search.candidates import HARDWARE, Candidates
from stagewright.model.config import ModelConfig
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import SequenceFlops, sequence_flops

_FILLS = (None, "1f1b", "gpipe", "interleaved", "looped-bfs")
"""Schedules in which a stage waits for the whole forward and backward of those before it."""


def lower_bounds(candidates: Candidates) -> Float:
    """Seconds of a training step that no candidate is faster than: [candidates].

    Shorter than any step of `simulate`; 0 in inference.
    """
    bounds = np.zeros(len(candidates))
    if candidates.base.run.mode != "train":
        return bounds
    candidates = candidates.regardless_of_memory()
    names = ("seq_length", "decoder_seq_length", "document_length", "precision")
    alike = candidates.distinct(
        HARDWARE, *names, "moe_expert_capacity_factor", "lora_rank", "freeze", "trainable"
    )
    for nth, first in enumerate(alike.first.tolist()):
        rows = np.flatnonzero(alike.of == nth)
        run = candidates.run(first).resolved(candidates.model)
        of = sequence_flops(run, candidates.model)
        rates = best_rates(candidates.hardware(first), PRECISIONS[run.precision].product)
        bounds[rows] = _bounds(candidates.take(rows), of, rates)
    return bounds * least_factor(candidates)


def least_factor(candidates: Candidates) -> float:
    """How much faster the fastest rank is than its GPU: a straggler with a factor below 1."""
    return min([1.0, *(candidates.base.cluster.stragglers or {}).values()])


class Rates(NamedTuple):
    """FLOP/s of one GPU that no kernel exceeds."""

    products: float
    """Of matrix products of a layer or of the output."""
    attention: float
    """Of attention kernels."""


def best_rates(hardware: Hardware, product: str) -> Rates:
    """The rates of the largest tiles; `product` is the data type of matrix products."""
    return Rates(_rate(hardware, product), _attention_rate(hardware))


def _rate(hardware: Hardware, dtype: str) -> float:
    """FLOP/s that no matrix product of a layer or of the output exceeds."""
    fast = hardware.sustained()
    return max(
        peak_flops(fast, each) * fast.products(each, grouped=grouped).fraction
        for each in {dtype, "bf16"}
        for grouped in (False, True)
    )


def _attention_rate(hardware: Hardware) -> float:
    """FLOP/s that no attention kernel exceeds."""
    fast = hardware.sustained()
    peak = max(peak_flops(fast, dtype) for dtype in ("bf16", "fp8") if fast.rate_of(dtype))
    fits = [fast.attention, *fast.attention_kernels.values()]
    return peak * max(fit.fraction * max(1.0, fit.bwd_ratio) for fit in fits)


def _bounds(rows: Candidates, of: SequenceFlops, rates: Rates) -> Float:
    """Of candidates with the same sequences and hardware."""
    products = (
        of.choices + of.products + (2 * of.products if of.gradients is None else of.gradients)
    )
    attention = sum(
        pairs.causal * (1 if layer in of.without_gradient else 3)
        for layer, pairs in of.attention.items()
    )
    seconds = products / rates.products + attention / rates.attention  # of a sequence on one GPU
    mean = seconds * rows.numbers("global_batch_size") / rows.world_size
    model = rows.model
    head = 3 * 2 * (rows.run(0).resolved(model).seq_length or 0) * model.hidden_size
    layers = (seconds - head * model.vocab_size / rates.products) / model.depth
    if not _layers_are_alike(model) or of.gradients is not None or layers < 0:
        return mean
    stages = rows.numbers("pp") * rows.numbers("vpp")
    least = model.depth // stages - _less(rows)
    chunk = np.maximum(least, 0) * layers * rows.numbers("micro_batch_size")
    chunk = chunk / (rows.numbers("tp") * rows.numbers("cp"))
    chunk[~rows.column("schedule").is_one_of(*_FILLS)] = 0.0
    chunk[~rows.column("layers_per_stage").is_one_of(None)] = 0.0
    # Averaged over ranks: each waits for the stages before its first, in forward and in backward.
    return mean + chunk * (rows.numbers("pp") - 1) / 2


def _less(rows: Candidates) -> int:
    """Layers that the stage with the fewest may have below an even share."""
    run = rows.base.run
    return 1 + run.first_stage_less_layers + run.last_stage_less_layers


def _layers_are_alike(model: ModelConfig) -> bool:
    plain = not (model.own_sizes or model.encoder_num_layers or model.tower or model.shared_blocks)
    return plain and len({model.layer(i) for i in range(model.depth)}) == 1
