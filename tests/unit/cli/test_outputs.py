"""One rule for files and directories that commands write: none is replaced without --force."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers import Command, cases
from stagewright.cli import output

pytestmark = pytest.mark.numerics  # whole commands

RUN = "gpt2 --layers 1 --seq-length 16 --vocab 64"
WRITING = [
    f"report {RUN} -o",
    f"simulate {RUN} --hardware h100-sxm --perfetto",
    f"generate {RUN} -o",
]


@pytest.mark.parametrize("line", WRITING)
def test_outputs_are_replaced_only_by_force(line: str, command: Command, tmp_path: Path):
    missing = tmp_path / "no" / "out"
    said = f"{missing}: directory {missing.parent} does not exist; create it first"
    assert command(f"{line} {missing}").err == f"stagewright: error: {said}\n"
    out = tmp_path / "out"
    assert command(f"{line} {out}").code == 0
    said = f"{out}: exists already; choose another name, or --force to replace it"
    assert command(f"{line} {out}") == (2, "", f"stagewright: error: {said}\n")
    assert command(f"{line} {out} --force").code == 0
    other = command(f"report {RUN} --force -o {out}")
    assert other.code == (2 if line.startswith("generate") else 0)


def test_a_terminal_is_no_file_to_replace(command: Command):
    report = f"report {RUN} -o"
    assert command(f"{report} {os.devnull}").code == 0
    error = command(f"{report} -").err
    assert error.startswith("stagewright: error: -: is no file; give a name")
    assert "is a directory; wanted the name of a file" in command(f"{report} {os.curdir}").err


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]):
    output.print_json({"a": [1.5, float("nan")], "b": {"c": float("-inf"), "d": (2,)}})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert found == {"a": [1.5, None], "b": {"c": None, "d": [2]}}


@pytest.mark.parametrize("number", [".inf", ".nan", "-.inf", "1e400"])
def test_hardware_has_finite_numbers(number: str, command: Command, tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text(f"base: h100-sxm\nmemory_gb: {number}\n", encoding="utf-8")
    found = command(f"simulate {RUN} --hardware {path} --json")
    assert found.code == 2
    assert found.err.startswith(f"stagewright: error: {path}: memory_gb is ")
    assert found.err.count("\n") == 1


SEARCH = (
    f"search {RUN} --gpus 2 --tp 1 --pp 1 --zero 1 --recompute none --micro-batch-size 1,2 "
    "--global-batch-size 8 --workers 1"
)
H100 = f"{SEARCH} --hardware h100-sxm"


@pytest.fixture(name="place")
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.hardware.yaml").write_text("base: h100-sxm\nmemory_gb: 81\nname: m\n")
    (tmp_path / "run.yaml").write_text("hardware: m.hardware.yaml\n")
    (tmp_path / "run.own.yaml").write_text("hardware: m.hardware.yaml\n")
    return tmp_path


@cases
def test_a_search_replaces_nothing_that_it_reads_and_checks_files_before(
    given: str, out: str, said: str, place: Path, command: Command
):
    before = {path.name: path.read_text() for path in place.iterdir()}
    options = [word for name in out.split() for word in ("-o", name)]
    found = command(*f"{SEARCH} {given}".split(), *options, "--force")
    assert found.code == 2
    assert said in found.err
    assert found.err.count("\n") == 1  # before anything is said of the space
    assert {path.name: path.read_text() for path in place.iterdir()} == before


def test_the_file_of_hardware_is_replaced_only_by_force(place: Path, command: Command):
    (place / "best.hardware.yaml").write_text("mine")
    asked = f"{H100} --vary memory.gb=70 -o best.yaml"
    assert "best.hardware.yaml: exists already" in command(asked).err
    assert (place / "best.hardware.yaml").read_text() == "mine"
    assert command(f"{H100} -o best.yaml").code == 0  # which needs no such file
    assert command(f"{asked} --force").code == 0
    assert "mine" not in (place / "best.hardware.yaml").read_text()


def test_parquet_without_its_package_is_refused_before(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "polars", None)
    found = command(f"{H100} -o a.csv -o a.parquet")
    assert found.err.startswith("stagewright: error: a.parquet: .parquet needs the ")
    assert not (place / "a.csv").exists()


def test_a_file_that_fails_late_takes_no_other_with_it(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stagewright.api.searched.html_page", full)
    found = command(f"{H100} -o a.html -o a.yaml -o a.csv --run 5")
    assert found.code == 2
    assert (place / "a.csv").exists()
    assert found.out.startswith("best: ")
    assert found.err.splitlines()[-1] == (
        "stagewright: error: a.html: cannot be written: No space left on device; --run 5: there "
        "is one run; give --run 1"
    )


def test_all_candidates_are_written_where_none_fits(place: Path, command: Command):
    out = "-o a.csv -o a.json -o a.html -o a.yaml"
    found = command(f"{H100} --vary memory.gb=0.001 {out}")
    assert found.code == 3
    said = found.err.splitlines()[-1]
    assert said.startswith("stagewright: error: none of the 2 candidates fits: the least")
    assert said.endswith("; a.yaml: not written, since there is no run to write")
    rows = json.loads((place / "a.json").read_text())["rows"]
    assert [row["fits"] for row in rows] == [False, False]
    assert all(row["peak"] > 1e6 for row in rows)
    assert (place / "a.csv").read_text().count("\n") == 3
    assert "none of the 2 candidates fits" in (place / "a.html").read_text()
    assert not (place / "a.yaml").exists()
