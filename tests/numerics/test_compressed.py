"""Attention to compressed keys and several residual streams (DeepSeek-V4): what they cost."""

from __future__ import annotations

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from spmd import TINY, case, single
from stagewright.graph.node import Graph
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind
from stagewright.run.lengths import COLUMNS, Cache, attention_sums
from stagewright.run.sections.inference import Group

V4 = "deepseek-v4-pro"


@pytest.mark.parametrize(("each", "top"), [(4, 0), (128, 0), (4, 1024), (3, 2)])
def test_sums_are_those_of_a_loop(each: int, top: int) -> None:
    for context, new in ((0, 1), (0, 5000), (2047, 200), (65535, 3), (127, 1), (128, 127)):
        seen = [(context + j + 1) // each for j in range(new)]
        kept = [min(n, top) if top else n for n in seen]
        reach = Reach(top=top, compress=each)
        (row,) = attention_sums([Group(1, context, new)], Cache(16), reach)
        got = dict(zip(COLUMNS, row.tolist(), strict=True))
        assert got["pairs"] == sum(kept)
        assert got["keys"] == min(seen[-1], sum(kept))
        assert got["stored"] == seen[-1] - context // each
        assert got["slots"] == -(-seen[-1] // 16) * 16


def flops_of(compiled: sw.Compiled, op: str) -> dict[int, int]:
    """FLOPs of an op on the first rank, by layer."""
    tasks = compiled.program.classes[0].tasks
    rows = np.flatnonzero(tasks.kind == TaskKind.COMPUTE)
    found: dict[int, int] = {}
    for i in rows:
        if tasks.ops[tasks.op[i]].split("+")[0] == op:
            layer = int(tasks.layer[i])
            found[layer] = found.get(layer, 0) + int(tasks.flops[i])
    return found


def test_pairs_of_a_sequence() -> None:
    """128 heads of 512 channels, as keys and as values, read a window of 128 rows and compressed
    rows: all of the first two layers, 1,024 in the third, whose indexer has 64 heads of 128."""
    length = 8192
    run = sw.Run(model=V4, layers=3, tp=1, ep=1, seq_length=length)
    compiled = sw.compile(run)
    window = sum(min(128, i + 1) for i in range(length))
    every = sum((i + 1) // 128 for i in range(length))
    some = sum(min(1024, (i + 1) // 4) for i in range(length))
    scored = sum((i + 1) // 4 for i in range(length))
    found = flops_of(compiled, "attention")
    assert found == {
        layer: 2 * 128 * 1024 * (window + pairs) for layer, pairs in enumerate((every, every, some))
    }
    assert flops_of(compiled, "index_topk") == {2: 2 * 64 * (128 + 1) * scored}


def test_a_token_costs_a_quarter_and_a_tenth_of_what_it_costs_v3_2() -> None:
    """At a million tokens DeepSeek-V4-Pro takes 27% of the FLOPs of V3.2 for a token, and 10% of
    its cache (its model card); caches in few bits, which the card counts, are not these here."""
    flops: list[float] = []
    bytes_: list[int] = []
    for model in ("deepseek-v3.2", V4):
        run = sw.Run(model=model, tp=1, mode="decode", batch_size=1, context_length=2**20 - 1)
        (of,) = sw.compile(run).program.classes
        flops.append(float(of.tasks.flops.sum()))
        bytes_.append(of.memory["kv_cache"])
    assert flops[1] / flops[0] == pytest.approx(0.27, abs=0.02)
    assert bytes_[1] / bytes_[0] == pytest.approx(0.10, abs=0.02)


def test_a_mix_keeps_the_sum_of_the_streams() -> None:
    """Its weights are doubly stochastic (arXiv 2512.24880, section 4.1)."""
    c = case("deepseek-v4", "layer")
    assert TINY["deepseek-v4"].residual_streams == 2
    (mix,) = (n for n in c.block.graph if n.name == "attn_mix")
    got = single(Graph.of(c.block.graph.nodes, {"mix": mix}), c.sizes, c.values)["mix"]
    np.testing.assert_allclose(got.sum(-2), 1, atol=1e-5)  # whatever the number of iterations
    np.testing.assert_allclose(got.sum(-1), 1, atol=0.2)  # after three of them


@cases
def test_what_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(sw.UserError, match=said):
        sw.compile(sw.Run(model=V4, layers=3, **settings))


@pytest.mark.parametrize("settings", [{"tp": 2, "sequence_parallel": True}, {"pp": 3}, {"cp": 2}])
def test_flops_are_those_of_one_device(settings: dict[str, object]) -> None:
    """However a model is split, its ranks compute as much together."""
    run = sw.Run(
        model=V4, layers=3, seq_length=4096, global_batch_size=6, cp_comm_type="all_gather"
    )
    whole = flops_of(sw.compile(run), "attention")
    compiled = sw.compile(run.model_copy(update=settings))
    program = compiled.program
    total = 0
    for of in program.classes:
        rows = [s.kernel == "attention" if s else False for s in of.tasks.shapes]
        here = np.array([*rows, False])[of.tasks.shape]
        total += int(of.tasks.flops[here & (of.tasks.phase == 0)].sum()) * len(of.ranks)
    assert total == sum(whole.values())
