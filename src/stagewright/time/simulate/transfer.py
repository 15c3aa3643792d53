"""Transfer matrices: the ends that a run of tasks leaves behind, from those that it begins with.

A task ends at the latest of some inputs plus a sum of durations, so that what a run of tasks leaves
is a product in (max, +) algebra: `out[i] = max over j of matrix[i, j] + in[j]`. A matrix holds for
all copies of a unit. Ticks are whole numbers, so that products are exact in any order.

Units are cut into runs at collectives of several lanes (*meetings*), which begin when the last of
their lanes is ready.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_values
from stagewright.time.simulate.order import LAUNCHED, Edges, IssueRules

WIDTHS = (8, 16, 32)
"""Matrices of at most so many inputs and outputs are evaluated together; wider ones apart."""
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
class UnitRun:
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


class Connections(NamedTuple):
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

    def __init__(
        self, rules: IssueRules, connections: Connections, units: int, messages: Edges
    ) -> None:
        """`messages` are receives and their sends within a unit; `units` is how many there are."""
        self.rules, self.connections, self.messages = rules, connections, messages
        size = len(rules.rows)
        begin = np.searchsorted(rules.unit, np.arange(units + 1))
        cuts = connections.cuts | connections.meets
        cuts[1:] |= connections.meets[:-1]
        run_of = np.zeros(size, np.int64)
        self.runs: list[UnitRun] = []
        bounds: list[tuple[int, int, int]] = []
        self.of_unit: list[range] = []
        """By unit: indices into `runs`, consecutive over all units."""
        for u in range(units):
            a, b = int(begin[u]), int(begin[u + 1])
            edges = [a, *(a + 1 + np.flatnonzero(cuts[a + 1 : b])).tolist(), b] if b > a else []
            in_unit = [(u, x, y) for x, y in itertools.pairwise(edges)]
            if in_unit and connections.meets[in_unit[-1][1]]:
                in_unit.append((u, b, b))  # registers are left by a run that is no meeting
            self.of_unit.append(range(len(bounds), len(bounds) + len(in_unit)))
            for number, (_, x, y) in enumerate(in_unit, len(bounds)):
                run_of[x:y] = number
            bounds += in_unit
        self.first = np.cumsum([0, *map(len, self.of_unit)])
        """By unit: its first run; and the number of all runs."""
        self.run_of = run_of
        self._connect(rules, connections, bounds)

    def _connect(
        self, rules: IssueRules, connections: Connections, bounds: Sequence[tuple[int, int, int]]
    ) -> None:
        """Inputs and outputs of all runs."""
        run_of: list[int] = self.run_of.tolist()
        launched = Port(REGISTER, rules.register(LAUNCHED))
        inputs: list[dict[Port, int]] = [{launched: 0} for _ in bounds]
        fill: list[tuple[int, int]] = []

        def reads(position: int, port: Port) -> None:
            columns = inputs[run_of[position]]
            fill.append((position, columns.setdefault(port, len(columns))))

        for position, register in _rows(*rules.reads):
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
        for position in np.flatnonzero(connections.receives).tolist():
            reads(position, Port(MESSAGE, position))

        outputs: list[list[tuple[Port, int]]] = [[(launched, 0)] for _ in bounds]
        for u, register, position in _rows(*rules.writes):
            last = self.of_unit[u][-1]
            if run_of[position] == last and position < bounds[last][2]:
                source = position
            else:
                local.add(position)
                columns = inputs[last]
                port = Port(LOCAL, position)
                source = -1 - columns.setdefault(port, len(columns))
            outputs[last].append((Port(REGISTER, register), source))
        for u, register, other in _rows(*rules.moves):
            if not self.of_unit[u]:
                continue
            columns = inputs[self.of_unit[u][-1]]
            column = columns.setdefault(Port(REGISTER, other), len(columns))
            outputs[self.of_unit[u][-1]].append((Port(REGISTER, register), -1 - column))
        for position in sorted(local):
            outputs[run_of[position]].append((Port(LOCAL, position), position))
        for what, mask in ((VALUE, connections.wanted), (MESSAGE, connections.sends)):
            for position in np.flatnonzero(mask).tolist():
                outputs[run_of[position]].append((Port(what, position), position))
        for number, (u, a, b) in enumerate(bounds):
            ports, sources = zip(*outputs[number], strict=True)
            meets = a < b and bool(connections.meets[a])
            self.runs.append(UnitRun(u, a, b, meets, tuple(inputs[number]), ports, sources))
        position, column = np.array(fill, dtype=np.int64).reshape(-1, 2).T
        self.fill = position[:ready_fill], column[:ready_fill]
        """Positions, and the inputs of their runs that they wait for to be ready."""
        self.arrivals = position[ready_fill:], column[ready_fill:]
        """Positions, and the inputs of their runs that are messages they receive."""

    def _across(self, edges: Edges) -> tuple[list[int], list[int]]:
        """Edges between runs."""
        across = self.run_of[edges.waiter] != self.run_of[edges.dep]
        return edges.waiter[across].tolist(), edges.dep[across].tolist()

    @cached_property
    def groups(self) -> list[RunGroup]:
        """Runs with about as many inputs, whose positions are evaluated side by side."""
        wide = np.array([_width(run) for run in self.runs], dtype=np.int64)
        return [
            RunGroup(self, np.flatnonzero(wide == width), width) for width in distinct_values(wide)
        ]


def _rows(*columns: Int) -> Iterator[tuple[int, ...]]:
    """Rows of columns of equal length."""
    lists: list[list[int]] = [column.tolist() for column in columns]
    return zip(*lists, strict=True)


def _width(run: UnitRun) -> int:
    """The width that the matrices of a run are padded to."""
    widest = max(len(run.inputs), len(run.outputs))
    return next((width for width in WIDTHS if widest <= width), max(WIDTHS) + 1)


class RunGroup:
    """Runs whose matrices have one width, and their positions in the order of evaluation.

    Step k evaluates the k-th position of every run that has one. Positions of a step are next to
    each other, longer runs first, so that runs that are still going on are the first of a step.
    """

    def __init__(self, runs: Runs, numbers: Int, width: int) -> None:
        """`numbers` are indices into `Runs.runs`."""
        begin = np.array([run.begin for run in runs.runs], dtype=np.int64)
        length = np.array([run.end - run.begin for run in runs.runs], dtype=np.int64)
        self.runs = numbers[np.argsort(-length[numbers], kind="stable")]
        """Indices into `Runs.runs`, longest first."""
        indices: list[int] = self.runs.tolist()
        members = [runs.runs[n] for n in indices]
        self.inputs = max(len(run.inputs) for run in members)
        self.outputs = max(len(run.outputs) for run in members)
        self.width = width
        begin, length = begin[self.runs], length[self.runs]
        total = int(length.sum())
        k = np.arange(total) - np.repeat(np.cumsum(length) - length, length)
        position = np.repeat(begin, length) + k
        order = np.argsort(k, kind="stable")
        self.position = position[order]
        """By row of the evaluation, the position."""
        self.steps = np.concatenate([[0], np.cumsum(np.bincount(k))]) if total else np.zeros(1, int)
        size = len(runs.rules.rows)
        row = np.full(size + 1, total)  # the last: no position
        row[self.position] = np.arange(total)
        self.row = row
        """By position, the row; positions of other groups: the number of rows."""
        self.fill = self._of_group(runs.fill)
        self.arrivals = self._of_group(runs.arrivals)
        waiter, dep = runs.rules.edges
        inside = (runs.run_of[waiter] == runs.run_of[dep]) & (row[waiter] < total)
        self.needs, self.further = self._needs(row[waiter[inside]], row[dep[inside]])
        waiter, dep = runs.messages
        inside = (runs.run_of[waiter] == runs.run_of[dep]) & (row[waiter] < total)
        self.sent = dict(zip(row[waiter[inside]].tolist(), row[dep[inside]].tolist(), strict=True))
        """Rows that receive what a row of the same run sends."""
        self.outs = self._outs(members)

    def _of_group(self, fill: tuple[Int, Int]) -> tuple[Int, Int]:
        """Rows and columns of inputs that positions of the group wait for."""
        rows = self.row[fill[0]]
        inside = rows < len(self.position)
        return rows[inside], fill[1][inside]

    def _needs(self, waiter: Int, dep: Int) -> tuple[list[Int], dict[int, list[tuple[int, Int]]]]:
        """The first needs of all rows, as columns; and of steps, rows that have more."""
        total = len(self.position)
        order = np.argsort(waiter, kind="stable")
        waiter, dep = waiter[order], dep[order]
        nth = np.arange(len(waiter)) - np.searchsorted(waiter, waiter)
        columns: list[Int] = []
        for number in range(min(2, int(nth.max(initial=-1)) + 1)):
            column = np.full(total, total)
            column[waiter[nth == number]] = dep[nth == number]
            columns.append(column)
        further: dict[int, list[tuple[int, Int]]] = defaultdict(list)
        for row in distinct_values(waiter[nth > 1]):
            step = int(np.searchsorted(self.steps, row, side="right")) - 1
            further[step].append((row, dep[(waiter == row) & (nth > 1)]))
        return columns, further

    def _outs(self, members: Sequence[UnitRun]) -> Int:
        """By run and output, the row of the extended evaluation that it is; see `Evaluated`."""
        total, width = len(self.position), self.inputs
        outs = np.full((len(members), self.outputs), total)
        for nth, run in enumerate(members):
            rows = [int(self.row[p]) if p >= 0 else total - p for p in run.sources]
            outs[nth, : len(rows)] = rows
            outs[nth, 0] = total + 1 + width + nth
        return outs


class Evaluated(NamedTuple):
    """The runs of a group, evaluated at each input alone, for several timings.

    Rows of `ends` are those of the group; one that never is; the inputs themselves; and of each run
    when the host has launched it, and waited.
    """

    ends: Int
    """[timings, rows, inputs]: the end of each position; of a meeting, when it is ready."""
    ready: Int
    """[timings, rows of the group, inputs]: when each is launched and all it waits for has ended;
    without the message that a receive waits for."""


def evaluate(
    group: RunGroup, duration: Int, cost: Int | None = None, waits: Bool | None = None
) -> Evaluated:
    """Evaluate runs at unit vectors. `duration`, `cost` (of launches) and `waits` (whether the host
    waits for the end) are [timings, positions], in ticks; no `cost`: launches take no time."""
    timings, total, width = len(duration), len(group.position), group.inputs
    ends = np.full((timings, total + 1 + width + len(group.runs), width), NEVER, np.int64)
    ends[:, group.fill[0], group.fill[1]] = 0
    ends[:, total + 1 + np.arange(width), np.arange(width)] = 0
    thread = ends[:, total + 1 + width :]
    thread[:, :, 0] = 0
    ready = np.empty((timings, total, width), np.int64)
    ticks = duration[:, group.position, None]
    launch = None if cost is None else cost[:, group.position, None]
    joins = None if waits is None else waits[:, group.position]
    arrives = np.full((total, width), NEVER, np.int64)
    arrives[group.arrivals] = 0
    late = np.zeros(total, dtype=bool)
    late[group.arrivals[0]] = True
    late[[*group.sent]] = True
    bounds = group.steps.tolist()
    any_late = np.logical_or.reduceat(np.append(late, False), group.steps[:-1]) if total else late
    any_join = np.zeros(len(bounds) - 1, dtype=bool)
    if joins is not None and total:
        joined = np.append(joins.any(axis=0), False)
        any_join = np.logical_or.reduceat(joined, group.steps[:-1])
    slow = {*np.flatnonzero(any_late).tolist(), *group.further}
    for k, (a, b) in enumerate(itertools.pairwise(bounds)):
        here = ends[:, a:b]
        for column in group.needs:
            np.maximum(here, ends[:, column[a:b]], out=here)
        if k in slow:
            for row, needs in group.further.get(k, ()):
                np.maximum(ends[:, row], ends[:, needs].max(axis=1), out=ends[:, row])
        if launch is not None:
            launched = thread[:, : b - a]
            launched += launch[:, a:b]
            np.maximum(here, launched, out=here)
        ready[:, a:b] = here
        if k in slow and any_late[k]:
            np.maximum(here, arrives[a:b], out=here)
            for row in np.flatnonzero(late[a:b]) + a:
                if int(row) in group.sent:
                    came = ends[:, group.sent[int(row)]]
                    np.maximum(ends[:, row], came, out=ends[:, row])
        here += ticks[:, a:b]
        if any_join[k] and launch is not None and joins is not None:
            launched = thread[:, : b - a]
            wait = joins[:, a:b, None]
            np.maximum(launched, np.where(wait, here, NEVER), out=launched)
    np.maximum(ends, NEVER, out=ends)
    np.maximum(ready, NEVER, out=ready)
    return Evaluated(ends, ready)
