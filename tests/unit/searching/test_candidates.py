"""Candidates: rows are ordinary runs, and distinct tuples are those of numpy."""

import numpy as np
import pytest

from columns import candidates_of
from stagewright import arrays
from stagewright.run.experiment import Experiment
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Column

BASE = Experiment(Run(model="gpt2", layers=4), ClusterSection(), Execution(prefetch=2))


def test_without_a_batch_there_are_as_many_microbatches_as_a_run_has():
    columns = {
        "pp": Column.of([1, 4, 4, 2, 4, 4]),
        "schedule": Column.of([None, None, "zbv", "dualpipe", None, None]),
        "vpp": Column.of([1, 1, 2, 1, 2, 1]),
        "microbatch_group_size_per_vp_stage": Column.of([None, None, None, None, 6, None]),
        "dp": Column.of([2, 1, 1, 1, 1, 1]),
        "global_batch_size": Column.of([None, None, None, None, None, 12]),
    }
    candidates = candidates_of(BASE, columns)
    assert candidates.microbatches.tolist() == [
        candidates.run(row).microbatches for row in range(6)
    ]


@pytest.mark.parametrize("keys", [0, 1 << 14])
def test_distinct_tuples_are_numpys(keys: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "_KEYS_OF_A_ROW", keys)
    draw = np.random.default_rng(3)
    sizes = {"tp": 3, "cp": 700, "dp": 2, "pp": 900}
    columns = {
        name: Column.of(draw.integers(0, size, 500).tolist()) for name, size in sizes.items()
    }
    first, of = candidates_of(BASE, columns).distinct(*columns)
    tuples = np.stack([column.numbers() for column in columns.values()], axis=1)
    assert len(first) == len(np.unique(tuples, axis=0))
    assert (tuples[first][of] == tuples).all()
    assert (first[of] <= np.arange(500)).all()
