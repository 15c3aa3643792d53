"""Lanes: ranks with equal timing, of which one is simulated; and lanes that communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Float, Int, distinct_rows, distinct_values
from stagewright.program.columns import Program, groups_of_ranks


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """Lanes of a program, numbered by class, then by first rank."""

    of_rank: Int
    """Lane of each rank."""
    example: Int
    """First rank of each lane."""
    class_of: Int
    """Rank class of each lane."""
    by_class: tuple[Int, ...]
    """Lanes of each class: consecutive numbers."""
    groups: tuple[Int, ...]
    """By communicator, by lane: a number equal for lanes of one group; -1: in no group."""
    peers: tuple[Int, ...]
    """By peer, by lane: the lane that it exchanges messages with."""

    @classmethod
    def of(cls, program: Program, slowdown: Float) -> LaneMap:
        """Lanes of a program. `slowdown` by rank multiplies the durations of kernels."""
        of_rank = lane_of_rank(program, slowdown)
        by_class = tuple(np.unique(of_rank[rank_class.ranks]) for rank_class in program.classes)
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
        """Number of lanes."""
        return len(self.example)

    def connected_classes(self, slot: int) -> list[tuple[int, ...]]:
        """Classes that groups of a communicator connect; every class is in one of the tuples."""
        first, group = np.arange(len(self.by_class)), self.groups[slot]
        for number in np.unique(group[group >= 0]).tolist():
            members = np.unique(self.class_of[group == number])
            first[np.isin(first, first[members])] = first[members].min()
        return [tuple(np.flatnonzero(first == c).tolist()) for c in distinct_values(first)]


def lane_of_rank(program: Program, slowdown: Float) -> Int:
    """Number of the lane of each rank.

    Ranks of a lane are of one class, have one `slowdown`, and communicate with the same lanes.
    """
    ranks = np.arange(program.mesh.world_size)
    lane = np.zeros(len(ranks), dtype=np.int64)
    for class_id, rank_class in enumerate(program.classes):
        lane[rank_class.ranks] = class_id
    lane = _numbered([lane, slowdown])
    groups = [
        groups_of_ranks(program.group_of(slot), ranks) for slot in range(len(program.communicators))
    ]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    # Pairs of peers that are inverse: on a ring, the next rank of the rank before is the rank.
    is_inverse = [first[second] == ranks for first in peers for second in peers]
    lane = _numbered([lane, *is_inverse])
    while True:
        columns = [lane, *(_lane_sets(g, lane) for g in groups), *(lane[peer] for peer in peers)]
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


def _lane_sets(groups: Int, lane: Int) -> Int:
    """Number of the set of lanes in each rank's group; -1: no group. `groups`: [groups, ranks]."""
    sets = np.sort(lane[groups], axis=1)
    set_id = sets[:, 0].copy()  # a group within one lane: that lane
    set_ids: dict[bytes, int] = {}
    first = int(lane.max(initial=0)) + 1
    for group in np.flatnonzero(sets[:, 0] != sets[:, -1]).tolist():
        set_id[group] = first + set_ids.setdefault(sets[group].tobytes(), len(set_ids))
    result = np.full(len(lane), -1, dtype=np.int64)
    result[groups] = set_id[:, None]
    return result
