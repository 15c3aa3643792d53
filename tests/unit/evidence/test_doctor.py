import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import stagewright
from stagewright.cli import main as cli
from stagewright.evidence import doctor


def test_what_is_needed_is_here():
    found = doctor.examine()

    assert found.stagewright == stagewright.__version__
    assert Path(found.location) == Path(stagewright.__file__).parent
    assert sys.executable in found.python
    assert found.problems == []
    assert json.loads(json.dumps(found.to_json()))["problems"] == []


def test_every_extra_is_told_what_it_is_for():
    names = set(importlib.metadata.metadata("stagewright").get_all("Provides-Extra") or ())

    assert set(doctor.USES) == names
    assert set(doctor.examine().extras) == names


REQUIREMENTS = [
    "click>=8.1",
    "numpy<1000,>=1.26",
    "rich>=1000",
    "nosuch>=2",
    'pyright[nodejs]>=1.1.390; extra == "dev"',
    "stagewright[ray]; extra == 'dev'",
    'nosuch-either>=3; extra == "more"',
]


def test_what_is_missing():
    packages, extras = doctor.needed(REQUIREMENTS)

    assert [(p.name, p.wanted, p.ok) for p in packages] == [
        ("click", ">=8.1", True),
        ("numpy", "<1000,>=1.26", True),
        ("rich", ">=1000", False),
        ("nosuch", ">=2", False),
    ]
    assert packages[0].version == importlib.metadata.version("click")
    assert packages[3].version == ""
    assert [p.name for p in extras["dev"]] == ["pyright"]
    assert extras["more"] == [doctor.Package("nosuch-either", ">=3", "", False)]


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIREMENTS)
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor"])
    out = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)

    assert caught.value.code == 1
    assert "MISSING rich" in out
    assert "MISSING nosuch is not installed, wanted >=2; pip install 'nosuch>=2'" in out
    assert "MISSING extra more" in out
    assert "missing: nosuch-either - (wanted >=3); pip install 'stagewright[more]'" in out
    assert out.endswith("something is missing\n")


def test_without_an_installation_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch):
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = doctor.examine()

    assert (found.packages, found.problems) == ([], [])
    assert any("run from its source" in note for note in found.notes)
