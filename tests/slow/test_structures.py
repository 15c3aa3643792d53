"""Blocks in columns have the kernels of the runs compiled alone; `structures.py` tries more."""

from __future__ import annotations

import pytest

from effort import times
from structures import compare


@pytest.mark.parametrize("chunk", range(times(4)))
def test_kernels_of_many_random_runs(chunk: int) -> None:
    count, differences = compare(60, 1000 + chunk)
    assert not differences, differences[:5]
    assert count["in columns"] > count["candidates"] // 3
