"""Parallel degrees along which the tasks of a rank communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.program.columns import COLLECTIVES, Program, TaskKind, Tasks

_COMPUTE = int(TaskKind.COMPUTE)


class Along(NamedTuple):
    """Degrees along which tasks communicate, and the pipeline positions if only some do."""

    degrees: tuple[str, ...]
    only: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "+".join(self.degrees) + ("" if self.only is None else str(list(self.only)))


def degree(program: Program, axis: Along) -> str:
    """Parallel degree that an axis counts as: gradients over cp and dp are dp's."""
    alias = {"edp": "dp", "etp": "tp", MIRROR: "dp"}
    degrees = {program.mesh.degree_of(name) for name in axis.degrees}
    degrees = {alias.get(degree, degree) for degree in degrees}
    return next((degree for degree in ("dp", "pp", "ep", "cp", "tp") if degree in degrees), "")


class TasksAlong(NamedTuple):
    """Axis that each task of a rank communicates along."""

    number: Int
    """By task, index into `keys`; -1: it communicates neither with a rank nor with the host."""
    keys: Sequence[tuple[int, int, int]]
    """Kind, slot and collective."""
    axes: Sequence[Along]
    """By key."""
    degrees: Sequence[str]
    """By key, the parallel degree that the axis counts as (`degree`)."""

    def of_tasks(self, by_key: Sequence[bool]) -> Bool:
        """By task, the flag of its key; False without a key."""
        return np.array([*by_key, False])[self.number]


def along(program: Program, tasks: Tasks) -> TasksAlong:
    """Find the axis that each task communicates along.

    Where one group of ranks serves two degrees, all-to-alls count as expert parallelism.
    """
    number, keys = _distinct((tasks.kind, tasks.slot, tasks.collective), tasks.kind != _COMPUTE)
    axes = [_axis(program, *key) for key in keys]
    return TasksAlong(number, keys, axes, [degree(program, axis) for axis in axes])


def axis_of(program: Program, tasks: Tasks) -> dict[tuple[int, int, int], Along]:
    """Axis that tasks communicate along (see `along`), by (kind, slot, collective)."""
    tasks_along = along(program, tasks)
    return dict(zip(tasks_along.keys, tasks_along.axes, strict=True))


def _axis(program: Program, kind: int, slot: int, collective: int) -> Along:
    if kind in (TaskKind.LOAD, TaskKind.STORE):
        return Along(("host",))
    if kind != TaskKind.COLLECTIVE:
        degrees, only = program.mesh.degrees((program.peers[slot].axis,)), None
    else:
        degrees, only = program.degrees_of(slot), program.communicators[slot].only
    experts = kind == TaskKind.COLLECTIVE and COLLECTIVES[collective] == "all_to_all"
    distinct = dict.fromkeys(_choose(names, experts) for names in degrees)
    return Along(tuple(distinct), only)


def _choose(names: Sequence[str], experts: bool) -> str:
    return "ep" if experts and "ep" in names else names[0]


def _distinct(
    columns: Sequence[NDArray[np.integer]], mask: Bool
) -> tuple[Int, list[tuple[int, int, int]]]:
    """Number the distinct rows of three columns: by row its number, -1 outside the mask; the rows.

    Columns have small numbers, -1 or more.
    """
    rows = np.flatnonzero(mask)
    key = np.zeros(len(rows), dtype=np.int64)
    sizes: list[int] = []
    for column in columns:
        values = column[rows].astype(np.int64) + 1
        sizes.append(int(values.max(initial=0)) + 1)
        key = key * sizes[-1] + values
    used = np.flatnonzero(np.bincount(key))
    number = np.full(len(mask), -1)
    number[rows] = np.searchsorted(used, key)
    distinct = [(column - 1).tolist() for column in np.unravel_index(used, sizes)]
    return number, [*zip(*distinct, strict=True)]
