"""Along which parallel degrees the tasks of a rank communicate."""

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
    """The degrees along which tasks communicate, and the pipeline positions if only some do."""

    degrees: tuple[str, ...]
    only: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "+".join(self.degrees) + ("" if self.only is None else str(list(self.only)))


def degree(program: Program, axis: Along) -> str:
    """The parallel degree that an axis stands for: gradients over cp and dp are dp's."""
    alias = {"edp": "dp", "etp": "tp", MIRROR: "dp"}
    degrees = {program.mesh.degree_of(name) for name in axis.degrees}
    degrees = {alias.get(degree, degree) for degree in degrees}
    return next((degree for degree in ("dp", "pp", "ep", "cp", "tp") if degree in degrees), "")


class TasksAlong(NamedTuple):
    """The axis that each task of a rank communicates along."""

    number: Int
    """By task, which of `keys` it has; -1: it communicates with no rank, nor with the host."""
    keys: Sequence[tuple[int, int, int]]
    """Kind, slot and collective."""
    axes: Sequence[Along]
    """By key."""
    degrees: Sequence[str]
    """The parallel degree that each of these stands for (`degree`)."""

    def of_tasks(self, by_key: Sequence[bool]) -> Bool:
        """By task, what holds for its key; of those without one: no."""
        return np.array([*by_key, False])[self.number]


def along(program: Program, tasks: Tasks) -> TasksAlong:
    """The axis that each task communicates along.

    Where one group of ranks serves two degrees, all-to-alls count as expert parallelism.
    """
    number, keys = _distinct((tasks.kind, tasks.slot, tasks.collective), tasks.kind != _COMPUTE)
    axes = [_axis(program, *key) for key in keys]
    return TasksAlong(number, keys, axes, [degree(program, axis) for axis in axes])


def axis_of(program: Program, tasks: Tasks) -> dict[tuple[int, int, int], Along]:
    """The axis that tasks communicate along, by (kind, slot, collective); as `along` has it."""
    found = along(program, tasks)
    return dict(zip(found.keys, found.axes, strict=True))


def _axis(program: Program, kind: int, slot: int, collective: int) -> Along:
    if kind in (TaskKind.LOAD, TaskKind.STORE):
        return Along(("host",))
    if kind != TaskKind.COLLECTIVE:
        degrees, only = program.mesh.degrees((program.peers[slot].axis,)), None
    else:
        degrees, only = program.degrees_of(slot), program.communicators[slot].only
    experts = kind == TaskKind.COLLECTIVE and COLLECTIVES[collective] == "all_to_all"
    chosen = dict.fromkeys(_choose(names, experts) for names in degrees)
    return Along(tuple(chosen), only)


def _choose(names: Sequence[str], experts: bool) -> str:
    return "ep" if experts and "ep" in names else names[0]


def _distinct(
    columns: Sequence[NDArray[np.integer]], chosen: Bool
) -> tuple[Int, list[tuple[int, int, int]]]:
    """Which of the distinct chosen rows each row is, -1 for those that are not chosen; and these.

    Three columns of small numbers, -1 or more.
    """
    rows = np.flatnonzero(chosen)
    key = np.zeros(len(rows), dtype=np.int64)
    sizes: list[int] = []
    for column in columns:
        values = column[rows].astype(np.int64) + 1
        sizes.append(int(values.max(initial=0)) + 1)
        key = key * sizes[-1] + values
    used = np.flatnonzero(np.bincount(key))
    number = np.full(len(chosen), -1)
    number[rows] = np.searchsorted(used, key)
    found = [(of - 1).tolist() for of in np.unravel_index(used, sizes)]
    return number, [*zip(*found, strict=True)]
