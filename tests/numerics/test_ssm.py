"""Layers that carry a state: textbook collectives, what they keep for backward, their FLOPs, whole
programs. What they compute, sharded or not, is tested with all other tiny models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.graph.node import Graph
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.lower.blocks import shard_block
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.kernels.extent import bytes_of, extent_of
from stagewright.lower.kernels.kernel import BlockSection
from stagewright.lower.kernels.lowering import tasks_of
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.model.layers import StateSpace
from stagewright.model.presets import PRESETS
from stagewright.parallel.degrees import parallelization
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.rules import check as check_run
from stagewright.run.settings import Run

_DELTA = StateSpace(heads=32, head_width=128, state=128, groups=16, chunk=64, conv_bias=False)
_PURE = {"mixers": ("gated_delta",), "state_space": _DELTA}
DELTA = replace(PRESETS["mamba-2.8b"], name="delta", **_PURE)
KIMI = replace(
    DELTA,
    name="kimi",
    mixers=("kimi_delta",),
    state_space=replace(_DELTA, groups=32, gate_rank=128),
)
LIGHTNING = replace(
    DELTA,
    name="lightning",
    mixers=("lightning",),
    state_space=replace(_DELTA, groups=32, conv=0, chunk=256),
)
MODELS = {m.name: m for m in (DELTA, KIMI, LIGHTNING)}


def model_of(name: str) -> ModelConfig:
    return MODELS[name] if name in MODELS else resolve(name)


@cache
def layer(name: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Graph, Run]:
    """The first layer as a run shards it."""
    model = model_of(name)
    run = Run(model=name, **dict(settings)).resolved(model)
    check_run(run, model)
    mesh, plan = parallelization(run, model)
    sizes, recipe = sizes_of(run, model), recipe_of(run, model)
    variant = BlockVariant("layer", model.layer(0))
    return shard_block(variant, run, model, mesh, plan, sizes, recipe), run


def moved(name: str, settings: dict[str, Any]) -> Counter[str]:
    """Collectives of activations and their gradients, by phase and axis."""
    graph, _ = layer(name, tuple(settings.items()))
    return Counter(
        f"{n.phase} {n.op} {'+'.join(n['axes'])}"  # pyright: ignore
        for n in graph
        if n.op in COLLECTIVE_OPS and not n.once and n.role is None
    )


@cases
def test_textbook(model: str, settings: dict[str, Any], wanted: dict[str, int]) -> None:
    assert moved(model, settings) == wanted


def test_sums_of_squares_where_ranks_share_a_group() -> None:
    """One group for all heads: RMSNorm needs one number per token of all ranks, as in vLLM."""
    graph, _ = layer("mamba2-2.7b", (("tp", 8),))
    found = [
        (n.phase, tuple(map(str, n.shape)))
        for n in graph
        if n.op == "all_reduce" and not n.once and n.role is None
    ]
    assert Counter(found) == {
        ("forward", ("B", "S", "Group")): 1,
        ("backward", ("B", "S", "Group")): 1,
        ("forward", ("B", "S", "M")): 1,
        ("backward", ("B", "S", "M")): 1,
    }


@cases
def test_what_can_be_split(settings: dict[str, Any], wanted: str | None) -> None:
    run = Run(**settings)
    if wanted is None:
        compile_run(run.model_copy(update={"layers": 2}))
        return
    with pytest.raises(UserError) as info:
        compile_run(run)
    assert str(info.value) == wanted


def test_axes_of_tp_where_heads_and_groups_are_few() -> None:
    """Qwen3-Next's shape: 2 key-value heads, and state heads in 4 groups, over 8 ranks."""
    state = StateSpace(heads=16, head_width=8, state=8, groups=4, chunk=64)
    model = replace(
        PRESETS["llama3.2-1b"],
        num_query_groups=2,
        mixers=("gated_delta", "global"),
        state_space=state,
    )
    mesh, plan = parallelization(Run(model="m", tp=8).resolved(model), model)
    assert mesh.axes[:3] == (("tp_rep", 2), ("tp_group", 2), ("tp_kv", 2))
    assert plan.tensor == ("tp_kv", "tp_group", "tp_rep")
    assert (plan.key_value, plan.state_groups) == (("tp_kv",), ("tp_kv", "tp_group"))
    odd = replace(model, state_space=replace(state, groups=3, heads=48), num_query_groups=2)
    with pytest.raises(UserError, match="shares 2 and 3 ways"):
        parallelization(Run(model="m", tp=6).resolved(odd), odd)


# ---- memory --------------------------------------------------------------------------------------


def kept(name: str, **settings: Any) -> int:
    """Bytes per token that a layer keeps for backward."""
    settings |= {"seq_length": 4096}
    graph, run = layer(name, tuple(settings.items()))
    model = model_of(name)
    mesh, _ = parallelization(run, model)
    extent = extent_of(sizes_of(run, model), mesh)
    tasks, _ = tasks_of(graph, extent, mesh)
    made = {n for t in tasks if t.section is BlockSection.FORWARD for n in t.made}
    made |= {n for n in graph if n.op == "input"}
    read = {
        n
        for t in tasks
        if t.section is BlockSection.BACKWARD
        for n in t.reads
        if n.phase == "forward"
    }
    return round(sum(bytes_of(n, extent) for n in made & read) / 4096)


def test_mamba_keeps_what_its_kernels_keep() -> None:
    """What mamba_inner_fn saves (selective_scan_interface.py, checkpoint_lvl 1): x and z, what time
    steps, B and C are made of, the scan's result; and the layer's input before and after norm."""
    m, s = PRESETS["mamba-2.8b"], PRESETS["mamba-2.8b"].state_space
    assert s
    elements = 2 * m.hidden_size + 3 * s.inner + s.dt_rank + 2 * s.state
    rates = 4 * s.inner * s.state / 4096  # A, in fp32, once
    assert kept("mamba-2.8b") == round(2 * elements + rates)


@pytest.mark.parametrize("tp", [1, 8])
def test_mamba2_keeps_what_megatron_keeps(tp: int) -> None:
    """Megatron-LM's MambaMixer with use_mamba_mem_eff_path: mamba_split_conv1d_scan_combined saves
    z, x, B, C, dt and its result before the gate; the norm its input, the output product its own.
    """
    m, s = PRESETS["nemotron-h-8b"], PRESETS["nemotron-h-8b"].state_space
    assert s
    split = 5 * s.inner + 2 * s.groups * s.state + s.heads
    per_rank = 2 * (2 * m.hidden_size + split // tp) + 4 * s.groups // tp  # mean squares in fp32
    assert abs(kept("nemotron-h-8b", tp=tp) - per_rank) <= 1


def test_delta_rule_keeps_what_its_kernels_keep() -> None:
    """flash-linear-attention's chunk_gated_delta_rule saves q and k of length 1 with their inverse
    lengths, v, decays, beta and the inverses of the chunks; the convolutions save their inputs."""
    m, s = DELTA, _DELTA
    keys, inverses = 2 * s.groups * s.state, s.heads * s.chunk
    elements = 2 * m.hidden_size  # input, normed
    elements += 2 * (keys + s.inner)  # before and after the convolutions
    elements += inverses + 4 * s.inner  # the result, normed, the gate, the product of both
    small = 2 * s.groups * 4 + s.heads * (2 + 4 + 2 + 4 + 4)  # beta's and dt's sources; fp32
    assert abs(kept("delta") - (2 * elements + small)) <= 8 * s.heads


# ---- work ----------------------------------------------------------------------------------------


def forward(name: str, **settings: Any) -> dict[str, int]:
    """FLOPs per token of a whole forward, by operation."""
    compiled = compile_run(Run(model=name, fuse=False, **settings), model_of(name))
    found: Counter[str] = Counter()
    for c in compiled.program.classes:
        t = c.tasks
        for row in ((t.phase == PHASES.index("forward")) & (t.kind == TaskKind.COMPUTE)).nonzero()[
            0
        ]:
            found[t.ops[t.op[row]]] += int(t.flops[row]) * len(c.ranks)
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"tp": 8}, {"tp": 4, "cp": 2}, {"dp": 2, "zero": 3}], ids=str
)
def test_nemotron_h_does_what_its_parts_do(settings: dict[str, Any]) -> None:
    """Megatron-LM's hybrid_flops (training.py), with the products of SSD in place of its estimate
    of the scan and a causal mask that is skipped."""
    length = 8192
    tokens = length * settings.get("dp", 1)
    m = PRESETS["nemotron-h-8b"]
    s = m.state_space
    assert s
    found = forward("nemotron-h-8b", seq_length=length, **settings)
    into = 2 * s.inner + 2 * s.groups * s.state + s.heads
    mamba = 2 * m.hidden_size * (into + s.inner)
    heads, kv = m.num_attention_heads * 128, m.num_query_groups * 128
    attention = 2 * m.hidden_size * (2 * heads + 2 * kv)
    mlp = 2 * 2 * m.hidden_size * m.ffn_hidden_size
    products = 24 * mamba + 4 * attention + 24 * mlp + 2 * m.hidden_size * m.vocab_size
    assert found["einsum"] == tokens * products
    assert found["attention"] == tokens * 4 * 2 * heads * length
    per_head = s.chunk * s.head_width + 4 * s.state * s.head_width
    ssd = s.heads * per_head + s.groups * 2 * s.chunk * s.state
    assert found["linear_attention"] == tokens * 24 * ssd
    assert found["conv1d"] == tokens * 24 * (s.inner + 2 * s.groups * s.state) * (2 * 4 + 8)


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"dp": 2, "zero": 3}, {"cp": 4}], ids=str)
def test_falcon_h1_does_what_its_halves_do(settings: dict[str, Any]) -> None:
    length = 4096
    tokens = length * settings.get("dp", 1)
    m = PRESETS["falcon-h1-1.5b"]
    s = m.state_space
    assert s
    found = forward(m.name, seq_length=length, vocab=65536, **settings)
    heads, kv = m.num_attention_heads * 128, m.num_query_groups * 128
    tp, copies = settings.get("tp", 1), settings.get("tp", 1) * settings.get("cp", 1)
    into = 2 * s.inner + 2 * s.state * tp + s.heads  # ranks share the one group of B and C
    weights = m.hidden_size * (into + s.inner + 2 * heads + 2 * kv + 3 * m.ffn_hidden_size)
    assert found["einsum"] == tokens * 2 * (24 * weights + m.hidden_size * 65536)
    assert found["attention"] == tokens * 24 * 2 * heads * length
    per_head = s.chunk * s.head_width + 4 * s.state * s.head_width
    ssd = s.heads * per_head + copies * 2 * s.chunk * s.state
    assert found["linear_attention"] == tokens * 24 * ssd


def test_six_per_parameter() -> None:
    """A state-space model does 6 FLOPs per parameter and token, and little else."""
    compiled = compile_run(Run(model="mamba2-2.7b", seq_length=2048))
    (c,) = compiled.program.classes
    step = c.tasks.phase != PHASES.index("optimizer")
    assert 1 < int(c.tasks.flops[step].sum()) / (6 * 2048 * compiled.parameters) < 1.06


def test_the_plain_scan_holds_its_states() -> None:
    """Table X of arXiv 2511.10480: states in memory, [B, S, inner, state] a few times over."""
    whole = 2 * PRESETS["mamba-2.8b"].hidden_size * 16 * 4
    assert kept("mamba-2.8b", flash_attention=False) > 3 * whole


# ---- whole programs ------------------------------------------------------------------------------
