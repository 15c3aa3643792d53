"""One rule for files and directories that commands write: none is replaced without --force."""

import json
import os
import sys
from pathlib import Path

import pytest

from stagewright.cli import output
from stagewright.cli.main import main

pytestmark = pytest.mark.numerics  # whole commands

RUN = ("gpt2", "--layers", "1", "--seq-length", "16", "--vocab", "64")
COMMANDS = {
    "report": ("report", *RUN, "-o"),
    "simulate": ("simulate", *RUN, "--hardware", "h100-sxm", "--perfetto"),
    "generate": ("generate", *RUN, "-o"),
}


def code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(str(stop.value.code))


@pytest.mark.parametrize("command", COMMANDS)
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
    assert code("report", *RUN, "-o", "-") == 2
    assert capsys.readouterr().err.startswith("stagewright: error: -: is no file; give a name")
    assert code("report", *RUN, "-o", os.curdir) == 2
    assert "is a directory; wanted the name of a file" in capsys.readouterr().err


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]):
    output.print_json({"a": [1.5, float("nan")], "b": {"c": float("-inf"), "d": (2,)}})
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


SEARCH = (
    *("search", *RUN, "--gpus", "2", "--tp", "1", "--pp", "1", "--zero", "1"),
    *("--recompute", "none", "--micro-batch-size", "1,2", "--global-batch-size", "8"),
    *("--workers", "1"),
)
H100 = ("--hardware", "h100-sxm")


@pytest.fixture(name="place")
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.hardware.yaml").write_text("base: h100-sxm\nmemory_gb: 81\nname: m\n")
    (tmp_path / "run.yaml").write_text("hardware: m.hardware.yaml\n")
    (tmp_path / "run.own.yaml").write_text("hardware: m.hardware.yaml\n")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "out", "said"),
    [
        ("--hardware m.hardware.yaml", "m.yaml", "m.hardware.yaml: would replace a file that"),
        ("--hardware m.hardware.yaml", "m.hardware.yaml", "m.hardware.yaml: would replace a file"),
        ("--config run.yaml", "run.yaml", "run.yaml: would replace a file that this search reads"),
        ("--config run.yaml", "m.hardware.yaml", "m.hardware.yaml: would replace a file that"),
        ("--hardware m.hardware.yaml", "run.yaml run.own.yaml run.own.hardware.yaml",
         "run.own.hardware.yaml: would be written twice; choose another name"),
        ("--hardware h100-sxm", "a.csv ./a.csv", "./a.csv: would be written twice, as a.csv, too"),
        ("--hardware h100-sxm", "a.csv /proc/a.csv", "/proc/a.csv: cannot be written: "),
        ("--hardware h100-sxm", f"{'a' * 250}.csv", "cannot be written: File name too long"),
        ("--hardware h100-sxm --run 21", "a.csv a.yaml", "--run 21: a search lists the best 20 "
         "(--top); give --run 1 to 20, or --top 21"),
    ],
)  # fmt: skip
def test_a_search_replaces_nothing_that_it_reads_and_checks_files_before(
    given: str, out: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
):
    before = {path.name: path.read_text() for path in place.iterdir()}
    options = [word for name in out.split() for word in ("-o", name)]
    assert code(*SEARCH, *given.split(), *options, "--force") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1  # before anything is said of the space
    assert {path.name: path.read_text() for path in place.iterdir()} == before


def test_the_file_of_hardware_is_replaced_only_by_force(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    (place / "best.hardware.yaml").write_text("mine")
    asked = (*SEARCH, *H100, "--vary", "memory.gb=70", "-o", "best.yaml")
    assert code(*asked) == 2
    assert "best.hardware.yaml: exists already" in capsys.readouterr().err
    assert (place / "best.hardware.yaml").read_text() == "mine"
    assert code(*SEARCH, *H100, "-o", "best.yaml") == 0  # which needs no such file
    assert code(*asked, "--force") == 0
    assert "mine" not in (place / "best.hardware.yaml").read_text()


def test_parquet_without_its_package_is_refused_before(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "polars", None)
    assert code(*SEARCH, *H100, "-o", "a.csv", "-o", "a.parquet") == 2
    assert capsys.readouterr().err.startswith("stagewright: error: a.parquet: .parquet needs the ")
    assert not (place / "a.csv").exists()


def test_a_file_that_fails_late_takes_no_other_with_it(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stagewright.api.searched.html_page", full)
    out = ("-o", "a.html", "-o", "a.yaml", "-o", "a.csv", "--run", "5")
    assert code(*SEARCH, *H100, *out) == 2
    assert (place / "a.csv").exists()
    captured = capsys.readouterr()
    assert captured.out.startswith("best: ")
    assert captured.err.splitlines()[-1] == (
        "stagewright: error: a.html: cannot be written: No space left on device; --run 5: there "
        "is one run; give --run 1"
    )


def test_all_candidates_are_written_where_none_fits(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    names = ("a.csv", "a.json", "a.html", "a.yaml")
    out = [word for name in names for word in ("-o", name)]
    assert code(*SEARCH, *H100, "--vary", "memory.gb=0.001", *out) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("stagewright: error: none of the 2 candidates fits: the least")
    assert said.endswith("; a.yaml: not written, since there is no run to write")
    rows = json.loads((place / "a.json").read_text())["rows"]
    assert [row["fits"] for row in rows] == [False, False]
    assert all(row["peak"] > 1e6 for row in rows)
    assert (place / "a.csv").read_text().count("\n") == 3
    assert "none of the 2 candidates fits" in (place / "a.html").read_text()
    assert not (place / "a.yaml").exists()
