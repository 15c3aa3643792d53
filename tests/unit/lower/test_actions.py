"""Distinct actions are few: what microbatches, stages, ranks and classes have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import table_of
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run

SIZES = {"seq_length": 64, "micro_batch_size": 1, "vocab": 240, "layers": 8}
DENSE: dict[str, Any] = {"model": "llama3-8b", "global_batch_size": 16} | SIZES

RUNS: dict[str, dict[str, Any]] = table_of("test_actions", "runs")


def program_of(settings: dict[str, Any]) -> Program:
    return compile(Run(**settings)).program


def test_microbatches_add_copies_only():
    few, many = (program_of(DENSE | {"pp": 4, "global_batch_size": n}) for n in (8, 64))
    for a, b in zip(few.classes, many.classes, strict=True):
        assert np.array_equal(a.work.actions.begin, b.work.actions.begin)
        assert len(b.work.order.action) - len(a.work.order.action) == 2 * 56


def test_stages_of_a_class_share_actions():
    few, many = (program_of(DENSE | {"pp": pp, "vpp": 2, "layers": 4 * pp}) for pp in (4, 8))
    assert len({id(of.work.actions) for of in many.classes}) == 1
    # First, inner and last stages; ranks with the first one, with none of these, with the last one.
    counts = [len(program.classes[0].work.actions.begin) - 1 for program in (few, many)]
    assert counts == [3 * 4 + 3] * 2


def test_replicas_of_a_mirrored_pipeline_are_shards():
    """241 rows of the vocabulary on four ranks: 61, 61, 61 and 58, the last pipeline rank last."""
    program = program_of(RUNS["DualPipe, uneven shards"])
    assert [of.ranks.tolist() for of in program.classes] == [[0, 1], [2], [3]]
    sizes = [of.memory["optimizer"] for of in program.classes]
    values_per_row = 4 * 4096  # two moments, of the embedding and of the output layer
    assert [sizes[0] - size for size in sizes] == [0, 0, 3 * values_per_row * 4]
