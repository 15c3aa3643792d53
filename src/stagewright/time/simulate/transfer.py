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
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.order import Edges
from stagewright.time.simulate.rules import LAUNCHED, IssueRules

NEVER = -(1 << 60)
"""No dependency: two of these, and any time, are within 64 bits."""
REGISTER, END, CARRIED, MESSAGE = range(4)
"""Roles of ports: a register; the end of a position of the same instance, in another fragment; the
end of a position of another instance (`IssueRules.carried`); the arrival of a message. Outputs are
registers and ends."""


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

    def __len__(self) -> int:
        return self.end - self.begin


class Connections(NamedTuple):
    """Masks of positions that connect units and lanes."""

    is_rendezvous: Bool
    receives: Bool
    """Messages that come from another unit, or another lane."""
    sends: Bool
    read_elsewhere: Bool
    """Ends that other units read."""
    cuts: Bool
    """Positions that begin a fragment."""


class Fragments:
    """Fragments of all units of a table, and what each position waits for."""

    def __init__(
        self, rules: IssueRules, connections: Connections, num_units: int, messages: Edges
    ) -> None:
        """`messages`: receives and their sends within a unit."""
        self.connections = connections
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
            self.by_unit.append(range(len(bounds), len(bounds) + max(len(edges) - 1, 0)))
            for x, y in itertools.pairwise(edges):
                self.fragment_of[x:y] = len(bounds)
                bounds.append((unit, x, y))
        self.deps: list[list[int]] = [[] for _ in rules.rows]
        """By position, earlier positions of the same fragment that it waits for."""
        self.sent: dict[int, int] = {}
        """Receives, and the positions of the same fragment that send to them."""
        self.fragments = self._connect(rules, bounds, messages)
        ends = {port.number for f in self.fragments for port in f.outputs if port.role == END}
        positions = np.array(sorted(ends), dtype=np.int64)
        unit = rules.unit[positions]
        self.end_number = np.full(len(rules.rows), -1)
        """[positions]: number among the ends that the unit leaves for other fragments; -1: none."""
        self.end_number[positions] = np.arange(len(unit)) - np.searchsorted(unit, unit)
        self.num_ends = np.bincount(unit, minlength=num_units)
        """[units]"""

    def _connect(
        self, rules: IssueRules, bounds: Sequence[tuple[int, int, int]], messages: Edges
    ) -> list[Fragment]:
        """Find inputs and outputs of fragments with these units, begins and ends."""
        fragment_of: list[int] = self.fragment_of.tolist()
        launched = Port(REGISTER, rules.register(LAUNCHED))
        inputs: list[dict[Port, int]] = [{launched: 0} for _ in bounds]
        outputs: list[dict[Port, int]] = [{launched: 0} for _ in bounds]

        def column(fragment: int, port: Port) -> int:
            return inputs[fragment].setdefault(port, len(inputs[fragment]))

        def read(position: int, port: Port) -> tuple[int, int]:
            return position, column(fragment_of[position], port)

        def end(position: int) -> Port:
            """An end, made an output of its fragment."""
            port = Port(END, position)
            outputs[fragment_of[position]][port] = position
            return port

        ready = [read(p, Port(REGISTER, number)) for p, number in _rows(*rules.reads)]
        for waiter, dep in _rows(*rules.edges):
            if fragment_of[waiter] == fragment_of[dep]:
                self.deps[waiter].append(dep)
            else:
                ready.append(read(waiter, end(dep)))
        carried: list[int] = rules.carried.waiter.tolist()
        ready += [read(position, Port(CARRIED, i)) for i, position in enumerate(carried)]
        received: list[tuple[int, int]] = []
        for receive, send in _rows(*messages):
            if fragment_of[receive] == fragment_of[send]:
                self.sent[receive] = send
            else:
                received.append(read(receive, end(send)))
        for position in np.flatnonzero(self.connections.receives).tolist():
            received.append(read(position, Port(MESSAGE, position)))
        elsewhere = self.connections.read_elsewhere | self.connections.sends
        for position in np.flatnonzero(elsewhere).tolist():
            end(position)
        for unit, register, position in _rows(*rules.writes):
            last = self.by_unit[unit][-1]
            source = position
            if fragment_of[position] != last or position >= bounds[last][2]:
                source = -1 - column(last, end(position))
            outputs[last][Port(REGISTER, register)] = source
        for unit, register, other in _rows(*rules.moves):
            if self.by_unit[unit]:
                last = self.by_unit[unit][-1]
                outputs[last][Port(REGISTER, register)] = -1 - column(last, Port(REGISTER, other))
        self.ready_inputs = _by_fragment(ready, fragment_of)
        """By fragment: positions, and inputs that they wait for to be ready."""
        self.message_inputs = _by_fragment(received, fragment_of)
        """By fragment: receives, and inputs that are the arrivals of their messages."""
        return [
            Fragment(
                unit, a, b, a < b and bool(self.connections.is_rendezvous[a]),
                tuple(inputs[f]), tuple(outputs[f]), tuple(outputs[f].values()),
            )
            for f, (unit, a, b) in enumerate(bounds)
        ]  # fmt: skip


def _rows(*columns: Int) -> Iterator[tuple[int, ...]]:
    """Rows of columns of equal length."""
    lists: list[list[int]] = [column.tolist() for column in columns]
    return zip(*lists, strict=True)


def _by_fragment(
    reads: Sequence[tuple[int, int]], fragment_of: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Positions and inputs, by the fragment of the position."""
    result: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for position, column in reads:
        result[fragment_of[position]].append((position, column))
    return result


class TransferMatrix(NamedTuple):
    """Matrices of a fragment for several sets of durations, in ticks."""

    outputs: Int
    """[sets, outputs, inputs]"""
    ends: Int
    """[positions, sets, inputs]: the end of each position; of a rendezvous, when it is ready."""
    ready: Int
    """[positions, sets, inputs]: when each is launched and all its deps have ended; without the
    message that a receive waits for."""


def transfer_matrix(
    fragments: Fragments, index: int, duration: Int, launch: Int | None = None,
    waits: Bool | None = None,
) -> TransferMatrix:  # fmt: skip
    """Propagate unit vectors through a fragment: column j starts input j at 0, others at -inf.

    `duration`, `launch` (cost of launches) and `waits` (the host waits for the end) are
    [sets, positions], in ticks. Without `launch`, launches take no time.
    """
    fragment = fragments.fragments[index]
    begin, rows = fragment.begin, slice(fragment.begin, fragment.end)
    sets, width = len(duration), len(fragment.inputs)
    ready = np.full((len(fragment), sets, width), NEVER)
    ends = ready.copy()
    for times, inputs in ((ready, fragments.ready_inputs), (ends, fragments.message_inputs)):
        for position, column in inputs.get(index, ()):
            times[position - begin, :, column] = 0
    host_time = np.full((sets, width), NEVER)
    host_time[:, 0] = 0
    ready_rows, end_rows = [*ready], [*ends]

    def repeated(columns: Int) -> list[Int]:
        """[sets, inputs] of each position, repeated: numpy is slow to broadcast few values."""
        return [*np.repeat(columns[:, rows].T[:, :, None], width, axis=2)]

    ticks, costs = repeated(duration), None if launch is None else repeated(launch)
    waited: Bool = np.zeros((len(fragment), sets), bool) if waits is None else waits[:, rows].T
    is_waited: list[bool] = [*map(bool, np.logical_or.reduce(waited, axis=1))]
    receives = {p for p, _ in fragments.message_inputs.get(index, ())} | fragments.sent.keys()
    for row, deps in enumerate(fragments.deps[rows]):
        start, end = ready_rows[row], end_rows[row]
        for dep in deps:
            np.maximum(start, end_rows[dep - begin], out=start)
        if costs is not None:
            host_time += costs[row]
            np.maximum(start, host_time, out=start)
        if row + begin not in receives:
            np.add(start, ticks[row], out=end)
        else:
            np.maximum(end, start, out=end)
            if row + begin in fragments.sent:
                np.maximum(end, end_rows[fragments.sent[row + begin] - begin], out=end)
            end += ticks[row]
        if is_waited[row]:
            np.maximum(host_time, np.where(waited[row, :, None], end, NEVER), out=host_time)
    outputs = np.full((sets, len(fragment.outputs), width), NEVER)
    outputs[:, 0] = host_time
    for number, source in enumerate(fragment.sources[1:], start=1):
        if source < 0:
            outputs[:, number, -1 - source] = 0
        else:
            outputs[:, number] = end_rows[source - begin]
    return TransferMatrix(outputs, ends, ready)
