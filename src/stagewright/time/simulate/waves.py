"""Topological levels of all fragments: those of one wave are independent.

Each time read or written has an index in one array (`Executed.times`): registers of a lane, and
ends that an instance of a unit leaves for others. These indices and the waves follow from the
schedule and the dependencies alone; durations play no part (`execute`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_values
from stagewright.errors import UserError
from stagewright.program.columns import COLLECTIVE, Program, numbers_among_copies
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.messages import messages
from stagewright.time.simulate.order import IssueTable, Register
from stagewright.time.simulate.transfer import (
    CARRIED,
    LOCAL,
    MESSAGE,
    REGISTER,
    Connections,
    FragmentGroup,
    Fragments,
    Port,
)
from stagewright.time.simulate.units import UnitSequence
from stagewright.time.simulate.wave_order import Deadlock, Wait, fragment_levels


class Waves:
    """Plan of a step: time indices, and the wave of each fragment.

    Programs of equal structure share one plan; `program` is the first.
    """

    def __init__(self, program: Program, tables: Sequence[IssueTable], lanes: Lanes) -> None:
        """Raises UserError where ranks wait for each other in a circle."""
        self.program, self.tables, self.lanes = program, tables, lanes
        count = len(program.classes)
        self.table_of = [0] * count
        """Table of each class."""
        self.sequence: list[UnitSequence] = [tables[0].sequences[0]] * count
        """Units that each class issues."""
        for t, table in enumerate(tables):
            for class_id, sequence in zip(table.classes, table.sequences, strict=True):
                self.table_of[class_id], self.sequence[class_id] = t, sequence
        self.rendezvous_class = [
            lanes.rendezvous_class(slot, count) for slot in range(len(program.communicators))
        ]
        self.messages = messages(program, tables, lanes)
        self.carried = [self._carried_sources(class_id) for class_id in range(count)]
        """By class and unit: source instances and positions of carried deps, each
        [instances of the unit, deps]."""
        self.tables = [self._without_implied(table) for table in self.tables]
        self.fragments = [self._fragments(t) for t in range(len(tables))]
        """By table."""
        self._assign_time_indices()
        self._number_fragments()
        self._build_batches(self._levels())

    # ---- fragments -------------------------------------------------------------------------------

    def _fragments(self, t: int) -> Fragments:
        """Cut the units of a table into fragments."""
        table = self.tables[t]
        rules = table.rules
        live_out, receives, sends = np.zeros((3, len(rules.rows)), dtype=bool)
        for class_id in table.classes:
            for _, positions in self.carried[class_id].values():
                live_out[positions] = True
        for mask, ends in ((receives, self.messages.received), (sends, self.messages.sent)):
            mask[ends.location[np.isin(ends.location[:, 0], table.classes), 2]] = True
        # Actions of a schedule begin when all their messages are there. Others may receive
        # messages that depend on their own first tasks.
        cuts = receives & (self._is_table(table)[rules.unit] | self._from_same_pipeline_rank(t))
        connections = Connections(self._is_rendezvous(table), receives, sends, live_out, cuts)
        return Fragments(rules, connections, len(table.units.actions), self.messages.within[t])

    def _is_rendezvous(self, table: IssueTable) -> Bool:
        """Mask of positions that are collectives of several lanes."""
        tasks, rows = table.actions.tasks, table.rules.rows
        kind, slot = tasks.kind[rows], tasks.slot[rows].astype(np.int64)
        result = np.zeros(len(rows), dtype=bool)
        lanes = np.concatenate([self.lanes.by_class[class_id] for class_id in table.classes])
        for s in distinct_values(slot[kind == COLLECTIVE]):
            group = self.lanes.groups[s]
            members = np.bincount(group[group >= 0], minlength=1)
            table_groups = group[lanes]
            if (members[table_groups[table_groups >= 0]] > 1).any():
                result |= (kind == COLLECTIVE) & (slot == s)
        return result

    def _is_table(self, table: IssueTable) -> Bool:
        """Mask of units from explicit tables, not from a schedule."""
        result = np.zeros(len(table.units.actions), dtype=bool)
        for class_id, sequence in zip(table.classes, table.sequences, strict=True):
            kind = self.program.classes[class_id].work.order.kind
            result[sequence.unit[kind[sequence.copies[:, 0], 0] < 0]] = True
        return result

    def _from_same_pipeline_rank(self, t: int) -> Bool:
        """Mask of positions that receive from another lane of their pipeline rank.

        Ranks of unequal expert loads are of several classes, and of one ring of attention.
        """
        received = self.messages.received
        result = np.zeros(len(self.tables[t].rules.rows), dtype=bool)
        class_id = received.location[:, 0]
        pipeline_rank = np.array([of.pipeline_rank for of in self.program.classes])
        sender = pipeline_rank[self.lanes.class_of[received.key[:, 1]]]
        in_table = np.isin(class_id, self.tables[t].classes)
        same_rank = sender == pipeline_rank[class_id]
        result[received.location[in_table & same_rank, 2]] = True
        return result

    def _without_implied(self, table: IssueTable) -> IssueTable:
        """Drop carried deps that registers imply at every source."""
        rules = table.rules
        waiter = rules.carried.waiter
        implied = np.ones(len(waiter), dtype=bool)
        for class_id in table.classes:
            for unit, (_, positions) in self.carried[class_id].items():
                deps = np.flatnonzero(rules.unit[waiter] == unit)
                implied[deps] &= rules.implied(waiter[deps], positions).all(axis=0)
        for class_id in table.classes:
            for unit, sources in self.carried[class_id].items():
                retained = ~implied[rules.unit[waiter] == unit]
                self.carried[class_id][unit] = sources[0][:, retained], sources[1][:, retained]
        return replace(table, rules=replace(rules, carried=rules.carried.select(~implied)))

    def _carried_sources(self, class_id: int) -> dict[int, tuple[Int, Int]]:
        """Find source instance and position of each carried dep, by unit of the waiter."""
        table, sequence = self.tables[self.table_of[class_id]], self.sequence[class_id]
        rules, units, carried = table.rules, table.units, table.rules.carried
        order, begin = self.program.classes[class_id].work.order, table.actions.begin
        unit_of = rules.unit[carried.waiter]
        result: dict[int, tuple[Int, Int]] = {}
        for unit in distinct_values(unit_of):
            instances = np.flatnonzero(sequence.unit == unit)
            if not len(instances):
                continue
            in_unit = np.flatnonzero(unit_of == unit)
            sources = np.zeros((2, len(instances), len(in_unit)), np.int64)
            result[unit] = sources[0], sources[1]
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
                instance = sequence.instance[source]
                offset = row - begin[order.action[source]]
                first = units.first[sequence.unit[instance], sequence.member[source]]
                position = units.index[first + offset]
                deferred = position < 0
                last = len(sequence.unit) - 1
                instance[deferred] = last
                member = sequence.deferred_member[source[deferred]]
                first = units.first[sequence.unit[last], member]
                position[deferred] = units.index[first + offset[deferred]]
                sources[0][:, columns] = instance
                sources[1][:, columns] = rules.position[position]
        return result

    # ---- time indices ----------------------------------------------------------------------------

    def _assign_time_indices(self) -> None:
        """Assign time indices to registers, ends within a unit, and ends read by other units."""
        self.live_out_offset: list[Int] = []
        """[positions] by table: offset among ends that the unit leaves for others; -1: not one."""
        self.local_offset: list[Int] = []
        """[positions] by table: offset among ends within units; -1: not one."""
        num_live_out: list[Int] = []
        for fragments, table in zip(self.fragments, self.tables, strict=True):
            unit = table.rules.unit
            live_out_offset, local_offset = np.full((2, len(unit)), -1)
            mask = fragments.connections.live_out | fragments.connections.sends
            live_out = np.flatnonzero(mask)
            num_live_out.append(np.bincount(unit[live_out], minlength=len(table.units.actions)))
            live_out_offset[live_out] = np.arange(len(live_out)) - np.searchsorted(
                unit[live_out], unit[live_out]
            )
            local = sorted(
                {
                    port.number
                    for f in fragments.fragments
                    for port in f.outputs
                    if port.role == LOCAL
                }
            )
            local_offset[local] = np.arange(len(local))
            self.live_out_offset.append(live_out_offset)
            self.local_offset.append(local_offset)
        self.num_lanes = np.array([len(lanes) for lanes in self.lanes.by_class])
        """[classes]"""
        self.base = np.zeros(len(self.sequence) + 1, np.int64)
        """[classes + 1]: first time index of each class. Those of its lanes are interleaved."""
        self.first_live_out: list[Int] = []
        """[instances] by class: offset of the first end that an instance leaves for others."""
        for class_id, sequence in enumerate(self.sequence):
            t = self.table_of[class_id]
            fixed = len(self.tables[t].rules.registers) + int(self.local_offset[t].max(initial=-1))
            counts = num_live_out[t][sequence.unit]
            self.first_live_out.append(fixed + 1 + np.cumsum(counts) - counts)
            size = (fixed + 1 + int(counts.sum())) * self.num_lanes[class_id]
            self.base[class_id + 1] = self.base[class_id] + size
        self.never = int(self.base[-1])
        """Index of a time that never is: pads inputs."""
        self.unused = self.never + 1
        """Write-only index for padding."""

    def _time_index(self, locations: Int, lane: Int) -> Int:
        """Time indices of ends at `MessageEnds.location`, on lanes of the class."""
        offset = np.zeros(len(locations), np.int64)
        class_of = locations[:, 0]
        for class_id in distinct_values(class_of):
            mask = class_of == class_id
            live_out_offset = self.live_out_offset[self.table_of[class_id]]
            offset[mask] = self.first_live_out[class_id][locations[mask, 1]]
            offset[mask] += live_out_offset[locations[mask, 2]]
        return self.base[class_of] + offset * self.num_lanes[class_of] + lane

    # ---- waves -----------------------------------------------------------------------------------

    def _number_fragments(self) -> None:
        """Number the fragments that each class issues, one after another: `fragment_index`."""
        self.first_fragment: list[Int] = []
        """[instances + 1] by class: fragment index of the first of each instance."""
        self.issued: list[Int] = []
        """By class and fragment index: index into `Fragments.fragments`."""
        for class_id, sequence in enumerate(self.sequence):
            fragments = self.fragments[self.table_of[class_id]]
            counts = np.diff(fragments.first)[sequence.unit]
            first = np.concatenate([[0], np.cumsum(counts)])
            offset = np.arange(int(first[-1])) - np.repeat(first[:-1], counts)
            self.first_fragment.append(first)
            self.issued.append(np.repeat(fragments.first[sequence.unit], counts) + offset)

    def _fragment_index(self, locations: Int) -> Int:
        """Fragment index at each of `MessageEnds.location`."""
        result = np.zeros(len(locations), np.int64)
        for class_id in distinct_values(locations[:, 0]):
            mask = locations[:, 0] == class_id
            instance, position = locations[mask, 1], locations[mask, 2]
            fragments = self.fragments[self.table_of[class_id]]
            first = fragments.first[self.sequence[class_id].unit[instance]]
            offset = fragments.fragment_of[position] - first
            result[mask] = self.first_fragment[class_id][instance] + offset
        return result

    def _levels(self) -> list[Int]:
        """Wave of each fragment that a class issues."""
        deps: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in self.sequence]
        ends = self.messages.received.location, self.messages.sent.location
        pairs = np.stack(
            [c for end in ends for c in (end[:, 0], self._fragment_index(end))], axis=1
        )
        distinct: list[list[int]] = np.unique(pairs, axis=0).tolist()
        for receiver, receive, sender, send in distinct:
            deps[receiver][receive].append((sender, send))
        slots: list[list[int]] = []
        for t, issued in zip(self.table_of, self.issued, strict=True):
            slot = [
                self._slot(t, f.begin) if f.is_rendezvous else -1
                for f in self.fragments[t].fragments
            ]
            slots.append(np.array(slot, dtype=np.int64)[issued].tolist())
        try:
            return fragment_levels(slots, deps, self.rendezvous_class)
        except Deadlock as deadlock:
            raise UserError(self._deadlock(deadlock.waits)) from None

    def _slot(self, t: int, position: int) -> int:
        """Communicator of a position."""
        return int(self.tables[t].actions.tasks.slot[self.tables[t].rules.rows[position]])

    def _deadlock(self, waits: Sequence[Wait]) -> str:
        """Message that names each rank of a deadlock and the task it waits for."""
        ranks = [int(rank_class.ranks[0]) for rank_class in self.program.classes]
        clauses: list[str] = []
        for class_id, other, index, is_rendezvous in waits:
            task = self._task(class_id if is_rendezvous else other, index)
            clause = f"in {task} for" if is_rendezvous else f"for {task} from"
            clauses.append(f"waits {clause} rank {ranks[other]}")
        story = ", which ".join(clauses)
        if waits[-1].other not in {wait.class_id for wait in waits}:
            story += ", which has ended"
        first = ranks[waits[0].class_id]
        return f"deadlock: rank {first} {story}; change the order of the schedule"

    def _task(self, class_id: int, fragment_index: int) -> str:
        """Name of the last send of a fragment, or of its first task."""
        fragments = self.fragments[self.table_of[class_id]]
        fragment = fragments.fragments[int(self.issued[class_id][fragment_index])]
        first = self.first_fragment[class_id]
        instance = int(np.searchsorted(first, fragment_index, side="right")) - 1
        sends = np.flatnonzero(fragments.connections.sends[fragment.begin : fragment.end])
        position = fragment.begin
        if len(sends) and not fragment.is_rendezvous:
            position += int(sends[-1])
        row = int(self.expanded_rows(class_id, np.array([instance]), np.array([position]))[0])
        tasks = self.program.classes[class_id].tasks
        name, microbatch = tasks.names[int(tasks.name[row])], int(tasks.microbatch[row])
        return f"{name} of microbatch {microbatch}" if microbatch >= 0 else name

    def expanded_rows(self, class_id: int, instances: Int, positions: Int) -> Int:
        """Rows of a class's expanded tasks; instances and positions are broadcast."""
        table, sequence = self.tables[self.table_of[class_id]], self.sequence[class_id]
        order = self.program.classes[class_id].work.order
        copy = sequence.copies[instances, table.rules.member[positions]]
        offset = table.rules.rows[positions] - table.actions.begin[order.action[copy]]
        return order.begin[copy] + offset

    # ---- batches ---------------------------------------------------------------------------------

    def _build_batches(self, levels: Sequence[Int]) -> None:
        """Collect the fragments of all classes in batches of one group."""
        sent = self.messages.sent
        self.arrivals = self._time_index(sent.location, sent.lane)
        """Time index of each message."""
        parts: dict[tuple[int, int, bool], list[_FragmentRows]] = defaultdict(list)
        group_of = [
            {f: g for g, group in enumerate(fragments.groups) for f in group.indices.tolist()}
            for fragments in self.fragments
        ]
        for class_id, level in enumerate(levels):
            t, sequence = self.table_of[class_id], self.sequence[class_id]
            opened, arrivals = self.opened(class_id), self._arrivals(class_id)
            for unit in distinct_values(sequence.unit):
                instances = np.flatnonzero(sequence.unit == unit)
                for k, f in enumerate(self.fragments[t].by_unit[unit]):
                    waves = level[self.first_fragment[class_id][instances] + k]
                    rows = self._fragment_rows(class_id, f, instances, opened, arrivals, waves)
                    is_rendezvous = self.fragments[t].fragments[f].is_rendezvous
                    parts[t, group_of[t][f], is_rendezvous].append(rows)
        self.count = 1 + max((int(level.max(initial=-1)) for level in levels), default=-1)
        self.batches = [
            FragmentBatch.of(t, g, self.fragments[t].groups[g], is_rendezvous, rows, self)
            for (t, g, is_rendezvous), rows in sorted(parts.items(), key=lambda part: part[0])
        ]

    def _arrivals(self, class_id: int) -> dict[int, Int]:
        """Messages that a class receives, by position: rows of `Messages.received`."""
        received = self.messages.received.location
        rows = np.flatnonzero(received[:, 0] == class_id)
        return {p: rows[received[rows, 2] == p] for p in distinct_values(received[rows, 2])}

    def opened(self, class_id: int) -> dict[int, Int]:
        """Register that replaces each `OPENED` register, by instance: [instances]."""
        sequence, rules = self.sequence[class_id], self.tables[self.table_of[class_id]].rules
        result = dict[int, Int]()
        for limit, open_at_end in rules.limits:
            after = open_at_end[sequence.unit]
            latest = np.maximum.accumulate(np.where(after >= 0, np.arange(len(after)), -1))
            before = np.append(-1, latest[:-1])[: len(after)]
            is_open = (before >= 0) & (after[before] > 0)
            for register, (held, number, stream) in enumerate(rules.registers):
                if held == Register.OPENED and number == limit:
                    result[register] = np.where(
                        is_open,
                        rules.register((Register.AWAITED, limit, stream)),
                        rules.register((Register.FREED, limit, stream)),
                    )
        return result

    def _fragment_rows(
        self, class_id: int, f: int, instances: Int, opened: Mapping[int, Int],
        arrivals: Mapping[int, Int], level: Int,
    ) -> _FragmentRows:  # fmt: skip
        """One fragment of all instances of its unit on all lanes of a class."""
        t = self.table_of[class_id]
        rules, fragment = self.tables[t].rules, self.fragments[t].fragments[f]
        lanes, num_lanes = self.lanes.by_class[class_id], int(self.num_lanes[class_id])
        shape = len(instances), num_lanes

        def time_index(offset: Int) -> Int:
            """Add a lane axis: [instances or 1, ports] to [instances, lanes, ports]."""
            lane = np.arange(num_lanes)[:, None]
            return self.base[class_id] + offset[:, None] * num_lanes + lane

        def fixed(ports: Sequence[Port]) -> tuple[Int, Int, Int]:
            """Roles and numbers of ports, and time indices of registers and local ends."""
            role, number = np.array(ports, dtype=np.int64).T
            is_local = role == LOCAL
            local = len(rules.registers) + self.local_offset[t][is_local * number]
            indices = np.empty((*shape, len(ports)), np.int64)
            indices[:] = time_index(np.where(is_local, local, number)[None])
            return role, number, indices

        role, number, inputs = fixed(fragment.inputs)
        for column in np.flatnonzero(role == REGISTER).tolist():
            if (register := int(number[column])) in opened:
                inputs[:, :, [column]] = time_index(opened[register][instances][:, None])
        columns = np.flatnonzero(role == CARRIED)
        if len(columns):
            first = np.searchsorted(rules.unit[rules.carried.waiter], fragment.unit)
            instance, position = (
                source[:, number[columns] - first]
                for source in self.carried[class_id][fragment.unit]
            )
            offset = self.first_live_out[class_id][instance] + self.live_out_offset[t][position]
            inputs[:, :, columns] = time_index(offset)
        for column in np.flatnonzero(role == MESSAGE).tolist():
            rows = arrivals[int(number[column])]
            received = self.messages.received
            instance_of: Int = received.location[rows, 1]
            row = np.searchsorted(instances, instance_of)
            inputs[row, received.lane[rows], column] = self.arrivals[rows]
        role, number, outputs = fixed(fragment.outputs)
        columns = np.flatnonzero(role >= MESSAGE)
        if len(columns):
            offset = self.first_live_out[class_id][instances][:, None]
            outputs[:, :, columns] = time_index(offset + self.live_out_offset[t][number[columns]])
        rendezvous, group = 0, lanes
        if fragment.is_rendezvous:
            slot = self._slot(t, fragment.begin)
            rendezvous_class = self.rendezvous_class[slot]
            rendezvous = slot * len(rendezvous_class) + int(rendezvous_class[class_id])
            lane_groups = self.lanes.groups[slot][lanes]
            group = np.where(lane_groups < 0, self.lanes.count + lanes, lane_groups)
        size = len(instances) * num_lanes
        columns = (
            np.repeat(level, num_lanes), np.full(size, f), np.tile(lanes, len(instances)),
            np.repeat(instances, num_lanes), np.full(size, rendezvous),
            np.tile(group, len(instances)),
        )  # fmt: skip
        return _FragmentRows(*columns, inputs.reshape(size, -1), outputs.reshape(size, -1))


class _FragmentRows(NamedTuple):
    """Fragments on lanes, a row each."""

    level: Int
    fragment: Int
    lane: Int
    instance: Int
    rendezvous: Int
    """Equal for lanes whose classes have the rendezvous in common."""
    rendezvous_group: Int
    """Equal for lanes of one group of it."""
    inputs: Int
    outputs: Int


@dataclass(frozen=True, slots=True, eq=False)
class FragmentBatch:
    """Fragments of one group, executed in one operation per wave; rows are sorted by wave."""

    table: int
    group: int
    """Index into `Fragments.groups`."""
    is_rendezvous: bool
    begin: Int
    """First position of each fragment."""
    wave: Int
    """[waves + 1]: first row of each wave."""
    fragment: Int
    """Fragment of the group."""
    lane: Int
    instance: Int
    rendezvous: Int
    rendezvous_group: Int
    inputs: Int
    """[rows, inputs]: time indices, padded with `Waves.never`."""
    outputs: Int
    """[rows, outputs]: time indices, padded with `Waves.unused`."""

    @classmethod
    def of(
        cls, table: int, number: int, group: FragmentGroup, is_rendezvous: bool,
        parts: Sequence[_FragmentRows], waves: Waves,
    ) -> FragmentBatch:  # fmt: skip
        """Join fragments of a group, and pad their inputs and outputs."""

        def padded(columns: Sequence[Int], width: int, value: int) -> Int:
            joined = np.full((sum(map(len, columns)), width), value)
            begin = 0
            for rows in columns:
                joined[begin : begin + len(rows), : rows.shape[1]] = rows
                begin += len(rows)
            return joined

        columns = [np.concatenate(c) for c in zip(*(part[:6] for part in parts), strict=True)]
        order = np.argsort(columns[0], kind="stable")
        level, fragment, lane, instance, rendezvous, groups = (c[order] for c in columns)
        by_index = np.argsort(group.indices)
        fragment = by_index[np.searchsorted(group.indices[by_index], fragment)]
        inputs = padded([part.inputs for part in parts], group.num_inputs, waves.never)
        outputs = padded([part.outputs for part in parts], group.num_outputs, waves.unused)
        begins = np.array([f.begin for f in waves.fragments[table].fragments])
        return cls(
            table, number, is_rendezvous, begins[group.indices[fragment]],
            np.searchsorted(level, np.arange(waves.count + 1)), fragment, lane, instance,
            rendezvous, groups, inputs[order], outputs[order],
        )  # fmt: skip
