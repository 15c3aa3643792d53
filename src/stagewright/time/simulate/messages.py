"""Messages between lanes: each send with its receive."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, distinct_values
from stagewright.program.columns import RECV, SEND, Program, numbers_among_copies
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.order import Edges, IssueRules, IssueTable
from stagewright.time.simulate.units import UnitSequence


class MessageEnds(NamedTuple):
    """Sends, or receives, a row each."""

    location: Int
    """[messages, 3]: class, instance of its unit, position."""
    lane: Int
    """[messages]: lane within its class."""
    key: Int
    """[messages, 4]: axis, sending lane, receiving lane, tag; equal on both ends."""


class Messages(NamedTuple):
    """The messages of a program."""

    sent: MessageEnds
    received: MessageEnds
    """Row i receives what row i of `sent` sends."""
    within: list[Edges]
    """By table, receives and sends within a unit, of lanes that send to themselves."""


def messages(program: Program, tables: Sequence[IssueTable], lanes: Lanes) -> Messages:
    """Match sends and receives: between two lanes along an axis, the n-th of each tag.

    Raises ValueError where messages are sent and not received, or the other way round.
    """
    axes = [peer.axis for peer in program.peers]
    numbers = {axis: n for n, axis in enumerate(dict.fromkeys(axes))}
    axis_of = np.array([numbers[axis] for axis in axes], dtype=np.int64)
    within: list[Edges] = []
    ends: dict[int, list[tuple[Int, Int, Int]]] = {SEND: [], RECV: []}
    for table in tables:
        rules, tasks = table.rules, table.actions.tasks
        kind = tasks.kind[rules.rows]
        positions = np.flatnonzero((kind == SEND) | (kind == RECV))
        slot = tasks.slot[rules.rows[positions]].astype(np.int64)
        table_lanes = np.concatenate([lanes.by_class[class_id] for class_id in table.classes])
        to_itself = np.array(
            [(peer[table_lanes] == table_lanes).all() for peer in lanes.peers], dtype=bool
        )
        inside = to_itself[slot] if len(slot) else np.zeros(0, dtype=bool)
        within.append(_within(rules, tasks.tag, positions[inside], axis_of[slot[inside]], kind))
        between = positions[~inside]
        for class_id, sequence in zip(table.classes, table.sequences, strict=True):
            for task_kind, parts in ends.items():
                selected = between[kind[between] == task_kind]
                parts += _ends(program, table, class_id, sequence, selected, axis_of, lanes)
    none = np.zeros((0, 3), np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.int64)
    sent, received = (
        _sorted(MessageEnds(*(np.concatenate(c) for c in zip(none, *ends[task_kind], strict=True))))
        for task_kind in (SEND, RECV)
    )
    if not np.array_equal(sent.key, received.key):
        raise ValueError(_unmatched(sent.key, received.key, lanes, [*numbers]))
    return Messages(sent, received, within)


def _ends(
    program: Program, table: IssueTable, class_id: int, sequence: UnitSequence, positions: Int,
    axis_of: Int, lanes: Lanes,
) -> Iterator[tuple[Int, Int, Int]]:  # fmt: skip
    """Sends, or receives, of all copies of a class and of each of its lanes."""
    rules, tasks = table.rules, table.actions.tasks
    order = program.classes[class_id].work.order
    for unit in distinct_values(rules.unit[positions]):
        instances = np.flatnonzero(sequence.unit == unit)
        if not len(instances):
            continue
        for m, action in enumerate(table.units.actions[unit]):
            mask = (rules.unit[positions] == unit) & (rules.member[positions] == m)
            if not mask.any():
                continue
            rows = rules.rows[positions[mask]]
            copies: Int = sequence.copies[instances, m]
            tags = order.tags(action, rows)[numbers_among_copies(order, action, copies)]
            slot = tasks.slot[rows].astype(np.int64)
            shape = tags.shape
            location = np.stack([
                np.full(shape, class_id), np.broadcast_to(instances[:, None], shape),
                np.broadcast_to(positions[mask], shape),
            ], axis=-1).reshape(-1, 3)  # fmt: skip
            receives = tasks.kind[rows[0]] == RECV
            for index, lane in enumerate(lanes.by_class[class_id].tolist()):
                peer_lane = np.array([int(peer[lane]) for peer in lanes.peers])[slot]
                pair = (np.full(shape, lane), np.broadcast_to(peer_lane, shape))
                if receives:
                    pair = pair[::-1]
                key = np.stack([np.broadcast_to(axis_of[slot], shape), *pair, tags], axis=-1)
                yield location, np.full(len(location), index), key.reshape(-1, 4)


def _sorted(ends: MessageEnds) -> MessageEnds:
    """Sort messages by key, and equal keys in issue order."""
    location, key = ends.location, ends.key
    order = np.lexsort((location[:, 2], location[:, 1], *key.T[::-1]))
    return MessageEnds(*(column[order] for column in ends))


def _unmatched(sent: Int, received: Int, lanes: Lanes, axes: Sequence[str]) -> str:
    """Message on the first pair of ranks whose sends and receives differ, by `MessageEnds.key`."""
    pairs = {*map(tuple, sent[:, :3].tolist())} | {*map(tuple, received[:, :3].tolist())}
    for pair in sorted(pairs):
        sends, receives = (keys[(keys[:, :3] == pair).all(axis=1)] for keys in (sent, received))
        if not np.array_equal(sends, receives):
            axis, source, target = pair
            ranks = [int(lanes.example[lane]) for lane in (target, source)]
            return (
                f"rank {ranks[0]} receives {len(receives)} messages from rank {ranks[1]} along "
                f"{axes[axis]}, which sends {len(sends)}, or others"
            )
    raise AssertionError("all messages are received")


def _within(
    rules: IssueRules, tag: NDArray[np.int32], positions: Int, axis: Int, kind: NDArray[np.uint8]
) -> Edges:
    """Match receives and sends of lanes that send to themselves, within each unit."""
    ends: dict[int, dict[tuple[int, ...], list[int]]] = {
        SEND: defaultdict(list), RECV: defaultdict(list)
    }  # fmt: skip
    for position, a in zip(positions.tolist(), axis.tolist(), strict=True):
        row = rules.rows[position]
        key = int(rules.unit[position]), int(rules.member[position]), a, int(tag[row])
        ends[int(kind[position])][key].append(position)
    pairs = [
        pair
        for key, received in ends[RECV].items()
        for pair in itertools.zip_longest(received, ends[SEND].get(key, ()))
    ]
    if any(receive is None or send is None or send >= receive for receive, send in pairs):
        raise ValueError("a rank class receives what it has not sent yet")
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Edges(columns[:, 0], columns[:, 1])
