"""Where the groups of ranks of many configurations lie on one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.program.columns import Program
from stagewright.program.communicators import Communication, Communicator, Peer
from stagewright.time.network import Machine, Placement, placements


@dataclass(frozen=True, slots=True, eq=False)
class _Groups(Communication):
    """Communicators of one configuration."""

    mesh: Mesh
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]


class Alike(NamedTuple):
    """Configurations whose groups lie alike, and where these lie: several ways, or one."""

    tuples: Int
    placements: list[Placement]


PlacedKey: TypeAlias = tuple[Communicator, tuple[tuple[str, int], ...]]
Placed: TypeAlias = dict[PlacedKey, "list[Placement]"]
"""Where groups lie, by communicator, and mesh axes with their sizes."""


@dataclass(frozen=True, eq=False)
class MeshColumns:
    """The meshes of configurations of one structure on a machine, by the sizes of their axes."""

    program: Program
    """Its communicators, peers, and the names of mesh axes are those of all configurations."""
    sizes: Mapping[str, Int]
    """By axis, fastest first, but for the pipeline's: [tuples]."""
    pipeline: Int
    """Ranks of the pipeline: [tuples]."""
    machine: Machine
    known: Placed = field(default_factory=dict[PlacedKey, "list[Placement]"])
    """Placements on the machine that other structures have asked for."""
    faster: int | None = None
    """How many axes are faster than the pipeline's; None: all."""

    @cached_property
    def _distinct(self) -> tuple[Int, Int]:
        """The distinct sizes of all axes, the pipeline's last; and which each tuple has."""
        table = np.stack([*self.sizes.values(), self.pipeline])
        distinct, of = np.unique(table, axis=1, return_inverse=True)
        return distinct, of.ravel()

    def size(self, axes: Sequence[str]) -> Int:
        """Ranks along some axes: [tuples]."""
        found = np.ones_like(self.pipeline)
        for axis in axes:
            found = found * (self.pipeline if axis == "pp" else self.sizes[axis])
        return found

    def groups_of(self, who: Communicator) -> list[Alike]:
        """Where the groups of a communicator lie, for the ranks of the first stage."""
        distinct, of = self._distinct
        by_place: dict[tuple[Placement, ...], list[int]] = {}
        for nth, sizes in enumerate(distinct.T.tolist()):
            if math.prod(sizes) > self.machine.gpus:
                continue  # of a structure's tuples, those of shorter pipelines only
            by_place.setdefault(tuple(self._placements(who, tuple(sizes))), []).append(nth)
        return [
            Alike(np.flatnonzero(np.isin(of, meshes)), [*places])
            for places, meshes in by_place.items()
        ]

    def _placements(self, who: Communicator, sizes: tuple[int, ...]) -> list[Placement]:
        axes = [*zip(self.sizes, sizes, strict=False)]
        at = len(axes) if self.faster is None else self.faster
        axes.insert(at, ("pp", sizes[-1]))
        key = who, tuple(axes)
        if key in self.known:
            return self.known[key]
        mesh = Mesh(tuple(axes), (), mirror=self.program.mesh.mirror)
        only = None if who.only is None else tuple(sorted({0, sizes[-1] - 1}))
        self.known[key] = places_of(Communicator(who.axes, only), mesh, self.machine)
        return self.known[key]


def places_of(who: Communicator, mesh: Mesh, machine: Machine) -> list[Placement]:
    """Where the groups of a communicator lie, for the ranks of the first stage.

    Where those lie, the groups of other stages lie if the pipeline is the slowest axis: a stage
    fills whole nodes.
    """
    groups = _Groups(mesh, (who,), ())
    several = "pp" not in who.axes and mesh.axes[-1][0] == "pp"
    inside = groups.group_count(0) // (mesh.size("pp") if several else 1)
    members = groups.members(0, np.arange(max(inside, 1), dtype=np.int64))
    if members.shape[1] < 2:
        return [Placement(1, (1,) * len(machine.tiers), (1,) * len(machine.tiers))]
    return placements(machine, members)
