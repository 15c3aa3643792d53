"""What trains: what PEFT counts of it, and what a run computes, exchanges and holds for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.parameters import TrainedParameters
from stagewright.program.columns import COLLECTIVES, PHASES, TaskKind
from stagewright.run.settings import Run
from stagewright.views.summary import summary

TINY = {"model": "llama3-8b", "layers": 2, "seq_length": 64}


def compiled(**settings: Any) -> CompiledRun:
    return compile(Run(**{**TINY, **settings}))


def flops(of: CompiledRun) -> dict[str, int]:
    """FLOPs of matrix products of all ranks, by phase."""
    found = dict.fromkeys(PHASES, 0)
    for each in of.program.classes:
        t = each.tasks
        for shape, phase in zip(t.shape.tolist(), t.phase.tolist(), strict=True):
            if shape >= 0 and t.shapes[shape].kernel == "gemm":
                product = 2 * math.prod(size for _, size in t.shapes[shape].extents)
                found[PHASES[phase]] += product * len(each.ranks)
    return found


# ---- counts --------------------------------------------------------------------------------------


@cases
def test_as_many_parameters_train_as_peft_counts(
    model: str, rank: int, targets: Sequence[str], more: Sequence[str], wanted: int
) -> None:
    run = Run(model=model, lora_rank=rank, lora_target_modules=targets, seq_length=8)
    run = run.model_copy(update={"trainable": tuple(more) or None})
    found = compile(run).trained
    assert found is not None
    assert found.trainable == wanted


def test_latent_attention_has_the_adapters_that_peft_counts() -> None:
    """As above, of DeepseekV3Config(num_hidden_layers=4)."""
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    run = {"model": "deepseek-v3", "layers": 4, "lora_rank": 8, "mtp_num_layers": 0}
    assert compiled(**run, lora_target_modules=names).trained == TrainedParameters(
        3_180_544, 3_180_544
    )


def test_fused_layers_have_one_first_factor() -> None:
    """Of Llama 3 8B's qkv: (4096 + 6144) r, not (3 * 4096 + 6144) r."""
    fused = compiled(lora_rank=8, lora_target_modules=("linear_qkv",)).trained
    each = compiled(lora_rank=8, lora_target_modules=("linear_q", "linear_k", "linear_v")).trained
    assert fused == TrainedParameters(2 * 8 * (4096 + 6144), 2 * 8 * (4096 + 6144))
    assert each == TrainedParameters(2 * 8 * (3 * 4096 + 6144), 2 * 8 * (3 * 4096 + 6144))


# ---- FLOPs, bytes, messages ----------------------------------------------------------------------


def test_backward_of_frozen_products_is_half() -> None:
    """Where all trains, backward has twice the products of forward; with these frozen, as many."""
    whole, norms = flops(compiled()), flops(compiled(trainable=("*norm.weight",)))
    assert whole["backward"] == 2 * whole["forward"]
    assert norms["forward"] == whole["forward"]
    assert norms["backward"] == norms["forward"]
    # Of the first layer, nothing below the norm needs a gradient: q, k and v are not multiplied.
    above = flops(compiled(trainable=("mlp_norm.weight",)))
    assert norms["backward"] - above["backward"] == 2 * 64 * 4096 * (2 * 4096 + 2 * 1024)


def test_a_step_with_adapters_is_forward_and_the_gradient_of_inputs() -> None:
    """4/6 of training, and three times the adapters' own products. The input of the first layer
    needs no gradient: its products with q, k and v, and with their first factor, are made once."""
    base, rank, tokens = flops(compiled()), 16, 64
    of = compiled(lora_rank=rank)
    found = flops(of)
    assert of.trained is not None
    adapters = 2 * tokens * of.trained.adapters
    first = 2 * tokens * 4096 * (4096 + 2 * 1024) + 2 * tokens * 4096 * rank
    assert found["forward"] == base["forward"] + adapters
    assert found["backward"] == base["forward"] + 2 * adapters - first


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    """With AdamW of Megatron-LM: 2 bytes for all, 4 + 12 for those that train."""
    of = compiled(lora_rank=16)
    assert of.trained is not None
    (only,) = of.program.classes
    assert only.memory["parameters"] == 2 * (of.parameters + of.trained.adapters)
    assert only.memory["gradients"] == 4 * of.trained.adapters
    assert only.memory["optimizer"] == 12 * of.trained.adapters


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_only_gradients_of_what_trains_are_reduced(zero: int) -> None:
    of = compiled(lora_rank=16, dp=4, zero=zero)
    assert of.trained is not None
    (only,) = of.program.classes
    t = only.tasks
    kinds = {i for i, op in enumerate(t.ops) if op in COLLECTIVES}
    reduces = np.isin(t.op, [*kinds]) & (t.phase == PHASES.index("backward"))
    names = [t.names[i] for i in t.name[reduces]]
    reductions = [n for n in names if "all_gather" not in n]
    size = int(t.comm_bytes[reduces][["all_gather" not in n for n in names]].sum())
    assert reductions
    assert size == 4 * of.trained.trainable
    gathered = int(t.comm_bytes[(t.kind == TaskKind.COLLECTIVE) & (t.phase == 0)].sum())
    # Frozen shards are gathered like others.
    assert gathered == (2 * (of.parameters + of.trained.adapters) // 4 if zero == 3 else 0)


def test_activations_of_frozen_products_are_not_kept() -> None:
    """Only gradients of weights need the inputs of products. SwiGLU's gradient needs up and gate,
    that of attention its operands and its result, that of a norm its input."""

    def kept(**settings: Any) -> set[str]:
        of = summary(compiled(**settings, vocab=64))["rank_classes"][0]["memory_peak"]
        assert of["layer"] == 1
        alive = [v for v in of["alive"] if v["category"] == "activations" and 0 in v["layers"]]
        return {v["name"] for v in alive}

    inputs = {"attn_norm_out", "mlp_norm_out", "act"}
    others = {"attn_residual", "core", "gate", "k_rope", "mlp_residual", "q_rope", "up", "v"}
    assert kept() == inputs | others
    assert kept(trainable=("*norm.weight",)) == others


# ---- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_a_stage_below_all_that_trains_has_no_backward(schedule: str) -> None:
    of = compiled(
        layers=8, pp=4, vpp=2 if schedule == "zbv" else 1, schedule=schedule,
        freeze=("embedding.*", "layer0.*", "layer1.*"), global_batch_size=8,
    )  # fmt: skip
    first = of.program.classes[0].tasks
    sends = first.kind == TaskKind.SEND
    backward = first.phase == PHASES.index("backward")
    assert int(sends.sum()) > 0
    last = of.program.classes[-1].tasks
    assert int((last.phase == PHASES.index("backward")).sum()) > 0
    if schedule != "zbv":  # whose first rank holds the last stage, too
        assert not backward.any()
        # Its rank takes part in the norm of all gradients.
        assert "grad_norm.all_reduce" in {first.names[i] for i in first.name}


@pytest.mark.parametrize("schedule", ["zbv", "v-half", "v-min"])
@cases
def test_weights_are_gathered_in_the_half_of_a_backward_that_reads_them(
    settings: dict[str, Any], schedule: str
) -> None:
    """Below what trains first there is no gradient of inputs, and the first half reads no weights:
    no other microbatch passes between a gather and the first kernel that reads it."""
    pipeline = {"layers": 4, "pp": 2, "vpp": 2, "dp": 2, "zero": 3, "schedule": schedule}
    of = compiled(**pipeline, global_batch_size=12, **settings)
    seen = 0
    for each in of.program.classes:
        t = each.tasks
        owner, needed = t.reads
        user = np.full(len(t), len(t))
        np.minimum.at(user, needed, owner)
        gathers = (t.phase == PHASES.index("backward")) & (t.microbatch >= 0)
        gathers &= t.collective == COLLECTIVES.index("all_gather")
        gathers &= np.diff(t.data_ptr) == 0
        for row in np.flatnonzero(gathers).tolist():
            between = t.microbatch[row : user[row] + 1]
            assert (between == t.microbatch[row]).all(), t.names[t.name[row]]
            seen += 1
    assert seen


def test_a_table_is_frozen_in_all_its_copies() -> None:
    """FSDP2's root unit gathers a tied embedding once, and hands it to the output projection."""
    of = compiled(model="gemma2-9b", framework="torchtitan", dp=2, zero=3, trainable=("w_up",))
    assert "d_wte" not in {n.name for n in of.blocks["head"]}


# ---- errors --------------------------------------------------------------------------------------


@cases
def test_what_cannot_train_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compiled(**settings)
