"""Layers that share their weights (Zamba2): one tensor on a rank, copies on others, products in
closed form, what stages send. What they compute is tested in test_carried.py and
test_inference_numerics.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from invariants import check as check_program
from stagewright.errors import UserError
from stagewright.lower.parameters import parameters
from stagewright.model.layers import SharedBlocks
from stagewright.model.presets import PRESETS
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.settings import Run

SMALL = PRESETS["zamba2-1.2b"]
LARGE = PRESETS["zamba2-7b"]


def compiled(model: str = "zamba2-1.2b", **settings: Any) -> sw.Compiled:
    return sw.compile(Run(model=model, **settings))


def shared_weights(model: str) -> int:
    """Of one shared block: it reads twice the width, and its norm does."""
    c = PRESETS[model]
    heads = c.num_attention_heads * c.kv_channels
    attention = 2 * c.hidden_size * 3 * heads + heads * c.hidden_size
    return attention + 3 * c.hidden_size * c.ffn_hidden_size + 3 * c.hidden_size


# ---- one tensor on a rank ------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["zamba2-1.2b", "zamba2-2.7b", "zamba2-7b"])
def test_a_rank_holds_it_once(model: str) -> None:
    """Weights, gradients and states of AdamW: 2 + 4 + 12 bytes of each parameter (arXiv 1910.02054,
    section 3.1, with gradients in fp32), however many layers use it."""
    memory = compiled(model, seq_length=64).program.classes[0].memory
    total = parameters(PRESETS[model])[0]
    assert memory["parameters"] == 2 * total
    assert memory["gradients"] == 4 * total
    assert memory["optimizer"] == 12 * total


def test_stages_hold_copies_whose_gradients_are_summed() -> None:
    """Layers 5, 11 | 17 (23) | 29, 35 of 38 on three stages: all have the one block."""
    split = (13, 12, 13)
    found = compiled(pp=3, layers_per_stage=split, seq_length=64, global_batch_size=3)
    check_program(found.program, seeds=(0,))
    copies = {
        c.pipeline_rank: Counter(
            c.tasks.names[i] for i in c.tasks.name[c.tasks.kind == TaskKind.COLLECTIVE]
        )
        for c in found.program.classes
    }
    ends = {0: "layer5", 1: "layer17", 2: "layer29"}  # the first that has it there
    for rank, names in copies.items():
        tied = [n for n in names if ".shared." in n]
        assert len(tied) == 9
        assert all(n.startswith(ends[rank]) and names[n] == 1 for n in tied)
    more = sum(c.memory["parameters"] for c in found.program.classes) - 2 * parameters(SMALL)[0]
    table = SMALL.vocab_size * SMALL.hidden_size
    assert more == 2 * (2 * shared_weights("zamba2-1.2b") + table)


def test_only_stages_with_a_copy_take_part() -> None:
    """Of three stages of layers, the one in the middle has no layer with the block."""
    few = replace(SMALL, num_layers=6, shared_blocks=SharedBlocks(layers=(1, 0, 0, 0, 0, 1)))
    run = Run(model=few.name, pp=3, seq_length=64, global_batch_size=3)
    found = sw.compile(run, few)
    assert {who.only for who in found.program.communicators if who.only} == {(0, 2)}
    t = found.program.classes[1].tasks
    assert not any("shared" in name for name in t.names if name in {t.names[i] for i in t.name})


@cases
def test_stages_of_a_rank_add_to_one_gradient(model: str, settings: dict[str, Any]) -> None:
    """Two stages of a rank have a copy: what each finds is added up in every microbatch, and once
    reduced where it is so in each."""
    weight, layers = ("shared.wq", 24) if model.startswith("zamba") else ("wte", 4)
    schedule = "interleaved" if model.startswith("zamba") else "zbv"
    run: dict[str, Any] = {"layers": layers, "pp": 2, "vpp": 2, "schedule": schedule, "dp": 2}
    run |= {"seq_length": 64, "global_batch_size": 8, "fuse": False, "bucket": "parameter"}
    program = compiled(model, **run | settings).program
    t = program.classes[0].tasks
    found: Counter[tuple[int, str]] = Counter()
    for i in range(len(t)):
        if t.names[t.name[i]].partition(".")[2].startswith(weight):
            found[int(t.stage[i]), t.ops[t.op[i]]] += 1
    stages = {stage for stage, op in found if op == "accumulate"}
    assert len(stages) == 2
    assert {found[stage, "accumulate"] for stage in stages} == {4}
    assert sum(found[stage, "adamw"] for stage in stages) == 1
    if settings:
        reduces = "reduce_scatter" if settings.get("zero") else "all_reduce"
        assert min(found[stage, reduces] for stage in stages) == 4


# ---- what is handed on ---------------------------------------------------------------------------


def test_stages_send_the_embedded_tokens_along() -> None:
    """As far as the last layer that reads them, and their gradient back."""
    few = replace(SMALL, num_layers=8, shared_blocks=SharedBlocks(layers=(0, 0, 0, 1, 0, 0, 0, 0)))
    found = sw.compile(Run(model=few.name, pp=4, seq_length=64, global_batch_size=4), few)
    sent = {
        c.pipeline_rank: {c.tasks.names[i] for i in c.tasks.name[c.tasks.kind == TaskKind.SEND]}
        for c in found.program.classes
    }
    assert sent == {
        0: {"forward.send", "forward.original.send"},
        1: {"forward.send", "backward.send", "backward.original.send"},
        2: {"forward.send", "backward.send"},
        3: {"backward.send"},
    }
    size = 64 * few.hidden_size * 2
    assert all(
        set(c.tasks.comm_bytes[c.tasks.kind == TaskKind.SEND].tolist()) == {size}
        for c in found.program.classes
    )


@pytest.mark.parametrize(("model", "adapters"), [("zamba2-1.2b", 4), ("zamba2-2.7b", 1)])
def test_collectives_of_a_layer(model: str, adapters: int) -> None:
    """As vLLM's zamba2.py: sums after attention, MLP and mixer, a gather inside each adapter; and a
    sum of squares of the mixer's one group."""
    program = compiled(model, seq_length=64, tp=2, layers=13).program
    t = program.classes[0].tasks
    here = (t.kind == TaskKind.COLLECTIVE) & (t.layer == 12 - (model == "zamba2-1.2b"))
    found = Counter((PHASES[t.phase[i]], t.ops[t.op[i]]) for i in here.nonzero()[0])
    assert found["forward", "all_reduce"] == 4
    assert found["forward", "all_gather"] == adapters
    assert found["backward", "reduce_scatter"] == adapters


# ---- work ----------------------------------------------------------------------------------------


@cases
def test_flops(model: str, settings: dict[str, Any]) -> None:
    """Products with weights, shared ones once for each layer that has them: 2, 4 backward."""
    length, batch = 512, 3 if "pp" in settings else settings.get("dp", 1)
    run = {"seq_length": length, "global_batch_size": batch, "fuse": False} | settings
    c, s = PRESETS[model], PRESETS[model].state_space
    assert s
    assert c.shared_blocks
    hidden, rank = c.hidden_size, c.shared_blocks.adapter_rank
    uses = sum(block > 0 for block in c.shared_blocks.layers)
    tp = settings.get("tp", 1)  # ranks have the one group's B and C, and the layer's own matrix
    mamba = hidden * (3 * s.inner + 2 * tp * s.state + s.heads)
    heads = c.num_attention_heads * c.kv_channels
    adapters = rank * (hidden + 2 * c.ffn_hidden_size)
    adapters += c.shared_blocks.attention_adapter * 3 * rank * (2 * hidden + heads)
    block = shared_weights(model) - 3 * hidden + tp * hidden**2 + adapters
    weights = c.num_layers * mamba + uses * block + hidden * c.vocab_size
    program = compiled(model, **run).program
    for phase, times in (("forward", 2), ("backward", 4)):
        found = core = 0
        for each in program.classes:
            t = each.tasks
            here = t.phase == PHASES.index(phase)
            ops = np.array(t.ops)[t.op]
            found += int(t.flops[here & (ops == "einsum")].sum()) * len(each.ranks)
            core += int(t.flops[here & (ops == "attention")].sum()) * len(each.ranks)
        assert found == times * batch * length * weights
        if phase == "forward":
            assert core == batch * uses * 2 * length * length * heads


# ---- inference -----------------------------------------------------------------------------------


def test_inference_holds_weights_once_and_a_cache_for_each_use() -> None:
    c, s = SMALL, SMALL.state_space
    assert s
    found = compiled(mode="decode", batch_size=8, context_length=1023, kv_block_size=1)
    memory = found.program.classes[0].memory
    assert memory["parameters"] == 2 * parameters(c)[0]
    keys = 6 * 2 * c.num_attention_heads * c.kv_channels * 1024
    states = c.num_layers * (s.inner * s.state + 3 * (s.inner + 2 * s.state))
    assert memory["kv_cache"] == 2 * 8 * (keys + states)
    two = compiled(mode="decode", batch_size=8, context_length=1023, pp=2)
    held = [each.memory["parameters"] for each in two.program.classes]
    table = c.vocab_size * c.hidden_size
    assert sum(held) == 2 * (parameters(c)[0] + shared_weights(c.name) + table)


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"shared_blocks": SharedBlocks(layers=(0, 2))}, "blocks that are numbered 1, 2"),
        ({"shared_blocks": SharedBlocks(layers=(0, 0))}, "blocks that are numbered 1, 2"),
        ({"shared_blocks": SharedBlocks(layers=())}, "blocks that are numbered 1, 2"),
        ({"shared_blocks": SharedBlocks(layers=(1, -1))}, "the number of a block for each layer"),
        ({"shared_blocks": SharedBlocks(layers=(1,), attention_adapter=True)}, "with a rank"),
        ({"qk_norm": True}, "qk_norm is True, wanted False in a model with shared blocks"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1, wanted 0 in a model with shared blocks"),
        ({"position": "alibi"}, "rope or none in a model with shared blocks"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        replace(SMALL, **change)


def test_adapters_that_tp_cannot_split() -> None:
    odd = replace(SMALL, shared_blocks=SharedBlocks(layers=(1,), adapter_rank=3))
    with pytest.raises(UserError, match="tp=2 does not divide the adapters' rank 3"):
        sw.compile(Run(model=odd.name, tp=2), odd)


def test_places_are_the_published_ones() -> None:
    """Two blocks in turn in 13 of 81 layers, at first five apart and then six."""
    assert LARGE.shared_blocks
    at = [i for i, block in enumerate(LARGE.shared_blocks.layers) if block]
    assert [b - a for a, b in pairwise(at)] == [5, *[6] * 11]
    assert [LARGE.layer(i).block for i in at] == [1, 2] * 6 + [1]
