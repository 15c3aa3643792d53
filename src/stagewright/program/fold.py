"""Shrink a program to the fewest ranks without losing any check."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from stagewright.program.columns import Program


def fold(program: Program) -> Program:
    """Keep every class and every pattern of communication on the fewest ranks.

    Along an axis that every class spans in full, all positions do the same with the same classes,
    so two positions represent all. Where ranks send messages along the axis, one more than twice
    the longest distance is needed, so that different distances lead to different ranks. Matching
    of groups and messages and freedom from deadlock then carry over to the full program.
    """
    mesh, distance = program.mesh, dict[str, int]()
    for axis, shift in program.peers:
        size = mesh.size(axis)
        distance[axis] = max(distance.get(axis, 0), min(shift % size, -shift % size))
    unfolded = {axis for c in program.communicators if c.only is not None for axis in c.axes}
    unfolded.add(mesh.mirror)
    owner = np.full(mesh.world_size, -1, np.int32)
    for index, rank_class in enumerate(program.classes):
        owner[rank_class.ranks] = index
    if math.prod(size for _, size in mesh.axes) != mesh.world_size:  # several meshes
        return program
    grid = owner.reshape([size for _, size in reversed(mesh.axes)])
    axes: list[tuple[str, int]] = []
    for index, (axis, size) in enumerate(mesh.axes):
        dim = grid.ndim - 1 - index
        if axis not in unfolded and (grid == grid.take([0], dim)).all():
            size = min(size, max(2, 2 * distance.get(axis, 0) + 1))
            grid = grid.take(range(size), dim)
        axes.append((axis, size))
    classes = tuple(
        replace(rank_class, ranks=np.flatnonzero(grid.ravel() == index))
        for index, rank_class in enumerate(program.classes)
    )
    return replace(program, mesh=replace(mesh, axes=tuple(axes)), classes=classes)
