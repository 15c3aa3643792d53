"""Tasks of lanes that belong together: messages and their sends, collectives of classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.time.simulate.order import IssueOrder
from stagewright.time.simulate.waves import Waves


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
    """The messages and collectives that connect lanes, by place in issue order."""

    lanes: tuple[Int, ...]  # by class: numbers of its lanes
    class_of: Int  # by lane
    received: tuple[Received, ...]  # by class
    meetings: tuple[Meeting, ...]
    groups: tuple[Int, ...]  # by slot, by lane: number of the group; -1: in no group


def endpoints(waves: Waves, issues: Sequence[IssueOrder]) -> Endpoints:
    """The messages and collectives of all classes, whose tasks are issued in these orders."""
    place: list[Int] = []
    for order in issues:
        of_row = np.empty_like(order.rows)
        of_row[order.rows] = np.arange(len(order))
        place.append(of_row)

    def places(of: Int) -> Int:
        """Places of class, instance and position."""
        found = np.zeros(len(of), np.int64)
        for nth in np.unique(of[:, 0]).tolist():
            mine = of[:, 0] == nth
            rows = waves.expanded_rows(nth, of[mine, 1], of[mine, 2])
            found[mine] = place[nth][rows]
        return found

    lanes = waves.lanes
    received: list[Received] = []
    ends = waves.messages.received
    at, sent = places(ends.of), places(waves.messages.sent.of)
    for nth, mine in enumerate(lanes.by_class):
        own = ends.of[:, 0] == nth
        columns = [
            at[own],
            ends.lane[own],
            ends.key[own, 1],
            sent[own],
        ]
        inside = _within(waves, nth)
        if len(inside[0]):
            pair = [places(np.insert(of, 0, nth, axis=1)) for of in inside]
            each = np.arange(len(mine))
            columns = [
                np.concatenate([column, more])
                for column, more in zip(columns, (
                    np.repeat(pair[0], len(mine)), np.tile(each, len(pair[0])),
                    np.tile(mine, len(pair[0])), np.repeat(pair[1], len(mine)),
                ), strict=True)
            ]  # fmt: skip
        order = np.lexsort((columns[1], columns[0]))
        table = [column[order].reshape(-1, len(mine)) for column in columns]
        received.append(Received(table[0][:, 0], table[2], table[3]))
    return Endpoints(
        lanes.by_class, lanes.class_of, tuple(received), tuple(_meetings(waves, places)),
        lanes.groups,
    )  # fmt: skip


def _within(waves: Waves, nth: int) -> tuple[Int, Int]:
    """Receives within units of a class and their sends: instances and positions of each."""
    t = waves.table_of[nth]
    edges, unit = waves.messages.within[t], waves.tables[t].rules.unit
    ends: list[list[Int]] = [[np.zeros((0, 2), np.int64)], [np.zeros((0, 2), np.int64)]]
    for u in np.unique(unit[edges.waiter]).tolist():
        instances = np.flatnonzero(waves.sequence[nth].unit == u)
        mine = unit[edges.waiter] == u
        for found, positions in zip(ends, edges, strict=True):
            pairs = np.meshgrid(instances, positions[mine], indexing="ij")
            found.append(np.stack(pairs, axis=-1).reshape(-1, 2))
    return np.concatenate(ends[0]), np.concatenate(ends[1])


def _meetings(waves: Waves, places) -> list[Meeting]:  # type: ignore[no-untyped-def]
    """Collectives whose groups span several classes."""
    met: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for batch in waves.batches:
        if not batch.meets:
            continue
        begin = waves.begin(batch)
        nth = waves.lanes.class_of[batch.lane]
        wave = np.repeat(np.arange(waves.count), np.diff(batch.wave))
        at = places(np.stack([nth, batch.instance, begin], axis=1))
        columns = wave.tolist(), batch.meeting.tolist(), nth.tolist(), at.tolist()
        for level, meeting, c, place in zip(*columns, strict=True):
            met[level, meeting][c] = place
    count = len(waves.lanes.by_class)
    return [
        Meeting(meeting // count, tuple(sorted(of)), tuple(of[c] for c in sorted(of)))
        for (_, meeting), of in sorted(met.items())
        if len(of) > 1
    ]
