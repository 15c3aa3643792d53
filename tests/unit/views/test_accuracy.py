"""Errors to expect: those of the group of an answer, or of the nearest group that has rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stagewright as sw
from helpers import ROOT, cases
from stagewright.cli.main import main
from stagewright.views.accuracy import PAGE, GroupError, error_of_step, nearest, table

SHORT = {"layers": 2, "seq_length": 4096}
LOAD = {"rate": 4, "isl": 128, "osl": 8, "num_requests": 8}


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        main([*command])
    return capsys.readouterr().out


@cases
def test_a_step_has_the_errors_of_its_group(
    settings: dict[str, Any], answer: str, group: tuple[str, ...]
) -> None:
    chosen: dict[str, Any] = {"model": "llama3-8b", "hardware": "h100-sxm", **SHORT, **settings}
    if "mode" in settings:
        chosen.pop("seq_length")
    step = sw.simulate(chosen.pop("model"), chosen.pop("hardware"), **chosen)
    (error,) = step.accuracy()
    assert error == error_of_step(step)
    assert error.asked == group
    assert error.errors == table()[answer, ", ".join(error.group)]


def test_a_step_far_below_the_peak_has_the_errors_of_such_steps() -> None:
    step = sw.simulate("llama3-8b", "h100-sxm", layers=1, seq_length=16)
    assert step.accuracy()[0].errors == table()["train-low", ""]


def test_a_group_without_rows_is_said_and_the_next_larger_one_shown() -> None:
    asked = ("vllm", "no-such-gpu", "gpt-oss", "mxfp4")
    error = nearest("serve-tpot", "time per output token", asked)
    assert (error.group, error.errors) == (("vllm",), table()["serve-tpot", "vllm"])
    assert "time per output token, vllm, no-such-gpu, gpt-oss, mxfp4: no rows; vllm: off by" in (
        error.sentence
    )
    assert not error.to_dict()["exact"]
    error = nearest("serve-tpot", "time per output token", ("mine",))
    assert error.errors == table()["serve-tpot", ""]
    assert "no rows; all others: off by" in error.sentence


def test_sentences_name_few_sources_and_the_side_of_the_bias() -> None:
    errors = table()["serve-rate", ""]._replace(rows=1, bias=-0.02, sources=("a, b",))
    sentence = GroupError("output tokens per second", (), (), errors).sentence
    assert ", 2.0% low" in sentence
    assert f"(1 row of a, b; {PAGE})" in sentence
    errors = errors._replace(rows=30, bias=0.0001, sources=("a", "b", "c"))
    sentence = GroupError("step time", (), (), errors).sentence
    assert "on average, p90" in sentence
    assert "(30 rows of 3 sources;" in sentence


def test_the_page_lists_all_groups() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    whole = {"decode": 3, "first-token": 3, "serve-tpot": 4, "serve-ttft": 4, "serve-rate": 4}
    for answer, group in table():
        if len(group.split(", ")) == whole.get(answer):
            assert f"| {group} |" in page, (answer, group)


def test_serving_says_the_errors_of_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    served = sw.serve("llama3.1-8b", "h100-sxm", scheduler="sglang", **LOAD)
    per_token, first, rate = served.accuracy()
    assert per_token.asked == ("sglang", "h100-sxm", "llama", "bf16")
    assert first.quantity == "time to the first token"
    assert rate.asked == per_token.asked
    assert per_token.sentence in served.page()
    command = ["serve", "llama3.1-8b", "--hardware", "h100-sxm", "--scheduler", "sglang"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in LOAD.items()]
    assert f"note: Accuracy: {per_token.sentence}" in printed(capsys, *command)
    said = json.loads(printed(capsys, *command, "--json"))["accuracy"]
    assert said == [of.to_dict() for of in (per_token, first, rate)]


def test_searches_say_the_errors_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "llama3-8b", "--layers", "2", "--hardware", "h100-sxm", "--gpus", "2"]
    command += ["--global-batch-size", "8", "--tp", "1,2"]
    (said,) = json.loads(printed(capsys, *command, "--json"))["accuracy"]
    assert said["asked"] == ["h100-sxm", "bf16"]
    assert said["rows"] == table()["train-dense", "h100-sxm, bf16"].rows
    text = printed(capsys, *command)
    assert f"off by {said['error']:.1%} on average" in text


def test_a_search_for_serving_says_the_errors_of_the_best() -> None:
    found = sw.search_serving(
        "llama3.1-8b", "h100-sxm", rate=4, isl=128, osl=8, num_requests=16, tp=1, gpus=1,
        ttft=1000, tpot=100,
    )  # fmt: skip
    per_token, *_ = found.accuracy()
    assert per_token.asked == ("vllm", "h100-sxm", "llama", "bf16")
    assert any(per_token.sentence in str(part) for part in found.text())
    assert found.to_dict()["accuracy"][0] == per_token.to_dict()
