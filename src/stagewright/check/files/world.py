"""All ranks together, and whether all of their communication completes.

Ranks of one program form a `WorldPart`: they issue the same events; only partners differ. A
*slot* is the set of a part's events with one partner, for each of its ranks. The cost of a check is
rows per part and slots per rank, never rows per rank.

The run has no times. Parts run their events in an order that their dependencies allow; all ranks of
a part advance in step. If that run completes, so does every other execution: a send waits for no
partner, and a receive or collective waits for its partner in any order. If the run does not
complete, `hang` runs the dependencies themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.check.files.dependency_graph import DependencyGraph
from stagewright.check.report import Findings
from stagewright.program.columns import TaskKind
from stagewright.trace.formats.et_def import CommType


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


class Nodes(NamedTuple):
    """All rows of a rank with their dependencies, for `hang`."""

    graph: DependencyGraph
    place: Int  # of each row among all, by id: of those that are ready the lowest goes first
    memory: Bool  # rows that take turns with collectives and sends


class NodeSource(Protocol):
    """The file or the program that a part was read from."""

    def label(self, row: int) -> str:
        """The node or task in words."""
        ...

    def nodes(self) -> Nodes:
        """All nodes of the rank, and their dependencies."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class WorldPart:
    """Ranks with the same events; `partner` has a row per rank and a column per slot."""

    ranks: Int
    exchange: Exchange
    partner: Int
    source: NodeSource


class Match(NamedTuple):
    """Events that meet; events are numbered through all parts."""

    send: Int  # sends and their receives, pairwise
    recv: Int
    barrier: Int  # per event: collectives of one number match; -1: within its part
    arrivals: Int  # events that must arrive at each such barrier


@dataclass(slots=True, eq=False)
class World:
    """The ranks with traces, out of `size`; events and slots are numbered through all parts."""

    parts: list[WorldPart]
    size: int
    groups: Mapping[int, Int] | None  # None: there is no file of groups
    findings: Findings = field(default_factory=Findings)

    first: Int = field(init=False)  # number of each part's first event, and of all events
    first_slot: Int = field(init=False)  # likewise
    kind: Int = field(init=False)  # of each event, as in Events
    op: Int = field(init=False)
    bytes: Int = field(init=False)
    tag: Int = field(init=False)
    slot: Int = field(init=False)
    of_slot: list[Int] = field(init=False)  # events of each slot
    part_of: Int = field(init=False)  # rank -> part; -1: no trace
    row_of: Int = field(init=False)  # rank -> its place in the part

    def __post_init__(self) -> None:
        self.parts = [single for part in self.parts for single in _one_slot_per_partner(part)]
        events = [part.exchange.events for part in self.parts]
        self.first = _starts([len(part_events.row) for part_events in events])
        self.first_slot = _starts([len(part.exchange.slot_kind) for part in self.parts])
        self.kind = _all([part_events.kind.astype(np.int64) for part_events in events])
        self.op = _all([part_events.op for part_events in events])
        self.bytes = _all([part_events.size for part_events in events])
        self.tag = _all([part_events.tag for part_events in events])
        self.slot = _all(
            [
                part_events.slot + self.first_slot[part_id]
                for part_id, part_events in enumerate(events)
            ]
        )
        by_slot = np.argsort(self.slot, kind="stable")
        ends = np.cumsum(np.bincount(self.slot, minlength=int(self.first_slot[-1])))
        self.of_slot = list(np.split(by_slot, ends))[:-1]
        self.part_of, self.row_of = np.full(self.size, -1), np.full(self.size, -1)
        for part_id, part in enumerate(self.parts):
            self.part_of[part.ranks] = part_id
            self.row_of[part.ranks] = np.arange(len(part.ranks))

    def rank_by_rank(self) -> World:
        """The same world with a part per rank, and no findings."""
        parts = [
            WorldPart(part.ranks[[nth]], part.exchange, part.partner[[nth]], part.source)
            for part in self.parts
            for nth in range(len(part.ranks))
        ]
        return World(parts, self.size, self.groups)

    @property
    def whole(self) -> bool:
        """True if every rank has a trace."""
        return bool((self.part_of >= 0).all())

    def part(self, event: int) -> int:
        """The part of an event."""
        return int(np.searchsorted(self.first, event, "right")) - 1

    def row(self, event: int) -> int:
        """The event's row in its part."""
        part = self.part(event)
        return int(self.parts[part].exchange.events.row[event - self.first[part]])

    def partner(self, rank: int, slot: int) -> int:
        """The partner of a rank on a slot: a group, or a rank."""
        part = int(self.part_of[rank])
        return int(self.parts[part].partner[self.row_of[rank], slot - self.first_slot[part]])

    def pairs(self, kind: TaskKind) -> tuple[Int, Int, Int]:
        """Every rank's slots of a kind: rank, partner, slot."""
        ranks: list[Int] = []
        partners: list[Int] = []
        slots: list[Int] = []
        for part_id, part in enumerate(self.parts):
            columns = np.flatnonzero(part.exchange.slot_kind == kind)
            ranks.append(np.repeat(part.ranks, len(columns)))
            partners.append(part.partner[:, columns].ravel())
            slots.append(np.tile(columns + self.first_slot[part_id], len(part.ranks)))
        return _all(ranks), _all(partners), _all(slots)

    # ---- in words -------------------------------------------------------------------------------

    def label(self, event: int) -> str:
        """An event's node."""
        return self.parts[self.part(event)].source.label(self.row(event))

    def word(self, event: int) -> str:
        """The operation of an event: `all_reduce`, ..., `send` or `recv`."""
        if self.kind[event] == TaskKind.COLLECTIVE:
            return CommType(int(self.op[event])).name.lower()
        return "send" if self.kind[event] == TaskKind.SEND else "recv"

    def describe(self, event: int) -> str:
        """An event in words, without its partner."""
        tag = f"tag {self.tag[event]}, " if self.kind[event] != TaskKind.COLLECTIVE else ""
        return f"{self.word(event)} of {self.bytes[event]} bytes ({tag}{self.label(event)})"

    def report(self, code: str, cases: Int, text: Callable[[int], str]) -> None:
        """Report errors of one kind: the first in words, and their number."""
        if len(cases):
            self.findings.error(code, text(int(cases[0])), len(cases))


def _starts(counts: Sequence[int]) -> Int:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))))


def _all(pieces: Sequence[Int]) -> Int:
    return np.concatenate((np.zeros(0, np.int64), *pieces))


def _one_slot_per_partner(part: WorldPart) -> Iterator[WorldPart]:
    """Split a part so that each has one slot per partner.

    A rank that has one partner on two slots becomes a separate part, with merged slots.
    """
    old = part.exchange
    kind = old.slot_kind.astype(np.int64)
    whom = part.partner * 4 + kind
    ordered = np.sort(whom, axis=1)
    doubled = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if not doubled.any():
        yield part
        return
    if not doubled.all():
        yield WorldPart(part.ranks[~doubled], old, part.partner[~doubled], part.source)
    for row in np.flatnonzero(doubled).tolist():
        _, slot, merged = np.unique(whom[row], return_index=True, return_inverse=True)
        several = np.flatnonzero(np.bincount(merged) > 1).tolist() if old.breaks.pairs else []
        loose = frozenset({*(int(merged[s]) for s in old.loose), *several})
        events = Events(*old.events[:5], merged[old.events.slot])
        new = Exchange(events, old.slot_kind[slot], part.partner[row, slot], loose, old.breaks)
        yield WorldPart(part.ranks[[row]], new, new.partner[None, :], part.source)


def runs_in_order(world: World, match: Match) -> bool:
    """True if all parts complete when each runs its events one after the other."""
    part = np.searchsorted(world.first, np.arange(len(world.slot)), "right") - 1
    # A message that a part sends itself and then receives blocks no rank.
    across = (part[match.send] != part[match.recv]) | (match.send > match.recv)
    send, recv = match.send[across], match.recv[across]
    by_recv = np.argsort(recv, kind="stable")
    waiting, begin = np.unique(recv[by_recv], return_index=True)
    pieces = list(np.split(send[by_recv], begin))[1:]
    needs = {int(e): list(map(int, sends)) for e, sends in zip(waiting, pieces, strict=True)}
    stops = np.unique(np.concatenate((np.flatnonzero(match.barrier >= 0), waiting, send)))
    todo = np.split(stops, np.searchsorted(stops, world.first[1:]))[:-1]
    return _run(
        [list(map(int, events[::-1])) for events in todo],
        needs,
        match.barrier.tolist(),
        match.arrivals.tolist(),
    )


def _run(
    todo: list[list[int]],
    needs: Mapping[int, list[int]],
    barrier: Sequence[int],
    arrivals: list[int],
) -> bool:
    """`todo`: the events of each part, the next one last."""
    done = bytearray(len(barrier))
    waiting: dict[tuple[bool, int], list[int]] = {}  # (is a barrier, number) -> parts
    ready = list(range(len(todo)))
    while ready:
        part = ready.pop()
        events = todo[part]
        while events:
            event = events[-1]
            meeting = barrier[event]
            if meeting >= 0:
                events.pop()
                arrivals[meeting] -= 1
                if arrivals[meeting]:
                    waiting.setdefault((True, meeting), []).append(part)
                    break
                ready += waiting.pop((True, meeting), [])
                continue
            late = next((send for send in needs.get(event, ()) if not done[send]), None)
            if late is not None:
                waiting.setdefault((False, late), []).append(part)
                break
            done[event] = 1
            ready += waiting.pop((False, event), [])
            events.pop()
    return not any(todo) and not waiting
