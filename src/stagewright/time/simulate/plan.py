"""Plan of a step: fragments that each class issues, and where their input and output times are.

All times that fragments read and write are in one array: the registers of each lane, and the ends
that each instance of a unit leaves for other fragments. Indices into it follow from schedule,
dependencies and lanes; durations play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_values
from stagewright.program.columns import COLLECTIVE, ActionOrder, Program, numbers_among_copies
from stagewright.time.simulate.lanes import LaneMap
from stagewright.time.simulate.messages import MessageEnds, Messages, messages
from stagewright.time.simulate.rules import IssueTable
from stagewright.time.simulate.transfer import (
    CARRIED,
    END,
    MESSAGE,
    Connections,
    Fragment,
    Fragments,
    Port,
)
from stagewright.time.simulate.units import UnitSequence


class CarriedSources(NamedTuple):
    """Ends that the carried deps of a unit refer to: [instances of the unit, deps]."""

    instance: Int
    position: Int


@dataclass(frozen=True, slots=True, eq=False)
class RendezvousMembers:
    """Classes whose collectives of a communicator are between the same lanes."""

    classes: tuple[int, ...]
    group: Int
    """Number of the group of each lane, of one class after another."""
    num_groups: int


@dataclass(frozen=True, slots=True, eq=False)
class FragmentCopies:
    """A fragment in all instances of its unit, on all lanes of a class."""

    fragment: Fragment
    instances: Int
    """[copies]"""
    inputs: Int
    """[copies, lanes, inputs]: time indices."""
    outputs: Int
    """[copies, lanes, outputs]"""
    receives: bool
    """True if an input is the arrival of a message from another unit or lane."""
    sends: Int
    """Outputs that are arrivals of messages at other units or lanes."""
    rendezvous: RendezvousMembers | None


class ClassPlan:
    """Units that a rank class issues, and the fragments of these."""

    def __init__(
        self, table_number: int, table: IssueTable, fragments: Fragments, sequence: UnitSequence,
        order: ActionOrder, carried: dict[int, CarriedSources], num_lanes: int, first_time: int,
    ) -> None:  # fmt: skip
        """`first_time`: first time index of the class."""
        self.table_number, self.table, self.fragments = table_number, table, fragments
        self.sequence = sequence
        self.order, self.num_lanes, self.first_time = order, num_lanes, first_time
        self.instances = {
            unit: np.flatnonzero(sequence.unit == unit) for unit in distinct_values(sequence.unit)
        }
        """Instances of each unit."""
        self.carried = carried
        """By unit."""
        counts = fragments.num_ends[sequence.unit]
        num_registers = len(table.rules.registers)
        self.first_end = num_registers + np.cumsum(counts) - counts
        """[instances]: offset of the first end that an instance leaves for other fragments."""
        self.num_times = (num_registers + int(counts.sum())) * num_lanes
        self.copies: dict[int, FragmentCopies] = {}
        """By index into `Fragments.fragments`."""

    def time_index(self, offset: Int, lane: Int) -> Int:
        """Indices of registers and ends of a lane of the class; lanes are interleaved."""
        return self.first_time + offset * self.num_lanes + lane

    def end_offset(self, instance: Int, position: Int) -> Int:
        """Offsets of ends that other fragments read."""
        return self.first_end[instance] + self.fragments.end_number[position]

    def expanded_rows(self, instances: Int, positions: Int) -> Int:
        """Rows of the class's expanded tasks; instances and positions are broadcast."""
        rules, order = self.table.rules, self.order
        copy = self.sequence.copies[instances, rules.member[positions]]
        offset = rules.rows[positions] - self.table.actions.begin[order.action[copy]]
        return order.begin[copy] + offset

    def add_copies(
        self, received: MessageEnds, arrivals: Int, rendezvous: Sequence[RendezvousMembers]
    ) -> None:
        """Find the inputs and outputs of all fragments.

        `received`: the messages of the class; `arrivals`: their time indices; `rendezvous`: those
        of the class, by communicator.
        """
        slots: list[int] = self.table.actions.tasks.slot[self.table.rules.rows].tolist()
        lane = np.arange(self.num_lanes)[:, None]
        by_position = {
            position: np.flatnonzero(received.location[:, 2] == position)
            for position in distinct_values(received.location[:, 2])
        }
        for unit, instances in self.instances.items():
            for f in self.fragments.by_unit[unit]:
                fragment = self.fragments.fragments[f]
                role, number, offset = self._offsets(fragment.inputs, unit, instances)
                inputs = self.time_index(offset[:, None], lane)
                arriving: list[int] = np.flatnonzero(role == MESSAGE).tolist()
                for column in arriving:
                    rows = by_position[int(number[column])]
                    instance_of: Int = received.location[rows, 1]
                    copy = np.searchsorted(instances, instance_of)
                    inputs[copy, received.lane[rows], column] = arrivals[rows]
                role, number, offset = self._offsets(fragment.outputs, unit, instances)
                outputs = self.time_index(offset[:, None], lane)
                is_sent = self.fragments.connections.sends[np.where(role == END, number, 0)]
                sends = np.flatnonzero(is_sent & (role == END))
                self.copies[f] = FragmentCopies(
                    fragment, instances, inputs, outputs, bool(arriving), sends,
                    rendezvous[slots[fragment.begin]] if fragment.is_rendezvous else None,
                )  # fmt: skip

    def _offsets(self, ports: Sequence[Port], unit: int, instances: Int) -> tuple[Int, Int, Int]:
        """Roles and numbers of ports, and offsets of their times: [instances, ports]."""
        role, number = np.array(ports, dtype=np.int64).T
        offset = np.empty((len(instances), len(ports)), np.int64)
        offset[:] = number
        columns = np.flatnonzero(role == END)
        if len(columns):
            offset[:, columns] = self.end_offset(instances[:, None], number[columns])
        columns = np.flatnonzero(role == CARRIED)
        if len(columns):
            rules = self.table.rules
            first = np.searchsorted(rules.unit[rules.carried.waiter], unit)
            sources = self.carried[unit]
            columns_of = number[columns] - first
            offset[:, columns] = self.end_offset(
                sources.instance[:, columns_of], sources.position[:, columns_of]
            )
        return role, number, offset


class StepPlan:
    """Plans of all classes, their messages and rendezvous."""

    def __init__(self, program: Program, tables: Sequence[IssueTable], lanes: LaneMap) -> None:
        """Raises ValueError where messages do not match."""
        self.lanes = lanes
        self.messages: Messages = messages(program, tables, lanes)
        by_class: dict[int, ClassPlan] = {}
        self.num_times = 0
        self.tables: list[IssueTable] = []
        self.fragments: list[Fragments] = []
        """By table."""
        for t, table in enumerate(tables):
            orders = [program.classes[class_id].work.order for class_id in table.classes]
            pairs = zip(table.sequences, orders, strict=True)
            table, carried = _without_implied(table, [_carried_sources(table, *p) for p in pairs])
            connections = self._connections(program, table, carried)
            fragments = Fragments(
                table.rules, connections, len(table.units.actions), self.messages.within[t]
            )
            self.tables.append(table)
            self.fragments.append(fragments)
            for number, class_id in enumerate(table.classes):
                by_class[class_id] = plan = ClassPlan(
                    t, table, fragments, table.sequences[number], orders[number], carried[number],
                    len(lanes.by_class[class_id]), self.num_times,
                )  # fmt: skip
                self.num_times += plan.num_times
        self.classes = [by_class[class_id] for class_id in sorted(by_class)]
        sent, received = self.messages.sent, self.messages.received
        self.arrivals = np.zeros(len(sent.lane), np.int64)
        """Time index of each message."""
        for class_id, plan in enumerate(self.classes):
            mine = sent.location[:, 0] == class_id
            _, instance, position = sent.location[mine].T
            self.arrivals[mine] = plan.time_index(
                plan.end_offset(instance, position), sent.lane[mine]
            )
        rendezvous = [_rendezvous(lanes, slot) for slot in range(len(program.communicators))]
        for class_id, plan in enumerate(self.classes):
            mine = received.location[:, 0] == class_id
            of_class = [by_class[class_id] for by_class in rendezvous]
            plan.add_copies(received.select(mine), self.arrivals[mine], of_class)

    def _connections(
        self, program: Program, table: IssueTable, carried: Sequence[dict[int, CarriedSources]]
    ) -> Connections:
        """Positions of a table that connect units and lanes."""
        received, sent = self.messages.received, self.messages.sent
        size = len(table.rules.rows)
        receives, sends, read_elsewhere, same_rank = np.zeros((4, size), dtype=bool)
        for sources in carried:
            for _, positions in sources.values():
                read_elsewhere[positions] = True
        for mask, ends in ((receives, received), (sends, sent)):
            mask[ends.location[np.isin(ends.location[:, 0], table.classes), 2]] = True
        # Ranks of unequal expert loads are of several classes, and of one ring of attention.
        pipeline_rank = np.array([of.pipeline_rank for of in program.classes])
        sender = pipeline_rank[self.lanes.class_of[received.key[:, 1]]]
        within = np.isin(received.location[:, 0], table.classes)
        within &= sender == pipeline_rank[received.location[:, 0]]
        same_rank[received.location[within, 2]] = True
        explicit = np.zeros(len(table.units.actions), dtype=bool)
        for class_id, sequence in zip(table.classes, table.sequences, strict=True):
            kind = program.classes[class_id].work.order.kind
            explicit[sequence.unit[kind[sequence.copies[:, 0], 0] < 0]] = True
        # Actions of a schedule begin when all their messages are there. Others may receive
        # messages that depend on their own first tasks.
        cuts = receives & (explicit[table.rules.unit] | same_rank)
        return Connections(self._is_rendezvous(table), receives, sends, read_elsewhere, cuts)

    def _is_rendezvous(self, table: IssueTable) -> Bool:
        """Mask of positions that are collectives of several lanes."""
        tasks, rows = table.actions.tasks, table.rules.rows
        is_collective = tasks.kind[rows] == COLLECTIVE
        slot = tasks.slot[rows].astype(np.int64)
        result = np.zeros(len(rows), dtype=bool)
        lanes = np.concatenate([self.lanes.by_class[class_id] for class_id in table.classes])
        for s in distinct_values(slot[is_collective]):
            group = self.lanes.groups[s]
            members = np.bincount(group[group >= 0], minlength=1)
            table_groups = group[lanes]
            if (members[table_groups[table_groups >= 0]] > 1).any():
                result |= is_collective & (slot == s)
        return result


def _rendezvous(lanes: LaneMap, slot: int) -> dict[int, RendezvousMembers]:
    """Rendezvous of a communicator, by class."""
    result: dict[int, RendezvousMembers] = {}
    for classes in lanes.connected_classes(slot):
        class_lanes = np.concatenate([lanes.by_class[class_id] for class_id in classes])
        group = lanes.groups[slot][class_lanes]
        group = np.where(group < 0, lanes.count + class_lanes, group)
        numbers, group = np.unique(group, return_inverse=True)
        result |= dict.fromkeys(classes, RendezvousMembers(classes, group, len(numbers)))
    return result


def _carried_sources(
    table: IssueTable, sequence: UnitSequence, order: ActionOrder
) -> dict[int, CarriedSources]:
    """Find source instance and position of each carried dep of a class, by unit of the waiter."""
    rules, units, carried = table.rules, table.units, table.rules.carried
    begin, unit_of = table.actions.begin, table.rules.unit[table.rules.carried.waiter]
    result: dict[int, CarriedSources] = {}
    for unit in distinct_values(unit_of):
        instances = np.flatnonzero(sequence.unit == unit)
        if not len(instances):
            continue
        in_unit = np.flatnonzero(unit_of == unit)
        sources = CarriedSources(*np.zeros((2, len(instances), len(in_unit)), np.int64))
        result[unit] = sources
        for m, action in enumerate(units.actions[unit]):
            columns = np.flatnonzero(carried.member[in_unit] == m)
            deps = in_unit[columns]
            if not len(deps):
                continue
            copies: Int = sequence.copies[instances, m]
            source = np.repeat(copies[:, None], len(deps), axis=1)
            row = np.repeat(carried.row[deps][None], len(copies), axis=0)
            looked_up = np.flatnonzero(carried.entry[deps] >= 0)
            if len(looked_up):
                number = numbers_among_copies(order, action, copies)
                copy, copy_row = order.sources(action, carried.entry[deps[looked_up]])
                source[:, looked_up], row[:, looked_up] = copy[number], copy_row[number]
            instance, unit_row = units.locate(sequence, source, row - begin[order.action[source]])
            sources.instance[:, columns] = instance
            sources.position[:, columns] = rules.position[unit_row]
    return result


def _without_implied(
    table: IssueTable, carried: Sequence[dict[int, CarriedSources]]
) -> tuple[IssueTable, list[dict[int, CarriedSources]]]:
    """Drop carried deps that registers imply at every source; `carried` is by class."""
    rules = table.rules
    waiter = rules.carried.waiter
    unit = rules.unit[waiter]
    implied = np.ones(len(waiter), dtype=bool)
    for u in distinct_values(unit):
        positions = [sources[u].position for sources in carried if u in sources]
        if positions:
            deps = np.flatnonzero(unit == u)
            distinct = np.unique(np.concatenate(positions), axis=0)
            implied[deps] = rules.implied(waiter[deps], distinct).all(axis=0)
    retained = [
        {
            u: CarriedSources(*(column[:, ~implied[unit == u]] for column in sources[u]))
            for u in sources
        }
        for sources in carried
    ]
    return replace(table, rules=replace(rules, carried=rules.carried.select(~implied))), retained
