"""Known errors of predictions, which all outputs say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import stagewright as sw
from helpers import ROOT, cases
from stagewright.api.simulated import Simulation
from stagewright.cli.main import main
from stagewright.views.advice import remarks
from stagewright.views.deviations import DEVIATIONS, SOURCE, known

STEPS: dict[str, dict[str, Any]] = {
    "All-reduces of 0.5 to 2 GB": {
        "model": "deepseek-v3", "mode": "decode", "dp": 144, "ep": 144, "num_redundant_experts": 32,
        "hardware": "gb200-nvl72",
    },
    "Microbatches of at most": {"seq_length": 128},
    "Published steps of dense": {"hardware": "b200"},
    "Steps of gpt-oss": {"model": "gpt-oss-20b"},
    "Times per output token": {
        "model": "mixtral-8x7b", "mode": "decode", "weight_precision": "nvfp4", "hardware": "b200",
    },
    "Measured times to the first": {"mode": "prefill"},
    "Six rows of DeepSpeed": {"hardware": "a100-sxm-80gb", "zero": 3, "dp": 16},
    "The gain of overlapping": {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    "Tokens that are sent once": {
        "model": "mixtral-8x7b", "ep": 8, "dp": 8, "moe_flex_dispatcher": True,
    },
    "Constants of hardware": {"hardware": "mi300x"},
}  # fmt: skip
BASE = {"model": "llama3-8b", "layers": 4, "hardware": "h100-sxm"}


def step(settings: dict[str, Any]) -> Simulation:
    chosen = {**BASE, **settings}
    return sw.simulate(chosen.pop("model"), chosen.pop("hardware"), **chosen)


@pytest.mark.numerics
def test_every_row_has_a_step_and_no_other_step_its_sentence() -> None:
    assert len(STEPS) == len(DEVIATIONS)
    assert len([*known(step({}))]) == 1  # the error of its group
    for row, (begin, settings) in zip(DEVIATIONS, STEPS.items(), strict=True):
        assert row.sentence.startswith(begin)
        assert f"{row.sentence} ({SOURCE})" in [*known(step(settings))]


def test_sentences_have_figures() -> None:
    for row in DEVIATIONS:
        assert "{" not in row.sentence
        assert "-" not in re.findall(r"(.)\d+%", row.sentence), row.sentence


def test_the_page_with_the_figures_is_there() -> None:
    page = (ROOT / SOURCE).read_text(encoding="utf-8")
    assert "<!-- table: known -->" in page


def test_text_and_json_say_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "llama3-8b", "--layers", "4", "--mode", "decode", "--tp", "2"]
    command += ["--hardware", "h100-sxm"]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main([*command, *more])
    text, found = capsys.readouterr().out.split("{", 1)
    said = step({"mode": "decode", "tp": 2})
    wanted = [remark._asdict() for remark in remarks(said.compiled, said)]
    assert json.loads("{" + found)["remarks"] == wanted
    for remark in wanted:
        assert f"{remark['level']}: {remark['about']}: {remark['text']}" in text


def test_tensor_parallelism_that_leaves_the_node_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "llama3.1-70b", "--layers", "4", "--tp", "16", "--hardware", "h100-sxm"])
    assert "tp=16 crosses the NVLink domain of 8 GPUs" in capsys.readouterr().out


@cases
def test_gradients_that_pytorch_loses_are_said(settings: dict[str, Any], lost: bool) -> None:
    run = {"pp": 2, "vpp": 2, "dp": 2, "zero": 3, "framework": "torchtitan", "seq_length": 128}
    found = sw.compile("llama3-8b", layers=4, global_batch_size=16, **run, **settings)
    assert any(remark.about == "Gradients" for remark in remarks(found)) == lost


@pytest.mark.numerics
def test_stages_with_fewer_layers_are_not_named_where_one_of_these_is_the_busiest() -> None:
    def said(**settings: Any) -> bool:
        found = sw.compile("llama3-8b", pp=2, **settings)
        return any("fewer than the most" in each.text for each in remarks(found))

    assert not said(layers=3, layers_per_stage=(2, 1), mode="decode", vocab=2_000_000)
    assert not said(layers=31, layers_per_stage=(16, 15), vocab=300_000)
    assert said(layers=32, layers_per_stage=(20, 12))
    assert said(layers=31, layers_per_stage=(15, 16), mode="decode")
