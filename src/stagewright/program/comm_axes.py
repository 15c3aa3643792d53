"""Parallel degrees along which the tasks of a rank communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int, distinct_numbers
from stagewright.program.columns import COLLECTIVES, Program, TaskKind, Tasks


class CommAxis(NamedTuple):
    """Degrees along which tasks communicate, and the pipeline positions if only some do."""

    degrees: tuple[str, ...]
    only: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "+".join(self.degrees) + ("" if self.only is None else str(list(self.only)))


class CommAxes(NamedTuple):
    """Axis that each task of a rank communicates along."""

    number: Int
    """By task, index into `keys`; -1: it communicates neither with a rank nor with the host."""
    keys: Sequence[tuple[int, int, int]]
    """Kind, slot and collective."""
    axes: Sequence[CommAxis]
    """By key."""
    degrees: Sequence[str]
    """By key, the parallel degree that the axis counts as: gradients over cp and dp are dp's."""

    def of_tasks(self, by_key: Sequence[bool]) -> Bool:
        """By task, the flag of its key; False without a key."""
        return np.array([*by_key, False])[self.number]


def comm_axes(program: Program, tasks: Tasks) -> CommAxes:
    """Find the axis that each task communicates along.

    Where one group of ranks serves two degrees, all-to-alls count as expert parallelism.
    """
    rows = np.flatnonzero(tasks.kind != TaskKind.COMPUTE)
    columns = [c[rows].astype(np.int64) for c in (tasks.kind, tasks.slot, tasks.collective)]
    first, key = distinct_numbers([c + 1 for c in columns], len(rows))  # -1 or more
    number = np.full(len(tasks), -1)
    number[rows] = key
    keys = [*zip(*(c[first].tolist() for c in columns), strict=True)]
    axes = [_axis(program, *key) for key in keys]
    return CommAxes(number, keys, axes, [_degree(program, axis) for axis in axes])


def _axis(program: Program, kind: int, slot: int, collective: int) -> CommAxis:
    if kind in (TaskKind.LOAD, TaskKind.STORE):
        return CommAxis(("host",))
    if kind != TaskKind.COLLECTIVE:
        degrees, only = program.mesh.degrees((program.peers[slot].axis,)), None
    else:
        degrees, only = program.degrees_of(slot), program.communicators[slot].only
    experts = kind == TaskKind.COLLECTIVE and COLLECTIVES[collective] == "all_to_all"
    distinct = dict.fromkeys("ep" if experts and "ep" in names else names[0] for names in degrees)
    return CommAxis(tuple(distinct), only)


def _degree(program: Program, axis: CommAxis) -> str:
    """Parallel degree that an axis counts as."""
    alias = {"edp": "dp", "etp": "tp", MIRROR: "dp"}
    degrees = {program.mesh.degree_of(name) for name in axis.degrees}
    degrees = {alias.get(degree, degree) for degree in degrees}
    return next((degree for degree in ("dp", "pp", "ep", "cp", "tp") if degree in degrees), "")
