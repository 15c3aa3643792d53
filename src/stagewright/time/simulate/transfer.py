"""Transfer matrices of fragments: (max, +) maps from input times to output times.

A task ends at the latest of some inputs plus a sum of durations, so that a fragment of tasks is a
product in (max, +) algebra: `out[i] = max over j of matrix[i, j] + in[j]`. A matrix holds for all
copies of a unit. Ticks are integers, so that products are exact in any order.

Units are cut into fragments at every *rendezvous*: a collective of several lanes, which begins when
the last of them is ready.
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
"""Padded matrix widths; wider fragments form one more group."""
NEVER = -(1 << 60)
"""No dependency: two of these, and any time, are within 64 bits."""
REGISTER, LOCAL, CARRIED, MESSAGE, LIVE_OUT = range(5)
"""Roles of ports. Inputs: a register, the end of a position in an earlier fragment of the unit, a
carried dep, a message. Outputs: the same without carried deps, and ends that other units read."""


class Port(NamedTuple):
    """An input or an output of a fragment."""

    role: int
    number: int
    """The register; the position; of a carried dep its index in `IssueRules.carried`."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Consecutive positions of a unit, with their inputs and outputs."""

    unit: int
    begin: int
    end: int
    is_rendezvous: bool
    inputs: tuple[Port, ...]
    """The first is `LAUNCHED`."""
    outputs: tuple[Port, ...]
    """The first is `LAUNCHED`."""
    sources: tuple[int, ...]
    """Position whose end each output is, or -1 - i for input i; ignored for `LAUNCHED`."""


class Connections(NamedTuple):
    """Masks of positions that connect units and lanes."""

    is_rendezvous: Bool
    receives: Bool
    """Messages that come from another unit, or another lane."""
    sends: Bool
    live_out: Bool
    """Ends that other units read."""
    cuts: Bool
    """Positions that begin a fragment."""


class Fragments:
    """Fragments of all units, and the order in which their positions are evaluated."""

    def __init__(
        self, rules: IssueRules, connections: Connections, num_units: int, messages: Edges
    ) -> None:
        """`messages`: receives and their sends within a unit."""
        self.rules, self.connections, self.messages = rules, connections, messages
        is_rendezvous = connections.is_rendezvous
        begin = np.searchsorted(rules.unit, np.arange(num_units + 1)).tolist()
        cuts = connections.cuts | is_rendezvous
        cuts[1:] |= is_rendezvous[:-1]
        self.fragment_of = np.zeros(len(rules.rows), np.int64)
        """[positions]"""
        self.by_unit: list[range] = []
        """Indices into `fragments` by unit, consecutive over all units."""
        bounds: list[tuple[int, int, int]] = []
        for unit, (a, b) in enumerate(itertools.pairwise(begin)):
            edges = [a, *(a + 1 + np.flatnonzero(cuts[a + 1 : b])).tolist(), b] if b > a else []
            if edges and is_rendezvous[edges[-2]]:
                edges.append(b)  # an empty fragment writes registers: no rendezvous does
            first = len(bounds)
            bounds += [(unit, x, y) for x, y in itertools.pairwise(edges)]
            self.by_unit.append(range(first, len(bounds)))
            for index in self.by_unit[unit]:
                self.fragment_of[bounds[index][1] : bounds[index][2]] = index
        self.first = np.cumsum([0, *map(len, self.by_unit)])
        """First fragment of each unit; at the end, the number of fragments."""
        self.fragments = self._connect(bounds)

    def _connect(self, bounds: Sequence[tuple[int, int, int]]) -> list[Fragment]:
        """Find inputs and outputs of fragments with these units, begins and ends."""
        rules, connections = self.rules, self.connections
        fragment_of: list[int] = self.fragment_of.tolist()
        launched = Port(REGISTER, rules.register(LAUNCHED))
        inputs: list[dict[Port, int]] = [{launched: 0} for _ in bounds]
        reads: list[tuple[int, int]] = []

        def column(fragment: int, port: Port) -> int:
            return inputs[fragment].setdefault(port, len(inputs[fragment]))

        def read(position: int, port: Port) -> None:
            reads.append((position, column(fragment_of[position], port)))

        for position, register in _rows(*rules.reads):
            read(position, Port(REGISTER, register))
        local: set[int] = set()
        for waiter, dep in self._across(rules.edges):
            local.add(dep)
            read(waiter, Port(LOCAL, dep))
        for index, position in enumerate(rules.carried.waiter.tolist()):
            read(position, Port(CARRIED, index))
        num_ready = len(reads)
        for waiter, dep in self._across(self.messages):
            local.add(dep)
            read(waiter, Port(LOCAL, dep))
        for position in np.flatnonzero(connections.receives).tolist():
            read(position, Port(MESSAGE, position))

        outputs: list[list[tuple[Port, int]]] = [[(launched, 0)] for _ in bounds]
        for unit, register, position in _rows(*rules.writes):
            last = self.by_unit[unit][-1]
            source = position
            if fragment_of[position] != last or position >= bounds[last][2]:
                local.add(position)
                source = -1 - column(last, Port(LOCAL, position))
            outputs[last].append((Port(REGISTER, register), source))
        for unit, register, other in _rows(*rules.moves):
            if self.by_unit[unit]:
                last = self.by_unit[unit][-1]
                source = -1 - column(last, Port(REGISTER, other))
                outputs[last].append((Port(REGISTER, register), source))
        ends = (LOCAL, sorted(local)), (LIVE_OUT, np.flatnonzero(connections.live_out).tolist())
        for role, positions in (*ends, (MESSAGE, np.flatnonzero(connections.sends).tolist())):
            for position in positions:
                outputs[fragment_of[position]].append((Port(role, position), position))
        position, columns = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        self.ready_inputs = position[:num_ready], columns[:num_ready]
        """Positions, and inputs of their fragments that they wait for to be ready."""
        self.message_inputs = position[num_ready:], columns[num_ready:]
        """Positions, and inputs of their fragments that are messages they receive."""
        fragments: list[Fragment] = []
        for index, (unit, a, b) in enumerate(bounds):
            ports, sources = zip(*outputs[index], strict=True)
            is_rendezvous = a < b and bool(connections.is_rendezvous[a])
            fragments.append(
                Fragment(unit, a, b, is_rendezvous, tuple(inputs[index]), ports, sources)
            )
        return fragments

    def _across(self, edges: Edges) -> Iterator[tuple[int, ...]]:
        """Edges between fragments."""
        across = self.fragment_of[edges.waiter] != self.fragment_of[edges.dep]
        return _rows(edges.waiter[across], edges.dep[across])

    @cached_property
    def groups(self) -> list[FragmentGroup]:
        """Fragments by padded width of their matrices."""
        widest = [max(len(f.inputs), len(f.outputs)) for f in self.fragments]
        width = np.searchsorted(WIDTHS, np.array(widest, dtype=np.int64))
        return [FragmentGroup(self, np.flatnonzero(width == w)) for w in distinct_values(width)]


def _rows(*columns: Int) -> Iterator[tuple[int, ...]]:
    """Rows of columns of equal length."""
    lists: list[list[int]] = [column.tolist() for column in columns]
    return zip(*lists, strict=True)


class FragmentGroup:
    """Fragments whose matrices have one width, and their positions in the order of evaluation.

    Step k evaluates the k-th position of every fragment that has one. Positions of a step are next
    to each other, longest fragments first: fragments that continue are the first rows of a step.
    """

    def __init__(self, fragments: Fragments, indices: Int) -> None:
        """`indices` into `Fragments.fragments`."""
        length = np.array([f.end - f.begin for f in fragments.fragments], dtype=np.int64)
        self.indices = indices[np.argsort(-length[indices], kind="stable")]
        """Indices into `Fragments.fragments`, longest first."""
        order: list[int] = self.indices.tolist()
        members = [fragments.fragments[i] for i in order]
        self.num_inputs = max(len(f.inputs) for f in members)
        self.num_outputs = max(len(f.outputs) for f in members)
        length = length[self.indices]
        total = int(length.sum())
        k = np.arange(total) - np.repeat(np.cumsum(length) - length, length)
        position = np.repeat(np.array([f.begin for f in members]), length) + k
        self.position = position[np.argsort(k, kind="stable")]
        """[rows]: position that each row of the evaluation stands for."""
        self.steps = np.concatenate([[0], np.cumsum(np.bincount(k))]) if total else np.zeros(1, int)
        self.row = np.full(len(fragments.rules.rows) + 1, total)  # the last: no position
        """Row of each position; the number of rows for positions of other groups."""
        self.row[self.position] = np.arange(total)
        self.ready_inputs = self._in_group(fragments.ready_inputs)
        self.message_inputs = self._in_group(fragments.message_inputs)
        self.deps, self.extra_deps = self._deps(*self._inside(fragments, fragments.rules.edges))
        waiter, dep = self._inside(fragments, fragments.messages)
        self.sent = dict(zip(waiter.tolist(), dep.tolist(), strict=True))
        """Rows of receives, and the rows of the same fragment that send to them."""
        self.output_rows = self._output_rows(members)
        """Row in `ends` of each output: [fragments, outputs]."""

    def _in_group(self, reads: tuple[Int, Int]) -> tuple[Int, Int]:
        """Rows of the group and the inputs that they wait for."""
        rows = self.row[reads[0]]
        inside = rows < len(self.position)
        return rows[inside], reads[1][inside]

    def _inside(self, fragments: Fragments, edges: Edges) -> tuple[Int, Int]:
        """Edges within fragments of the group, as rows."""
        inside = fragments.fragment_of[edges.waiter] == fragments.fragment_of[edges.dep]
        inside &= self.row[edges.waiter] < len(self.position)
        return self.row[edges.waiter[inside]], self.row[edges.dep[inside]]

    def _deps(self, waiter: Int, dep: Int) -> tuple[list[Int], dict[int, list[tuple[int, Int]]]]:
        """The first two deps of all rows, as columns; by step, rows that have more."""
        total = len(self.position)
        order = np.argsort(waiter, kind="stable")
        waiter, dep = waiter[order], dep[order]
        column_of = np.arange(len(waiter)) - np.searchsorted(waiter, waiter)
        columns: list[Int] = []
        for number in range(min(2, int(column_of.max(initial=-1)) + 1)):
            column = np.full(total, total)
            column[waiter[column_of == number]] = dep[column_of == number]
            columns.append(column)
        extra: dict[int, list[tuple[int, Int]]] = defaultdict(list)
        for row in distinct_values(waiter[column_of > 1]):
            step = int(np.searchsorted(self.steps, row, side="right")) - 1
            extra[step].append((row, dep[(waiter == row) & (column_of > 1)]))
        return columns, extra

    def _output_rows(self, members: Sequence[Fragment]) -> Int:
        total = len(self.position)
        result = np.full((len(members), self.num_outputs), total)
        for index, fragment in enumerate(members):
            rows = [int(self.row[p]) if p >= 0 else total - p for p in fragment.sources]
            result[index, : len(rows)] = rows
            result[index, 0] = total + 1 + self.num_inputs + index
        return result


class TransferMatrices(NamedTuple):
    """Matrices of the fragments of a group, for several sets of durations.

    Rows of `ends` are those of the group; one that never ends; the inputs; and for each fragment
    the time at which the host has launched it, and waited.
    """

    ends: Int
    """[sets, rows, inputs]: the end of each position; of a rendezvous, when it is ready."""
    ready: Int
    """[sets, rows of the group, inputs]: when each is launched and all its deps have ended; without
    the message that a receive waits for."""


def transfer_matrices(
    group: FragmentGroup, duration: Int, launch: Int | None = None, waits: Bool | None = None
) -> TransferMatrices:
    """Propagate unit vectors through fragments: column j starts input j at 0, others at -inf.

    `duration`, `launch` (cost of launches) and `waits` (the host waits for the end) are
    [sets, positions], in ticks. Without `launch`, launches take no time.
    """
    sets, total, width = len(duration), len(group.position), group.num_inputs
    ends = np.full((sets, total + 1 + width + len(group.indices), width), NEVER, np.int64)
    ends[:, group.ready_inputs[0], group.ready_inputs[1]] = 0
    ends[:, total + 1 + np.arange(width), np.arange(width)] = 0
    host_time = ends[:, total + 1 + width :]
    host_time[:, :, 0] = 0
    ready = np.empty((sets, total, width), np.int64)
    ticks = duration[:, group.position, None]
    cost = None if launch is None else launch[:, group.position, None]
    host_waits = None if waits is None else waits[:, group.position]
    arrival = np.full((total, width), NEVER, np.int64)
    arrival[group.message_inputs] = 0
    receives = np.zeros(total, dtype=bool)
    receives[group.message_inputs[0]] = True
    receives[[*group.sent]] = True
    any_receive = _any_of_step(group, receives)
    any_wait = np.zeros_like(any_receive)
    if cost is not None and host_waits is not None:
        any_wait = _any_of_step(group, np.logical_or.reduce(host_waits, axis=0))
    for k, (a, b) in enumerate(itertools.pairwise(group.steps.tolist())):
        ends_k = ends[:, a:b]
        for column in group.deps:
            np.maximum(ends_k, ends[:, column[a:b]], out=ends_k)
        for row, deps in group.extra_deps.get(k, ()):
            np.maximum(ends[:, row], ends[:, deps].max(axis=1), out=ends[:, row])
        launched = host_time[:, : b - a]
        if cost is not None:
            launched += cost[:, a:b]
            np.maximum(ends_k, launched, out=ends_k)
        ready[:, a:b] = ends_k
        if any_receive[k]:
            np.maximum(ends_k, arrival[a:b], out=ends_k)
            for row in (np.flatnonzero(receives[a:b]) + a).tolist():
                if row in group.sent:
                    np.maximum(ends[:, row], ends[:, group.sent[row]], out=ends[:, row])
        ends_k += ticks[:, a:b]
        if any_wait[k] and host_waits is not None:
            waited = np.where(host_waits[:, a:b, None], ends_k, NEVER)
            np.maximum(launched, waited, out=launched)
    np.maximum(ends, NEVER, out=ends)
    np.maximum(ready, NEVER, out=ready)
    return TransferMatrices(ends, ready)


def _any_of_step(group: FragmentGroup, mask: Bool) -> Bool:
    """Mask of evaluation steps with a row in `mask`."""
    if not len(mask):
        return np.zeros(0, dtype=bool)
    return np.logical_or.reduceat(mask, group.steps[:-1])
