"""docs/fidelity.md is what `benchmarks/fidelity.py` writes, as far as that is quick to make."""

from __future__ import annotations

import importlib.util

import pytest

from paths import ROOT
from stagewright.evidence import validate
from stagewright.evidence.measurements import measurements

SPEC = importlib.util.spec_from_file_location("fidelity", ROOT / "benchmarks" / "fidelity.py")
assert SPEC
assert SPEC.loader
fidelity = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fidelity)
TOLD = "see pytest --bless, which is `benchmarks/fidelity.py --quick`; not so if step times changed"


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> str:
    if request.config.getoption("--bless"):
        fidelity.PAGE.write_text(fidelity.page(quick=True), encoding="utf-8")
    return fidelity.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("title", fidelity.QUICK)
def test_section_is_current(page: str, title: str) -> None:
    part = fidelity.QUICK[title]()
    assert f"\n{fidelity.section(title, part)}\n" in page, TOLD
    head = page.split("\n## ")[0]
    for row in part.glance:
        assert f"| {' | '.join(row)} |" in head, TOLD


def test_step_times_are_current(page: str) -> None:
    """Of runs on one node; all of them take minutes."""
    few = [m for m in measurements() if m.run.world_size <= 8 and m.row in page]
    assert len(few) > 10
    for o in validate.validate(rows=few):
        assert f"| {' | '.join(fidelity.line(o))} |" in page, TOLD


def test_every_section_is_there(page: str) -> None:
    for title in fidelity.QUICK | fidelity.SLOW:
        assert f"\n## {title}\n" in page
