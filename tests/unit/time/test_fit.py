"""Whether a step fits: the same comparison in every mode, command and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import Command

pytestmark = pytest.mark.numerics  # whole steps

MODES = [
    "llama3-8b --layers 4 --seq-length 1024",
    "llama3-8b --mode decode --layers 4 --batch-size 64",
    "llama3-8b --mode prefill --layers 4",
]
of_every_mode = pytest.mark.parametrize("run", MODES)


@of_every_mode
def test_simulate_ends_with_3_where_a_step_does_not_fit(run: str, command: Command) -> None:
    fits = command(f"simulate {run} --hardware h100-sxm")
    assert fits.code == 0
    assert "memory: at most" in fits.out
    assert "does not fit" not in fits.out + fits.err
    small = f"simulate {run} --hardware h100-sxm --device-memory 1GB"
    told = command(small)
    assert told.code == 3
    first, *others = told.out.splitlines()[1:4]
    assert first.startswith("memory: ")
    assert "of 1 GB: it does not fit" in first
    assert any(line.startswith("step ") for line in others)
    assert "--allow-oom" in told.err
    assert command(f"{small} --allow-oom").code == 0


@of_every_mode
def test_json_says_whether_it_fits(run: str, command: Command) -> None:
    line = f"simulate {run} --hardware h100-sxm --json"
    memory = json.loads(command(line).out)["memory"]
    assert memory["fits"]
    assert memory["device_memory"] == 80e9
    assert memory["peak"] == sum(memory["by_category"].values()) > 0
    just = memory["peak"]
    assert command(f"{line} --device-memory {just}B").code == 0
    code, out, _ = command(f"{line} --device-memory {just - 1}B")
    assert code == 3
    found = json.loads(out)
    assert not found["memory"]["fits"]
    assert {lane["memory"]["capacity"] for lane in found["lanes"]} == {just - 1}
    assert max(lane["memory"]["at_peak"]["peak"] for lane in found["lanes"]) == just


@of_every_mode
def test_report_and_show_compare_with_the_memory_that_is_named(
    run: str, tmp_path: Path, command: Command
) -> None:
    page = tmp_path / "page.html"
    given = f"{run} --device-memory 1GB"
    assert command(f"show {run}").code == 0
    assert command(f"show {given} --allow-oom").code == 0
    code, out, _ = command(f"show {given} --json")
    assert (code, json.loads(out)["fit"]["fits"]) == (3, False)
    for line, ends in ((run, 0), (given, 3), (f"{given} --hardware h100-sxm", 3)):
        assert command(f"report {line} -o {page} --force").code == ends
    assert "does not fit" in page.read_text()


@of_every_mode
def test_an_allowance_counts_in_every_mode(run: str, command: Command) -> None:
    given = f"show {run} --device-memory 80GB --json"
    plain = json.loads(command(given).out)
    code, out, _ = command(f"{given} --memory-allowance 79GB")
    found = json.loads(out)
    assert code == 3
    assert found["fit"]["peak"] == plain["fit"]["peak"] + 79 * 10**9
    assert found["fit"]["by_category"]["allowance"] == 79 * 10**9
    for one, other in zip(plain["rank_classes"], found["rank_classes"], strict=True):
        assert other["memory"] == one["memory"] | {"allowance": 79 * 10**9}
    line = f"simulate {run} --hardware h100-sxm --memory-allowance 79GB --json"
    assert json.loads(command(line).out)["memory"]["peak"] == found["fit"]["peak"]


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


def test_both_groups_of_a_disaggregated_step_are_compared() -> None:
    # Prefill on one GPU holds all weights, decode on eight an eighth of them.
    settings: dict[str, Any] = {"mode": "decode", "tp": 8, "batch_size": 8, "context_length": 1024}
    found = sw.simulate("llama3.1-70b", "h100-sxm", **settings, prefill="tp=1")
    assert not found.fit.fits
    assert found.fit.fullest.rank_class.ranks.tolist() == [0]
    assert sw.simulate("llama3.1-70b", "h100-sxm", **settings, prefill="tp=4").fit.fits


GPT_OSS = "show gpt-oss-120b --mode decode --context-length 8192 --hardware h100-sxm"


def test_show_compares_with_the_memory_of_the_hardware(command: Command) -> None:
    code, out, _ = command(f"{GPT_OSS} --batch-size 64")
    assert code == 3
    assert "80 GB hold 47 such requests" in out
    assert command(f"{GPT_OSS} --batch-size 8").code == 0
    code, out, _ = command(f"{GPT_OSS} --batch-size 64 --device-memory 141GB")
    assert code == 0
    assert "141 GB hold" in out
    training = "show llama3-8b --layers 16 --hardware a100-sxm-80gb"
    assert command(training).code == (0 if _peak(16) <= 80e9 else 3)
    code, out, _ = command("show llama3.1-70b --mode decode --prefill tp=2 --hardware h100-sxm")
    assert code == 3
    assert "this step does not fit" in out


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


def test_what_is_too_much_by_little_is_told_from_the_room(command: Command) -> None:
    code, out, err = command(f"show llama3-8b --layers 2 --device-memory {_peak(2) - 1}")
    assert code == 3
    line = next(each for each in out.splitlines() if each.startswith("at most"))
    held, room = line.removeprefix("at most ").split(":")[0].split(" of ")
    assert held != room
    assert held in err


def test_json_of_an_inference_step_says_what_show_says_of_memory(command: Command) -> None:
    run = "llama3.1-8b --layers 2 --mode decode --hardware h100-sxm --json"
    simulated, shown = (json.loads(command(f"{of} {run}").out) for of in ("simulate", "show"))
    assert simulated["stored"] == shown["stored"] == {"weights": ["bf16"], "kv_cache": "bf16"}
    assert simulated["capacity"] == shown["capacity"]
