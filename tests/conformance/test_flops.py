"""FLOPs and bytes of kernels against those that torch counts; `record_flops.py` says how."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve
from stagewright.model.layers import Vision
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.settings import Run

RECORDED = json.loads(Path(__file__).with_name("flops.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = RECORDED["cases"]

# What each recorded case is here: a preset whose sizes are replaced, and settings of the run.
IN_PARTS = {"flash_attention": False}
UNGATED = {"gated": False, "tied_embeddings": True}
NO_EXPERTS = dict.fromkeys(
    ("num_experts", "top_k", "moe_ffn_hidden_size", "shared_ffn_hidden_size"), 0
) | {"first_dense_layers": 0, "norm_topk_prob": True, "num_expert_groups": 1, "topk_groups": 1}
IMAGES = {
    "vision": Vision(image_size=64, patch_size=8, classes=10),
    "max_position_embeddings": 65, "vocab_size": 1,
}  # fmt: skip
OURS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped-query, flash": ("llama3-8b", {}, {}),
    "grouped-query, in parts": ("llama3-8b", {}, IN_PARTS),
    "multi-head, flash": ("llama3-8b", UNGATED, {}),
    "multi-head, in parts": ("llama3-8b", UNGATED, IN_PARTS),
    "computed again": ("llama3-8b", {}, {"recompute": "full"}),
    "latent": ("deepseek-v2", NO_EXPERTS, IN_PARTS),
    "experts": ("deepseek-moe-16b", {"first_dense_layers": 0}, {}),
    "vision": ("vit-b-16", IMAGES, {}),
}


def counted(case: str) -> dict[tuple[str, str], tuple[int, int]]:
    """FLOPs and bytes by phase and kind of a step of one microbatch, each operation by itself."""
    preset, changes, settings = OURS[case]
    of = CASES[case]
    model = replace(resolve(preset), **{**of["sizes"], **changes})
    length = None if model.vision else of["sequence"]
    run = Run(model=preset, micro_batch_size=of["batch"], seq_length=length, fuse=False,
              dropout=False, **settings)  # fmt: skip
    t = compile(run, model).program.classes[0].tasks
    flops: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for i in range(len(t)):
        op, phase = t.ops[t.op[i]], PHASES[t.phase[i]]
        kind = "products" if op == "einsum" else op
        key = "forward" if phase == "forward" else "backward", kind
        if t.kind[i] == TaskKind.COMPUTE and phase != "optimizer":
            flops[key] += int(t.flops[i])
            moved[key] += int(t.traffic[i])
    return {key: (flops[key], moved[key]) for key in flops}


def test_every_case_that_is_recorded() -> None:
    assert list(OURS) == list(CASES)


@pytest.mark.parametrize("case", OURS)
def test_as_torch(case: str) -> None:
    ours = counted(case)
    for phase in ("forward", "backward"):
        theirs = CASES[case][phase]
        assert {kind for p, kind in ours if p == phase} >= set(theirs)
        for kind, torchs in theirs.items():
            flops, moved = ours[phase, kind]
            # torch counts masked pairs of flash attention too, which the kernel skips.
            masked = kind != "products" and case != "vision"
            assert flops * (2 if masked else 1) == torchs["flops"], (phase, kind)
            assert moved == torchs["bytes"] - repeated(case, phase), (phase, kind)


def repeated(case: str, phase: str) -> int:
    """Bytes of heads of keys and values that torch's products read again for each query's head."""
    of = CASES[case]["sizes"]
    if case != "grouped-query, in parts":
        return 0
    more = of["num_attention_heads"] - of["num_query_groups"]
    one = CASES[case]["batch"] * CASES[case]["sequence"] * of["kv_channels"] * 2
    uses = 2 if phase == "forward" else 4  # of k and v; in backward their gradients, too
    return of["num_layers"] * uses * more * one


def test_a_decode_step_sees_all_that_is_cached() -> None:
    """torch's flash attention of one query of each request, whose keys are all to be seen."""
    sizes = CASES["grouped-query, flash"]["sizes"]
    model = replace(resolve("llama3-8b"), **sizes)
    run = Run(model="llama3-8b", mode="decode", batch_size=5, context_length=63, fuse=False)
    t = compile(run, model).program.classes[0].tasks
    rows = [i for i in range(len(t)) if t.ops[t.op[i]] == "cached_attention"]
    heads, width = sizes["num_attention_heads"], sizes["kv_channels"]
    assert t.flops[rows].tolist() == [2 * 2 * 5 * heads * 1 * 64 * width] * sizes["num_layers"]
