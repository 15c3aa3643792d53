"""Blocks in columns have the kernels of the runs compiled alone."""

from __future__ import annotations

import pytest

from structures import compare


@pytest.mark.parametrize("seed", range(4))
def test_kernels_are_those_of_runs_compiled_alone(seed: int) -> None:
    """Names, ops, axes, parts, FLOPs, bytes, extents and what waits for what, one by one."""
    count, differences = compare(5, seed)
    assert not differences, differences[:5]
    assert count["candidates"]
