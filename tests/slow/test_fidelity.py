"""docs/fidelity.md is what `benchmarks/fidelity.py` writes."""

from __future__ import annotations

import importlib.util

import pytest

from paths import ROOT

SPEC = importlib.util.spec_from_file_location("fidelity", ROOT / "benchmarks" / "fidelity.py")
assert SPEC
assert SPEC.loader
fidelity = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fidelity)
TOLD = "see pytest --bless, which is `python benchmarks/fidelity.py`"


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> str:
    if request.config.getoption("--bless"):
        fidelity.PAGE.write_text(fidelity.page(), encoding="utf-8")
    return fidelity.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("title", fidelity.SECTIONS)
def test_section_is_current(page: str, title: str) -> None:
    part = fidelity.SECTIONS[title]()
    assert f"\n{fidelity.section(title, part)}\n" in f"{page}\n", TOLD
    head = page.split("\n## ")[0]
    for row in part.glance:
        assert f"| {' | '.join(row)} |" in head, TOLD
