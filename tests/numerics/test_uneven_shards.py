"""FSDP2 over ranks that do not divide the rows of a weight: what every rank holds and updates."""

import numpy as np
import pytest

import invariants
from helpers import cases
from stagewright.lower.compile import compile
from stagewright.model.config import ModelConfig
from stagewright.program.columns import Program, TaskKind
from stagewright.run.settings import Run

MODEL = ModelConfig(
    name="m", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
    num_query_groups=2, kv_channels=16, vocab_size=200, max_position_embeddings=32,
    num_experts=4, top_k=2, moe_ffn_hidden_size=48,
)  # fmt: skip
FSDP = {"framework": "torchtitan", "zero": 3, "seq_length": 32, "micro_batch_size": 1}


def run_of(**settings) -> Run:
    return Run(**({"model": "m", "global_batch_size": 2 * settings["dp"]} | FSDP | settings))


def states(program: Program) -> int:
    """Bytes of the optimizer's states on all ranks."""
    return sum(len(of.ranks) * of.memory["optimizer"] for of in program.classes)


@cases
def test_ranks_hold_every_state_once(settings):
    run = run_of(**settings)
    compiled = compile(run, MODEL)
    program = compiled.program
    invariants.check(program)
    every = np.sort(np.concatenate([of.ranks for of in program.classes]))
    assert every.tolist() == list(range(program.mesh.world_size))
    moments = 2 * 4 * compiled.parameters  # in fp32
    whole = compile(run_of(dp=1, pp=run.pp, zero=0), MODEL).program
    counts = states(whole) - moments  # of steps: every rank has one of each tensor
    replicas = run.dp // (run.dp_shard or run.dp)
    assert states(program) == replicas * moments + run.dp * counts


def test_a_rank_without_experts_updates_none():
    program = compile(run_of(dp=8), MODEL).program
    first, last = program.classes[0], program.classes[-1]
    assert (first.ranks.tolist()[0], last.ranks.tolist()[-1]) == (0, 7)
    names = [first.tasks.names[n] for n in first.tasks.name]
    rows = [i for i, name in enumerate(names) if name.endswith(".we_up.new")]
    assert rows
    assert (first.tasks.flops[rows] > 0).all()
    assert (last.tasks.flops[rows] == 0).all()
    assert (last.tasks.traffic[rows] < 16).all()  # the count of steps
    # All send and store as much: what is padding is sent, too.
    moves = first.tasks.kind == TaskKind.COLLECTIVE
    assert (first.tasks.comm_bytes[moves] == last.tasks.comm_bytes[moves]).all()
    assert first.memory["parameters"] == last.memory["parameters"]


@pytest.mark.parametrize("settings", [{"dp": 8}, {"dp": 16, "ep": 2}, {"dp": 4}], ids=str)
def test_ranks_that_outnumber_experts_may_split_each(settings):
    """torchtitan's `Shard(1)`: no rank is without experts, and nothing is padded."""
    even = {"fsdp_shard_dim": "few_experts_second"}
    program = compile(run_of(**settings, **even), MODEL.with_overrides(vocab_size=192)).program
    invariants.check(program)
    held = [of.memory["optimizer"] for of in program.classes]
    row = 2 * 4 * MODEL.hidden_size  # of a router, which some ranks lack
    assert max(held) - min(held) <= MODEL.num_layers * row
    padded = compile(run_of(**settings), MODEL.with_overrides(vocab_size=192)).program
    stored = [of.classes[0].memory["parameters"] for of in (program, padded)]
    assert (stored[0] < stored[1]) == (settings["dp"] > MODEL.num_experts)
