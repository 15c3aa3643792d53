"""Blocks in columns have the kernels of the runs compiled alone; `structures.py` tries more."""

from __future__ import annotations

import pytest

from effort import times
from structures import compare, memory_gaps


@pytest.mark.parametrize("chunk", range(times(1)))
def test_kernels_of_many_random_runs(chunk: int) -> None:
    count, differences = compare(20, 1000 + chunk)
    assert not differences, differences[:5]
    assert count["in columns"] > count["candidates"] // 3


@pytest.mark.parametrize("chunk", range(times(1)))
def test_memory_of_many_runs(chunk: int) -> None:
    gaps, left = memory_gaps(6, 1000 + chunk)
    assert all(abs(gap) <= 0.01 for gap, _ in gaps), gaps
    assert left < len(gaps)
