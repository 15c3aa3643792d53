"""Whether a step fits: the same comparison in every mode, command and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.cli.main import main

pytestmark = pytest.mark.numerics  # whole steps

TRAINING = ("llama3-8b", "--seq-length", "1024", "--layers", "4")
DECODE = (*TRAINING[:1], "--mode", "decode", "--layers", "4", "--batch-size", "64")
PREFILL = (*TRAINING[:1], "--mode", "prefill", "--layers", "4")
MODES = [TRAINING, DECODE, PREFILL]


def stagewright(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(str(end.value.code))


@pytest.mark.numerics
@pytest.mark.parametrize("run", MODES, ids=["train", "decode", "prefill"])
def test_simulate_ends_with_3_where_a_step_does_not_fit(
    run: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("simulate", *run, "--hardware", "h100-sxm")
    assert stagewright(*command) == 0
    fits = capsys.readouterr()
    assert "memory: at most" in fits.out
    assert "does not fit" not in fits.out + fits.err
    small = (*command, "--device-memory", "1GB")
    assert stagewright(*small) == 3
    told = capsys.readouterr()
    first, *others = told.out.splitlines()[1:4]
    assert first.startswith("memory: ")
    assert "of 1 GB: it does not fit" in first
    assert any(line.startswith("step ") for line in others)
    assert others[0].startswith("global batch ") is ("--mode" not in command)
    assert "--allow-oom" in told.err
    assert stagewright(*small, "--allow-oom") == 0


@pytest.mark.numerics
@pytest.mark.parametrize("run", MODES, ids=["train", "decode", "prefill"])
def test_json_says_whether_it_fits(
    run: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("simulate", *run, "--hardware", "h100-sxm", "--json")
    assert stagewright(*command) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["fits"]
    assert memory["device_memory"] == 80e9
    assert memory["peak"] == sum(memory["by_category"].values()) > 0
    just = memory["peak"]
    assert stagewright(*command, "--device-memory", f"{just}B") == 0
    capsys.readouterr()
    assert stagewright(*command, "--device-memory", f"{just - 1}B") == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["memory"]["fits"]
    assert {lane["memory"]["capacity"] for lane in found["lanes"]} == {just - 1}
    assert max(lane["memory"]["at_peak"]["peak"] for lane in found["lanes"]) == just


@pytest.mark.numerics
def test_report_and_show_compare_with_the_memory_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "page.html")
    for run in MODES:
        given = (*run, "--device-memory", "1GB")
        assert stagewright("show", *run) == 0
        assert stagewright("show", *given) == 3
        assert stagewright("show", *given, "--allow-oom") == 0
        capsys.readouterr()
        assert stagewright("show", *given, "--json") == 3
        assert json.loads(capsys.readouterr().out)["fit"]["fits"] is False
        assert stagewright("report", *run, "-o", page, "--force") == 0
        assert stagewright("report", *given, "-o", page, "--force") == 3
        assert stagewright("report", *given, "--hardware", "h100-sxm", "-o", page, "--force") == 3
        assert "does not fit" in Path(page).read_text()


@pytest.mark.parametrize("run", MODES, ids=["train", "decode", "prefill"])
def test_an_allowance_counts_in_every_mode(
    run: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*run, "--device-memory", "80GB", "--json")
    assert stagewright("show", *given) == 0
    plain = json.loads(capsys.readouterr().out)
    assert stagewright("show", *given, "--memory-allowance", "79GB") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fit"]["peak"] == plain["fit"]["peak"] + 79 * 10**9
    assert found["fit"]["by_category"]["allowance"] == 79 * 10**9
    for one, other in zip(plain["rank_classes"], found["rank_classes"], strict=True):
        assert other["memory"] == one["memory"] | {"allowance": 79 * 10**9}
    simulated = ("simulate", *run, "--hardware", "h100-sxm", "--memory-allowance", "79GB", "--json")
    assert stagewright(*simulated) == 3
    assert json.loads(capsys.readouterr().out)["memory"]["peak"] == found["fit"]["peak"]


@pytest.mark.numerics
@pytest.mark.parametrize("settings", [{"mode": "decode"}, {"mode": "prefill"}], ids=str)
def test_fewer_requests_fit_beside_an_allowance(settings: dict[str, Any]) -> None:
    """An allowance leaves room for as many requests as a device with that much less memory."""

    def found(**memory: str) -> Any:
        run = sw.Run(model="llama3-8b", layers=4, tp=8, batch_size=8, **settings, **memory)
        capacity = sw.compile(run).capacity
        assert capacity is not None
        return capacity

    beside = found(device_memory="80GB", memory_allowance="60GB")
    assert beside == found(device_memory="20GB")._replace(device_memory=80 * 10**9)
    assert beside.fits
    assert 0 < beside.requests < found(device_memory="80GB").requests
    none = found(device_memory="80GB", memory_allowance="80GB")
    assert (none.fits, none.requests, none.tokens) == (False, 0, 0)


def test_an_allowance_counts_on_both_groups_of_a_disaggregated_step() -> None:
    run = sw.Run(
        model="llama3-8b", mode="decode", layers=4, batch_size=8, context_length=1024,
        prefill="tp=2",
    )  # fmt: skip
    more = run.model_copy(update={"memory_allowance": "2GiB"})
    for of in sw.compile(more).program.classes:
        assert of.memory["allowance"] == 2 * 2**30
    plain, found = (sw.simulate(each, "h100-sxm") for each in (run, more))
    assert found.fit.peak == plain.fit.peak + 2 * 2**30
    for one, other in zip(plain.groups, found.groups, strict=True):
        assert other.fit.peak == one.fit.peak + 2 * 2**30


@pytest.mark.numerics
def test_both_groups_of_a_disaggregated_step_are_compared() -> None:
    # Prefill on one GPU holds all weights, decode on eight an eighth of them.
    settings: dict[str, Any] = {"mode": "decode", "tp": 8, "batch_size": 8, "context_length": 1024}
    found = sw.simulate("llama3.1-70b", "h100-sxm", **settings, prefill="tp=1")
    assert not found.fit.fits
    assert found.fit.fullest.rank_class.ranks.tolist() == [0]
    assert sw.simulate("llama3.1-70b", "h100-sxm", **settings, prefill="tp=4").fit.fits


GPT_OSS = ["gpt-oss-120b", "--mode", "decode", "--context-length", "8192", "--hardware", "h100-sxm"]


def test_show_compares_with_the_memory_of_the_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert stagewright("show", *GPT_OSS, "--batch-size", "64") == 3
    assert "80 GB hold 47 such requests" in capsys.readouterr().out
    assert stagewright("show", *GPT_OSS, "--batch-size", "8") == 0
    assert stagewright("show", *GPT_OSS, "--batch-size", "64", "--device-memory", "141GB") == 0
    assert "141 GB hold" in capsys.readouterr().out
    training = ["llama3-8b", "--layers", "16", "--hardware", "a100-sxm-80gb"]
    assert stagewright("show", *training) == (0 if _peak(16) <= 80e9 else 3)
    capsys.readouterr()
    disaggregated = ["--mode", "decode", "--prefill", "tp=2", "--hardware", "h100-sxm"]
    assert stagewright("show", "llama3.1-70b", *disaggregated) == 3
    assert "this step does not fit" in capsys.readouterr().out


def _peak(layers: int) -> int:
    classes = sw.compile("llama3-8b", layers=layers).program.classes
    return max(of.memory["peak"] for of in classes)


def test_the_advice_on_memory_of_inference_names_what_helps() -> None:
    def advice(model: str, **settings: Any) -> str:
        found = sw.simulate(model, "h100-sxm", mode="decode", context_length=8192, **settings)
        return next(each.text for each in found.remarks() if each.about == "Memory")

    text = advice("llama3-8b", batch_size=100)
    for words in ("fewer or shorter requests", "kv_cache_dtype=fp8", "weight_precision=fp8", "tp"):
        assert words in text
    text = advice("gpt-oss-120b", batch_size=64, kv_cache_dtype="fp8", device_memory="70GB")
    assert "fewer or shorter requests" in text
    assert "kv_cache_dtype" not in text
    assert "weight_precision" not in text
    text = advice("llama3.1-70b", batch_size=1)
    assert "fewer" not in text
    assert "weight_precision=fp8" in text


def test_what_is_too_much_by_little_is_told_from_the_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peak = _peak(2)
    assert stagewright("show", "llama3-8b", "--layers", "2", "--device-memory", f"{peak - 1}") == 3
    printed = capsys.readouterr()
    line = next(each for each in printed.out.splitlines() if each.startswith("at most"))
    held, room = line.removeprefix("at most ").split(":")[0].split(" of ")
    assert held != room
    assert held in printed.err


def test_json_of_an_inference_step_says_what_show_says_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[dict[str, Any]] = []
    words = ["llama3.1-8b", "--layers", "2", "--mode", "decode", "--hardware", "h100-sxm", "--json"]
    for command in ("simulate", "show"):
        with pytest.raises(SystemExit):
            main([command, *words])
        found.append(json.loads(capsys.readouterr().out))
    simulated, shown = found
    assert simulated["stored"] == shown["stored"] == {"weights": ["bf16"], "kv_cache": "bf16"}
    assert simulated["capacity"] == shown["capacity"]
