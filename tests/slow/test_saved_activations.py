"""Bytes that layers save for backward, by the simulator and by published equations."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve
from stagewright.run.settings import Run

# Korthikanti et al., arXiv 2205.05198: models of table 3 on the ranks they name.
SIZES: dict[str, dict[str, Any]] = {
    "megatron-22b": {"pp": 1, "global_batch_size": 4, "micro_batch_size": 4},
    "megatron-175b": {"pp": 8, "vpp": 3, "global_batch_size": 64},
    "megatron-530b": {"pp": 35, "vpp": 3, "global_batch_size": 280},
    "megatron-1t": {"pp": 64, "global_batch_size": 512},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "no recompute": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


def korthikanti(model: str, variant: str) -> tuple[Fraction, Fraction]:
    """Bytes that layers keep on the first stage, ours and by the paper, with sequence parallelism.

    The paper: L layers of equation 4, 6 or 2 s b h / t, times 1 + (p - 1) / (p m) if interleaved.
    """
    config, how, t = resolve(model), SIZES[model], 8
    h, s, b = config.hidden_size, 2048, how.get("micro_batch_size", 1)
    scores = Fraction(5 * config.num_attention_heads * s, h)
    each = {"no recompute": 34 + scores, "selective": Fraction(34), "full": Fraction(2)}[variant]
    p, m = how["pp"], how.get("vpp", 1)
    factor = 1 + Fraction(p - 1, p * m) if m > 1 else Fraction(1)
    paper = each * s * b * h * config.num_layers / t * factor
    few = {"global_batch_size": 2 * p * m * b} if p > 1 else {}
    settings = {"model": model, "tp": t, "sequence_parallel": True, "seq_length": s}
    settings |= {"flash_attention": False, **how, **few, **VARIANTS[variant]}
    one = compile(Run(**settings)).program.classes[0]
    v, tasks = one.values, one.tasks
    comes = (v.first >= 0) & (v.last < len(tasks))
    last = np.minimum(v.last, len(tasks) - 1)
    kept = comes & (tasks.phase[v.first] == 0) & (tasks.phase[last] > 0) & (tasks.layer[last] >= 0)
    sizes = v.size[v.value[kept]]
    change = np.bincount(v.first[kept], sizes, len(tasks) + 1)
    change -= np.bincount(v.last[kept] + 1, sizes, len(tasks) + 1)
    return Fraction(int(change.cumsum().max())), paper


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", ["megatron-22b", "megatron-175b"])
def test_korthikanti(model: str, variant: str) -> None:
    ours, paper = korthikanti(model, variant)
    assert abs(ours / paper - 1) < 0.02


def test_few_microbatches_stand_for_many() -> None:
    settings: dict[str, Any] = {"model": "gpt2", "seq_length": 64, "layers": 8, "pp": 4}
    for extra in ({}, {"vpp": 2}, {"schedule": "zb-h1"}):
        run = {**settings, **extra}
        peaks = [
            max(c.memory["peak"] for c in compile(Run(**run, global_batch_size=n)).program.classes)
            for n in (4 * run.get("vpp", 1), 24)
        ]
        assert peaks[0] == peaks[1]
