"""Runs the dependencies of all ranks, without times, and explains a deadlock in words.

Every event that can run is run, and the outcome does not depend on the order. If events are left,
each waits for another: the explanation follows who waits for whom until the cycle closes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.check.files.matching import check_world
from stagewright.check.files.world import Match, Nodes, World
from stagewright.program.columns import TaskKind

MOST_STEPS = 64  # of an explanation
MOST_NODES = 20_000_000  # of a run rank by rank, in some 50 bytes each


def explain(world: World, match: Match) -> str | None:
    """Why the ranks deadlock, in words; None if all of them complete."""
    why = _DependencyRun(world, match).go()
    if why is None or all(len(part.ranks) == 1 for part in world.parts):
        return why
    # Ranks of a part that advance in step wait for more events than each rank by itself.
    if sum(len(p.ranks) * p.source.nodes().graph.count for p in world.parts) > MOST_NODES:
        return why
    single = world.rank_by_rank()
    return _DependencyRun(single, check_world(single)).go()


@dataclass(slots=True, eq=False)
class Running:
    """The state of a part, or of one rank; ranks of a part share all but `missing` and `done`."""

    nodes: Nodes
    first: list[int]  # rows that need each row, as CSR
    children: list[int]
    events: dict[int, int]  # row -> which event of the part
    first_event: int
    missing: list[int]  # dependencies of each row that are not done
    done: bytearray

    def event_of(self, row: int) -> int | None:
        """The number of the row's event; None where the row is no communication."""
        index = self.events.get(row)
        return None if index is None else self.first_event + index

    def end(self, row: int) -> list[int]:
        """Complete a row; returns the rows that it was the last dependency of."""
        self.done[row] = 1
        ready: list[int] = []
        for child in self.children[self.first[row] : self.first[row + 1]]:
            self.missing[child] -= 1
            if not self.missing[child]:
                ready.append(child)
        return ready

    def roots(self) -> list[int]:
        """Rows without dependencies."""
        return [row for row, count in enumerate(self.missing) if not count]


def running(world: World) -> list[Running]:
    """All parts before their first row."""
    initial: dict[tuple[int, int], Running] = {}
    states: list[Running] = []
    for part, first_event in zip(world.parts, world.first[:-1].tolist(), strict=True):
        key = id(part.source), id(part.exchange)
        if key not in initial:
            nodes = part.source.nodes()
            graph = nodes.graph
            missing = np.bincount(graph.child, minlength=graph.count).tolist()
            rows = part.exchange.events.row.tolist()
            events = {row: index for index, row in enumerate(rows)}
            initial[key] = Running(nodes, *graph.children(), events, 0, missing, bytearray())
        fresh = initial[key]
        done, missing = bytearray(fresh.nodes.graph.count), list(fresh.missing)
        states.append(replace(fresh, first_event=first_event, missing=missing, done=done))
    return states


@dataclass(slots=True, eq=False)
class _DependencyRun:
    """Parts that run until no row is ready; all ranks of a part advance in step."""

    world: World
    match: Match
    parts: list[Running] = field(init=False)
    needs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # receive -> sends
    needed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    arrived: list[list[int]] = field(init=False)  # events by number of their barrier
    issued: set[int] = field(default_factory=set[int])  # events
    ended: set[int] = field(default_factory=set[int])
    ready: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # part, row

    def __post_init__(self) -> None:
        self.parts = running(self.world)
        self.arrived = [[] for _ in range(len(self.match.arrivals))]
        for send, recv in zip(self.match.send.tolist(), self.match.recv.tolist(), strict=True):
            self.needs.setdefault(recv, []).append(send)
            self.needed.setdefault(send, []).append(recv)

    def go(self) -> str | None:
        """Run all ready rows; returns the explanation of a deadlock, or None."""
        for part_id, part in enumerate(self.parts):
            self.ready += [(part_id, row) for row in part.roots()]
        while self.ready:
            part_id, row = self.ready.pop()
            event = self.parts[part_id].event_of(row)
            if event is not None:
                self.issue(event)
            else:
                self.ready += [(part_id, child) for child in self.parts[part_id].end(row)]
        return self.why()

    def issue(self, event: int) -> None:
        """Issue a communication; all of its dependencies are complete."""
        self.issued.add(event)
        meeting = int(self.match.barrier[event])
        kind = int(self.world.kind[event])
        if kind == TaskKind.RECV:
            self.receive(event)
        elif kind == TaskKind.SEND or meeting < 0:
            self.end(event)
            for recv in self.needed.get(event, ()):
                if recv in self.issued:
                    self.receive(recv)
        else:
            self.arrived[meeting].append(event)
            if len(self.arrived[meeting]) == self.match.arrivals[meeting]:
                for each in self.arrived[meeting]:
                    self.end(each)

    def receive(self, event: int) -> None:
        """Complete a receive if all of its sends are."""
        sends = self.needs.get(event)
        if sends and event not in self.ended and all(send in self.ended for send in sends):
            self.end(event)

    def end(self, event: int) -> None:
        """Complete an event and queue the rows that it releases."""
        self.ended.add(event)
        part_id = self.world.part(event)
        ready = self.parts[part_id].end(self.world.row(event))
        self.ready += [(part_id, child) for child in ready]

    # ---- why ------------------------------------------------------------------------------------

    def why(self) -> str | None:
        """Explain who waits for whom, from one incomplete event until the cycle closes."""
        stuck = self.issued - self.ended
        if not stuck:
            return None
        event = min(stuck, key=lambda e: (self.rank(e), e))
        rank = self.rank(event)
        seen: dict[tuple[int, int], int] = {}
        lines: list[str] = []
        while (rank, event) not in seen:
            seen[rank, event] = len(lines)
            text, other, wanted = self.waits(rank, event)
            lines.append(text)
            blocker = self.blocker(wanted) if wanted is not None else None
            if blocker is None or len(lines) == MOST_STEPS:
                return "; ".join(lines)
            sent = self.world.kind[event] == TaskKind.RECV
            lines[-1] += f", which has not {'sent' if sent else 'reached'} it"
            rank, event = other, blocker
        circle = lines[seen[rank, event] :]
        return "; ".join([*circle, f"and so on in a circle of {len(circle)}"])

    def rank(self, event: int) -> int:
        """The first rank of the event's part."""
        return int(self.world.parts[self.world.part(event)].ranks[0])

    def waits(self, rank: int, event: int) -> tuple[str, int, int | None]:
        """The sentence on an issued event, the rank it waits for, and that rank's event if any."""
        world = self.world
        slot = int(world.slot[event])
        partner, label = world.partner(rank, slot), world.label(event)
        if world.kind[event] == TaskKind.RECV:
            text = f"rank {rank} waits in recv from {partner} (tag {world.tag[event]}, {label})"
            part_id = int(world.part_of[partner]) if partner < world.size else -1
            sends = [send for send in self.needs.get(event, ()) if world.part(send) == part_id]
            if not sends:
                return f"{text}, which rank {partner} never sends", partner, None
            return text, partner, sends[0]
        number = int(np.flatnonzero(world.of_slot[slot] == event)[0]) + 1
        group = f"group {partner}" if partner else "all ranks"
        text = (
            f"rank {rank} waits in {world.word(event)} on {group} (number {number} there, {label})"
        )
        other, wanted = self.absent(partner, event)
        if wanted is None:
            return f"{text} for rank {other}, which never issues it", other, None
        return f"{text} for rank {other}", other, wanted

    def absent(self, group: int, event: int) -> tuple[int, int | None]:
        """A member that has not issued a collective, and its event if it has one."""
        world, meeting = self.world, self.match.barrier[event]
        ranks, groups, slots = world.pairs(TaskKind.COLLECTIVE)
        for member, slot in zip(ranks[groups == group], slots[groups == group], strict=True):
            events = world.of_slot[int(slot)]
            matching = [int(e) for e in events if self.match.barrier[e] == meeting]
            if not matching or matching[0] not in self.issued:
                return int(member), matching[0] if matching else None
        # All members of this rank's group are here; other ranks of its part wait for others.
        late = [e for e in np.flatnonzero(self.match.barrier == meeting) if e not in self.issued]
        members = set(world.groups.get(group, []) if world.groups else []) - set(ranks.tolist())
        if late:
            return self.rank(int(late[0])), int(late[0])
        return int(min(members, default=-1)), None

    def blocker(self, event: int) -> int | None:
        """The issued event that keeps an event from being issued."""
        part = self.parts[self.world.part(event)]
        first, parents = part.nodes.graph.parents()
        row = self.world.row(event)
        while True:
            late = [p for p in parents[first[row] : first[row + 1]] if not part.done[p]]
            if not late:
                return None
            row = max(late)
            event_of_row = part.event_of(row)
            if event_of_row in self.issued:
                return event_of_row
