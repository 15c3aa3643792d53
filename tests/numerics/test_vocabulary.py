"""The vocabulary over the ranks of a pipeline: the same numbers, and the messages of the program.

Messages as in interlaced_schedule.py of github.com/sail-sg/VocabularyParallelism.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import invariants
from spmd import PLAIN, TINY, check, dims, random_values, single
from stagewright import blocks as nn
from stagewright.algebra.layout import Mesh
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


def block(name: str, config: ModelConfig, recipe: nn.Recipe) -> nn.Block:
    return nn.BLOCKS[name](config, recipe, config.layer(0))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["embedding", "head"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_compute_what_one_device_computes(model, name, mesh, sequence_parallel):
    config = untied(model)
    built, sizes = block(name, config, SHARED), dims(config)
    tensor = ("tp",) if "tp" in mesh else ()
    plan = Plan(
        Mesh(tuple(mesh.items())),
        tensor=tensor,
        vocabulary=("pp", *tensor),
        sequence_parallel=sequence_parallel and bool(tensor),
        embedding_all_reduce=config.position == "learned",
    )
    sharded = shard(built.graph, strategy(plan, sizes), built.primal, model_axes=plan.model_axes)
    assert any("pp" in axes for n in sharded if n.op == "param" for axes in n.layout.dims)
    check(built.graph, sharded, mesh, sizes, random_values(built.graph, sizes))


def values_of(built: nn.Block, known, sizes):
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


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2},
        {"pp": 4},
        {"pp": 3, "layers_per_stage": (1, 2, 1), "streams": "separate"},
        {"pp": 2, "tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1},
        {"pp": 2, "dp": 2, "zero": 3, "recompute": "full", "order": "tp-cp-ep-pp-dp"},
        {"pp": 2, "cp": 2, "global_batch_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_every_rank_does_its_part(settings, position):
    run = run_of(**settings)
    program = compile(run, replace(SIZES, position=position)).program
    invariants.check(program, streams=run.streams, rendezvous=(False,))


def test_messages():
    """Per microbatch: hidden states to all ranks, three sums of a number per token, the gradient of
    the hidden states; and the embedding's rows and their gradient."""
    microbatches = 6
    program = compile(run_of(pp=4), SIZES).program
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


def test_tables_are_split_evenly():
    """The vocabulary is padded to a multiple of pp; every rank has an equal part of both tables."""
    program = compile(run_of(pp=4, make_vocab_size_divisible_by=8), SIZES).program
    layers = compile(run_of(pp=4, schedule="1f1b"), SIZES).program
    part = 2 * 2 * (224 // 4) * 64
    middle = [of.memory["parameters"] for of in program.classes[1:3]]
    assert middle == [of.memory["parameters"] + part for of in layers.classes[1:3]]
