"""Messages between lanes: each send with its receive."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int, distinct_values
from stagewright.program.columns import RECV, SEND, ActionOrder, Program, numbers_among_copies
from stagewright.time.simulate.lanes import LaneMap
from stagewright.time.simulate.order import Edges
from stagewright.time.simulate.rules import IssueRules, IssueTable
from stagewright.time.simulate.units import UnitSequence


class MessageEnds(NamedTuple):
    """Sends, or receives, a row each."""

    location: Int
    """[messages, 3]: class, instance of its unit, position."""
    lane: Int
    """[messages]: lane within its class."""
    key: Int
    """[messages, 4]: axis, sending lane, receiving lane, tag; equal on both ends."""

    def select(self, rows: Int | Bool) -> MessageEnds:
        """Messages by index or mask."""
        return MessageEnds(*(column[rows] for column in self))


class Messages(NamedTuple):
    """The messages of a program."""

    sent: MessageEnds
    received: MessageEnds
    """Row i receives what row i of `sent` sends."""
    within: list[Edges]
    """By table, receives and sends within a unit, of lanes that send to themselves."""


def messages(program: Program, tables: Sequence[IssueTable], lanes: LaneMap) -> Messages:
    """Match sends and receives: between two lanes along an axis, the n-th of each tag.

    Raises ValueError where messages are sent and not received, or the other way round.
    """
    axes = [peer.axis for peer in program.peers]
    numbers = {axis: n for n, axis in enumerate(dict.fromkeys(axes))}
    axis_of = np.array([numbers[axis] for axis in axes], dtype=np.int64)
    within: list[Edges] = []
    parts = [np.zeros((9, 0), np.int64)]
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
        for class_id, sequence in zip(table.classes, table.sequences, strict=True):
            order = program.classes[class_id].work.order
            parts += _ends(order, table, class_id, sequence, positions[~inside], axis_of, lanes)
    columns = np.concatenate(parts, axis=1)
    ends: list[MessageEnds] = []
    for task_kind in (SEND, RECV):
        selected = columns[:, columns[-1] == task_kind]
        # By key, and equal keys in issue order.
        selected = selected[:, np.lexsort((selected[2], selected[1], *selected[7:3:-1]))]
        ends.append(MessageEnds(selected[:3].T, selected[3], selected[4:8].T))
    sent, received = ends
    if not np.array_equal(sent.key, received.key):
        raise ValueError(_unmatched(sent.key, received.key, lanes, [*numbers]))
    return Messages(sent, received, within)


def _ends(
    order: ActionOrder, table: IssueTable, class_id: int, sequence: UnitSequence, positions: Int,
    axis_of: Int, lanes: LaneMap,
) -> Iterator[Int]:  # fmt: skip
    """Sends and receives of all copies of a class and of each of its lanes.

    Rows: class, instance, position, lane within the class, axis, sending and receiving lane, tag,
    and kind of task.
    """
    rules, tasks, own = table.rules, table.actions.tasks, lanes.by_class[class_id]
    for unit in distinct_values(rules.unit[positions]):
        instances = np.flatnonzero(sequence.unit == unit)
        if not len(instances):
            continue
        for m, action in enumerate(table.units.actions[unit]):
            of_member = positions[(rules.unit[positions] == unit) & (rules.member[positions] == m)]
            if not len(of_member):
                continue
            rows = rules.rows[of_member]
            copies: Int = sequence.copies[instances, m]
            tags = order.tags(action, rows)[numbers_among_copies(order, action, copies)]
            slot = tasks.slot[rows].astype(np.int64)
            peer = np.stack(lanes.peers)[slot][:, own]
            kind = tasks.kind[rows, None].astype(np.int64)
            receives = kind == RECV
            columns = np.broadcast_arrays(
                class_id, instances[:, None, None], of_member[:, None], np.arange(len(own)),
                axis_of[slot, None], np.where(receives, peer, own), np.where(receives, own, peer),
                tags[:, :, None], kind,
            )  # fmt: skip
            yield np.stack(columns).reshape(9, -1)


def _unmatched(sent: Int, received: Int, lanes: LaneMap, axes: Sequence[str]) -> str:
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
