"""Expansion: all tasks of a class in issue order, with their dependencies."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Int, distinct_values
from stagewright.time.simulate.order import IssueOrder, ordered
from stagewright.time.simulate.waves import Waves


def expand_issue_order(waves: Waves, class_id: int) -> IssueOrder:
    """Issue order of all tasks of a class."""
    table, sequence = waves.tables[waves.table_of[class_id]], waves.sequence[class_id]
    rules, carried = table.rules, table.rules.carried
    begin = np.searchsorted(rules.unit, np.arange(len(table.units.actions) + 1))
    counts = np.diff(begin)[sequence.unit]
    instance = np.repeat(np.arange(len(counts)), counts)
    shift = np.cumsum(counts) - counts - begin[sequence.unit]  # from positions to issue indices
    position = np.arange(len(instance)) - shift[instance]
    holders = _register_holders(waves, class_id, shift)
    none = np.zeros(0, np.int64)
    waiters, deps = [none], [none]
    for unit in distinct_values(sequence.unit):
        instances = np.flatnonzero(sequence.unit == unit)
        unit_shift = shift[instances, None]
        in_unit = rules.unit[rules.edges.waiter] == unit
        waiters.append((rules.edges.waiter[in_unit] + unit_shift).ravel())
        deps.append((rules.edges.dep[in_unit] + unit_shift).ravel())
        positions, registers = rules.reads
        in_unit = rules.unit[positions] == unit
        waiters.append((positions[in_unit] + unit_shift).ravel())
        deps.append(holders[instances][:, registers[in_unit]].ravel())
        if unit in waves.carried[class_id]:
            source_instance, source = waves.carried[class_id][unit]
            in_unit = rules.unit[carried.waiter] == unit
            waiters.append((carried.waiter[in_unit] + unit_shift).ravel())
            deps.append((source + shift[source_instance]).ravel())
    waiter, dep = np.concatenate(waiters), np.concatenate(deps)
    return ordered(
        waves.expanded_rows(class_id, instance, position), rules.stream[position],
        rules.is_kernel[position], waiter[dep >= 0], dep[dep >= 0],
    )  # fmt: skip


def _register_holders(waves: Waves, class_id: int, shift: Int) -> Int:
    """Issue index held by each register at instance begin: [instances, registers]; -1: none.

    `shift` by instance: from positions to issue indices.
    """
    sequence, rules = waves.sequence[class_id], waves.tables[waves.table_of[class_id]].rules
    opened = waves.opened(class_id)
    updates = {
        unit: [
            [c[units == unit] for c in columns] for units, *columns in (rules.moves, rules.writes)
        ]
        for unit in distinct_values(sequence.unit)
    }
    holders = np.full((len(sequence.unit) + 1, len(rules.registers)), -1)
    for instance, unit in enumerate(sequence.unit.tolist()):
        begin, end = holders[instance], holders[instance + 1]
        for register, source in opened.items():
            begin[register] = begin[source[instance]]
        end[:] = begin
        (moved, source), (written, position) = updates[unit]
        end[moved] = begin[source]
        end[written] = position + shift[instance]
    return holders[:-1]
