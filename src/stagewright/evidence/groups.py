"""By what measurements are told apart: traits of a run, and the split into fitted and held out.

Constants are fitted to seven tenths of the configurations and reported on the others.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from stagewright.evidence.measurements import Measurement

FITTED_TENTHS = 7
"""Tenths of the configurations that constants may be fitted to."""

TOKENS = ((1024, "up to 1,024"), (4096, "up to 4,096"), (16384, "up to 16,384"))
GPUS = ((8, "up to 8"), (64, "9 to 64"), (512, "65 to 512"))


class Traits(NamedTuple):
    """What the totals of `validate` group a row by."""

    hardware: str
    precision: str
    experts: bool
    """Whether the model is a mixture of experts."""
    adapters: bool
    """Whether adapters train beside frozen weights."""
    gpus: int
    tokens: int
    """Tokens of a kernel: of a microbatch, on a rank of tensor and of context parallelism."""
    held_out: bool
    """Whether constants may not be fitted to the row."""
    low_utilization: bool


def traits(m: Measurement) -> Traits:
    """The traits of a row."""
    run = m.run
    tokens = run.micro_batch_size * (run.seq_length or 0) // (run.tp * run.cp)
    return Traits(
        hardware=m.hardware,
        precision="mxfp8" if run.fp8_recipe == "mxfp8" else run.precision,
        experts=m.model.num_experts > 0,
        adapters=run.lora_rank is not None,
        gpus=run.world_size,
        tokens=tokens,
        held_out=held_out(m),
        low_utilization=m.low_utilization,
    )


def held_out(m: Measurement) -> bool:
    """Whether a row is one of the tenths that no constant may be fitted to.

    By a hash of sizes, degrees, batch and accelerator: rows of several releases, precisions or
    overlaps fall on one side, and an assumption that is added changes no row's side.
    """
    run, model = m.run, m.model
    sizes = (
        *(run.layers or model.num_layers, model.hidden_size, model.ffn_hidden_size),
        *(model.num_attention_heads, model.num_query_groups, run.vocab or model.vocab_size),
        *(model.num_experts, model.top_k),
    )
    degrees = (run.tp, run.cp, run.ep, run.dp, run.pp, run.vpp, run.zero)
    batch = (run.seq_length, run.micro_batch_size, run.global_batch_size)
    return held_back(repr((m.hardware, sizes, degrees, batch)))


def held_back(key: str) -> bool:
    """Whether what this text names is one of the tenths that no constant may be fitted to."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10 >= FITTED_TENTHS


def configuration(m: Measurement) -> str:
    """What runs, and where: equal for rows of one run, whatever their source or release."""
    return repr((m.run, m.model, m.execution, m.hardware, m.attention_kernel, m.network_gb_s))


def bounded(value: int, bounds: tuple[tuple[int, str], ...]) -> str:
    """The range that a number lies in, in words."""
    for most, words in bounds:
        if value <= most:
            return words
    return f"above {bounds[-1][0]:,}"
