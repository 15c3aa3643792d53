"""Servers in their steady state, beside closed forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stagewright.evidence import inference
from stagewright.evidence.inference import ServedRow
from stagewright.evidence.rows import Prediction, compare
from stagewright.lower.compile import compile
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.host import HOSTS
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

SETTINGS = {"model": "gpt2", "layers": 2}
ROW = ServedRow(
    source="test",
    row="one",
    url="",
    hardware="h100-sxm",
    quantity="tpot_ms",
    measured=1.0,
    engine="one whose host takes no time",
    concurrency=1.0,
    request_rate=None,
    isl=256,
    cached=0,
    osl=64,
    shortest=1.0,
    chunk=8192,
    checkpoint="",
    settings=SETTINGS,
    reason="",
)


def seconds(engine: Any = None, **more: object) -> float:
    run = Run(**{**SETTINGS, **more})
    how = Execution(serving_engine=engine)
    return simulate(compile(run), Machine.of(resolve("h100-sxm"), gpus=1), how).seconds


def test_one_user_is_alone() -> None:
    """Its tokens take decode steps, and its first token a prefill step."""
    found = inference.steady_state(ROW)
    assert found.tpot == seconds(mode="decode", batch_size=1, context_length=256 + 32)
    steps = seconds(mode="prefill", batch_size=1, prompt_length=256, context_length=0)
    assert found.ttft == pytest.approx(steps + inference.host_seconds(ROW))


def test_users_see_the_prompts_of_the_others() -> None:
    """Each request sees a prompt of each other request: c - 1 of them in its 64 steps."""
    found = inference.steady_state(dataclasses.replace(ROW, concurrency=8.0))
    n = max(1, round(found.requests))
    alone = seconds(mode="decode", batch_size=n, context_length=288)
    both = seconds(mode="decode", batch_size=n, context_length=288, prompt_length=256)
    assert 6 < found.requests <= 8
    share = found.requests * 7 / 8 / 64
    assert found.tpot == pytest.approx(alone + share * (both - alone), rel=0.01)


def test_prompts_alone_take_longer_than_beside_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "HOST_MS", {})
    monkeypatch.setattr(inference, "HOSTS", {})
    users = dataclasses.replace(ROW, concurrency=8.0, shortest=0.9)
    beside = inference.steady_state(users)
    alone = inference.steady_state(dataclasses.replace(users, engine="sglang"))
    assert alone.tpot > beside.tpot


def test_users_in_step_wait_for_half_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equally long requests, prompts in steps of their own: all users send prompts at once. 32 of
    them fit into a step of 8,192 tokens, and the time of seven others is halved."""
    monkeypatch.setattr(inference, "HOSTS", {})
    found = inference.steady_state(dataclasses.replace(ROW, concurrency=8.0, engine="sglang"))
    decode = seconds("sglang", mode="decode", batch_size=8, context_length=288)
    prompts = (
        seconds("sglang", mode="prefill", batch_size=32, prompt_length=256, context_length=0) / 32
    )
    assert found.tpot == pytest.approx(decode + 7 * prompts / 64 / 2)
    row = dataclasses.replace(ROW, engine="sglang")
    assert found.ttft == pytest.approx(prompts * 9 / 2 + inference.host_seconds(row))


def test_the_host_of_an_engine_counts_until_the_first_token() -> None:
    """5 ms and 16 ms per 1,024 tokens of vLLM's."""
    hosted = inference.steady_state(dataclasses.replace(ROW, engine="vllm"))
    alone = inference.steady_state(ROW)
    assert hosted.ttft - alone.ttft == pytest.approx(0.005 + 0.016 / 4)


def test_the_host_of_a_step_runs_beside_the_gpu_or_after_it() -> None:
    """A token of two layers takes the host longer than the GPU, of which vLLM hides 0.1 ms less.

    AIConfigurator's server does not schedule ahead, so that its host is added to the GPU's step.
    """
    alone = inference.steady_state(ROW).tpot
    vllm, trtllm = HOSTS["vllm"], HOSTS["trtllm"]
    found = inference.steady_state(dataclasses.replace(ROW, engine="trtllm")).tpot
    assert alone < found == pytest.approx(trtllm.step(1))
    found = inference.steady_state(dataclasses.replace(ROW, engine="vllm")).tpot
    exposed = vllm.exposed_per_step + vllm.exposed_per_request
    assert found == pytest.approx(vllm.step(1) + exposed)
    behind = dataclasses.replace(ROW, engine="vllm", source="aiconfigurator, vLLM")
    found = inference.steady_state(behind).tpot
    assert found == pytest.approx(alone + vllm.step(1) + exposed, rel=0.01)  # its kernels differ


def test_requests_count_at_their_mean_lengths() -> None:
    """Lengths from 0.5 to 1 of the longest: 0.75 on average."""
    found = inference.steady_state(dataclasses.replace(ROW, shortest=0.5))
    assert found.tpot == seconds(mode="decode", batch_size=1, context_length=192 + 24)


@pytest.mark.numerics
def test_checkpoints_are_stored_as_published() -> None:
    """NVIDIA's checkpoint of DeepSeek-R1 has experts and `wo` in four bits, else bf16."""
    settings = {"model": "deepseek-r1", "layers": 4, "tp": 8}
    row = dataclasses.replace(ROW, settings=settings, checkpoint="deepseek-r1-nvfp4-v2")
    program = inference._compiled(inference._key(row, mode="decode", batch_size=8)).program
    tasks = program.classes[0].tasks
    pairs = zip(tasks.name, tasks.dtype, strict=True)
    data_types = {tasks.names[n]: tasks.dtypes[d] for n, d in pairs}
    assert data_types["layer3.q"] == data_types["layer3.latent"] == "bf16"
    assert data_types["layer3.attn_out"] == data_types["layer3.mlp_out"] == "fp4"


def test_requests_of_a_rate_follow_littles_law() -> None:
    found = inference.steady_state(dataclasses.replace(ROW, concurrency=None, request_rate=800.0))
    assert found.requests == pytest.approx(800 * 64 * found.tpot, rel=0.1)


def test_a_step_has_so_many_tokens_of_prompts_at_most() -> None:
    """256 tokens a step are one prompt a step: 64 requests end as fast as prompts come in."""
    found = inference.steady_state(dataclasses.replace(ROW, concurrency=4096.0, chunk=256))
    assert found.requests == pytest.approx(64, abs=1)


def test_rows_that_the_package_carries_can_be_read() -> None:
    every = inference.rows()
    assert len(every) > 250
    assert {row.quantity for row in every} == set(inference.QUANTITIES)
    assert all((row.concurrency is None) != (row.request_rate is None) for row in every)
    assert all(row.url.startswith("https://") and row.measured > 0 for row in every)


def test_power_of_a_run_is_that_of_its_busy_and_its_idle_time() -> None:
    """An idle H100 draws a fifth of its TDP."""
    row = dataclasses.replace(ROW, quantity="watts")
    found = row.simulate()
    busy, half = row.predict(found), dataclasses.replace(row, busy=0.5).predict(found)
    assert half == pytest.approx((busy + 140) / 2)


@pytest.mark.slow
def test_servers_under_load_are_near() -> None:
    """vLLM under a constant rate: 9 of 10 stages within 6%, the median within 4%."""
    outcomes = compare(inference.rows("vLLM under load"))
    errors = sorted(abs(o.error) for o in outcomes if isinstance(o, Prediction))
    assert errors[len(errors) // 2] < 0.04
    assert errors[-2] < 0.08
