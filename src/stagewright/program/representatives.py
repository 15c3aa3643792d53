"""The tasks of one microbatch, which stand for those of all: what repeats is timed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import PHASES, Tasks

_FEWEST = 3
"""Microbatches of which it pays to look at one alone."""
_EQUAL = (
    "kind", "op", "layer", "flops", "traffic", "collective", "dtype", "comm_bytes", "slot", "shape",
)  # fmt: skip
"""Columns that tasks share which differ in nothing but their microbatch."""


_Figures = TypeVar("_Figures", bound=NDArray[Any])


class Representatives(NamedTuple):
    """Tasks of one microbatch and those that are there once per step."""

    tasks: Tasks
    """In issue order, with the data that they read, without what the schedule lets them wait for
    and without measured durations."""
    of: Int
    """By task of the rank, which of these it is like."""


def by_representatives(tasks: Tasks, figures: Callable[[Tasks], _Figures]) -> _Figures:
    """Figures by task, found for representatives where there are: `figures` must depend on nothing
    but tasks of the same microbatch, and on the rank's tasks as a set."""
    few = representatives(tasks)
    return figures(tasks) if few is None else figures(few.tasks)[few.of]


def representatives(tasks: Tasks) -> Representatives | None:
    """The tasks that stand for those of all microbatches; None: there are few microbatches, or they
    differ in more than their number.

    Tasks of one name, stage and phase that agree in all their figures are alike, whatever they took
    where they were measured; several of a microbatch are told apart by their order.
    """
    if int(tasks.microbatch.max(initial=0)) + 1 < _FEWEST:
        return None
    rows = np.flatnonzero(tasks.microbatch <= 0)
    first = rows[tasks.microbatch[rows] == 0]
    if not len(first):
        return None
    key = _keys(tasks)
    first = first[np.argsort(key[first], kind="stable")]
    known = key[first]
    others = np.flatnonzero(tasks.microbatch > 0)
    at = np.minimum(np.searchsorted(known, key[others]), len(first) - 1)
    like = np.arange(len(tasks))
    like[others] = first[at]
    inputs = np.diff(tasks.data_ptr)
    every = (key, inputs, *(getattr(tasks, name) for name in _EQUAL))
    if not all(np.array_equal(column[others], column[like[others]]) for column in every):
        return None
    place = np.empty(len(tasks), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    of = place[like]
    return Representatives(_only(tasks, rows, of), of)


def _keys(tasks: Tasks) -> Int:
    """Numbers of tasks: equal where name, stage and phase are, and as many tasks of the microbatch
    before a task agree with it in these."""
    stages = int(tasks.stage.max()) + 2
    named = (tasks.name.astype(np.int64) * stages + tasks.stage + 1) * len(PHASES) + tasks.phase
    each = named * (int(tasks.microbatch.max()) + 2) + tasks.microbatch + 1
    order = np.argsort(each, kind="stable")
    rows = np.arange(len(each))
    begins = np.append(True, np.diff(each[order]) != 0)
    nth = np.empty_like(rows)
    nth[order] = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return named * (int(nth.max()) + 1) + nth


def _only(tasks: Tasks, rows: Int, of: Int) -> Tasks:
    """Some tasks, which read from the one that each of their inputs is like (`of`)."""
    inputs = np.diff(tasks.data_ptr)[rows]
    pointer = np.concatenate([[0], np.cumsum(inputs)])
    begin = np.repeat(tasks.data_ptr[rows] - pointer[:-1], inputs)
    needed = tasks.data[begin + np.arange(int(pointer[-1]))]
    columns = ("name", "phase", "stage", "microbatch", "tag", *_EQUAL)
    return replace(
        tasks,
        **{name: getattr(tasks, name)[rows] for name in columns},
        data_ptr=pointer,
        data=of[needed].astype(np.int32),
        order_ptr=np.zeros(len(rows) + 1, dtype=np.int64),
        order=tasks.order[:0],
        duration=None,
        uneven_bytes=None if tasks.uneven_bytes is None else tasks.uneven_bytes[rows],
    )
