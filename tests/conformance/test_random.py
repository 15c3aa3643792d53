"""Random programs of PyTorch: each is exact, or listed with the reason."""

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
