"""MFU and HFU in one convention, exact beyond 64 bits; no kernel beats its precision's peak."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import stagewright as sw
from helpers import pairs, table_of
from stagewright.arrays import exact_sum
from stagewright.program.columns import TaskKind
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import names, resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import executed_flops, sequence_flops

pytestmark = pytest.mark.numerics  # whole steps of many models and precisions take seconds

MODELS = table_of("test_utilization", "models")
SERVED = ("decode", "prefill", "absorbed")


@functools.cache
def compiled(name: str, precision: str) -> sw.Compiled:
    return sw.compile(**{"layers": 2, **MODELS[name]}, precision=precision)


@pytest.mark.parametrize(("name", "precision"), pairs(MODELS, ["bf16", "fp32", "fp8"], 3))
def test_no_kernel_is_faster_than_the_peak_of_its_precision(name: str, precision: str) -> None:
    if precision == "fp8" and name in SERVED:
        pytest.skip("weights of inference have a precision of their own")
    program = compiled(name, precision).program
    for hardware in map(resolve, names()):
        if precision == "fp8" and hardware.peak_fp8_tflops is None:
            continue
        machine = Machine.of(hardware, gpus=program.mesh.world_size)
        for of, seconds in zip(program.classes, task_seconds(program, machine), strict=True):
            tasks = of.tasks
            # Sums that a fused product does away with take no time.
            timed = (tasks.kind == TaskKind.COMPUTE) & (seconds > 0)
            reached = tasks.flops[timed] / seconds[timed] / 1e12
            used = np.unique(tasks.dtype[timed & (tasks.flops > 0)]).tolist()
            peaks = np.full(len(tasks.dtypes), np.inf)
            peaks[used] = [peak_flops(hardware, tasks.dtypes[dtype]) / 1e12 for dtype in used]
            share = reached / peaks[tasks.dtype[timed]]
            worst = int(np.argmax(share))
            op = tasks.ops[int(tasks.op[timed][worst])]
            assert share[worst] <= 1, f"{op} at {share[worst]:.0%} on {hardware.name}"


DRAWS = table_of("test_utilization", "draws")


@pytest.mark.parametrize(
    ("model", "settings"),
    pairs(["llama3-8b", "gpt-oss-20b", "gemma2-2b", "deepseek-v2-lite"], DRAWS),
    ids=str,
)
def test_hfu_is_never_below_mfu(model: str, settings: dict[str, object]) -> None:
    chosen = {"tp": 2, "dp": 2, "layers": 2, "seq_length": 8192, **settings}
    found = sw.simulate(model, "h100-sxm", **chosen)
    assert found.hfu >= found.mfu >= found.mfu_causal
    assert found.hfu >= found.hfu_causal >= found.mfu_causal
    assert found.hfu <= 1


@pytest.mark.parametrize("factor", [0.5, 1.25])
def test_tokens_beyond_the_capacity_of_experts_need_nothing(factor: float) -> None:
    found = sw.simulate(
        "mixtral-8x7b", "h100-sxm", layers=2, dp=4, ep=4, moe_expert_capacity_factor=factor
    )
    assert found.hfu >= found.mfu
    assert found.hfu_causal >= found.mfu_causal


@pytest.mark.parametrize(
    ("model", "flash"),
    pairs(["vit-b-16", "clip-vit-l-336", "t5-small", "gpt2"], [True, False]),
)
def test_other_families_too(model: str, flash: bool) -> None:
    found = sw.simulate(model, "h100-sxm", flash_attention=flash)
    assert found.hfu >= found.mfu


def test_attention_in_full_is_the_square_in_each_pass() -> None:
    """Closed form: forward 4 H D S^2, backward five products of two, for each of L layers."""
    compiled = sw.compile("llama3-8b", layers=2, seq_length=4096, recompute="full")
    run = compiled.run
    needed = sequence_flops(run, compiled.model)
    full, causal = executed_flops(compiled.program, needed)
    square = 4 * 32 * 128 * 4096**2
    passes = 2 + 2.5  # forward twice; backward makes the scores again
    assert full - causal == pytest.approx(2 * passes * square / 2, rel=1e-2)


def test_flops_beyond_64_bits_are_exact() -> None:
    settings = {"seq_length": 131072, "micro_batch_size": 128, "global_batch_size": 512}
    found = sw.simulate("llama3.1-405b", "h100-sxm", **settings, tp=8, layers=64)
    (of,) = found.compiled.program.classes
    assert exact_sum(of.tasks.flops) > 2**63
    one = executed_flops(sw.compile("llama3.1-405b", seq_length=131072, tp=8, layers=64).program)
    assert executed_flops(found.compiled.program).causal == pytest.approx(512 * one.causal, 1e-3)
    assert 0 < found.mfu <= found.hfu < 1


def test_a_step_that_is_too_long_is_refused_in_words() -> None:
    with pytest.raises(sw.UserError, match=r"a step may take 1e\+06 s"):
        sw.simulate(
            "llama3.1-405b", "tpu-v5p", precision="fp32", micro_batch_size=16,
            global_batch_size=512,
        )  # fmt: skip
