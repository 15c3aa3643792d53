"""Transfer matrices: the ends that a run of tasks leaves behind, from those that it begins with.

A task ends at the latest of some inputs plus a sum of durations, so that what a run of tasks leaves
is a product in (max, +) algebra: `out[i] = max over j of matrix[i, j] + in[j]`. A matrix holds for
all copies of a unit. Ticks are whole numbers, so that products are exact in any order.

Units are cut into runs at collectives of several lanes (*meetings*), which begin when the last of
their lanes is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.order import LAUNCHED, Edges, IssueRules

NEVER = -(1 << 60)
"""No dependency: two of these, and any time, are within 64 bits."""
REGISTER, LOCAL, CARRIED, MESSAGE = range(4)
"""Inputs of a run: a register, the end of a position in an earlier run of the same unit, a carried
need, a message."""
VALUE = 4
"""Besides `REGISTER`, `LOCAL` and `MESSAGE` an output: an end that other units need."""


class Port(NamedTuple):
    """An input or an output of a run."""

    what: int
    number: int
    """The register; the position; of a carried need its index in `IssueRules.carried`."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive positions of a unit, with what they read and what they leave."""

    unit: int
    begin: int
    end: int
    meets: bool
    """Whether it is one collective of several lanes."""
    inputs: tuple[Port, ...]
    """The first is `LAUNCHED`."""
    outputs: tuple[Port, ...]
    """The first is `LAUNCHED`."""
    sources: tuple[int, ...]
    """By output: the position whose end it is, or -1 - i for input i; of `LAUNCHED` any number."""


class Asked(NamedTuple):
    """Which positions connect units and lanes: masks."""

    meets: Bool
    receives: Bool
    """Messages that come from another unit, or another lane."""
    sends: Bool
    wanted: Bool
    """Ends that other units need."""
    cuts: Bool
    """Positions that begin a run."""


class Runs:
    """The runs of all units, and the order in which their positions are evaluated."""

    def __init__(self, rules: IssueRules, asked: Asked, units: int, messages: Edges) -> None:
        """`messages` are receives and their sends within a unit; `units` is how many there are."""
        self.rules, self.asked, self.messages = rules, asked, messages
        size = len(rules.rows)
        begin = np.searchsorted(rules.unit, np.arange(units + 1))
        cuts = asked.cuts | asked.meets
        cuts[1:] |= asked.meets[:-1]
        run_of = np.zeros(size, np.int64)
        self.runs: list[Run] = []
        bounds: list[tuple[int, int, int]] = []
        self.of_unit: list[list[int]] = []
        for u in range(units):
            a, b = int(begin[u]), int(begin[u + 1])
            edges = [a, *(a + 1 + np.flatnonzero(cuts[a + 1 : b])).tolist(), b] if b > a else []
            mine = [(u, x, y) for x, y in zip(edges, edges[1:], strict=False)]
            if mine and asked.meets[mine[-1][1]]:
                mine.append((u, b, b))  # registers are left by a run that is no meeting
            self.of_unit.append([*range(len(bounds), len(bounds) + len(mine))])
            for number, (_, x, y) in enumerate(mine, len(bounds)):
                run_of[x:y] = number
            bounds += mine
        self.run_of = run_of
        self._connect(rules, asked, bounds)
        self._schedule()

    def _connect(
        self, rules: IssueRules, asked: Asked, bounds: Sequence[tuple[int, int, int]]
    ) -> None:
        """Inputs and outputs of all runs."""
        run_of = self.run_of
        launched = Port(REGISTER, rules.register(LAUNCHED))
        inputs: list[dict[Port, int]] = [{launched: 0} for _ in bounds]
        fill: list[tuple[int, int]] = []

        def reads(position: int, port: Port) -> None:
            columns = inputs[run_of[position]]
            fill.append((position, columns.setdefault(port, len(columns))))

        for position, register in zip(*(column.tolist() for column in rules.reads), strict=True):
            reads(position, Port(REGISTER, register))
        local: set[int] = set()
        for waiter, dep in zip(*self._across(rules.edges), strict=True):
            local.add(dep)
            reads(waiter, Port(LOCAL, dep))
        for number, position in enumerate(rules.carried.at.tolist()):
            reads(position, Port(CARRIED, number))
        ready_fill = len(fill)
        for waiter, dep in zip(*self._across(self.messages), strict=True):
            local.add(dep)
            reads(waiter, Port(LOCAL, dep))
        for position in np.flatnonzero(asked.receives).tolist():
            reads(position, Port(MESSAGE, position))

        outputs: list[list[tuple[Port, int]]] = [[(launched, 0)] for _ in bounds]
        for u, register, position in zip(*(c.tolist() for c in rules.writes), strict=True):
            last = self.of_unit[u][-1]
            if run_of[position] == last and position < bounds[last][2]:
                source = position
            else:
                local.add(position)
                columns = inputs[last]
                port = Port(LOCAL, position)
                source = -1 - columns.setdefault(port, len(columns))
            outputs[last].append((Port(REGISTER, register), source))
        for u, register, other in zip(*(c.tolist() for c in rules.moves), strict=True):
            if not self.of_unit[u]:
                continue
            columns = inputs[self.of_unit[u][-1]]
            column = columns.setdefault(Port(REGISTER, other), len(columns))
            outputs[self.of_unit[u][-1]].append((Port(REGISTER, register), -1 - column))
        for position in sorted(local):
            outputs[run_of[position]].append((Port(LOCAL, position), position))
        for what, mask in ((VALUE, asked.wanted), (MESSAGE, asked.sends)):
            for position in np.flatnonzero(mask).tolist():
                outputs[run_of[position]].append((Port(what, position), position))
        for number, (u, a, b) in enumerate(bounds):
            ports, sources = zip(*outputs[number], strict=True)
            meets = a < b and bool(asked.meets[a])
            self.runs.append(Run(u, a, b, meets, tuple(inputs[number]), ports, sources))
        pairs = np.array(fill, dtype=np.int64).reshape(-1, 2)
        self.fill, self.arrivals = pairs[:ready_fill].T, pairs[ready_fill:].T

    def _across(self, edges: Edges) -> tuple[list[int], list[int]]:
        """Edges between runs."""
        across = self.run_of[edges.waiter] != self.run_of[edges.dep]
        return edges.waiter[across].tolist(), edges.dep[across].tolist()

    def _schedule(self) -> None:
        """Positions of all runs side by side: the first of each, then the second, and so on."""
        begin = np.array([run.begin for run in self.runs], dtype=np.int64)
        length = np.array([run.end for run in self.runs], dtype=np.int64) - begin
        waiter, dep = self.rules.edges
        within = self.run_of[waiter] == self.run_of[dep]
        waiter, dep = waiter[within], dep[within]  # sorted by waiter
        size = len(self.rules.rows)
        inside = self.run_of[self.messages.waiter] == self.run_of[self.messages.dep]
        sent = np.full(size, -1)
        sent[self.messages.waiter[inside]] = self.messages.dep[inside]
        receives = np.zeros(size, dtype=bool)
        receives[self.messages.waiter[inside]] = True
        receives[self.arrivals[0]] = True
        pointer = np.concatenate([[0], np.cumsum(np.bincount(waiter, minlength=size))])
        longest = np.argsort(-length, kind="stable")
        count = np.bincount(length, minlength=1)
        alive = len(length) - np.cumsum(count)  # runs of more than k positions
        self.steps: list[tuple[Int, Int, Int, Int, Int, Int, Int]] = []
        for k in range(int(length.max(initial=0))):
            live = longest[: int(alive[k])]
            at = begin[live] + k
            counts = pointer[at + 1] - pointer[at]
            some = np.flatnonzero(counts)
            total = int(counts.sum())
            starts = np.cumsum(counts[some]) - counts[some]
            flat = np.arange(total) - np.repeat(starts, counts[some])
            needs = dep[flat + np.repeat(pointer[at[some]], counts[some])]
            late = np.flatnonzero(receives[at])
            self.steps.append((at, live, some, starts, needs, late, sent[at[late]]))
        self.width = max((len(run.inputs) for run in self.runs), default=1)


class Matrices(NamedTuple):
    """Matrices of all runs for several timings, padded with `NEVER` to the widest inputs."""

    ends: Int
    """[timings, positions, inputs]: the end of each position; of a meeting, when it is ready."""
    ready: Int
    """[timings, positions, inputs]: when each is launched and all it waits for has ended; without
    the message that a receive waits for."""
    launched: Int
    """[timings, runs, inputs]: when the host has launched a run, and waited."""


def transfer_matrices(
    runs: Runs, duration: Int, cost: Int | None = None, waits: Bool | None = None
) -> Matrices:
    """Matrices of all runs. `duration`, `cost` (of launches) and `waits` (whether the host waits for
    the end) are [timings, positions], in ticks; no `cost`: launches take no time."""
    timings, size = duration.shape
    width = runs.width
    ends = np.full((timings, size, width), NEVER, np.int64)
    ready = np.full_like(ends, NEVER)
    ready[:, runs.fill[0], runs.fill[1]] = 0
    message = np.full((size, width), NEVER, np.int64)
    message[runs.arrivals[0], runs.arrivals[1]] = 0
    thread = np.full((timings, len(runs.runs), width), NEVER, np.int64)
    thread[:, :, 0] = 0
    joins = waits is not None and bool(waits.any())
    for at, live, some, starts, needs, late, sent in runs.steps:
        here = ready[:, at]
        if len(some):
            latest = np.maximum.reduceat(ends[:, needs], starts, axis=1)
            here[:, some] = np.maximum(here[:, some], latest)
        if cost is not None:
            mine = thread[:, live] + cost[:, at, None]
            np.maximum(here, mine, out=here)
        ready[:, at] = here
        if len(late):
            came = np.where((sent >= 0)[:, None], ends[:, sent], message[at[late]])
            here[:, late] = np.maximum(here[:, late], np.maximum(came, message[at[late]]))
        here += duration[:, at, None]
        ends[:, at] = here
        if cost is not None:
            if joins and waits is not None:
                mine = np.where(waits[:, at, None], np.maximum(mine, here), mine)
            thread[:, live] = mine
    for times in (ends, ready, thread):
        np.maximum(times, NEVER, out=times)
    return Matrices(ends, ready, thread)
