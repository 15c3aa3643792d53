"""Which ranks behave alike, and who meets whom: messages, and collectives across rank classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.program import Int, Kind, Program
from stagewright.simulation.issue import Issue


def alike(program: Program, factor: NDArray[np.float64]) -> Int:
    """For each rank the number of its lane: ranks that behave alike.

    They are of one class, have one `factor`, and whom they meet behaves alike. Lanes count by
    class, and within it by their first rank.
    """
    ranks = np.arange(program.mesh.world_size)
    lane = np.zeros(len(ranks), dtype=np.int64)
    for nth, of in enumerate(program.classes):
        lane[of.ranks] = nth
    pairs = np.stack([lane, np.unique(factor, return_inverse=True)[1]])
    lane = _numbered(pairs)
    groups = [program.group_of(slot) for slot in range(len(program.communicators))]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    while True:
        columns = [lane, *(_members(lane, ids) for ids in groups), *(lane[to] for to in peers)]
        finer = _numbered(np.stack(columns))
        if finer.max() == lane.max():
            return lane
        lane = finer


def _numbered(columns: Int) -> Int:
    """Equal columns as equal numbers, ascending by the first row and then by first occurrence."""
    _, first, number = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    order = np.lexsort((first, columns[0, first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[number.ravel()]


def _members(lane: Int, ids: Int) -> Int:
    """For each rank a number for the lanes of its group; -1 where it is in none."""
    result = np.full(len(lane), -1, dtype=np.int64)
    inside = np.flatnonzero(ids > 0)
    if len(inside):
        order = inside[np.lexsort((lane[inside], ids[inside]))]
        size = int((ids == ids[order[0]]).sum())
        _, kind = np.unique(lane[order].reshape(-1, size), axis=0, return_inverse=True)
        result[order] = np.repeat(kind.ravel(), size)
    return result


class Messages(NamedTuple):
    """All messages between classes or lanes: a row each, places in issue order."""

    sender: Int  # class
    send: Int  # place
    receiver: Int
    recv: Int
    slot: Int  # of the receive


class Meeting(NamedTuple):
    """One collective of ranks of several classes: its classes and the place in each."""

    slot: int
    classes: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """The lanes, and what joins them."""

    lanes: tuple[Int, ...]  # by class: numbers of its lanes
    example: Int  # by lane: its first rank
    lane_of: Int  # by rank
    messages: Messages
    meetings: tuple[Meeting, ...]
    groups: tuple[Int, ...]  # by slot, by lane: number of the lanes that meet; -1: in no group
    sources: tuple[Int, ...]  # by peer slot, by lane: the lane that its peer is of

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return len(self.example)

    def received(self, lane: int, class_: int) -> tuple[Int, Int, Int]:
        """What a lane of a class receives: its places, the lanes that send, their places."""
        messages = self.messages
        mine = np.flatnonzero(messages.receiver == class_)
        sources = np.array([of[lane] for of in self.sources], dtype=np.int64)
        return messages.recv[mine], sources[messages.slot[mine]], messages.send[mine]


def partners(program: Program, issues: Sequence[Issue], lane_of: Int) -> Partners:
    """Match what the classes of a program send, receive and do together."""
    lanes = tuple(np.unique(lane_of[of.ranks]) for of in program.classes)
    _, example = np.unique(lane_of, return_index=True)
    class_of = np.zeros(len(lane_of), dtype=np.int64)
    for nth, of in enumerate(program.classes):
        class_of[of.ranks] = nth
    sources = tuple(lane_of[program.peer_of(slot)[example]] for slot in range(len(program.peers)))
    groups: list[Int] = []
    for slot in range(len(program.communicators)):
        ids = program.group_of(slot)
        least = np.full(int(ids.max()) + 1, len(lane_of), dtype=np.int64)
        np.minimum.at(least, ids, lane_of)
        groups.append(np.where(ids > 0, least[ids], -1)[example])
    class_of_lane = class_of[example]
    return Partners(
        lanes,
        example,
        lane_of,
        _messages(program, issues, class_of, sources),
        tuple(_meetings(program, issues, groups, class_of_lane)),
        tuple(groups),
        sources,
    )


def _messages(
    program: Program, issues: Sequence[Issue], class_of: Int, sources: Sequence[Int]
) -> Messages:
    """Match sends with receives: the n-th of a tag with the n-th."""
    axes = sorted({peer.axis for peer in program.peers})
    ends: dict[Kind, list[Int]] = {Kind.SEND: [], Kind.RECV: []}
    for nth, (of, order) in enumerate(zip(program.classes, issues, strict=True)):
        kind, slot = of.tasks.kind[order.rows], of.tasks.slot[order.rows]
        for slot_ in sorted({int(s) for s in slot[(kind == Kind.SEND) | (kind == Kind.RECV)]}):
            others = np.unique(class_of[program.peer_of(slot_)[of.ranks]])
            if len(others) > 1:
                raise ValueError(f"the peers of rank class {nth} are of several classes")
            for end, found in ends.items():
                at = np.flatnonzero((kind == end) & (slot == slot_))
                pair = [np.full(len(at), nth), np.full(len(at), others[0])]
                axis = np.full(len(at), axes.index(program.peers[slot_].axis))
                tag = of.tasks.tag[order.rows[at]].astype(np.int64)
                ordered = pair if end == Kind.SEND else pair[::-1]
                with_ = np.full(len(at), slot_)
                found.append(np.stack([*ordered, axis, tag, at, with_]).astype(np.int64))
    sides: list[Int] = []
    for found in ends.values():
        table = np.concatenate(found, axis=1) if found else np.zeros((6, 0), dtype=np.int64)
        sides.append(table[:, np.lexsort(table[::-1])])
    send, recv = sides
    if send.shape != recv.shape or (send[:4] != recv[:4]).any():
        raise ValueError("sends and receives do not match")
    return Messages(send[0], send[4], recv[1], recv[4], recv[5])


def _meetings(
    program: Program, issues: Sequence[Issue], groups: Sequence[Int], class_of_lane: Int
) -> list[Meeting]:
    """Collectives whose groups have ranks of several classes: the n-th of each with the n-th."""
    result: list[Meeting] = []
    for slot, group in enumerate(groups):
        home = np.arange(len(program.classes))  # class -> the first class that it meets
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
                mine = (tasks.kind[rows] == Kind.COLLECTIVE) & (tasks.slot[rows] == slot)
                places.append(np.flatnonzero(mine))
            if len({len(at) for at in places}) > 1:
                raise ValueError(f"classes {classes} do not meet on {program.label_of(slot)}")
            table = np.stack(places, axis=1)
            result += [Meeting(slot, tuple(classes), tuple(row)) for row in table.tolist()]
    return result
