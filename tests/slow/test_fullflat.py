"""docs/fullflat.md has today's simulations of the systems of the FullFlat study."""

from __future__ import annotations

import importlib.util

import pytest

from paths import ROOT

SPEC = importlib.util.spec_from_file_location("fullflat", ROOT / "benchmarks" / "fullflat.py")
assert SPEC
assert SPEC.loader
fullflat = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fullflat)


@pytest.mark.slow
def test_the_page_has_these_tables(request: pytest.FixtureRequest) -> None:
    text = fullflat.PAGE.read_text(encoding="utf-8")
    new = fullflat.page(text)
    if request.config.getoption("--bless"):
        fullflat.PAGE.write_text(new, encoding="utf-8")
    else:
        assert new == text, "run python benchmarks/fullflat.py, or pytest --bless"


@pytest.mark.numerics
def test_tables_of_layouts_are_those_of_the_file() -> None:
    text = fullflat.PAGE.read_text(encoding="utf-8")
    assert fullflat.page(text, fullflat.OF_FILE) == text, "run python benchmarks/fullflat.py"


@pytest.mark.slow
@pytest.mark.parametrize("batch", fullflat.BATCHES)
@pytest.mark.parametrize("system", fullflat.SYSTEMS)
def test_with_all_that_the_tool_assumes_ours_is_near(system: str, batch: int) -> None:
    """Within a tenth of what the study's tool prints."""
    theirs = fullflat.SYSTEMS[system].fixed[fullflat.BATCHES.index(batch)]
    found = fullflat.step(fullflat.assuming_all(system), batch).seconds
    assert found == pytest.approx(theirs, rel=0.1)
