"""The communication of a rank: its events, their partners, and their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.check.files.dependency_graph import DependencyGraph
from stagewright.program.columns import TaskKind


class Events(NamedTuple):
    """Collectives, sends and receives of a rank."""

    row: Int  # which node, or task
    kind: Int  # TaskKind
    op: Int  # COLLECTIVE: `et_def.CommType`; else -1
    size: Int  # bytes
    tag: Int  # SEND, RECV; else -1
    slot: Int  # with whom: equal for events of one kind with one partner

    def at(self, rows: Int) -> Events:
        """The events in some rows."""
        return Events(*(column[rows] for column in self))


class Exchange(NamedTuple):
    """Events in an order that the dependencies allow, receives as late as possible."""

    events: Events
    slot_kind: NDArray[np.uint8]  # TaskKind
    partner: Int  # by slot: id of a group (0: all ranks), or a rank
    loose: frozenset[int]  # slots of groups on which collectives can come in another order
    breaks: Breaks


class Breaks(NamedTuple):
    """Neighbours, among collectives, sends and memory nodes, that no dependency orders."""

    pairs: int
    one: int = -1  # rows of the first pair
    two: int = -1


class Spots(NamedTuple):
    """Bytes of a file in which ranks of one program differ: partners, and the rank itself."""

    at: Int  # byte where each begins, and ends
    end: Int
    slot: Int  # -1: the own rank


def slots(kind: Int, partner: Int) -> tuple[Int, Int, Int]:
    """Kind and partner of each slot, in order of first events; and the slot of each event."""
    pairs, first, inverse = np.unique(
        np.stack([kind, partner]), axis=1, return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    pairs = pairs[:, order]
    return pairs[0], pairs[1], np.argsort(order)[inverse.ravel()]


def arranged(
    graph: DependencyGraph, order: Int, events: Events, slotted: Int, *, exact: bool = True
) -> tuple[Events, frozenset[int], Breaks]:
    """Events by their turn in `order` (of all rows), loose slots, and breaks.

    `slotted`: rows that take turns: collectives, sends, memory nodes. Unless `exact`, only those
    that need the one before directly count as ordered.
    """
    key = graph.late(order, events.row[events.kind == TaskKind.RECV])
    events = events.at(np.argsort(key[events.row], kind="stable"))
    chain = slotted[np.argsort(key[slotted])]
    gaps = graph.unordered(order, chain) if exact else graph.unlinked(chain)
    if not len(gaps):
        return events, frozenset(), Breaks(0)
    loose = [
        slot
        for slot in np.unique(events.slot[events.kind == TaskKind.COLLECTIVE]).tolist()
        if len(graph.unordered(order, events.row[events.slot == slot]))
    ]
    first = Breaks(len(gaps), int(chain[gaps[0] - 1]), int(chain[gaps[0]]))
    return events, frozenset(loose), first
