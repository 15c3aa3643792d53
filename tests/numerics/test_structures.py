"""Blocks in columns have the kernels of the runs compiled alone."""

from __future__ import annotations

import pytest

from effort import times
from stagewright.search.candidates import Candidates, Column
from stagewright.explore.structures import structures
from stagewright.run.experiment import Experiment
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from structures import compare, differences, memory_gaps


@pytest.mark.parametrize("seed", range(times(2)))
def test_kernels_are_those_of_runs_compiled_alone(seed: int) -> None:
    """Names, ops, axes, parts, FLOPs, bytes, extents and what waits for what, one by one."""
    count, differences = compare(5, seed)
    assert not differences, differences[:5]
    assert count["candidates"]


@pytest.mark.parametrize("seed", range(times(1)))
def test_memory_is_that_of_runs_compiled_alone(seed: int) -> None:
    """The peak of the fullest rank, within 1% in every run of a few real models."""
    gaps, left = memory_gaps(3, seed)
    assert all(abs(gap) <= 0.01 for gap, _ in gaps), gaps
    assert left <= len(gaps)


def test_a_structure_has_several_microbatches_as_its_candidates_do() -> None:
    """Also one without the first candidate, whose batch has one with the others' numbers."""
    rows = [{"tp": 1, "micro_batch_size": 1, "global_batch_size": 8},
            {"tp": 2, "micro_batch_size": 2, "global_batch_size": 16}]  # fmt: skip
    columns = {name: Column.of([row[name] for row in rows]) for name in rows[0]}
    run = Run(model="opt-125m", layers=1, dp=4, zero=3, framework="torchtitan", vocab=240)
    base = Experiment(run, ClusterSection(), Execution())
    candidates = Candidates.of(base, resolve("h100-sxm"), columns)
    found = structures(candidates).found
    assert [of.run.microbatches for of in found] == [2, 2]
    assert not [one for of in found for one in differences(candidates, of)]
