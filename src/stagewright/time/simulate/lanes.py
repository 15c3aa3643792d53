"""Lanes: ranks with equal timing, one of which stands for all; and which lanes communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Float, Int, distinct_rows
from stagewright.program.columns import Program


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The lanes of a program, numbered by class, and within a class by their first rank."""

    of_rank: Int
    """By rank: its lane."""
    example: Int
    """By lane: its first rank."""
    class_of: Int
    """By lane: the rank class."""
    by_class: tuple[Int, ...]
    """By class: its lanes, consecutive numbers."""
    groups: tuple[Int, ...]
    """By communicator, by lane: a number equal for lanes of one group; -1: in no group."""
    peers: tuple[Int, ...]
    """By peer, by lane: the lane of the rank that it exchanges messages with."""

    @classmethod
    def of(cls, program: Program, factor: Float) -> Lanes:
        """The lanes of a program whose ranks' kernels take `factor` times as long."""
        of_rank = lane_of_rank(program, factor)
        by_class = tuple(np.unique(of_rank[of.ranks]) for of in program.classes)
        _, example = np.unique(of_rank, return_index=True)
        class_of = np.repeat(np.arange(len(by_class)), [len(lanes) for lanes in by_class])
        groups: list[Int] = []
        for slot in range(len(program.communicators)):
            ids = program.group_of(slot)
            first = np.full(int(ids.max()) + 1, len(of_rank), dtype=np.int64)
            np.minimum.at(first, ids, of_rank)
            groups.append(np.where(ids > 0, first[ids], -1)[example])
        peers = tuple(of_rank[program.peer_of(slot, example)] for slot in range(len(program.peers)))
        return cls(of_rank, example, class_of, by_class, tuple(groups), peers)

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self.example)

    def connected(self, slot: int, classes: int) -> Int:
        """By class, the first class that it meets in groups of a communicator, or itself."""
        home = np.arange(classes)
        group = self.groups[slot]
        for number in np.unique(group[group >= 0]).tolist():
            met = np.unique(self.class_of[group == number])
            home[np.isin(home, home[met])] = home[met].min()
        return home


def lane_of_rank(program: Program, factor: Float) -> Int:
    """For each rank the number of its lane.

    Ranks of a lane are of one class, have one `factor`, and communicate with the same lanes.
    """
    ranks = np.arange(program.mesh.world_size)
    lane = np.zeros(len(ranks), dtype=np.int64)
    for nth, of in enumerate(program.classes):
        lane[of.ranks] = nth
    lane = _numbered([lane, factor])
    groups = [_GroupRanks.of(program.group_of(slot)) for slot in range(len(program.communicators))]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    # Which peer of its peers a rank is: on a ring, the rank before is the next rank of that rank.
    back = [forth[other] == ranks for forth in peers for other in peers]
    lane = _numbered([lane, *back])
    while True:
        columns = [lane, *(of.lanes(lane) for of in groups), *(lane[to] for to in peers)]
        finer = _numbered(columns)
        if finer.max() == lane.max():
            return lane
        lane = finer


def _numbered(columns: Sequence[NDArray[Any]]) -> Int:
    """A number per row, equal for equal rows, ordered by first column, then first occurrence."""
    first, number = distinct_rows(columns)
    order = np.lexsort((first, columns[0][first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[number]


class _GroupRanks(NamedTuple):
    """The groups of a communicator: all of one size."""

    ranks: Int
    """(groups, size)"""
    world: int

    @classmethod
    def of(cls, ids: Int) -> _GroupRanks:
        """The groups by the number of each rank's; 0: none."""
        inside = np.flatnonzero(ids > 0)
        order = inside[np.argsort(ids[inside], kind="stable")]
        size = int((ids == ids[order[0]]).sum()) if len(order) else 1
        return cls(order.reshape(-1, size), len(ids))

    def lanes(self, lane: Int) -> Int:
        """For each rank a number for the set of lanes in its group; -1 for ranks without one."""
        sets = np.sort(lane[self.ranks], axis=1)
        kind = sets[:, 0].copy()  # of groups within a lane that lane
        several = np.flatnonzero(sets[:, 0] != sets[:, -1])
        kinds: dict[bytes, int] = {}
        first = int(lane.max(initial=0)) + 1
        for group in several.tolist():
            kind[group] = first + kinds.setdefault(sets[group].tobytes(), len(kinds))
        result = np.full(self.world, -1, dtype=np.int64)
        result[self.ranks] = kind[:, None]
        return result
