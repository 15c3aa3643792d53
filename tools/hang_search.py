"""An oracle of deadlocks: looks for an order of communication that hangs, by chance.

`verify` warns where dependencies leave the order of communication open. Here the ranks really run,
each one collective or send at a time, the lowest id first of those that are ready, as ASTRA-sim
does, and everything takes a random time. Within a group the first collectives meet, then the second
ones, and so on; they hang if they are not of one kind and size.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import numpy as np

from stagewright.check.files.hang import Running, running
from stagewright.check.files.matching import check_world
from stagewright.check.files.world import Match, World
from stagewright.program.columns import TaskKind


def search(world: World, tries: int) -> str | None:
    """An order that the dependencies allow and that hangs, in words; None if none was found."""
    single = world.rank_by_rank()
    match = check_world(single)
    for seed in range(tries):
        why = _RandomRun(single, match, random.Random(seed)).go()
        if why is not None:
            return why
    return None


@dataclass(slots=True, eq=False)
class _RandomRun:
    """A run in which what is ready takes its turn at random; a part is one rank."""

    world: World
    match: Match
    dice: random.Random
    ranks: list[Running] = field(init=False)
    places: list[list[int]] = field(init=False)  # of rows, by id
    send_of: dict[int, int] = field(init=False)
    recv_of: dict[int, int] = field(init=False)
    users: dict[int, int] = field(init=False)  # ranks that use each group

    under_way: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    queues: list[list[tuple[int, int]]] = field(init=False)  # ready rows that take turns
    turn: list[int | None] = field(init=False)  # the row of each rank whose turn it is
    posted: set[int] = field(default_factory=set[int])  # receives
    sent: set[int] = field(default_factory=set[int])
    count: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    meeting_of: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    here: dict[tuple[int, int], list[int]] = field(
        default_factory=dict[tuple[int, int], list[int]]
    )  # group, and how many came before -> events

    def __post_init__(self) -> None:
        self.ranks = running(self.world)
        self.places = [rank.nodes.place.tolist() for rank in self.ranks]
        send, recv = self.match.send.tolist(), self.match.recv.tolist()
        self.send_of = dict(zip(recv, send, strict=True))
        self.recv_of = dict(zip(send, recv, strict=True))
        self.queues = [[] for _ in self.ranks]
        self.turn = [None] * len(self.ranks)
        groups, counts = np.unique(self.world.pairs(TaskKind.COLLECTIVE)[1], return_counts=True)
        self.users = dict(zip(groups.tolist(), counts.tolist(), strict=True))

    def go(self) -> str | None:
        """Run; how it hangs, or None."""
        for nth, rank in enumerate(self.ranks):
            for row in rank.roots():
                self.get_ready(nth, row)
            self.next_turn(nth)
        while self.under_way:
            at = self.dice.randrange(len(self.under_way))
            self.under_way[at], self.under_way[-1] = self.under_way[-1], self.under_way[at]
            self.end(*self.under_way.pop())
        return self.why()

    def get_ready(self, nth: int, row: int) -> None:
        """A row whose dependencies are done."""
        event = self.ranks[nth].event_of(row)
        if event is not None and self.world.kind[event] == TaskKind.RECV:
            self.posted.add(event)
            if self.send_of.get(event) in self.sent:
                self.under_way.append((nth, row))
        elif event is not None or self.ranks[nth].nodes.memory[row]:
            heapq.heappush(self.queues[nth], (self.places[nth][row], row))
        else:
            self.under_way.append((nth, row))

    def next_turn(self, nth: int) -> None:
        """Let the next communication of a rank begin if none is under way."""
        if self.turn[nth] is not None or not self.queues[nth]:
            return
        _, row = heapq.heappop(self.queues[nth])
        self.turn[nth] = row
        event = self.ranks[nth].event_of(row)
        if event is None or self.world.kind[event] == TaskKind.SEND:
            self.under_way.append((nth, row))
            return
        group = self.world.partner(self.rank(nth), int(self.world.slot[event]))
        before = self.count.get((nth, group), 0)
        self.count[nth, group] = before + 1
        self.meeting_of[event] = group, before
        here = self.here.setdefault((group, before), [])
        here.append(event)
        if len(here) == self.users[group] and all(self.alike(event, e) for e in here):
            self.under_way += [(self.world.part(e), self.world.row(e)) for e in here]

    def end(self, nth: int, row: int) -> None:
        """A row is over."""
        rank = self.ranks[nth]
        event = rank.event_of(row)
        if event is not None and self.world.kind[event] == TaskKind.SEND:
            self.sent.add(event)
            recv = self.recv_of.get(event)
            if recv is not None and recv in self.posted:
                self.under_way.append((self.world.part(recv), self.world.row(recv)))
        for child in rank.end(row):
            self.get_ready(nth, child)
        if self.turn[nth] == row:
            self.turn[nth] = None
        self.next_turn(nth)

    def alike(self, one: int, two: int) -> bool:
        """Whether two collectives can meet."""
        world = self.world
        return world.op[one] == world.op[two] and world.bytes[one] == world.bytes[two]

    def rank(self, nth: int) -> int:
        """The rank that a part is."""
        return int(self.world.parts[nth].ranks[0])

    # ---- why ------------------------------------------------------------------------------------

    def why(self) -> str | None:
        """Who waits for whom, from some rank that is stuck until the circle closes."""
        stuck = [nth for nth, row in enumerate(self.turn) if row is not None]
        if not stuck:
            return None
        nth, seen, lines = stuck[0], dict[int, int](), list[str]()
        while nth not in seen:
            seen[nth] = len(lines)
            text, other = self.waits(nth)
            lines.append(text)
            if other is None:
                return "; ".join(lines)
            nth = other
        circle = lines[seen[nth] :]
        return "; ".join([*circle, f"and so on in a circle of {len(circle)}"])

    def waits(self, nth: int) -> tuple[str, int | None]:
        """What a rank waits for, and the part it waits for; None: that is all there is to say."""
        world, rank, row = self.world, self.rank(nth), self.turn[nth]
        if row is None:
            return self.waits_for_message(nth)
        event = self.ranks[nth].event_of(row)
        assert event is not None  # a memory node waits for nobody
        group, before = self.meeting_of[event]
        here = self.here[group, before]
        on = f"group {group}" if group else "all ranks"
        text = f"rank {rank} begins {world.describe(event)} on {on}"
        for other in here:
            if not self.alike(event, other):
                there = self.rank(world.part(other))
                return f"{text}, but rank {there} there begins {world.describe(other)}", None
        ranks, groups, _ = world.pairs(TaskKind.COLLECTIVE)
        came = {world.part(e) for e in here}
        members = (int(world.part_of[rank]) for rank in ranks[groups == group].tolist())
        absent = next(part for part in members if part not in came)
        return f"{text} and waits for rank {self.rank(absent)}", absent

    def waits_for_message(self, nth: int) -> tuple[str, int | None]:
        """Likewise, of a rank whose turn nobody has."""
        world, rank = self.world, self.rank(nth)
        mine = (e for e in sorted(self.posted) if world.part(e) == nth)
        late = next((e for e in mine if self.send_of.get(e) not in self.sent), None)
        if late is None:
            return f"rank {rank} has nothing left to do", None
        source = world.partner(rank, int(world.slot[late]))
        return f"rank {rank} waits in {world.describe(late)} from {source}", int(
            world.part_of[source]
        )
