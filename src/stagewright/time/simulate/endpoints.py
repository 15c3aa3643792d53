"""Tasks of lanes that belong together: messages and their sends, collectives of classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int, distinct_values
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
    place_of_row: list[Int] = []
    for order in issues:
        place = np.empty_like(order.rows)
        place[order.rows] = np.arange(len(order))
        place_of_row.append(place)

    def places(positions: Int) -> Int:
        """Places of positions, each given as class, instance and position."""
        result = np.zeros(len(positions), np.int64)
        for nth in distinct_values(positions[:, 0]):
            chosen = positions[:, 0] == nth
            rows = waves.expanded_rows(nth, positions[chosen, 1], positions[chosen, 2])
            result[chosen] = place_of_row[nth][rows]
        return result

    lanes = waves.lanes
    received: list[Received] = []
    ends = waves.messages.received
    receive_places, send_places = places(ends.of), places(waves.messages.sent.of)
    for nth, class_lanes in enumerate(lanes.by_class):
        chosen, width = ends.of[:, 0] == nth, len(class_lanes)
        columns = [
            receive_places[chosen],
            ends.lane[chosen],
            ends.key[chosen, 1],
            send_places[chosen],
        ]
        inside = _within(waves, nth)
        count = len(inside[0])
        if count:
            receives, sends = (places(np.insert(end, 0, nth, axis=1)) for end in inside)
            columns = [
                np.concatenate([column, more])
                for column, more in zip(columns, (
                    np.repeat(receives, width), np.tile(np.arange(width), count),
                    np.tile(class_lanes, count), np.repeat(sends, width),
                ), strict=True)
            ]  # fmt: skip
        order = np.lexsort((columns[1], columns[0]))
        table = [column[order].reshape(-1, width) for column in columns]
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
    for u in distinct_values(unit[edges.waiter]):
        instances = np.flatnonzero(waves.sequence[nth].unit == u)
        in_unit = unit[edges.waiter] == u
        for parts, positions in zip(ends, edges, strict=True):
            pairs = np.meshgrid(instances, positions[in_unit], indexing="ij")
            parts.append(np.stack(pairs, axis=-1).reshape(-1, 2))
    return np.concatenate(ends[0]), np.concatenate(ends[1])


def _meetings(waves: Waves, places: Callable[[Int], Int]) -> list[Meeting]:
    """Collectives whose groups span several classes; `places` as in `endpoints`."""
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
        Meeting(meeting // count, tuple(sorted(place)), tuple(place[c] for c in sorted(place)))
        for (_, meeting), place in sorted(met.items())
        if len(place) > 1
    ]
