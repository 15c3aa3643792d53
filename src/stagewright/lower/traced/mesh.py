"""The mesh that the process groups of a recording are along."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.algebra.layout import Mesh
from stagewright.errors import UserError
from stagewright.imports.trace.recording import Process, ProcessGroup
from stagewright.program.communicators import Communicator


class GroupsOnMesh(NamedTuple):
    """A mesh, and by name of a process group the axes it is along, outermost first."""

    mesh: Mesh
    communicators: Mapping[str, Communicator]


def mesh_of(process: Process) -> GroupsOnMesh:
    """The coarsest mesh along whose axes all groups of a process are.

    An axis has the name of the group that is along it alone; one without such a group is called
    after the distance of its ranks. Raises UserError for a group that is along no axes.

    >>> tp, dp = ProcessGroup((2, 3), "tp"), ProcessGroup((0, 2), "dp")
    >>> found = mesh_of(Process(2, 4, {"1": tp, "2": dp}))
    >>> found.mesh.axes, found.communicators["2"].axes
    ((('tp', 2), ('dp', 2)), ('dp',))
    """
    runs = {name: _runs(group) for name, group in process.groups.items()}
    cuts = {1, process.world_size}
    for name, of_group in runs.items():
        for distance, count in of_group:
            cuts |= {distance, distance * count}
        if any(r < 0 or r >= process.world_size for r in process.groups[name].ranks):
            raise _refused(process.groups[name], process)
    strides = sorted(cuts)
    if any(b % a for a, b in itertools.pairwise(strides)):
        widest = max(process.groups.values(), key=lambda g: len(g.ranks))
        raise _refused(widest, process)
    spans = [*itertools.pairwise(strides)]
    along = {
        name: [s for s in spans if any(d <= s[0] and s[1] <= d * n for d, n in of_group)]
        for name, of_group in runs.items()
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
        first = min(group.ranks)
        own = {axis for axis, at in mesh.coords(first).items() if at and axis in axes}
        if own or mesh.size(*axes) != len(group.ranks) or process.rank not in group.ranks:
            raise _refused(group, process)
        communicators[name] = Communicator(axes)
    return GroupsOnMesh(mesh, communicators)


def _runs(group: ProcessGroup) -> list[tuple[int, int]]:
    """The distances of a group's ranks along each axis and how many there are, smallest first."""
    ranks = sorted(group.ranks)
    left = [rank - ranks[0] for rank in ranks]
    found: list[tuple[int, int]] = []
    while len(left) > 1:
        distance = left[1]
        count = next((n for n in range(2, len(left)) if left[n] != n * distance), len(left))
        while len(left) % count:
            count -= 1
        heads: Sequence[int] = left[::count]
        if count < 2 or left != [head + n * distance for head in heads for n in range(count)]:
            raise UserError(f"the process group of ranks {ranks} is no product of dims of a mesh")
        found.append((distance, count))
        left = [*heads]
    return found


def _refused(group: ProcessGroup, process: Process) -> UserError:
    return UserError(
        f"the process group of ranks {sorted(group.ranks)} is along no dims of a mesh of "
        f"{process.world_size} ranks that all groups share, as those of init_device_mesh are"
    )
