"""An indexer learns what attention attends to, and costs what its loops do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from spmd import TINY, case, single
from stagewright.blocks import Recipe
from stagewright.graph.node import Graph, Node
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind
from stagewright.run.lengths import COLUMNS, Cache, attention_sums
from stagewright.run.sections.inference import Group

LEARNS = Recipe(index_loss=1.0)
WEIGHTS = ("w_index_q", "w_index_k", "w_index_weights", "index_k_norm.weight", "index_k_norm.bias")


def nodes(graph: Graph) -> dict[str, Node]:
    return {n.op: n for n in graph if n.phase == "forward"}


@pytest.mark.parametrize("model", ["glm-5.2", "minimax-m3"])
def test_the_gradient_of_an_indexer_is_that_of_the_divergence(model: str) -> None:
    """KL(attention of the chosen keys || softmax of their scores), arXiv 2512.02556, equation 4."""
    c = case(model, "layer", LEARNS)
    found = nodes(c.block.graph)
    parts = {"scores": found["index_scores"], "target": found["index_target"]}
    graph = Graph.of(c.block.graph.nodes, parts)
    target = single(graph, c.sizes, c.values)["target"]
    target = target / target.sum(-1, keepdims=True)

    def divergence(values: dict[str, Any]) -> float:
        x = single(graph, c.sizes, values)["scores"]
        x = x - x.max(-1, keepdims=True)
        return float(-(target * (x - np.log(np.exp(x).sum(-1, keepdims=True)))).sum())

    rng = np.random.default_rng(0)
    for name in (n.name for n in c.block.graph if n.op == "param" and "index" in n.name):
        way, h = rng.normal(size=c.values[name].shape), 1e-6
        ends = [divergence(c.values | {name: c.values[name] + s * h * way}) for s in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert (c.truth[f"grad.{name}"] * way).sum() == pytest.approx(slope, rel=1e-4), name


def test_nothing_else_learns_from_the_scores() -> None:
    with_loss, without = case("glm-5.2", "layer", LEARNS), case("glm-5.2", "layer")
    for name, value in without.truth.items():
        if name.removeprefix("grad.") not in WEIGHTS and name[:4] == "grad":
            np.testing.assert_array_equal(with_loss.truth[name], value)
    assert not any(without.truth[f"grad.{name}"].any() for name in WEIGHTS)


def test_a_query_reads_so_many_keys_at_most() -> None:
    """Against a loop over the new tokens of requests shorter and longer than the choice."""
    top = 2048
    for context, new in ((0, 1), (2047, 2), (65536, 1), (0, 5000), (1000, 3000), (65536, 3)):
        seen = [min(top, context + j + 1) for j in range(new)]
        (row,) = attention_sums([Group(1, context, new)], Cache(16), Reach(top=top))
        got = dict(zip(COLUMNS, row.tolist(), strict=True))
        assert got["pairs"] == sum(seen)
        assert got["keys"] == min(context + new, sum(seen))
        assert got["slots"] == -(-(context + new) // 16) * 16  # nothing is forgotten


def test_blocks_of_keys_with_the_own_one_among_them() -> None:
    top, block = 2048, 128
    for context, new in ((0, 1), (2047, 200), (65535, 3), (0, 5000), (1000, 3001)):
        at = [context + j for j in range(new)]
        seen = [p + 1 if p < top else top - block + p % block + 1 for p in at]
        (row,) = attention_sums([Group(1, context, new)], Cache(16), Reach(top=top, block=block))
        assert dict(zip(COLUMNS, row.tolist(), strict=True))["pairs"] == sum(seen)


def kernels(compiled: sw.Compiled) -> dict[str, tuple[int, int]]:
    """FLOPs and bytes of the last layer's kernels on the first rank, by the name of the op."""
    tasks = compiled.program.classes[0].tasks
    chosen = np.flatnonzero((tasks.kind == TaskKind.COMPUTE) & (tasks.layer == tasks.layer.max()))
    names = {tasks.ops[tasks.op[i]]: (int(tasks.flops[i]), int(tasks.traffic[i])) for i in chosen}
    return {name.split("+")[0]: work for name, work in names.items()}


@pytest.mark.parametrize("context", [1000, 2047, 65535])
def test_work_of_a_decode_step(context: int) -> None:
    """DeepSeek-V3.2: 64 heads of 128 score every token's key of 128 bytes and a scale; 128 heads
    read the latents, 576 numbers in bf16, of at most 2048 tokens."""
    run = sw.Run(
        model="deepseek-v3.2", layers=4, mode="decode", tp=1, batch_size=4, context_length=context
    )
    work, tokens = kernels(sw.compile(run)), context + 1
    flops, traffic = work["index_topk"]
    assert flops == 2 * 64 * (128 + 1) * 4 * tokens
    queries = 4 * (64 * 128 + 2 * 64 + 4 * 2048)  # fp8 queries, weights in bf16, numbers of keys
    assert 0 < traffic - queries - 4 * tokens * (128 + 4 + 8) < 4 * 8 * (2 + tokens // 16)
    flops, traffic = work["cached_attention"]
    read = min(2048, tokens)
    assert flops == 2 * 128 * (576 + 512) * 4 * read
    queries = 4 * (128 * (576 + 512) * 2 + 4 * 2048)
    assert 0 < traffic - queries - 4 * read * 576 * 2 < 4 * 8 * (2 + tokens // 16)


def test_work_of_a_decode_step_in_blocks() -> None:
    """MiniMax-M3 with tp=4: a key-value head of each rank reads 15 blocks of 128 keys and what its
    own block has; one index head scores all keys, and the highest score of a block is written."""
    run = sw.Run(
        model="minimax-m3", layers=4, mode="decode", tp=4, batch_size=4, context_length=65535
    )
    work, tokens = kernels(sw.compile(run)), 65536
    flops, traffic = work["index_topk"]
    assert flops == 2 * 128 * 4 * tokens
    rows = 4 * (128 * 2 + 4 * 16)
    assert 0 < traffic - rows - 4 * (tokens * 128 * 2 + 8 * tokens // 128) < 4 * 8 * (2 + 4096)
    flops, traffic = work["cached_attention"]
    read = 15 * 128 + 128
    assert flops == 2 * 16 * (128 + 128) * 4 * read
    rows = 4 * (16 * 256 * 2 + 4 * 16)
    assert 0 < traffic - rows - 4 * read * 256 * 2 < 4 * 8 * (2 + 4096)


def test_every_layer_of_training_reads_chosen_keys() -> None:
    """In a sequence of 8192, 2 x 2048 x 8192 - 2048 ** 2 over 2 pairs instead of 8192 ** 2 / 2."""
    run = sw.Run(model="deepseek-v3.2", layers=4, tp=1, seq_length=8192)
    work = kernels(sw.compile(run))
    pairs = (2 * 2048 * 8192 - 2048**2) // 2
    assert work["attention"][0] == 2 * 128 * (576 + 512) * pairs
    assert work["index_topk"][0] == 2 * 64 * (128 + 1) * 8192**2 // 2


def test_a_choice_is_shared_over_stages() -> None:
    """GLM-5.2: a stage that begins with layers without indexer is sent the numbers of the keys, and
    hands no gradient of them back."""
    run = sw.Run(model="glm-5.2", layers=8, pp=2, tp=8, seq_length=4096, etp=1, ep=1)
    program = sw.compile(run).program
    sent = [
        [int(t.comm_bytes[i]) for i in np.flatnonzero(t.kind == TaskKind.SEND)]
        for t in (of.tasks for of in program.classes)
    ]
    stream, numbers = 4096 * 6144 * 2, 4096 * 2048 * 4
    forward, backward = sent
    assert set(forward) == {stream, numbers}
    assert set(backward) == {stream}


def test_indexers_that_no_model_can_have() -> None:
    tiny = TINY["glm-5.2"]
    for fields, message in (
        (
            {"index_topk": 0, "index_n_heads": 0, "index_head_dim": 0},
            "index_topk is 0, wanted some",
        ),
        ({"index_n_heads": 0}, "index_n_heads is 0, wanted the number"),
        ({"index_head_dim": 1}, "index_head_dim is 1, wanted at least the 2"),
        ({"mixers": ("index_shared", "indexed")}, "mixers is .*, wanted an indexed layer before"),
    ):
        with pytest.raises(sw.UserError, match=message):
            replace(tiny, **fields)


# ---- attention to compressed keys, and several residual streams (DeepSeek-V4) --------------------


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
