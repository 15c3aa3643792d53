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
EXPERTS: dict[str, Any] = {"model": "mixtral-8x7b", "global_batch_size": 32} | SIZES
FSDP = {"framework": "torchtitan", "zero": 3, "dp": 2}

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


def test_classes_of_a_pipeline_rank_differ_in_numbers_only():
    program = program_of(RUNS["uneven experts"])
    first, *others = [of.work for of in program.classes if of.pipeline_rank == 0]
    assert others
    for work in others:
        assert work.order is first.order
        for name in ("begin", "part", "carried"):
            assert getattr(work.actions, name) is getattr(first.actions, name)
        assert work.actions.tasks.data is first.actions.tasks.data
        assert not np.array_equal(work.actions.tasks.flops, first.actions.tasks.flops)


def test_replicas_of_a_mirrored_pipeline_are_shards():
    """241 rows of the vocabulary on four ranks: 61, 61, 61 and 58, the last pipeline rank last."""
    program = program_of(RUNS["DualPipe, uneven shards"])
    assert [of.ranks.tolist() for of in program.classes] == [[0, 1], [2], [3]]
    sizes = [of.memory["optimizer"] for of in program.classes]
    values_per_row = 4 * 4096  # two moments, of the embedding and of the output layer
    assert [sizes[0] - size for size in sizes] == [0, 0, 3 * values_per_row * 4]


def test_explicit_tables_are_one_action():
    (of,) = program_of(DENSE | {"global_batch_size": 2}).classes
    work = of.work.from_tables(of.tasks, values=of.values)
    assert work.tasks is of.tasks
    assert work.actions.tasks is of.tasks
    assert work.order.action.tolist() == [0]
    assert work.order.begin.tolist() == [0, len(of.tasks)]
    assert not work.actions.carried.any()
    assert work.memory == of.memory
    again = of.work.with_tasks(of.tasks)
    assert again.memory == of.memory
    assert again.values is of.values
