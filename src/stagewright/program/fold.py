"""Shrinks a program to the fewest ranks on which everything that is checked can still go wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from stagewright.program.columns import Program


def fold(program: Program) -> Program:
    """The same classes on the fewest ranks that communicate in all the same ways.

    Along an axis that every class spans whole, all positions do the same and meet the same classes,
    so that two positions stand for many. Where ranks send messages along the axis, one more than
    twice the longest distance is needed, so that different distances lead to different ranks.
    Matching of groups and messages and freedom from deadlock then carry over to the full program.
    """
    mesh, ways = program.mesh, dict[str, int]()
    for axis, shift in program.peers:
        size = mesh.size(axis)
        ways[axis] = max(ways.get(axis, 0), min(shift % size, -shift % size))
    whole = {axis for who in program.communicators if who.only is not None for axis in who.axes}
    whole.add(mesh.mirror)
    owner = np.full(mesh.world_size, -1, np.int32)
    for nth, of in enumerate(program.classes):
        owner[of.ranks] = nth
    if math.prod(size for _, size in mesh.axes) != mesh.world_size:  # meshes side by side
        return program
    grid = owner.reshape([size for _, size in reversed(mesh.axes)])
    axes: list[tuple[str, int]] = []
    for nth, (axis, size) in enumerate(mesh.axes):
        at = grid.ndim - 1 - nth
        if axis not in whole and (grid == grid.take([0], at)).all():
            size = min(size, max(2, 2 * ways.get(axis, 0) + 1))
            grid = grid.take(range(size), at)
        axes.append((axis, size))
    ranks = [np.flatnonzero(grid.ravel() == nth) for nth in range(len(program.classes))]
    return replace(
        program,
        mesh=replace(mesh, axes=tuple(axes)),
        classes=tuple(
            replace(of, ranks=mine) for of, mine in zip(program.classes, ranks, strict=True)
        ),
    )
