"""Lanes of ranks with equal timing, and the messages and collectives that connect rank classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Float, Int, distinct_rows
from stagewright.program.columns import Program, RankClass, TaskKind
from stagewright.time.simulate.issue import Issue


def lane_of_rank(program: Program, factor: Float) -> Int:
    """For each rank the number of its lane: ranks with equal timing.

    Ranks of a lane are of one class, have one `factor`, and communicate with the same lanes. Lanes
    are numbered by class, and within a class by their first rank.
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
        kinds: dict[bytes, int] = {}
        sets = np.sort(lane[self.ranks], axis=1)
        kind = [kinds.setdefault(lanes.tobytes(), len(kinds)) for lanes in sets]
        result = np.full(self.world, -1, dtype=np.int64)
        result[self.ranks] = np.array(kind, dtype=np.int64)[:, None]
        return result


class Received(NamedTuple):
    """The messages that a class receives, a row each: its place, and by lane the sender."""

    place: Int  # ascending
    sender: Int  # (messages, lanes): lane
    sent: Int  # (messages, lanes): place


class Meeting(NamedTuple):
    """One collective among ranks of several classes: the classes, and its place in each."""

    slot: int
    classes: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Endpoints:
    """The lanes of a program, and the messages and collectives that connect them."""

    lanes: tuple[Int, ...]  # by class: numbers of its lanes
    example: Int  # by lane: its first rank
    class_of: Int  # by lane
    lane_of: Int  # by rank
    received: tuple[Received, ...]  # by class
    meetings: tuple[Meeting, ...]
    groups: tuple[Int, ...]  # by slot, by lane: number of the group; -1: in no group

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self.example)


def endpoints(program: Program, issues: Sequence[Issue], lane_of: Int) -> Endpoints:
    """Match the sends, receives and shared collectives of the classes of a program."""
    lanes = tuple(np.unique(lane_of[of.ranks]) for of in program.classes)
    _, example = np.unique(lane_of, return_index=True)
    class_of = np.repeat(np.arange(len(lanes)), [len(of_class) for of_class in lanes])
    groups: list[Int] = []
    for slot in range(len(program.communicators)):
        ids = program.group_of(slot)
        least = np.full(int(ids.max()) + 1, len(lane_of), dtype=np.int64)
        np.minimum.at(least, ids, lane_of)
        groups.append(np.where(ids > 0, least[ids], -1)[example])
    meetings = tuple(_meetings(program, issues, groups, class_of))
    received = tuple(_Messages(program, issues, lane_of, example, class_of).received(lanes))
    return Endpoints(lanes, example, class_of, lane_of, received, meetings, tuple(groups))


class _Messages:
    """Matches sends with receives: between two ranks along an axis, the n-th of each tag."""

    def __init__(
        self, program: Program, issues: Sequence[Issue], lane_of: Int, example: Int, class_of: Int
    ) -> None:
        self.lane_of, self.example, self.class_of = lane_of, example, class_of
        self.peers = [program.peer_of(slot) for slot in range(len(program.peers))]
        self.axes = [peer.axis for peer in program.peers]
        self.ends: list[dict[TaskKind, dict[int, tuple[Int, Int]]]] = [
            {kind: self._ends(of, order, kind) for kind in (TaskKind.SEND, TaskKind.RECV)}
            for of, order in zip(program.classes, issues, strict=True)
        ]

    def _ends(self, of: RankClass, order: Issue, kind: TaskKind) -> dict[int, tuple[Int, Int]]:
        """Places and tags of a class's sends or receives, by slot."""
        mine = np.flatnonzero(of.tasks.kind[order.rows] == kind)
        slot, tag = of.tasks.slot[order.rows[mine]], of.tasks.tag[order.rows[mine]]
        used = sorted({int(s) for s in slot})
        return {s: (mine[slot == s], tag[slot == s].astype(np.int64)) for s in used}

    def received(self, lanes: Sequence[Int]) -> Iterator[Received]:
        """The messages that each class receives."""
        for numbers in lanes:
            by_lane = [self._of_lane(int(number)) for number in numbers]
            columns = zip(*by_lane, strict=True)
            place, sender, sent = (np.stack(column, axis=1) for column in columns)
            yield Received(place[:, 0], sender, sent)

    def _of_lane(self, lane: int) -> tuple[Int, Int, Int]:
        """The places at which a lane receives, with the sending lane and the place of the send."""
        rank = int(self.example[lane])
        ends = self.ends[int(self.class_of[lane])][TaskKind.RECV]
        matched: list[Int] = [np.zeros((3, 0), dtype=np.int64)]
        # On a ring of two ranks, the rank before is also the rank after.
        for other, axis in sorted({(int(self.peers[s][rank]), self.axes[s]) for s in ends}):
            mine = self._sorted(ends, rank, other, axis)
            number = int(self.lane_of[other])
            theirs = self.ends[int(self.class_of[number])][TaskKind.SEND]
            at = self._sorted(theirs, other, rank, axis)
            if not np.array_equal(mine[0], at[0]):
                raise ValueError(
                    f"rank {rank} receives {mine.shape[1]} messages from rank {other} along "
                    f"{axis}, which sends {at.shape[1]}, or others"
                )
            matched.append(np.stack([mine[1], np.full_like(mine[1], number), at[1]]))
        table = np.concatenate(matched, axis=1)
        place, sender, sent = table[:, np.argsort(table[0])]
        return place, sender, sent

    def _sorted(self, ends: Mapping[int, tuple[Int, Int]], rank: int, other: int, axis: str) -> Int:
        """Tags and places of the messages of a rank with another along an axis, by tag."""
        messages = [
            np.stack([tag, place])
            for slot, (place, tag) in ends.items()
            if self.axes[slot] == axis and self.peers[slot][rank] == other
        ]
        table = np.concatenate([np.zeros((2, 0), dtype=np.int64), *messages], axis=1)
        return table[:, np.lexsort((table[1], table[0]))]


def _meetings(
    program: Program, issues: Sequence[Issue], groups: Sequence[Int], class_of_lane: Int
) -> list[Meeting]:
    """Collectives whose groups span several classes, matched in order: the n-th of each class."""
    result: list[Meeting] = []
    for slot, group in enumerate(groups):
        home = np.arange(len(program.classes))  # class -> first class connected to it
        for number in np.unique(group[group >= 0]).tolist():
            met = np.unique(class_of_lane[group == number])
            home[np.isin(home, home[met])] = home[met].min()
        for first in np.unique(home).tolist():
            classes = np.flatnonzero(home == first).tolist()
            if len(classes) < 2:
                continue
            places: list[Int] = []
            for nth in classes:
                tasks, rows = program.classes[nth].tasks, issues[nth].rows
                mine = (tasks.kind[rows] == TaskKind.COLLECTIVE) & (tasks.slot[rows] == slot)
                places.append(np.flatnonzero(mine))
            if len({len(at) for at in places}) > 1:
                raise ValueError(f"classes {classes} do not meet on {program.label_of(slot)}")
            table = np.stack(places, axis=1)
            result += [Meeting(slot, tuple(classes), tuple(row)) for row in table.tolist()]
    return result
