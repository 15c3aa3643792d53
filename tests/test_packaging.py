"""What is released agrees with itself. That a wheel works alone is tried by `.ci/run`."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import stagewright
from helpers import ROOT
from lowest import lowest


def test_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (\S+)", changes, re.MULTILINE)

    assert cited["version"] == stagewright.__version__
    assert heads[0] in ("Unreleased", stagewright.__version__)


def test_citation_has_what_citers_need():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert {"cff-version", "message", "title", "authors", "license", "references"} <= set(cited)
    (paper,) = cited["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2511.10480"


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_issue_forms_are_forms(path: Path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(form)
    for each in form["body"]:
        assert each["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert "value" in each["attributes"] or {"id"} <= set(each)


def test_hooks_are_the_tools_of_ci():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = hooks["repos"]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")

    assert repository["repo"] == "local"  # nothing is downloaded
    for hook in repository["hooks"]:
        assert f".venv/bin/{hook['entry'].removesuffix(' --fix')}" in script


def test_types_are_shipped():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (package,) = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert (ROOT / package / "py.typed").exists()
    assert "Typing :: Typed" in settings["project"]["classifiers"]


def test_forges_run_what_ci_runs():
    """On every Python that is supported, and with the lowest versions of what is needed."""
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = {f"3.{minor}" for minor in (11, 12, 13)}
    named = {c.rsplit(" ", 1)[1] for c in project["classifiers"] if ":: Python :: 3." in c}

    assert set(flow["jobs"]["all"]["strategy"]["matrix"]["python"]) == supported == named
    assert project["requires-python"] == ">=3.11"
    assert {"run": "bash .ci/run"} in flow["jobs"]["all"]["steps"]
    assert len(lowest(project["dependencies"])) == len(project["dependencies"])
