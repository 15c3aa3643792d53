"""Along which parallel degrees the tasks of a rank communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool
from stagewright.program.columns import COLLECTIVES, Program, TaskKind, Tasks


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


def axis_of(program: Program, tasks: Tasks) -> dict[tuple[int, int, int], Along]:
    """The axis that tasks communicate along, by (kind, slot, collective).

    Where one group of ranks serves two degrees, all-to-alls count as expert parallelism.
    """
    columns = (tasks.kind, tasks.slot, tasks.collective)
    moves = tasks.kind != TaskKind.COMPUTE
    axes: dict[tuple[int, int, int], Along] = {}
    for key in _distinct(columns, moves):
        kind, slot, collective = key
        if kind in (TaskKind.LOAD, TaskKind.STORE):
            axes[kind, slot, collective] = Along(("host",))
            continue
        if kind != TaskKind.COLLECTIVE:
            degrees, only = program.mesh.degrees((program.peers[slot].axis,)), None
        else:
            degrees, only = program.degrees_of(slot), program.communicators[slot].only
        experts = kind == TaskKind.COLLECTIVE and COLLECTIVES[collective] == "all_to_all"
        chosen = dict.fromkeys(_choose(names, experts) for names in degrees)
        axes[kind, slot, collective] = Along(tuple(chosen), only)
    return axes


def _choose(names: Sequence[str], experts: bool) -> str:
    return "ep" if experts and "ep" in names else names[0]


def _distinct(columns: Sequence[NDArray[np.integer]], chosen: Bool) -> list[tuple[int, ...]]:
    """The distinct rows of columns of small numbers, -1 or more."""
    key = np.zeros(int(chosen.sum()), dtype=np.int64)
    sizes = [int(c[chosen].max(initial=0)) + 2 for c in columns]
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column[chosen] + 1
    used = np.flatnonzero(np.bincount(key))
    return [tuple(int(x) - 1 for x in np.unravel_index(k, sizes)) for k in used]
