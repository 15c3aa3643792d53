"""Partners of every rank, computed from the mesh: groups of collectives, peers of messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.arrays import Bool, Int


class Communicator(NamedTuple):
    """Groups of ranks that differ only in their coordinates along `axes`.

    The axis `MIRROR` joins two replicas. `only` restricts a single axis to some positions, such as
    the first and the last pipeline stage, which share a tied embedding.
    """

    axes: tuple[str, ...]
    only: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "+".join(self.axes) + ("" if self.only is None else f"{list(self.only)}")


class Peer(NamedTuple):
    """Rank `shift` positions further along `axis`, cyclically; other coordinates are equal."""

    axis: str
    shift: int


class Users(NamedTuple):
    """Ranks, and the communicators, by slot, on which they issue collectives."""

    ranks: Int
    communicators: tuple[int, ...]


class Communication:
    """Communicators and peers of a program by slot, resolved for each rank."""

    __slots__ = ()
    mesh: Mesh
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]

    def degrees_of(self, slot: int) -> tuple[tuple[str, ...], ...]:
        """Degrees that communicator `slot` spans; see `Mesh.degrees`."""
        return self.mesh.degrees(self.communicators[slot].axes)

    def label_of(self, slot: int) -> str:
        """Label of communicator `slot`: `tp`, `cp+dp`, `pp[0, 3]`."""
        axes, only = self.communicators[slot]
        return self.mesh.label(axes) + ("" if only is None else str(list(only)))

    def group_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Group id of each of `ranks` in communicator `slot`; 0: in none.

        Here and in `peer_of`, `ranks` are by default all ranks of the mesh.
        """
        communicator, mesh = self.communicators[slot], self.mesh
        ranks = np.arange(self.mesh.world_size, dtype=np.int64) if ranks is None else ranks
        index, scale = np.zeros_like(ranks), 1
        for axis, size, paired in self._group_axes(communicator):
            coord = ranks // mesh.stride(axis) % mesh.size(axis)
            coord = np.minimum(coord, mesh.size(axis) - 1 - coord) if paired else coord
            index += coord * scale
            scale *= size
        ids = self.group_ids(slot, index)
        if communicator.only is None:
            return ids
        (axis,) = communicator.axes
        coord = ranks // mesh.stride(axis) % mesh.size(axis)
        return np.where(np.isin(coord, communicator.only), ids, 0)

    def group_count(self, slot: int) -> int:
        """Number of groups of communicator `slot`."""
        return math.prod(size for _, size, _ in self._group_axes(self.communicators[slot]))

    def members(self, slot: int, index: Int) -> Int:
        """Ascending ranks of the groups with these indices in communicator `slot`, a row each."""
        (axes, only), mesh = self.communicators[slot], self.mesh
        first, steps = np.zeros_like(index)[:, None], np.zeros(1, np.int64)
        for axis in mesh.names:
            if axis in axes:
                coords = np.array(range(mesh.size(axis)) if only is None else only)
                steps = (steps + coords[:, None] * mesh.stride(axis)).ravel()
        for axis, size, paired in self._group_axes(self.communicators[slot]):
            coord = index[:, None] % size
            if paired:
                coord = np.concatenate((coord, mesh.size(axis) - 1 - coord), axis=1)
            first, index = first + coord * mesh.stride(axis), index // size
        ranks = first[:, :, None] + np.sort(steps)
        return np.sort(ranks.reshape(len(index), first.shape[1] * len(steps)), axis=1)

    def peer_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Rank with which each of `ranks` exchanges messages as peer `slot`."""
        axis, shift = self.peers[slot]
        size, stride = self.mesh.size(axis), self.mesh.stride(axis)
        ranks = np.arange(self.mesh.world_size, dtype=np.int64) if ranks is None else ranks
        coord = ranks // stride % size
        return ranks + ((coord + shift) % size - coord) * stride

    def used_groups(self, slot: int, users: Sequence[Users]) -> Bool:
        """Mask of the groups of a communicator that some rank uses.

        The ranks of a stage without layers do not use a communicator that only layers use.
        """
        members = [u.ranks for u in users if slot in u.communicators]
        is_used = np.ones(self.group_count(slot), bool)
        if len(members) < len(users):
            ids = self.group_of(slot, np.concatenate((*members, np.zeros(0, np.int64))))
            first = self.group_ids(slot, np.zeros(1, np.int64))
            is_used[:] = False
            is_used[(ids[ids > 0] - first) // self._stride()] = True
        return is_used

    def group_ids(self, slot: int, index: Int) -> Int:
        """Ids of the groups with these indices in communicator `slot`."""
        return self._first_id() + self._stride() * index + slot

    def _stride(self) -> int:
        # ASTRA-sim derives message tags from 1e6 * group id mod 5e8: ids of overlapping groups must
        # differ mod 500. Groups of one communicator are disjoint; different communicators differ
        # mod a divisor of 500.
        return next(
            k
            for k in (1, 2, 4, 5, 10, 20, 25, 50, 100, 125, 250, 500)
            if k >= len(self.communicators)
        )

    def _first_id(self) -> int:
        # All ids have the same number of digits, so that a rank's group names are patched in place.
        slots = range(len(self.communicators))
        needed = max((self.group_count(slot) for slot in slots), default=1) * self._stride()
        first = 1
        while first * 9 < needed:
            first *= 10
        return first

    def _group_axes(self, communicator: Communicator) -> Iterator[tuple[str, int, bool]]:
        """Axes along which groups differ: their sizes, and True if mirrored positions are one."""
        for axis, size in self.mesh.axes:
            if axis not in communicator.axes:
                paired = axis == self.mesh.mirror and MIRROR in communicator.axes
                yield axis, size // 2 if paired else size, paired


def place_along(mesh: Mesh, axes: Sequence[str]) -> Int:
    """Index of every rank in the joint group of `axes`, outermost first.

    Of two replicas along `MIRROR`, the one with the lower rank has index 0.

    >>> place_along(Mesh((("tp", 2), ("dp", 3))), ["dp"]).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    index = np.zeros_like(ranks)
    for axis in axes:
        mesh_axis = mesh.mirror if axis == MIRROR else axis
        coord = ranks // mesh.stride(mesh_axis) % mesh.size(mesh_axis)
        if axis == MIRROR:
            coord = coord * 2 // mesh.size(mesh_axis)
        index = index * mesh.size(axis) + coord
    return index
