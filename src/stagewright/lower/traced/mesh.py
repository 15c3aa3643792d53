"""Mesh of the process groups of a recording."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.algebra.layout import Mesh
from stagewright.errors import UserError
from stagewright.imports.trace.recording import Process, ProcessGroup
from stagewright.program.communicators import Communicator


class GroupsOnMesh(NamedTuple):
    """Mesh, and the axes of each process group by name, outermost first."""

    mesh: Mesh
    communicators: Mapping[str, Communicator]


def mesh_of(process: Process) -> GroupsOnMesh:
    """Coarsest mesh whose axes span all groups of a process.

    An axis has the name of the group that spans it alone; without one, it is named after the
    distance of its ranks. Raises UserError for a group that spans no axes.

    >>> tp, dp = ProcessGroup((2, 3), "tp"), ProcessGroup((0, 2), "dp")
    >>> on_mesh = mesh_of(Process(2, 4, {"1": tp, "2": dp}))
    >>> on_mesh.mesh.axes, on_mesh.communicators["2"].axes
    ((('tp', 2), ('dp', 2)), ('dp',))
    """
    runs = {name: _runs(group) for name, group in process.groups.items()}
    cuts = {1, process.world_size}
    for name, group_runs in runs.items():
        for distance, count in group_runs:
            cuts |= {distance, distance * count}
        if any(r < 0 or r >= process.world_size for r in process.groups[name].ranks):
            raise _refused(process.groups[name], process)
    strides = sorted(cuts)
    if any(b % a for a, b in itertools.pairwise(strides)):
        widest = max(process.groups.values(), key=lambda g: len(g.ranks))
        raise _refused(widest, process)
    spans = [*itertools.pairwise(strides)]
    along = {
        name: [s for s in spans if any(d <= s[0] and s[1] <= d * n for d, n in group_runs)]
        for name, group_runs in runs.items()
    }
    names = {span: f"every{span[0]}" for span in spans}
    for name, group in process.groups.items():
        if len(along[name]) == 1 and group.dim and group.dim not in names.values():
            names[along[name][0]] = group.dim
    mesh = Mesh(
        tuple((names[s], s[1] // s[0]) for s in spans), tuple((n, (n,)) for n in names.values())
    )
    communicators: dict[str, Communicator] = {}
    for name, group in process.groups.items():
        axes = tuple(names[s] for s in reversed(along[name]))
        coords = mesh.coords(min(group.ranks))
        if (
            any(coords[axis] for axis in axes)
            or mesh.size(*axes) != len(group.ranks)
            or process.rank not in group.ranks
        ):
            raise _refused(group, process)
        communicators[name] = Communicator(axes)
    return GroupsOnMesh(mesh, communicators)


def _runs(group: ProcessGroup) -> list[tuple[int, int]]:
    """(distance, number) of a group's ranks along each axis, smallest distance first."""
    ranks = sorted(group.ranks)
    offsets = [rank - ranks[0] for rank in ranks]
    runs: list[tuple[int, int]] = []
    while len(offsets) > 1:
        distance, total = offsets[1], len(offsets)
        count = next((n for n in range(2, total) if offsets[n] != n * distance), total)
        while total % count:
            count -= 1
        heads: Sequence[int] = offsets[::count]
        if count < 2 or offsets != [head + n * distance for head in heads for n in range(count)]:
            raise UserError(f"the process group of ranks {ranks} is no product of dims of a mesh")
        runs.append((distance, count))
        offsets = [*heads]
    return runs


def _refused(group: ProcessGroup, process: Process) -> UserError:
    return UserError(
        f"the process group of ranks {sorted(group.ranks)} is along no dims of a mesh of "
        f"{process.world_size} ranks that all groups share, as those of init_device_mesh are"
    )
