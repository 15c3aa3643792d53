"""Expansion: all tasks of a class in issue order, with what each waits for."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Int
from stagewright.time.simulate.order import IssueOrder, IssueRules, Register, ordered
from stagewright.time.simulate.waves import Waves


def expanded(waves: Waves, nth: int) -> IssueOrder:
    """The issue order of all tasks of class `nth`."""
    table, sequence = waves.tables[waves.table_of[nth]], waves.sequence[nth]
    rules = table.rules
    units = len(table.units.actions)
    begin = np.searchsorted(rules.unit, np.arange(units + 1))
    counts = np.diff(begin)[sequence.unit]
    first = np.cumsum(counts) - counts  # place of each instance
    total = int(counts.sum())
    instance = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(total) - np.repeat(first - begin[sequence.unit], counts)
    held = _registers(waves, nth, first - begin[sequence.unit])
    waiters: list[Int] = [np.zeros(0, np.int64)]
    deps: list[Int] = [np.zeros(0, np.int64)]
    for unit in np.unique(sequence.unit).tolist():
        instances = np.flatnonzero(sequence.unit == unit)
        shift = (first - begin[unit])[instances, None]
        mine = rules.unit[rules.edges.waiter] == unit
        waiters.append((rules.edges.waiter[mine] + shift).ravel())
        deps.append((rules.edges.dep[mine] + shift).ravel())
        positions, registers = rules.reads
        mine = rules.unit[positions] == unit
        waiters.append((positions[mine] + shift).ravel())
        deps.append(held[instances][:, registers[mine]].ravel())
        if unit in waves.carried[nth]:
            where, source = waves.carried[nth][unit]
            at = rules.carried.at[rules.unit[rules.carried.at] == unit]
            waiters.append(np.broadcast_to(at + shift, where.shape).ravel())
            deps.append((source + first[where] - begin[sequence.unit[where]]).ravel())
    waiter, dep = np.concatenate(waiters), np.concatenate(deps)
    known = dep >= 0
    rows = waves.expanded_rows(nth, instance, position)
    return ordered(
        rows, rules.stream[position], rules.is_kernel[position], waiter[known], dep[known]
    )


def _registers(waves: Waves, nth: int, shift: Int) -> Int:
    """The place whose end each register holds as an instance begins, [instances, registers]; -1: no
    place. `shift`: by instance, from positions to places."""
    rules, sequence = waves.tables[waves.table_of[nth]].rules, waves.sequence[nth]
    opened = waves.opened(nth)
    writes, moves = _by_unit(rules)
    held = np.full((len(sequence.unit) + 1, len(rules.registers)), -1)
    openings = [
        (r, opened[kind], rules.register((Register.AWAITED, kind, stream)),
         rules.register((Register.FREED, kind, stream)))
        for r, (what, kind, stream) in enumerate(rules.registers) if what == Register.OPENED
    ]  # fmt: skip
    for instance, unit in enumerate(sequence.unit.tolist()):
        begins = held[instance]
        for register, is_open, awaited, freed in openings:
            begins[register] = begins[awaited if is_open[instance] else freed]
        ends = held[instance + 1]
        ends[:] = begins
        if unit in moves:
            to, source = moves[unit]
            ends[to] = begins[source]
        if unit in writes:
            to, position = writes[unit]
            ends[to] = position + shift[instance]
    return held[:-1]


def _by_unit(
    rules: IssueRules,
) -> tuple[dict[int, tuple[Int, Int]], dict[int, tuple[Int, Int]]]:
    """Registers that units write, with positions, and that they move, with sources."""
    found: list[dict[int, tuple[Int, Int]]] = []
    for units, registers, sources in (rules.writes, rules.moves):
        of_unit: dict[int, tuple[Int, Int]] = {}
        for unit in np.unique(units).tolist():
            mine = units == unit
            of_unit[unit] = registers[mine], sources[mine]
        found.append(of_unit)
    return found[0], found[1]
