"""The vocabulary over the ranks of a pipeline: the same numbers, and the messages of the program.

Messages as in interlaced_schedule.py and vocab_parallel_schedule.py of
github.com/sail-sg/VocabularyParallelism, whose hidden states go to all ranks in fp32 in the latter.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import invariants
from helpers import cases
from spmd import PLAIN, TINY, check, dims, random_values, single
from stagewright import blocks as model_blocks
from stagewright.graph.shard import shard
from stagewright.lower.compile import compile
from stagewright.model.config import ModelConfig
from stagewright.parallel.placement import strategy
from stagewright.parallel.plan import Plan
from stagewright.program.columns import COLLECTIVES, PHASES, TaskKind
from stagewright.run.settings import Run

SHARED = replace(PLAIN, shared_vocabulary=True, dropout=False)
MODELS = ["llama", "gpt2"]


def untied(model: str) -> ModelConfig:
    return replace(TINY[model], tied_embeddings=False)


def block(name: str, config: ModelConfig, recipe: model_blocks.Recipe) -> model_blocks.Block:
    return model_blocks.BLOCKS[name](config, recipe, config.layer(0))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["embedding", "head"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_compute_what_one_device_computes(model, name, mesh, sequence_parallel):
    config = untied(model)
    built, sizes = block(name, config, SHARED), dims(config)
    tensor = ("tp",) if "tp" in mesh else ()
    plan = Plan(
        tensor=tensor,
        vocabulary=("pp", *tensor),
        sequence_parallel=sequence_parallel and bool(tensor),
        embedding_all_reduce=config.position == "learned",
    )
    sharded = shard(built.graph, strategy(plan), built.primal, model_axes=plan.model_axes)
    assert any("pp" in axes for n in sharded if n.op == "param" for axes in n.layout.dims)
    check(built.graph, sharded, mesh, sizes, random_values(built.graph, sizes))


IN_GROUPS = ["output", "output_with_gradient", "loss"]


@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_groups_of_the_vocabulary_compute_what_one_device_computes(name, mesh, sequence_parallel):
    """The output layer in two passes: what ranks sum is of the groups that they have."""
    config = untied("llama")
    groups = int(np.prod([*mesh.values()]))
    ends = frozenset({"group_lse", "group_picked"}) if name == "loss" else frozenset()
    built, sizes = block(name, config, replace(SHARED, ends=ends)), dims(config)
    sizes |= {"VocabularyGroups": groups}
    tensor = ("tp",) if "tp" in mesh else ()
    plan = Plan(
        tensor=tensor,
        vocabulary=("pp", *tensor),
        sequence_parallel=sequence_parallel and bool(tensor),
    )
    sharded = shard(built.graph, strategy(plan), built.primal, model_axes=plan.model_axes)
    check(built.graph, sharded, mesh, sizes, random_values(built.graph, sizes))
    # Pass S adds up nothing over ranks: they go on at once.
    moves = [n for n in sharded if n.op == "all_reduce" and n.phase == "forward"]
    assert len(moves) == (3 if name == "loss" else 0)


@pytest.mark.parametrize("name", ["output", "output_with_gradient"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_two_passes_compute_what_the_head_computes(name, groups):
    """Pass S, the loss of its sums, and pass T with the gradients of these."""
    config = untied("llama")
    sizes, plain = dims(config) | {"VocabularyGroups": groups}, replace(PLAIN, dropout=False)
    together = block("head", config, plain)
    given = random_values(together.graph, sizes)
    truth = single(together.graph, sizes, given)
    first = block("final_norm", config, SHARED)
    passes = block(name, config, SHARED)
    behind = block("loss", config, replace(SHARED, ends=frozenset({"group_lse", "group_picked"})))
    x = values_of(first, given, sizes)
    y = {"x": single(first.graph, sizes, x)["y"]}
    s = values_of(passes, given, sizes) | y
    made = single(passes.graph, sizes, s)
    of = {name: made[name] for name in ("group_lse", "group_picked")}
    found = single(behind.graph, sizes, values_of(behind, given, sizes) | of)
    back = {name: found[name] for name in ("d_group_lse", "d_group_picked")}
    found |= single(passes.graph, sizes, s | back)
    found |= single(first.graph, sizes, x | {"dy": found["dx"]})
    for name, want in truth.items():
        if name != "norm2":
            np.testing.assert_allclose(found[name], want, rtol=1e-6, atol=1e-9, err_msg=name)


def values_of(built: model_blocks.Block, known, sizes):
    """Random values, but for those that are known."""
    values = random_values(built.graph, sizes)
    return values | {name: known[name] for name in values.keys() & known.keys()}


@pytest.mark.parametrize("model", MODELS)
def test_blocks_apart_compute_what_they_compute_together(model):
    config = untied(model)
    sizes, plain = dims(config), replace(PLAIN, dropout=False)
    for names, whole in (
        (("embedding", "positions"), "embedding"),
        (("final_norm", "head"), "head"),
    ):
        together = block(whole, config, plain)
        given = random_values(together.graph, sizes)
        truth = single(together.graph, sizes, given)
        first, second = (block(name, config, SHARED) for name in names)
        # Forward through both; then the gradient of the second is handed to the first.
        ones = {"clip_scale": given["clip_scale"]} if "clip_scale" in given else {}
        x = values_of(first, given, sizes)
        y = single(first.graph, sizes, x)["y"]
        then = values_of(second, given | ones, sizes) | {"x": y}
        behind = single(second.graph, sizes, then)
        before = single(first.graph, sizes, x | {"dy": behind["dx"]})
        found = before | behind | {name: before[name] for name in ("dx",) if name in before}
        for name, want in truth.items():
            if name != "norm2":
                np.testing.assert_allclose(found[name], want, rtol=1e-6, err_msg=name)
        norm = sum(
            of.get("norm2", 0) for of in (before, behind)
        )  # blocks without weights have none
        assert norm == pytest.approx(truth["norm2"])


SIZES = ModelConfig(
    name="m", num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
    num_query_groups=2, kv_channels=16, vocab_size=200, max_position_embeddings=32,
)  # fmt: skip


def run_of(**settings) -> Run:
    several = {"model": "m", "schedule": "interlaced", "seq_length": 32, "micro_batch_size": 1}
    return Run(**(several | {"global_batch_size": 6 * settings.get("dp", 1)} | settings))


@cases
@pytest.mark.parametrize(
    ("schedule", "position"),
    [("interlaced", "learned"), ("vocab-1", "rope"), ("vocab-2", "learned")],
)
def test_every_rank_does_its_part(settings, schedule, position):
    run = run_of(**settings, schedule=schedule)
    program = compile(run, replace(SIZES, position=position)).program
    invariants.check(program, streams=run.streams, rendezvous=(False,))


@pytest.mark.parametrize("schedule", ["interlaced", "vocab-1", "vocab-2"])
def test_messages(schedule):
    """Per microbatch: hidden states to all ranks, three sums of a number per token, the gradient of
    the hidden states; and the embedding's rows and their gradient."""
    microbatches = 6
    program = compile(run_of(pp=4, schedule=schedule), SIZES).program
    tokens, hidden = 32, 32 * 64
    for of in program.classes:
        t = of.tasks
        over = (t.kind == TaskKind.COLLECTIVE) & (t.microbatch >= 0)
        assert {program.communicators[s].axes for s in t.slot[over]} == {("pp",)}
        found = Counter(
            (PHASES[p], COLLECTIVES[c], int(n))
            for p, c, n in zip(t.phase[over], t.collective[over], t.comm_bytes[over], strict=True)
        )
        assert found == {
            ("forward", "all_reduce", 2 * hidden): microbatches,  # the embedding
            ("forward", "broadcast", 2 * hidden): microbatches,
            ("forward", "all_reduce", 4 * tokens): 3 * microbatches,
            ("backward", "all_reduce", 2 * hidden): microbatches,
            ("backward", "broadcast", 2 * hidden): microbatches,  # the embedding's gradient
        }


@pytest.mark.parametrize("schedule", ["vocab-1", "vocab-2"])
def test_ranks_work_while_sums_are_under_way(schedule):
    """Small kernels between collectives are on the stream of these; no other kernel of layers or of
    pass S waits for a sum over ranks that is not of a microbatch before it."""
    program = compile(run_of(pp=4, schedule=schedule, streams="separate"), SIZES).program
    for of in program.classes:
        t = of.tasks
        aside = (t.kind == TaskKind.COMPUTE) & (t.slot >= 0)
        names = {t.names[n] for n in t.name[aside]}
        sums = ("max", "exp_sum", "picked", "nll+loss", "d_nll+d_group_lse")
        more = {"output_with_gradient.d_x"} if schedule == "vocab-2" else set()
        assert names == {f"loss.{name}" for name in sums} | more


def test_tables_are_split_evenly():
    """The vocabulary is padded to a multiple of pp; every rank has an equal part of both tables."""
    program = compile(run_of(pp=4, make_vocab_size_divisible_by=8), SIZES).program
    layers = compile(run_of(pp=4, schedule="1f1b"), SIZES).program
    part = 2 * 2 * (224 // 4) * 64
    middle = [of.memory["parameters"] for of in program.classes[1:3]]
    assert middle == [of.memory["parameters"] + part for of in layers.classes[1:3]]
