"""docs/studies/fullflat.md has today's simulations of the systems of the FullFlat study."""

from __future__ import annotations

import importlib.util
from itertools import islice

import pytest

from helpers import ROOT, times

SPEC = importlib.util.spec_from_file_location("fullflat", ROOT / "benchmarks" / "fullflat.py")
assert SPEC
assert SPEC.loader
fullflat = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fullflat)


@pytest.mark.slow
@pytest.mark.parametrize("name", fullflat.TABLES)
def test_the_page_has_the_first_rows_of_each_table(name: str) -> None:
    """All of them with EFFORT=4; `python benchmarks/fullflat.py` writes them."""
    text = fullflat.PAGE.read_text(encoding="utf-8")
    text = text.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    for row in islice(fullflat.TABLES[name](), 1 + times(4)):
        assert f"| {' | '.join(row)} |" in text, "run python benchmarks/fullflat.py"


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
