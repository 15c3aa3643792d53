"""A step on a machine: definitions, and the command."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.cli.main import main
from stagewright.model.catalog import resolve as model_of
from stagewright.program.columns import TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate
from stagewright.time.simulate.utilization import model_flops

SMALL = ("llama3-8b", "--layers", "2", "--seq-length", "512", "--hardware", "h100-sxm")


def stagewright(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(str(end.value.code))


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "mixtral-8x7b"])
def test_model_flops_are_those_of_palm(name: str) -> None:
    # arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per token. N counts what is multiplied with:
    # neither a table that is only looked up, nor biases and norms (0.03% of these models).
    model = model_of(name)
    run = sw.Run(model=name, global_batch_size=4, dp=2).resolved(model)
    tokens = 4 * (run.seq_length or 0)
    compiled = sw.compile(sw.Run(model=name, seq_length=64))
    table = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    attention = model.num_layers * model.num_attention_heads * model.kv_channels
    palm = 6 * (compiled.active_parameters - table) + 12 * attention * (run.seq_length or 0)
    full, causal = model_flops(run, model)
    assert full == pytest.approx(palm * tokens, rel=3e-4)
    half = 6 * attention * (run.seq_length or 0) * tokens
    assert full - causal == pytest.approx(half, rel=1e-2)


def test_utilization_is_work_over_time() -> None:
    run = sw.Run(model="llama3-8b", layers=4, tp=2, dp=2, seq_length=2048, recompute="full")
    compiled = sw.compile(run)
    machine = Machine.of(resolve("h100-sxm"), gpus=4)
    found = simulate(compiled, machine)
    peak = 4 * 989.4e12 * found.seconds
    assert found.mfu * peak == model_flops(compiled.run, compiled.model)[0]
    executed = sum(of.tasks.flops.sum() * len(of.ranks) for of in compiled.program.classes)
    assert found.hfu_causal * peak == pytest.approx(float(executed))
    # Layers run forward twice; the output product does not.
    plain = simulate(sw.compile(run.model_copy(update={"recompute": "none"})), machine)
    assert 1.1 < found.hfu * found.seconds / (plain.hfu * plain.seconds) < 4 / 3
    assert found.tokens_per_second * found.seconds == pytest.approx(2 * 2048)
    assert found.mean.total == pytest.approx(found.seconds)


def test_less_overlap_and_stragglers_take_longer() -> None:
    compiled = sw.compile(sw.Run(model="llama3-8b", layers=2, dp=4, zero=3, seq_length=512))
    machine = Machine.of(resolve("h100-sxm"), gpus=4)
    plain = simulate(compiled, machine).seconds
    ways = (
        {"no_overlap": frozenset({"dp"})},
        {"prefetch": 0},
        {"streams": "one"},
    )
    for way in ways:
        assert simulate(compiled, machine, Execution(**way)).seconds > plain
    assert simulate(compiled, machine, slowdowns={2: 1.5}).seconds > plain


@cases
def test_no_more_than_two_lots_wait_for_a_slow_network(settings: dict[str, Any]) -> None:
    """FSDP2, DeepSpeed, Megatron-FSDP and Transformer Engine wait for the lot before the last."""
    of = resolve("h100-sxm")
    link = of.scale_up.model_copy(update={"bandwidth_gb_s": 0.5})
    slow = of.model_copy(update={"scale_up": link, "host_bandwidth_gb_s": 0.5})
    layers = {"layers": 8, "vocab": 128, "seq_length": 256, "global_batch_size": 8}
    run = sw.Run(model="gpt2", **layers, **settings)
    compiled = sw.compile(run)
    (held,) = simulate(compiled, Machine.of(slow, gpus=run.world_size)).memory_over_time
    (rank,) = compiled.program.classes
    values = rank.values
    freed = [
        int(values.size[values.value[values.last == row]].sum())  # by one transfer
        for row in np.flatnonzero(rank.tasks.kind != TaskKind.COMPUTE).tolist()
    ]
    assert held.peak <= rank.memory["peak"] + 2 * max(freed)


def test_inference_has_no_model_flops() -> None:
    run = sw.Run(model="llama3-8b", mode="decode", tp=2, batch_size=8, context_length=1024)
    found = simulate(sw.compile(run), Machine.of(resolve("h100-sxm"), gpus=2))
    assert found.tokens == 8
    assert "mfu" not in found.to_dict()
    assert 0 < found.hfu < 0.1


# ---- the command ---------------------------------------------------------------------------------


@cases
def test_errors(arguments: list[str], told: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert stagewright("simulate", *SMALL, *arguments) == (0 if told is None else 2)
    if told is not None:
        assert told in capsys.readouterr().err


def test_progress_counts_the_tasks_of_all_classes() -> None:
    compiled = sw.compile("gpt2", pp=4, dp=2, seq_length=64, global_batch_size=8)
    reports: list[tuple[int, int]] = []
    machine = Machine.of(resolve("h100-sxm"), gpus=8)
    step = simulate(
        compiled, machine, slowdowns={1: 1.5}, progress=lambda *counts: reports.append(counts)
    )
    assert len(step.timeline.lanes) > len(compiled.program.classes)
    assert len(reports) > 4
    assert reports == sorted(reports)
    assert {total for _, total in reports} == {
        sum(len(of.tasks) for of in compiled.program.classes)
    }
    assert reports[-1][0] == reports[-1][1]


def test_keywords_of_other_tools_reach_the_execution():
    run = {"layers": 2, "seq_length": 512, "dp": 16}
    seconds = [
        sw.simulate("gpt3-6.7b", "a100-sxm-80gb", **run, **given).seconds
        for given in ({"no_overlap": ("dp",)}, {"overlap_grad_reduce": False}, {})
    ]
    assert seconds[0] == seconds[1] > seconds[2]
