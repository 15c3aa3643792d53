"""FLOPs of a step against published closed forms, and against the same model on one rank."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.settings import Run
from stagewright.time.simulate.utilization import model_flops

CORE = ("scores", "core", "d_probs", "d_scores", "d_q_core", "d_k_core", "d_v_core")
PRODUCTS = ("einsum", "attention", "attention_bwd")  # as unfused kernels are named


def work(compiled: CompiledRun) -> Counter[tuple[str, str]]:
    """FLOPs of all ranks by phase and operation."""
    found: Counter[tuple[str, str]] = Counter()
    for c in compiled.program.classes:
        t = c.tasks
        for phase, op in {(int(p), int(o)) for p, o in zip(t.phase, t.op, strict=True)}:
            mine = (t.phase == phase) & (t.op == op) & (t.kind == TaskKind.COMPUTE)
            found[PHASES[phase], t.ops[op]] += int(t.flops[mine].sum()) * len(c.ranks)
    return found


@cache
def _products(items: tuple[tuple[str, Any], ...]) -> dict[str, int]:
    found = work(compile(Run(**dict(items), fuse=False)))
    return {p: sum(found[p, op] for op in PRODUCTS) for p in PHASES[:3]}


def products(**settings: Any) -> dict[str, int]:
    """FLOPs of matrix products and attention of all ranks by phase."""
    return _products(tuple(settings.items()))


# ---- published closed forms ----------------------------------------------------------------------


def closed_form(compiled: CompiledRun) -> int:
    """Forward and backward of a step, in all.

    PaLM (arXiv 2204.02311), appendix B, has 6 N + 12 L H Q T per token: N parameters in products
    (the look-up of the embedding is none), L layers, H heads of width Q, T tokens a sequence. This
    counts masked pairs as well and nothing twice. Flash attention (arXiv 2307.08691, section 4.1)
    counts half for a causal mask and 2.5 forwards for the backward, which makes the scores again:
    12 becomes 4 (1 + 2.5) / 2 = 7.
    """
    run, m = compiled.run, compiled.model
    assert run.global_batch_size
    assert run.seq_length
    heads = m.num_attention_heads * m.kv_channels
    attention = m.hidden_size * (2 * heads + 2 * m.num_query_groups * m.kv_channels)
    mlp = (3 if m.gated else 2) * m.hidden_size * m.ffn_hidden_size
    weights = m.num_layers * (attention + mlp) + m.vocab_size * m.hidden_size
    per_token = 6 * weights
    per_token += (7 if run.flash_attention else 12) * m.num_layers * heads * run.seq_length
    return run.global_batch_size * run.seq_length * per_token


@pytest.mark.parametrize("flash", [False, True])
@cases
def test_published(settings: dict[str, Any], flash: bool) -> None:
    vocab = 50304 if settings["model"] == "gpt3-175b" else None  # 50257 is padded for tp
    run = Run(**settings, flash_attention=flash, vocab=vocab)
    compiled = compile(run)
    wanted = closed_form(compiled)
    if run.tp == 1 or compiled.model.num_query_groups >= run.tp:
        assert sum(products(**run.model_dump(exclude={"fuse"})).values()) == wanted
    everything = sum(n for (phase, _), n in work(compiled).items() if phase != "optimizer")
    assert wanted < everything < 1.005 * wanted


def test_window() -> None:
    """A local layer of gemma2 at twice its window attends to three quarters of the causal pairs."""
    t = compile(Run(model="gemma2-2b", layers=2, seq_length=8192)).program.classes[0].tasks
    core = [t.ops.index("attention") == op for op in t.op]
    pairs = [4096 * 8192 - 4096**2 // 2, 8192**2 // 2]
    assert t.flops[core].tolist() == [4 * 8 * 256 * n for n in pairs]


# ---- the same work, however it is split ----------------------------------------------------------

LLAMA = {"model": "llama3.1-8b", "layers": 4, "seq_length": 256, "global_batch_size": 8}
GPT = LLAMA | {"model": "gpt2", "vocab": 50304}
GEMMA = LLAMA | {"model": "gemma2-2b"}
PALM = LLAMA | {"model": "palm-8b"}


@cases
def test_sum_over_ranks_is_the_work_of_one(model: dict[str, Any], split: dict[str, Any]) -> None:
    alone = {k: v for k, v in split.items() if k in ("flash_attention", "precision")}
    assert products(**model, **split) == products(**model, **alone)


@pytest.mark.parametrize("flash", [True, False])
@cases
def test_copies_of_key_value_heads(
    model: dict[str, Any], tp: int, groups: int, channels: int, flash: bool
) -> None:
    """Where heads of keys and values are fewer than tp, ranks share one: its products run twice."""
    hidden = {"llama3.1-8b": 4096, "palm-8b": 4096, "gemma2-2b": 2304}[model["model"]]
    one = model["layers"] * 8 * 256 * 2 * 2 * hidden * groups * channels  # both, forward
    extra = (tp // groups - 1) * one
    split = products(**model, tp=tp, flash_attention=flash)
    alone = products(**model, flash_attention=flash)
    assert split["forward"] - alone["forward"] == extra
    assert split["backward"] - alone["backward"] == 2 * extra


@cases
def test_attention_is_never_done_twice(model: dict[str, Any], split: dict[str, Any]) -> None:
    """Scores and what follows from them; a projection may be, where ranks share a head."""
    found = []
    for settings in (split, {k: v for k, v in split.items() if k == "flash_attention"}):
        flops = 0
        for c in compile(Run(**model, **settings, fuse=False)).program.classes:
            t = c.tasks
            names = {"attention", "attention_bwd"}
            core = {n for n in t.names if n.split(".")[-1] in CORE}
            mine = [t.ops[o] in names or (t.ops[o] == "einsum" and t.names[n] in core)
                    for o, n in zip(t.op, t.name, strict=True)]  # fmt: skip
            flops += int(t.flops[mine].sum()) * len(c.ranks)
        found.append(flops)
    assert found[0] == found[1]


# ---- recompute -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("model", [LLAMA, GPT, GEMMA, PALM], ids=lambda s: s["model"])
def test_full_recompute_adds_one_forward_of_the_layers(model: dict[str, Any], fuse: bool) -> None:
    plain = compile(Run(**model, tp=2, pp=2, fuse=fuse))
    again = compile(Run(**model, tp=2, pp=2, fuse=fuse, recompute="full"))
    for one, two in zip(plain.program.classes, again.program.classes, strict=True):
        t = one.tasks
        forward = int(t.flops[(t.phase == PHASES.index("forward")) & (t.layer >= 0)].sum())
        u = two.tasks
        assert int(u.flops[u.phase == PHASES.index("recompute")].sum()) == forward
        assert int(u.flops.sum()) == int(t.flops.sum()) + forward


def test_recompute_of_some_layers() -> None:
    """The first of each stage's two layers."""
    run = Run(**LLAMA, pp=2, recompute="full", recompute_num_layers=1)
    for c in compile(run).program.classes:
        t = c.tasks
        again = t.phase == PHASES.index("recompute")
        assert set(t.layer[again].tolist()) == {2 * c.pipeline_rank}
        forward = (t.phase == PHASES.index("forward")) & (t.layer == 2 * c.pipeline_rank)
        assert t.flops[again].sum() == t.flops[forward].sum()


@pytest.mark.parametrize(
    ("modules", "ops"),
    [
        (("core_attn",), {"attention"}),
        (("norm",), {"norm"}),
        (("activation",), {"glu"}),
        (("core_attn", "activation"), {"attention", "glu"}),
    ],
)
def test_selective_recompute(modules: tuple[str, ...], ops: set[str]) -> None:
    run = Run(**LLAMA, fuse=False, recompute="selective", recompute_modules=modules)
    compiled = compile(run)
    found = work(compiled)
    assert {op for (phase, op) in found if phase == "recompute"} == ops
    for op in ops:
        # Of the norms, those of the layers: two each of 4, and not the final one.
        share = Fraction(8, 9) if op == "norm" else 1
        assert found["recompute", op] == found["forward", op] * share


# ---- kernels, by what they must do ---------------------------------------------------------------


def rows_of(op: str, **settings: Any) -> list[tuple[int, int]]:
    """FLOPs and bytes of the kernels that begin with an operation, in order."""
    t = compile(Run(**settings)).program.classes[0].tasks
    found = [i for i in range(len(t)) if t.ops[t.op[i]].split("+")[0] == op]
    assert found
    return [(int(t.flops[i]), int(t.traffic[i])) for i in found]


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        ("llama3.1-8b", 512 * 512 // 2),  # causal
        ("mistral-7b-v0.1", 512 * 512 // 2),  # its window is wider
        ("bert-base", 512 * 512),
    ],
)
def test_flash_attention(model: str, pairs: int) -> None:
    """Two products forward and five backward of each pair; all else is read and written once.

    Forward reads q, k and v and writes the output and a logarithm for each row of scores; backward
    reads these and the output's gradient, and writes three (arXiv 2307.08691, algorithms 1 and 2).
    """
    settings = {"model": model, "layers": 1, "seq_length": 512, "micro_batch_size": 3}
    m = compile(Run(**settings)).model
    width, heads = m.kv_channels, m.num_attention_heads
    q, kv, row = (3 * 512 * x for x in (heads * width, m.num_query_groups * width, heads))
    forward = 2 * 2 * 3 * heads * pairs * width, 2 * (2 * q + 2 * kv) + 4 * row
    backward = 5 * 2 * 3 * heads * pairs * width, 2 * (4 * q + 4 * kv) + 4 * row
    assert rows_of("attention", **settings) == [forward]
    assert rows_of("attention_bwd", **settings) == [backward]


@pytest.mark.parametrize(("document", "pairs"), [(128, 4 * 128**2), (200, 2 * 200**2 + 112**2)])
def test_documents_of_a_sequence_do_not_see_each_other(document: int, pairs: int) -> None:
    """Of a packed sequence, attention counts the squares of its documents; MFU does, too."""
    settings = {"model": "llama3.1-8b", "layers": 1, "seq_length": 512}
    whole, packed = ((Run(**settings, **more)) for more in ({}, {"document_length": document}))
    (alone,), (apart,) = (rows_of("attention", **r.model_dump()) for r in (whole, packed))
    assert apart[0] * 512**2 == alone[0] * pairs
    assert apart[1] == alone[1]
    model = compile(whole).model
    needed = [model_flops(r.resolved(model), model) for r in (whole, packed)]
    assert needed[0].causal - needed[1].causal == 3 * (alone[0] - apart[0])


def test_documents_shorter_than_a_window_count() -> None:
    settings = {"model": "gemma2-9b", "layers": 2, "seq_length": 8192}
    (local, wide), (short, small) = (
        rows_of("attention", **settings, **more) for more in ({}, {"document_length": 1024})
    )
    assert small[0] == short[0] < local[0] < wide[0]


def test_grouped_products() -> None:
    """Rows of tokens times each expert's matrix: all matrices are read, each row once."""
    settings = {"model": "mixtral-8x7b", "layers": 1, "seq_length": 512, "fuse": False}
    compiled = compile(Run(**settings, ep=4, dp=4))
    t = compiled.program.classes[0].tasks
    h, f, experts, rows = 4096, 14336, 2, 4 * 512 * 2 // 4
    grouped = [i for i in range(len(t)) if t.ops[t.op[i]] == "einsum"
               and t.shapes[t.shape[i]].extents[0] == ("batch", experts)]  # fmt: skip
    product = 2 * rows * h * f, 2 * (rows * h + experts * h * f + rows * f)
    # Gate, up and down, forward and twice backward.
    assert [(int(t.flops[i]), int(t.traffic[i])) for i in grouped] == [product] * 9


def test_cross_entropy() -> None:
    """Per logit: largest, then less that, exponential and sum; backward the same, less a one.

    Logits are read once in 16 bit and kept in fp32, which backward reads to write 16 bit; besides,
    a label of 8 bytes, and the numbers that both share, for each token.
    """
    tokens, vocab = 2 * 256, 1024
    settings = {"model": "llama3-8b", "layers": 1, "seq_length": 256, "micro_batch_size": 2,
                "vocab": vocab}  # fmt: skip
    ((flops, moved),) = rows_of("cast", **settings)
    assert flops == tokens * (5 * vocab + 4)  # a conversion counts as one
    assert 6 * tokens * vocab < moved <= 6 * tokens * vocab + 24 * tokens
    ((flops, moved),) = rows_of("spread", **settings)
    assert 4 * tokens * vocab < flops <= tokens * (5 * vocab + 4)
    assert 6 * tokens * vocab < moved <= 6 * tokens * vocab + 24 * tokens


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 4 * 4 + 3 * 4 + 2), ("fp32", 28)])
def test_adam(precision: str, moved: int) -> None:
    """Bytes: reads gradient, weight and both moments, writes the last three, and a copy in 16 bit.

    FLOPs (arXiv 1711.05101, algorithm 2): 3 and 4 for the moments; root, epsilon, quotient; two for
    the step, two for the decay; corrections of the moments are part of the step size.
    """
    for flops, size in rows_of("adamw", model="gpt2", layers=2, seq_length=64, precision=precision):
        parameters, rest = divmod(flops, 14)
        assert rest == 0
        assert size == moved * parameters + 4  # and the scale of clipping


# ---- models of images ----------------------------------------------------------------------------


PUBLISHED = {
    # huggingface.co/google/vit-base-patch16-224 and -large-: parameters of the classifiers of 1000
    # classes, as torchvision and timm count them too; vit_huge_patch14_224 of timm.
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    # CLIP's vision model without the norm (2 x 1024) after its last layer
    "clip-vit-l-336": 303_507_456 - 2048,
    # llava-hf/llava-1.5-7b-hf, model.safetensors.index.json, without that norm
    "llava-1.5-7b": 7_063_427_072 - 2048,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert parameters(PRESETS[name]) == (PUBLISHED[name], PUBLISHED[name])


def test_flops_of_a_vision_transformer() -> None:
    """17.6 GFLOP forward, of 197 positions (ViT-B/16 in torchvision: 17.56 GFLOPs as
    multiply-adds, so twice that); element-wise work comes on top."""
    compiled = sw.compile(Run(model="vit-b-16"))
    t = compiled.program.classes[0].tasks
    forward = int(t.flops[t.phase == 0].sum())
    assert np.isclose(forward, 2 * 17.56e9, rtol=0.01)
