"""Transfer matrices of a small unit, against its evaluation task by task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.order import Edges
from stagewright.time.simulate.rules import KERNEL, LAUNCHED, IssueRules, Register
from stagewright.time.simulate.transfer import (
    CARRIED,
    END,
    MESSAGE,
    REGISTER,
    Connections,
    Fragments,
    Port,
    transfer_matrix,
)
from stagewright.time.simulate.units import CarriedDeps

STREAM = (Register.STREAM, 0, 1)
SIZE = 7
EDGES = [(1, 0), (2, 0), (3, 1), (3, 2), (5, 2), (5, 3), (5, 4), (6, 3), (6, 2)]
"""Kernels 0, 1, 3 and 5; transfers 2 and 6 on a stream of their own; 4 receives a message."""
READS = [(0, 1), (2, 2)]
WRITES = [(1, 5), (2, 6)]
NEEDS_OTHERS, WANTED = 1, 3


def fragments_of(rendezvous: tuple[int, ...] = ()) -> Fragments:
    """The unit, cut at rendezvous."""
    none = np.zeros(0, np.int64)
    waiter, dep = np.array(EDGES).T
    registers, positions = np.array(WRITES).T
    rules = IssueRules(
        unit=np.zeros(SIZE, np.int64), member=np.zeros(SIZE, np.int64), rows=np.arange(SIZE),
        stream=np.array([0, 0, 1, 0, -1, 0, 1]), is_kernel=np.isin(np.arange(SIZE), (0, 1, 3, 5)),
        edges=Edges(waiter, dep),
        carried=CarriedDeps(np.array([NEEDS_OTHERS]), *(np.zeros(1, np.int64) for _ in range(3))),
        follows_kernel=np.zeros(SIZE, bool), precedes_kernel=np.zeros(SIZE, bool), awaited=none,
        registers=(LAUNCHED, KERNEL, STREAM),
        reads=(np.array(READS)[:, 0], np.array(READS)[:, 1]),
        writes=(np.zeros_like(registers), registers, positions), moves=(none, none, none),
        position=np.arange(SIZE),
    )  # fmt: skip

    def mask(*at: int) -> Bool:
        return np.isin(np.arange(SIZE), at)

    connections = Connections(mask(*rendezvous), mask(4), mask(), mask(WANTED), mask())
    return Fragments(rules, connections, 1, Edges(none, none))


@dataclass
class Given:
    """Durations, launches and what the unit begins with."""

    duration: Int
    cost: Int
    waits: Bool
    begins: dict[Port, int]

    @classmethod
    def drawn(cls, seed: int) -> Given:
        random = np.random.default_rng(seed)
        duration, cost = random.integers(0, 100, (2, SIZE))
        duration[4] = 0  # a receive takes as long as its message
        ports = [Port(REGISTER, n) for n in range(3)] + [Port(CARRIED, 0), Port(MESSAGE, 4)]
        begins = dict(zip(ports, random.integers(0, 300, 5).tolist(), strict=True))
        return cls(duration, cost, random.random(SIZE) < 0.3, begins)


def direct(given: Given, launches: bool) -> dict[Port, int]:
    """What the unit leaves, task by task."""
    launched = given.begins[Port(REGISTER, 0)]
    end: list[int] = []
    for at in range(SIZE):
        ready = [end[dep] for waiter, dep in EDGES if waiter == at]
        ready += [given.begins[Port(REGISTER, n)] for position, n in READS if position == at]
        ready += [given.begins[Port(CARRIED, 0)]] if at == NEEDS_OTHERS else []
        ready += [given.begins[Port(MESSAGE, 4)]] if at == 4 else []
        if launches:
            launched += int(given.cost[at])
            ready.append(launched)
        end.append(max(ready) + int(given.duration[at]))
        if launches and given.waits[at]:
            launched = max(launched, end[at])
    left = {Port(REGISTER, register): end[position] for register, position in WRITES}
    return left | {Port(REGISTER, 0): launched, Port(END, WANTED): end[WANTED]}


def by_matrices(fragments: Fragments, given: Given, launches: bool) -> dict[Port, int]:
    """Outputs of the unit, by matrices; a rendezvous begins when its one lane is ready."""
    duration = np.where(fragments.connections.is_rendezvous, 0, given.duration)[None]
    cost = given.cost[None] if launches else None
    waits = (given.waits & ~fragments.connections.is_rendezvous)[None] if launches else None
    # One of several sets of durations: the others change nothing.
    both = [None if of is None else np.concatenate([of * 3, of]) for of in (duration, cost)]
    stacked = None if waits is None else np.concatenate([~waits, waits])
    left = dict(given.begins)
    for number in fragments.by_unit[0]:
        fragment = fragments.fragments[number]
        matrix = transfer_matrix(fragments, number, both[0], both[1], stacked).outputs[1]  # pyright: ignore
        begun = np.array([left[port] for port in fragment.inputs])
        outputs = dict(zip(fragment.outputs, (matrix + begun).max(axis=1).tolist(), strict=True))
        if fragment.is_rendezvous:
            (ready,) = {time for port, time in outputs.items() if port != Port(REGISTER, 0)}
            end = ready + int(given.duration[fragment.begin])
            host = outputs[Port(REGISTER, 0)]
            waits_here = launches and bool(given.waits[fragment.begin])
            outputs = dict.fromkeys(outputs, end)
            outputs[Port(REGISTER, 0)] = max(host, end) if waits_here else host
        left |= outputs
    return left


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("rendezvous", [(), (2,), (6,), (2, 6)], ids=str)
def test_a_unit_leaves_what_its_tasks_leave(rendezvous: tuple[int, ...], launches: bool) -> None:
    fragments = fragments_of(rendezvous)
    for seed in range(50):
        given = Given.drawn(seed)
        found = by_matrices(fragments, given, launches)
        for port, time in direct(given, launches).items():
            assert found[port] == time, port


def test_a_rendezvous_is_a_fragment_of_its_own() -> None:
    """The last fragment writes registers; it is empty if the last task is a rendezvous."""
    fragments = fragments_of((2, 6))
    bounds = [(f.begin, f.end, f.is_rendezvous) for f in fragments.fragments]
    assert bounds == [(0, 2, False), (2, 3, True), (3, 6, False), (6, 7, True), (7, 7, False)]
    left = [
        {port.number for port in fragment.outputs if port.role == REGISTER}
        for fragment in fragments.fragments
    ]
    assert left == [{0}, {0}, {0}, {0}, {0, 1, 2}]
    needed = [
        {port.number for port in fragment.inputs if port.role == END}
        for fragment in fragments.fragments
    ]
    assert needed == [set(), {0}, {1, 2}, {2, 3}, {5, 6}]
    assert [fragment.inputs[0] for fragment in fragments.fragments] == [Port(REGISTER, 0)] * 5


def test_a_unit_without_rendezvous_is_one_fragment() -> None:
    (fragment,) = fragments_of().fragments
    assert set(fragment.inputs) == {*Given.drawn(0).begins}
    assert set(fragment.outputs) == {*direct(Given.drawn(0), launches=False)}
