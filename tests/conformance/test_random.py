"""Random programs of PyTorch: each is exact, or listed with what it misses."""

from pathlib import Path

import pytest
import random_programs

# One of ten in the second tier, all others in the third.
SOME = [
    name if nth % 10 == 0 else pytest.param(name, marks=pytest.mark.slow)
    for nth, name in enumerate(random_programs.CASES)
]


@pytest.mark.parametrize("name", SOME)
def test_exact_or_listed(name: str) -> None:
    found = random_programs.result(random_programs.CASES[name])
    assert found.exact == (name not in random_programs.DIFFERENT), found


@pytest.mark.slow
def test_the_shares_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    wanted = "put what `python tests/conformance/random_programs.py` prints there"
    assert random_programs.table() in text, wanted
