"""Endpoints of lanes: messages with their sends, and collectives of several classes."""

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
    """Messages that a class receives, a row each: issue index, and the sender by lane."""

    issue_index: Int  # ascending
    sender: Int  # [messages, lanes]: lane
    sent: Int  # [messages, lanes]: issue index of the send


class SharedCollective(NamedTuple):
    """One collective among ranks of several classes, and its issue index in each."""

    classes: tuple[int, ...]
    issue_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Endpoints:
    """Messages and collectives that connect lanes, by issue index."""

    lanes: tuple[Int, ...]  # by class: numbers of its lanes
    class_of: Int  # by lane
    received: tuple[Received, ...]  # by class
    rendezvous: tuple[SharedCollective, ...]
    groups: tuple[Int, ...]  # by slot, by lane: number of the group; -1: in no group


def endpoints(waves: Waves, issues: Sequence[IssueOrder]) -> Endpoints:
    """Messages and collectives of all classes, given the issue order of each class."""
    index_of_row = [np.argsort(order.rows) for order in issues]

    def issue_index(locations: Int) -> Int:
        """Issue index at each of `MessageEnds.location`."""
        result = np.zeros(len(locations), np.int64)
        for class_id in distinct_values(locations[:, 0]):
            mask = locations[:, 0] == class_id
            rows = waves.expanded_rows(class_id, locations[mask, 1], locations[mask, 2])
            result[mask] = index_of_row[class_id][rows]
        return result

    lanes = waves.lanes
    received: list[Received] = []
    ends = waves.messages.received
    receives, sends = issue_index(ends.location), issue_index(waves.messages.sent.location)
    for class_id, class_lanes in enumerate(lanes.by_class):
        mask, num_lanes = ends.location[:, 0] == class_id, len(class_lanes)
        between = receives[mask], ends.lane[mask], ends.key[mask, 1], sends[mask]
        within = [issue_index(locations) for locations in _within(waves, class_id)]
        count = len(within[0])
        added = (
            np.repeat(within[0], num_lanes), np.tile(np.arange(num_lanes), count),
            np.tile(class_lanes, count), np.repeat(within[1], num_lanes),
        )  # fmt: skip
        columns = [np.concatenate(pair) for pair in zip(between, added, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        table = [column[order].reshape(-1, num_lanes) for column in columns]
        received.append(Received(table[0][:, 0], table[2], table[3]))
    rendezvous = tuple(_rendezvous(waves, issue_index))
    return Endpoints(lanes.by_class, lanes.class_of, tuple(received), rendezvous, lanes.groups)


def _within(waves: Waves, class_id: int) -> tuple[Int, Int]:
    """Receives and sends within units of a class, as `MessageEnds.location`."""
    t = waves.table_of[class_id]
    edges, unit = waves.messages.within[t], waves.tables[t].rules.unit
    ends: list[list[Int]] = [[np.zeros((0, 3), np.int64)], [np.zeros((0, 3), np.int64)]]
    for u in distinct_values(unit[edges.waiter]):
        instances = np.flatnonzero(waves.sequence[class_id].unit == u)
        in_unit = unit[edges.waiter] == u
        for parts, positions in zip(ends, edges, strict=True):
            columns = np.meshgrid(class_id, instances, positions[in_unit], indexing="ij")
            parts.append(np.stack(columns, axis=-1).reshape(-1, 3))
    return np.concatenate(ends[0]), np.concatenate(ends[1])


def _rendezvous(waves: Waves, issue_index: Callable[[Int], Int]) -> list[SharedCollective]:
    """Collectives whose groups span several classes; `issue_index` as in `endpoints`."""
    indices: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for batch in waves.batches:
        if not batch.is_rendezvous:
            continue
        class_of = waves.lanes.class_of[batch.lane]
        wave = np.repeat(np.arange(waves.count), np.diff(batch.wave))
        index = issue_index(np.stack([class_of, batch.instance, batch.begin], axis=1))
        columns = wave.tolist(), batch.rendezvous.tolist(), class_of.tolist(), index.tolist()
        for level, rendezvous, class_id, i in zip(*columns, strict=True):
            indices[level, rendezvous][class_id] = i
    return [
        SharedCollective(*zip(*sorted(by_class.items()), strict=True))
        for _, by_class in sorted(indices.items())
        if len(by_class) > 1
    ]
