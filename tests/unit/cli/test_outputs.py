"""One rule for files and directories that commands write: none is replaced without --force."""

import json
import os
from pathlib import Path

import pytest

from stagewright.cli import shared
from stagewright.cli.main import main

pytestmark = pytest.mark.numerics  # whole commands

RUN = ("gpt2", "--layers", "1", "--seq-length", "16", "--vocab", "64")
COMMANDS = {
    "report": ("report", *RUN, "-o"),
    "simulate": ("simulate", *RUN, "--hardware", "h100-sxm", "--perfetto"),
    "show": ("show", *RUN, "--memory-plot"),
    "reproduce": ("reproduce", "stage-paper", "-o"),
    "generate": ("generate", *RUN, "-o"),
}
SLOW = {"reproduce"}


def code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(str(stop.value.code))


@pytest.mark.parametrize(
    "command",
    [
        *sorted(COMMANDS.keys() - SLOW),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_outputs_are_replaced_only_by_force(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert code(*COMMANDS[command], out) == 0
    capsys.readouterr()

    assert code(*COMMANDS[command], out) == 2
    said = f"{out}: exists already; choose another name, or --force to replace it"
    assert capsys.readouterr() == ("", f"stagewright: error: {said}\n")
    assert code(*COMMANDS[command], out, "--force") == 0
    assert code("report", *RUN, "--force", "-o", out) == (2 if command == "generate" else 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_directory_is_said_in_one_way(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "no" / "out"
    assert code(*COMMANDS[command], out) == 2
    said = f"{out}: directory {out.parent} does not exist; create it first"
    assert capsys.readouterr().err == f"stagewright: error: {said}\n"


def test_a_terminal_is_no_file_to_replace(capsys: pytest.CaptureFixture[str]):
    assert code("report", *RUN, "-o", os.devnull) == 0
    assert code("report", *RUN, "-o", os.curdir) == 2
    assert "is a directory; wanted the name of a file" in capsys.readouterr().err


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]):
    shared.print_json({"a": [1.5, float("nan")], "b": {"c": float("-inf"), "d": (2,)}})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert found == {"a": [1.5, None], "b": {"c": None, "d": [2]}}


@pytest.mark.parametrize("number", [".inf", ".nan", "-.inf", "1e400"])
@pytest.mark.parametrize(
    "name", ["peak_bf16_tflops", "memory_gb", "tdp_w", "price_usd_per_gpu_hour"]
)
def test_hardware_has_finite_numbers(
    name: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "own.yaml"
    path.write_text(f"base: h100-sxm\n{name}: {number}\n", encoding="utf-8")
    assert code("simulate", *RUN, "--hardware", path, "--json") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"stagewright: error: {path}: {name} is ")
    assert said.count("\n") == 1
