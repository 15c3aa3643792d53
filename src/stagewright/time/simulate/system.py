"""Advances all rank classes: each runs until it needs a message or collective of another class."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Float, Int
from stagewright.errors import UserError
from stagewright.program.columns import PHASES, Program, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.endpoints import Endpoints
from stagewright.time.simulate.host import HostThread
from stagewright.time.simulate.issue import Issue, with_needs
from stagewright.time.simulate.max_plus import NEVER, SegmentMatrices
from stagewright.time.simulate.walk import (
    LaneWork,
    SeveralLanes,
    SingleLane,
    earliest_order,
    lanes_met,
)

Sent = tuple[int, int]
"""A send: class and place."""

Key = tuple[str, Sent | int]
"""What a class waits for: a message, or a collective across classes (meeting) by number."""


Progress = Callable[[int, int], None]
"""Called with the number of tasks done and the number of all tasks."""


class Times(NamedTuple):
    """When places are launched, ready, begin, end: ticks, (places, lanes); see `timeline.Lane`."""

    launched: Int
    ready: Int
    begin: Int
    end: Int


class System:
    """The simulation of all rank classes, each of which runs until it needs another."""

    def __init__(
        self, program: Program, how: Execution, issues: Sequence[Issue], durations: Sequence[Int],
        factor: Float, who: Endpoints, hosts: Sequence[HostThread | None],
    ) -> None:  # fmt: skip
        """`issues`, `durations` and `hosts` by class, `factor` by lane."""
        self.program, self.who = program, who
        self.issues, self.durations, self.hosts = issues, durations, hosts
        self.posted: dict[Sent, Int] = {}  # ends by lane of the sender's class
        self.readiness: list[dict[int, Int]] = [{} for _ in who.meetings]
        self.starts: list[Int | None] = [None] * len(who.meetings)
        matrices = SegmentMatrices()
        self.classes: list[BySegment | ByTask] = []
        self.first = [int(lanes[0]) for lanes in who.lanes]
        awaited = _awaited(who)
        for nth, lanes in enumerate(who.lanes):
            ports = Ports.of(program, nth, issues[nth], who, awaited[nth])
            if len(lanes) == 1 and how.overlap_slowdown == 0 and factor[lanes[0]] == 1:
                self.classes.append(BySegment(nth, self, ports, matrices))
            else:
                self.classes.append(ByTask(nth, self, ports, factor[lanes], how.overlap_slowdown))

    def run(self, progress: Progress | None = None) -> None:
        """Run all classes to their ends."""
        total = sum(len(order) for order in self.issues)
        waiting: dict[Key, list[int]] = {}
        runnable = [*range(len(self.classes))][::-1]
        self.woken: list[Key] = []
        passed = 0  # of all classes: of thousands, adding up all at every step would take longest
        while runnable:
            nth = runnable.pop()
            before = self.classes[nth].passed
            key = self.classes[nth].advance()
            passed += self.classes[nth].passed - before
            if progress is not None:
                progress(passed, total)
            if key is not None:
                waiting.setdefault(key, []).append(nth)
            for woken in self.woken:
                runnable += waiting.pop(woken, ())
            self.woken.clear()
        if waiting:
            raise UserError(self._deadlock({nth: k for k, some in waiting.items() for nth in some}))

    def _deadlock(self, awaited: Mapping[int, Key]) -> str:
        """Which rank waits for which, until the circle closes; `awaited` by class."""
        chain: list[int] = []
        words: list[str] = []
        nth = min(awaited)
        while nth in awaited and nth not in chain:
            chain.append(nth)
            which = awaited[nth][1]
            if isinstance(which, int):
                meeting = self.who.meetings[which]
                missing = next(c for c in meeting.classes if c not in self.readiness[which])
                place = meeting.places[meeting.classes.index(missing)]
                words.append(
                    f"waits in {self._task(missing, place)} for rank {self._rank(missing)}"
                )
            else:
                missing, place = which
                words.append(
                    f"waits for {self._task(missing, place)} from rank {self._rank(missing)}"
                )
            nth = missing
        story = ", which ".join(words)
        if nth not in awaited:
            story += ", which has ended"
        return f"deadlock: rank {self._rank(chain[0])} {story}; change the order of the schedule"

    def _rank(self, nth: int) -> int:
        """The first rank of a class, for messages."""
        return int(self.program.classes[nth].ranks[0])

    def _task(self, nth: int, place: int) -> str:
        """A task of a class as people call it."""
        tasks, row = self.program.classes[nth].tasks, self.issues[nth].rows[place]
        name, microbatch = tasks.names[int(tasks.name[row])], int(tasks.microbatch[row])
        return f"{name} of microbatch {microbatch}" if microbatch >= 0 else name

    def post(self, sent: Sent, end: Int) -> None:
        """Record that a message has been sent, and when by lane."""
        self.posted[sent] = end
        self.woken.append(("message", sent))

    def meet(self, number: int, nth: int, ready: Int) -> Int | None:
        """Record when a class is ready for a meeting; once all are, return its start by lane."""
        meeting, here = self.who.meetings[number], self.readiness[number]
        here[nth] = ready
        if len(here) < len(meeting.classes):
            return None
        start = self.starts[number]
        if start is None:
            start = np.full(self.who.count, -1, dtype=np.int64)
            for each, at in here.items():
                start[self.who.lanes[each]] = at
            group = self.who.groups[meeting.slot]
            most = np.full(int(group.max()) + 1, -1, dtype=np.int64)
            np.maximum.at(most, group, start)
            self.starts[number] = start = most[group]
            self.woken.append(("meeting", number))
        return start[self.who.lanes[nth]]


def _awaited(who: Endpoints) -> list[set[int]]:
    """By class: places of the sends that another class waits for."""
    awaited: list[set[int]] = [set() for _ in who.lanes]
    for nth, of in enumerate(who.received):
        sender = who.class_of[of.sender]
        for each in np.unique(sender[sender != nth]).tolist():
            awaited[each] |= set(np.unique(of.sent[sender == each]).tolist())
    return awaited


@dataclass(frozen=True, slots=True, eq=False)
class Ports:
    """The places at which a class exchanges messages or meets other classes."""

    issue: Issue
    kind: NDArray[np.uint8]
    sends: set[int]  # to another class
    receives: Mapping[int, int]  # row of `Received`, also of what the class sends to itself
    meets: Mapping[int, int]  # number of the meeting

    @classmethod
    def of(cls, program: Program, nth: int, order: Issue, who: Endpoints, sends: set[int]) -> Ports:
        """The ports of class number `nth`."""
        received = who.received[nth]
        inside = who.class_of[received.sender] == nth
        if (inside & (received.sent >= received.place[:, None])).any():
            raise ValueError("a rank class receives what it has not sent yet")
        meets = {
            m.places[m.classes.index(nth)]: i
            for i, m in enumerate(who.meetings)
            if nth in m.classes
        }
        receives = {place: row for row, place in enumerate(received.place.tolist())}
        return cls(order, program.classes[nth].tasks.kind[order.rows], sends, receives, meets)


class BySegment:
    """A class of one lane, advanced segment by segment."""

    def __init__(self, nth: int, system: System, ports: Ports, matrices: SegmentMatrices) -> None:
        """Class number `nth`; `matrices` are shared with the classes before it."""
        self.nth, self.system, self.ports = nth, system, ports
        received, first = system.who.received[nth], system.first[nth]
        local = received.sender[:, 0] == first
        own = received.place[local], received.sent[local, 0]
        order = self.issue = with_needs(ports.issue, *own)
        sender = system.who.class_of[received.sender[:, 0]]
        away = zip(sender[~local].tolist(), received.sent[~local, 0].tolist(), strict=True)
        self.sources = dict(zip(received.place[~local].tolist(), away, strict=True))
        tasks = system.program.classes[nth].tasks
        # A message takes the time of its send.
        self.duration = np.where(ports.kind == TaskKind.RECV, 0, system.durations[nth])
        cuts = _cuts(tasks, order)
        for place in ports.meets:
            cuts += [place, place + 1]
        cuts += [0, len(order), *self.sources]
        self.cuts = np.unique(cuts)
        arrives = np.zeros(len(order), dtype=bool)
        arrives[[*self.sources]] = True
        sent = np.zeros(len(order), dtype=bool)
        sent[[*ports.sends, *ports.meets]] = True
        host = system.hosts[nth]
        self.matrices = matrices.of(self.cuts, order, self.duration, arrives, sent, host)
        self.host = 0  # when the host has launched all places that are done, and waited
        sends = np.array(sorted(ports.sends), dtype=np.int64)
        at = np.searchsorted(sends, self.cuts)
        self.sends = [sends[a:b].tolist() for a, b in itertools.pairwise(at.tolist())]
        self.inputs: list[Int] = []
        self.ends = np.zeros(len(order), dtype=np.int64)

    @property
    def passed(self) -> int:
        """Places that are done."""
        return int(self.cuts[len(self.inputs)])

    def advance(self) -> Key | None:
        """Run until a message or meeting is missing, and return its key; None at the end."""
        order, system = self.issue, self.system
        while len(self.inputs) < len(self.matrices):
            nth = len(self.inputs)
            begin, matrix = int(self.cuts[nth]), self.matrices[nth]
            arrival = 0
            if begin in self.sources:
                sent = self.sources[begin]
                if sent not in system.posted:
                    return "message", sent
                arrival = int(system.posted[sent][0])
            mine = order.needs[order.pointer[begin] : order.pointer[self.cuts[nth + 1]]]
            values = matrix.inputs(mine, self.ends, arrival, self.host)
            ends, host = matrix.port_ends(values)
            if begin in self.ports.meets:
                ticks = int(self.duration[begin])
                number = self.ports.meets[begin]
                start = system.meet(number, self.nth, ends - ticks)
                if start is None:
                    return "meeting", number
                # The meeting decides: all inputs count as if they came at its start.
                values = np.full_like(values, start[0])
                ends = start + ticks
                thread = system.hosts[self.nth]
                if thread is not None:
                    values[-1] = NEVER
                    host = max(host, int(ends[0])) if thread.waits[begin] else host
            self.ends[begin + matrix.ports] = ends
            self.host = host
            self.inputs.append(values)
            for place in self.sends[nth]:
                system.post((self.nth, place), self.ends[place : place + 1])
        return None

    def times(self) -> Times:
        """The times of all places."""
        runs: dict[int, list[int]] = {}
        for nth, matrix in enumerate(self.matrices):
            runs.setdefault(id(matrix), []).append(nth)
        for mine in runs.values():
            matrix = self.matrices[mine[0]]
            ends = matrix.ends(np.stack([self.inputs[nth] for nth in mine]))
            self.ends[self.cuts[mine][:, None] + np.arange(ends.shape[1])] = ends
        return _times(self.system, self.nth, self.ports, self.ends[:, None])


class ByTask:
    """A class whose ranks differ, or whose kernels slow down, advanced task by task."""

    def __init__(
        self, nth: int, system: System, ports: Ports, factor: Float, slowdown: float
    ) -> None:
        """Class number `nth`; `factor` by lane of the class."""
        self.nth, self.system, self.ports = nth, system, ports
        lanes = system.who.lanes[nth]
        tasks = system.program.classes[nth].tasks
        numbers: dict[int, Int | None] = {-1: None}
        slot = np.where(ports.kind == TaskKind.COLLECTIVE, tasks.slot[ports.issue.rows], -1)
        for used in sorted({int(s) for s in slot} - {-1}):
            group = system.who.groups[used][lanes]
            numbers[used] = None if len(np.unique(group)) == len(lanes) else lanes_met(group)
        groups = [numbers[int(s)] for s in slot]
        duration = system.durations[nth]
        host = system.hosts[nth]
        work = LaneWork(ports.issue, ports.kind, duration, groups, factor, slowdown, host)
        self.walk = SingleLane(work) if len(lanes) == 1 else SeveralLanes(work)
        self.order = [*range(len(slot))]
        if slowdown:
            fixed = (ports.kind == TaskKind.COMPUTE) | (ports.kind == TaskKind.RECV)
            fixed[[*ports.meets]] = True
            self.order = earliest_order(ports.issue, fixed, host)
        joins = {*ports.meets, *ports.receives, *ports.sends}
        self.stops = [nth for nth, place in enumerate(self.order) if place in joins]
        self.stops.append(len(self.order))
        self.passed = 0  # of order
        self.stopped = 0  # of stops

    def advance(self) -> Key | None:
        """Run until a message or meeting is missing, and return its key; None at the end."""
        while True:
            stop = self.stops[self.stopped]
            self.walk.run(self.order[self.passed : stop])
            self.passed = stop
            if stop == len(self.order):
                return None
            key = self._join(self.order[stop])
            if key is not None:
                return key
            self.passed, self.stopped = stop + 1, self.stopped + 1

    def _join(self, place: int) -> Key | None:
        """Run a place that involves other classes; returns the key of what is missing, or None."""
        walk, ports, system = self.walk, self.ports, self.system
        if place in ports.meets:
            start = system.meet(ports.meets[place], self.nth, walk.ready(place))
            if start is None:
                return "meeting", ports.meets[place]
            walk.settle(place, start + int(system.durations[self.nth][place]))
        elif place in ports.receives:
            row = ports.receives[place]
            received = system.who.received[self.nth]
            arrival = np.zeros(received.sender.shape[1], dtype=np.int64)
            for lane, (sender, sent) in enumerate(
                zip(received.sender[row].tolist(), received.sent[row].tolist(), strict=True)
            ):
                nth = int(system.who.class_of[sender])
                ends = walk.end(sent) if nth == self.nth else system.posted.get((nth, sent))
                if ends is None:
                    return "message", (nth, sent)
                arrival[lane] = ends[sender - system.first[nth]]
            walk.settle(place, np.maximum(walk.ready(place), arrival))
        else:
            walk.run([place])
            system.post((self.nth, place), walk.end(place))
        return None

    def times(self) -> Times:
        """The times of all places."""
        return _times(self.system, self.nth, self.ports, self.walk.all_ends())


def _times(system: System, nth: int, ports: Ports, ends: Int) -> Times:
    """The times of all places, given their ends."""
    order, duration = ports.issue, system.durations[nth][:, None]
    ready = np.zeros_like(ends)
    waiting = np.flatnonzero(np.diff(order.pointer))
    if len(waiting):
        starts = order.pointer[waiting]
        ready[waiting] = np.maximum.reduceat(ends[order.needs], starts, axis=0)
    host = system.hosts[nth]
    launched = np.zeros_like(ends) if host is None else host.launched(ends)
    ready = np.maximum(ready, launched)
    kernel = (ports.kind == TaskKind.COMPUTE)[:, None]
    # A receive whose message has already arrived takes no time.
    late = (ports.kind == TaskKind.RECV)[:, None] & (ends == ready)
    return Times(launched, ready, np.where(kernel | late, ready, ends - duration), ends)


def _cuts(tasks: Tasks, order: Issue) -> list[int]:
    """The places at which each action begins, and the place at which the optimizer begins."""
    rows = order.rows
    microbatch, phase = tasks.microbatch[rows], tasks.phase[rows]
    backward = phase != PHASES.index("forward")
    inside = np.flatnonzero(microbatch >= 0)
    stage = tasks.stage[rows][inside].astype(np.int64)
    microbatches = int(microbatch.max(initial=0)) + 1
    action = (stage * 2 + backward[inside]) * microbatches + microbatch[inside]
    ordered = np.argsort(action, kind="stable")
    first = ordered[np.diff(action[ordered], prepend=-1) != 0]
    step = np.flatnonzero(phase == PHASES.index("optimizer"))
    return [*inside[first].tolist(), *step[:1].tolist()]
