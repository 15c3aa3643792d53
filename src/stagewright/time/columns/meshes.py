"""Where the groups of ranks of many configurations lie on one machine."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int, digest, distinct_rows
from stagewright.program.columns import Program
from stagewright.program.communicators import Communication, Communicator, Peer
from stagewright.time.network import Machine, Placement, Tier, placements_in


@dataclass(frozen=True, slots=True, eq=False)
class _Groups(Communication):
    """Communicators of one configuration."""

    mesh: Mesh
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]


class Alike(NamedTuple):
    """Configurations whose groups lie alike, and where these lie: several ways, or one."""

    tuples: Int
    placements: Sequence[Placement]


class AxisOrders(NamedTuple):
    """In which order configurations have the axes of their meshes."""

    names: tuple[tuple[str, ...], ...]
    """Each order that there is: all axes, the fastest first."""
    of: Int
    """Which of them each configuration has: [tuples]."""

    @classmethod
    def same(cls, names: Sequence[str], tuples: int) -> Self:
        """One order of all."""
        return cls((tuple(names),), np.zeros(tuples, dtype=np.int64))


Groups: TypeAlias = "dict[tuple[Communicator, Hashable], list[Alike]]"
"""Where groups of all configurations lie, by communicator and what else decides (`MeshColumns`)."""


@dataclass(frozen=True, eq=False)
class MeshColumns:
    """The meshes of configurations of one structure on a machine, by the sizes of their axes."""

    program: Program
    """Its communicators, peers, and the names of mesh axes are those of all configurations."""
    sizes: Mapping[str, Int]
    """By axis, but for the pipeline's: [tuples]."""
    pipeline: Int
    """Ranks of the pipeline: [tuples]."""
    machine: Machine
    groups: Groups = field(default_factory=dict[tuple[Communicator, Hashable], "list[Alike]"])
    """Where groups of these configurations lie on the machine, as programs have asked."""
    orders: AxisOrders | None = None
    """None: all configurations have the axes as they stand in `sizes`, and the pipeline's last."""

    @cached_property
    def _distinct(self) -> tuple[Int, Int]:
        """The distinct sizes of all axes, the pipeline's last, and behind them the order of axes;
        and which each tuple has."""
        order = np.zeros_like(self.pipeline) if self.orders is None else self.orders.of
        table = np.stack([*self.sizes.values(), self.pipeline, order])
        first, of = distinct_rows([*table])
        return table[:, first], of

    def size(self, axes: Sequence[str]) -> Int:
        """Ranks along some axes: [tuples]."""
        found = np.ones_like(self.pipeline)
        for axis in axes:
            found = found * (self.pipeline if axis == "pp" else self.sizes[axis])
        return found

    @cached_property
    def content(self) -> bytes:
        """What is equal for meshes in which groups lie alike, on machines with one network."""
        distinct, of = self._distinct
        names = None if self.orders is None else self.orders.names
        mirror, network = self.program.mesh.mirror, self.machine.network
        return digest(names, [*self.sizes], mirror, network, distinct, of)

    def groups_of(self, who: Communicator) -> list[Alike]:
        """Where the groups of a communicator lie, for the ranks of the first stage."""
        key = who, self.program.mesh.mirror
        if key not in self.groups:
            self.groups[key] = self._groups_of(who)
        return self.groups[key]

    def _groups_of(self, who: Communicator) -> list[Alike]:
        distinct, of = self._distinct
        by_place: dict[tuple[Placement, ...], int] = {}
        place = np.full(distinct.shape[1], -1)
        for nth, (*sizes, order) in enumerate(distinct.T.tolist()):
            if math.prod(sizes) > self.machine.gpus:
                continue  # of a structure's tuples, those of shorter pipelines only
            places = self._placements(who, sizes, order)
            place[nth] = by_place.setdefault(places, len(by_place))
        lies = place[of]
        return [Alike(np.flatnonzero(lies == n), places) for places, n in by_place.items()]

    def _placements(
        self, who: Communicator, sizes: Sequence[int], order: int
    ) -> tuple[Placement, ...]:
        every = dict(zip([*self.sizes, "pp"], sizes, strict=True))
        names = [*every] if self.orders is None else self.orders.names[order]
        axes = tuple((name, every[name]) for name in names)
        mesh = Mesh(axes, (), mirror=self.program.mesh.mirror)
        only = None if who.only is None else tuple(sorted({0, sizes[-1] - 1}))
        return places_of(Communicator(who.axes, only), mesh, self.machine.tiers)


@lru_cache(maxsize=1 << 14)
def places_of(who: Communicator, mesh: Mesh, tiers: tuple[Tier, ...]) -> tuple[Placement, ...]:
    """Where the groups of a communicator lie in a network, for the ranks of the first stage.

    Where those lie, the groups of other stages lie if the pipeline is the slowest axis: a stage
    fills whole nodes.
    """
    groups = _Groups(mesh, (who,), ())
    several = "pp" not in who.axes and mesh.axes[-1][0] == "pp"
    inside = groups.group_count(0) // (mesh.size("pp") if several else 1)
    members = groups.members(0, np.arange(max(inside, 1), dtype=np.int64))
    if members.shape[1] < 2:
        return (Placement(1, (1,) * len(tiers), (1,) * len(tiers)),)
    return (*placements_in(tiers, members),)
