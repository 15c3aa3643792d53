"""Messages between lanes: which receive gets what which send leaves."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, distinct_values
from stagewright.program.columns import RECV, SEND, Program
from stagewright.program.rank_work import numbers_among_copies
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.order import Edges, IssueRules, IssueTable
from stagewright.time.simulate.units import UnitSequence


class MessageEnds(NamedTuple):
    """Sends, or receives, a row each."""

    of: Int
    """[messages, 3]: class, instance of its unit, position."""
    lane: Int
    """The lane within its class."""
    key: Int
    """[messages, 4]: axis, sending lane, receiving lane, tag; equal on both ends."""


class Messages(NamedTuple):
    """The messages of a program."""

    sent: MessageEnds
    received: MessageEnds
    """Row by row those of `sent`."""
    within: list[Edges]
    """By table, receives and sends of a lane that sends to itself, within one unit."""


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
        table_lanes = np.concatenate([lanes.by_class[nth] for nth in table.classes])
        to_itself = np.array(
            [(peer[table_lanes] == table_lanes).all() for peer in lanes.peers], dtype=bool
        )
        inside = to_itself[slot] if len(slot) else np.zeros(0, dtype=bool)
        within.append(_within(rules, tasks.tag, positions[inside], axis_of[slot[inside]], kind))
        between = positions[~inside]
        for nth, sequence in zip(table.classes, table.sequences, strict=True):
            for what, parts in ends.items():
                chosen = between[kind[between] == what]
                parts += _of_class(program, table, nth, sequence, chosen, axis_of, lanes)
    none = np.zeros((0, 3), np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.int64)
    sent, received = (
        _sorted(MessageEnds(*(np.concatenate(c) for c in zip(none, *ends[what], strict=True))))
        for what in (SEND, RECV)
    )
    if not np.array_equal(sent.key, received.key):
        raise ValueError(_unmatched(sent.key, received.key, lanes, [*numbers]))
    return Messages(sent, received, within)


def _of_class(
    program: Program, table: IssueTable, nth: int, sequence: UnitSequence, positions: Int,
    axis_of: Int, lanes: Lanes,
) -> Iterator[tuple[Int, Int, Int]]:  # fmt: skip
    """The sends, or receives, of all copies of a class and of each of its lanes."""
    rules, order, tasks = table.rules, program.classes[nth].work.order, table.actions.tasks
    for unit in distinct_values(rules.unit[positions]):
        instances = np.flatnonzero(sequence.unit == unit)
        if not len(instances):
            continue
        for m, action in enumerate(table.units.actions[unit]):
            chosen = positions[(rules.unit[positions] == unit) & (rules.member[positions] == m)]
            if not len(chosen):
                continue
            rows = rules.rows[chosen]
            copies: Int = sequence.copies[instances, m]
            tags = order.tags(action, rows)[numbers_among_copies(order, action, copies)]
            slot = tasks.slot[rows].astype(np.int64)
            shape = tags.shape
            of = np.stack([
                np.full(shape, nth), np.broadcast_to(instances[:, None], shape),
                np.broadcast_to(chosen, shape),
            ], axis=-1).reshape(-1, 3)  # fmt: skip
            receives = tasks.kind[rows[0]] == RECV
            for number, lane in enumerate(lanes.by_class[nth].tolist()):
                other = np.array([int(peer[lane]) for peer in lanes.peers])[slot]
                pair = (np.full(shape, lane), np.broadcast_to(other, shape))
                if receives:
                    pair = pair[::-1]
                key = np.stack([np.broadcast_to(axis_of[slot], shape), *pair, tags], axis=-1)
                yield of, np.full(len(of), number), key.reshape(-1, 4)


def _sorted(ends: MessageEnds) -> MessageEnds:
    """Messages in order of what both ends agree on: of equal ones in the order of issue."""
    of, key = ends.of, ends.key
    order = np.lexsort((of[:, 2], of[:, 1], key[:, 3], key[:, 2], key[:, 1], key[:, 0]))
    return MessageEnds(*(column[order] for column in ends))


def _unmatched(sent: Int, received: Int, lanes: Lanes, axes: Sequence[str]) -> str:
    """What is received and not sent, or the other way round; given are keys of `MessageEnds`."""
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
    """Receives and their sends among messages that a lane sends to itself, within each unit."""
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
