"""Steps of inference in the words of serving, for prefill, decode, both at once, and two groups."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stagewright as sw
from stagewright.cli.main import main
from stagewright.run.settings import Run
from stagewright.time.simulate.serving import served

pytestmark = pytest.mark.numerics  # whole steps of large models take seconds

GPU = "h100-sxm"


def test_prefill() -> None:
    settings: dict[str, Any] = {"mode": "prefill", "tp": 2, "batch_size": 4, "prompt_length": 1000}
    found = sw.simulate("llama3-8b", GPU, **settings, context_length=24)
    of = found.served
    assert of is not None
    assert (of.what, of.requests, of.isl, of.osl) == ("prefill", 4, 1024, None)
    assert of.ttft_seconds == found.seconds
    assert of.tpot_seconds is None
    assert of.requests_per_second == pytest.approx(4 / found.seconds)
    assert of.input_tokens_per_second == pytest.approx(4000 / found.seconds)
    assert of.tokens_per_second_per_gpu == pytest.approx(2000 / found.seconds)


def test_decode_with_an_output_length() -> None:
    settings: dict[str, Any] = {"mode": "decode", "tp": 2, "batch_size": 8, "context_length": 512}
    found = sw.simulate("llama3-8b", GPU, **settings)
    of = found.served
    assert of is not None
    assert (of.what, of.requests, of.context_length) == ("decode", 8, 512)
    assert of.ttft_seconds is of.requests_per_second is None
    assert of.tpot_seconds == found.seconds
    assert of.output_tokens_per_second_per_user == pytest.approx(1 / found.seconds)
    assert of.tokens_per_second_per_gpu == pytest.approx(4 / found.seconds)
    known = sw.simulate("llama3-8b", GPU, **settings, osl=100).served
    assert known is not None
    assert known.requests_per_second == pytest.approx(8 / found.seconds / 100)


def test_draft_tokens_count_as_accepted() -> None:
    run = Run(model="llama3-8b", mode="decode", num_speculative_tokens=3, batch_size=2,
              context_length=9)  # fmt: skip
    of = served(run, 0.04, 1)
    assert of.tpot_seconds == pytest.approx(0.01)
    assert of.output_tokens_per_second == pytest.approx(200)


def test_a_chunk_beside_decode() -> None:
    run = Run(model="llama3-8b", mode="decode", prompt_length=256, dp=2, pp=2, batch_size=8,
              context_length=99)  # fmt: skip
    of = served(run, 0.1, 4)
    assert (of.what, of.requests) == ("mixed", 8)
    assert of.output_tokens_per_second == pytest.approx(80)
    assert of.input_tokens_per_second == pytest.approx(4 * 256 / 0.1)


def test_isl_and_osl_are_other_names() -> None:
    assert Run.load(None, {"model": "gpt2", "mode": "prefill", "isl": 77}).prompt_length == 77
    decode = {"model": "gpt2", "mode": "decode", "isl": 100, "osl": 51}
    run = Run.load(None, decode)
    assert (run.context_length, run.output_length) == (125, 51)
    both = Run.load(None, {**decode, "prefill": "tp=1"})
    assert both.context_length == 100  # what the ranks of prefill compute
    with pytest.raises(sw.UserError, match="give the mode beside it"):
        Run.load(None, {"model": "gpt2", "isl": 77})
    with pytest.raises(sw.UserError, match="--isl 100 means --context-length 125"):
        Run.load(None, {**decode, "context_length": 100})


DISAGGREGATED: dict[str, Any] = {
    "mode": "decode", "tp": 2, "pp": 2, "batch_size": 16, "context_length": 1024,
}  # fmt: skip


def test_both_groups_of_a_disaggregated_step_are_those_that_run_alone() -> None:
    found = sw.simulate("llama3-8b", GPU, **DISAGGREGATED, prefill="tp=4")
    prefill, decode = found.groups
    assert found.served is None
    assert [(g.name, g.first_rank, g.gpus) for g in found.groups] == [
        ("prefill", 0, 4),
        ("decode", 4, 4),
    ]
    alone = sw.simulate("llama3-8b", GPU, mode="prefill", tp=4, batch_size=16, prompt_length=1024)
    assert prefill.served == alone.served
    assert prefill.fit.peak == alone.fit.peak
    steady = sw.simulate("llama3-8b", GPU, **DISAGGREGATED)
    assert decode.served == steady.served
    assert decode.fit.peak == steady.fit.peak
    assert found.seconds >= alone.seconds > steady.seconds


def test_the_group_that_limits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "llama3-8b", "--mode", "decode", "--tp", "2", "--batch-size", "16"]
    command += ["--context-length", "1024", "--prefill", "tp=4", "--hardware", GPU]

    def said(*more: str) -> str:
        with pytest.raises(SystemExit):
            main([*command, *more])
        return capsys.readouterr().out

    plain = said()
    for group in ("prefill group: 4 GPUs (ranks 0-3)", "decode group: 2 GPUs (ranks 4-5)"):
        assert group in plain
    serving = json.loads(said("--json"))["serving"]
    balance, limit = serving["osl_where_both_limit"], serving["limited_by"]
    assert limit is None
    assert set(serving["groups"]) == {"prefill", "decode"}
    assert serving["groups"]["decode"]["memory"]["fits"]
    for osl, name in ((int(balance) // 2, "prefill"), (int(balance) * 2, "decode")):
        assert f"limits: the {name} group" in said("--osl", str(osl))
        found = json.loads(said("--osl", str(osl), "--json"))["serving"]
        assert found["limited_by"] == name
        rates = {key: of["requests_per_second"] for key, of in found["groups"].items()}
        assert min(rates, key=lambda key: rates[key]) == name
