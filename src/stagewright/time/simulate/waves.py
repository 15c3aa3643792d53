"""Waves: the runs of all ranks, so ordered that those of one wave need nothing of each other.

Every time that a run reads or leaves has a *slot*: registers of a lane, and ends that a copy of a
unit leaves for others. Which slots a run reads, and in which wave it is, follows from the schedule
and from what waits for what; durations play no part (`execute`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_values
from stagewright.errors import UserError
from stagewright.program.columns import COLLECTIVE, Program
from stagewright.program.rank_work import numbers_among_copies
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.messages import messages
from stagewright.time.simulate.order import IssueTable, Register
from stagewright.time.simulate.transfer import (
    CARRIED,
    LOCAL,
    MESSAGE,
    REGISTER,
    Connections,
    Port,
    RunGroup,
    Runs,
)
from stagewright.time.simulate.units import UnitSequence


class Waves:
    """The plan of a step: slots, waves, and which class issues which run when."""

    def __init__(self, program: Program, tables: Sequence[IssueTable], lanes: Lanes) -> None:
        """Raises UserError where ranks wait for each other in a circle."""
        self.program, self.tables, self.lanes = program, tables, lanes
        count = len(program.classes)
        self.table_of = [0] * count
        self.sequence: list[UnitSequence] = [tables[0].sequences[0]] * count
        for t, table in enumerate(tables):
            for nth, sequence in zip(table.classes, table.sequences, strict=True):
                self.table_of[nth], self.sequence[nth] = t, sequence
        self.connected = [
            lanes.connected(slot, count) for slot in range(len(program.communicators))
        ]
        self.messages = messages(program, tables, lanes)
        self._cut()
        self._number_slots()
        self._place()

    # ---- runs ------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Cut the units of each table into runs."""
        self.runs: list[Runs] = []
        self.carried: list[dict[int, tuple[Int, Int]]] = [{} for _ in self.program.classes]
        """By class and unit: instances and positions of the sources of carried needs, each
        [instances of the unit, needs]."""
        for nth in range(len(self.program.classes)):
            self._find_carried(nth)
        self.tables = [self._without_implied(table) for table in self.tables]
        for t, table in enumerate(self.tables):
            rules = table.rules
            wanted = np.zeros(len(rules.rows), dtype=bool)
            for nth in table.classes:
                for _, positions in self.carried[nth].values():
                    wanted[positions] = True
            masks: list[Bool] = []
            for ends in (self.messages.received, self.messages.sent):
                mask = np.zeros(len(rules.rows), dtype=bool)
                mask[ends.of[np.isin(ends.of[:, 0], table.classes), 2]] = True
                masks.append(mask)
            receives, sends = masks
            # Actions of a schedule begin when all their messages are there. Others may wait for
            # what depends on their own first tasks.
            cuts = receives & (self._given(table)[rules.unit] | self._from_own_class(t))
            connections = Connections(self._meetings(table), receives, sends, wanted, cuts)
            self.runs.append(
                Runs(rules, connections, len(table.units.actions), self.messages.within[t])
            )

    def _meetings(self, table: IssueTable) -> Bool:
        """By position, whether it is a collective of several lanes."""
        tasks, rows = table.actions.tasks, table.rules.rows
        kind, slot = tasks.kind[rows], tasks.slot[rows].astype(np.int64)
        meets = np.zeros(len(rows), dtype=bool)
        lanes = np.concatenate([self.lanes.by_class[nth] for nth in table.classes])
        for s in distinct_values(slot[kind == COLLECTIVE]):
            group = self.lanes.groups[s]
            members = np.bincount(group[group >= 0], minlength=1)
            lane_groups = group[lanes]
            if (members[lane_groups[lane_groups >= 0]] > 1).any():
                meets |= (kind == COLLECTIVE) & (slot == s)
        return meets

    def _given(self, table: IssueTable) -> Bool:
        """By unit, whether it is no action of a schedule but rows that were given."""
        result = np.zeros(len(table.units.actions), dtype=bool)
        for nth, sequence in zip(table.classes, table.sequences, strict=True):
            kind = self.program.classes[nth].work.order.kind
            given = (kind[:, 0] < 0)[sequence.copies[:, 0]]
            result[sequence.unit[given]] = True
        return result

    def _from_own_class(self, t: int) -> Bool:
        """By position, whether it receives from another lane of its class."""
        received = self.messages.received
        result = np.zeros(len(self.tables[t].rules.rows), dtype=bool)
        of_table = np.isin(received.of[:, 0], self.tables[t].classes)
        same_class = self.lanes.class_of[received.key[:, 1]] == received.of[:, 0]
        result[received.of[of_table & same_class, 2]] = True
        return result

    def _without_implied(self, table: IssueTable) -> IssueTable:
        """The table without carried needs that follow from registers, in all units that have them
        and wherever these find what they need."""
        rules = table.rules
        at = rules.carried.at
        implied = np.ones(len(at), dtype=bool)
        for nth in table.classes:
            for unit, (_, positions) in self.carried[nth].items():
                mine = np.flatnonzero(rules.unit[at] == unit)
                implied[mine] &= rules.implied(at[mine], positions).all(axis=0)
        for nth in table.classes:
            for unit, found in self.carried[nth].items():
                kept = ~implied[rules.unit[at] == unit]
                self.carried[nth][unit] = found[0][:, kept], found[1][:, kept]
        return replace(table, rules=replace(rules, carried=rules.carried.select(~implied)))

    def _find_carried(self, nth: int) -> None:
        """By carried need of a class: its instances, and the instances and positions of sources."""
        table = self.tables[self.table_of[nth]]
        rules, units, sequence = table.rules, table.units, self.sequence[nth]
        order, begin = self.program.classes[nth].work.order, table.actions.begin
        needs = rules.carried
        owner = rules.unit[needs.at]
        first = np.zeros((len(units.actions), 1 + max(map(len, units.actions))), np.int64)
        for (u, m), at in units.first.items():
            first[u, m] = at
        for unit in distinct_values(owner):
            instances = np.flatnonzero(sequence.unit == unit)
            if not len(instances):
                continue
            of_unit = np.flatnonzero(owner == unit)
            sources = np.zeros((2, len(instances), len(of_unit)), np.int64)
            self.carried[nth][unit] = sources[0], sources[1]
            for m, action in enumerate(units.actions[unit]):
                of_member = np.flatnonzero(needs.member[of_unit] == m)
                mine = of_unit[of_member]
                if not len(mine):
                    continue
                copies: Int = sequence.copies[instances, m]
                source = np.repeat(copies[:, None], len(mine), axis=1)
                row = np.repeat(needs.row[mine][None], len(copies), axis=0)
                taken = np.flatnonzero(needs.entry[mine] >= 0)
                if len(taken):
                    number = numbers_among_copies(order, action, copies)
                    other = order.sources(action, needs.entry[mine[taken]])
                    source[:, taken], row[:, taken] = other[0][number], other[1][number]
                where = sequence.instance[source]
                offset = row - begin[order.action[source]]
                found = units.index[first[sequence.unit[where], sequence.member[source]] + offset]
                late = found < 0  # deferred to the last unit
                last = len(sequence.unit) - 1
                where[late] = last
                member = sequence.deferred[source[late]]
                found[late] = units.index[first[sequence.unit[last], member] + offset[late]]
                found = rules.position[found]
                sources[0][:, of_member], sources[1][:, of_member] = where, found

    def _number_slots(self) -> None:
        """Give slots to registers, to ends within a unit, and to what each instance leaves."""
        count = len(self.program.classes)
        self.stored: list[Int] = []
        """By table, by position: its number among what its unit leaves for others; -1: none."""
        self.local: list[Int] = []
        """By table, by position: its number among ends within units; -1: none."""
        per_unit: list[Int] = []
        for runs, table in zip(self.runs, self.tables, strict=True):
            size, units = len(table.rules.rows), len(table.units.actions)
            unit = table.rules.unit
            stored = np.full(size, -1)
            local = np.full(size, -1)
            left = np.flatnonzero(runs.connections.wanted | runs.connections.sends)
            per_unit.append(np.bincount(unit[left], minlength=units))
            stored[left] = np.arange(len(left)) - np.searchsorted(unit[left], unit[left])
            kept = sorted({p.number for run in runs.runs for p in run.outputs if p.what == LOCAL})
            local[kept] = np.arange(len(kept))
            self.stored.append(stored)
            self.local.append(local)
        self.width = np.array([len(lanes) for lanes in self.lanes.by_class])
        self.base = np.zeros(count + 1, np.int64)
        self.first: list[Int] = []
        """By class, by instance: the first slot of what it leaves for others."""
        for nth in range(count):
            t = self.table_of[nth]
            fixed = len(self.tables[t].rules.registers) + int(self.local[t].max(initial=-1)) + 1
            each = per_unit[t][self.sequence[nth].unit]
            self.first.append(fixed + np.cumsum(each) - each)
            slots = fixed + int(each.sum())
            self.base[nth + 1] = self.base[nth] + slots * self.width[nth]
        self.nothing = int(self.base[-1])
        """The slot of a time that never was."""
        self.unused = self.nothing + 1
        """The slot of outputs that pad a matrix."""

    def _flat(self, of: Int, lane: Int) -> Int:
        """Slots of ends that instances leave; `of` are class, instance and position."""
        slot = np.zeros(len(of), np.int64)
        for nth in distinct_values(of[:, 0]):
            chosen = of[:, 0] == nth
            stored = self.stored[self.table_of[nth]]
            slot[chosen] = self.first[nth][of[chosen, 1]] + stored[of[chosen, 2]]
        return self.base[of[:, 0]] + slot * self.width[of[:, 0]] + lane

    # ---- waves -----------------------------------------------------------------------------------

    def _items(self) -> None:
        """Number the runs that each class issues, one after another."""
        self.item_begin: list[Int] = []
        self.item_run: list[Int] = []
        for nth, sequence in enumerate(self.sequence):
            runs = self.runs[self.table_of[nth]]
            counts = np.diff(runs.first)[sequence.unit]
            begin = np.concatenate([[0], np.cumsum(counts)])
            offset = np.arange(int(begin[-1])) - np.repeat(begin[:-1], counts)
            self.item_begin.append(begin)
            self.item_run.append(np.repeat(runs.first[sequence.unit], counts) + offset)

    def _item(self, of: Int) -> Int:
        """The items of class, instance and position."""
        items = np.zeros(len(of), np.int64)
        for nth in distinct_values(of[:, 0]):
            chosen = of[:, 0] == nth
            instance, position = of[chosen, 1], of[chosen, 2]
            runs = self.runs[self.table_of[nth]]
            first = runs.first[self.sequence[nth].unit[instance]]
            items[chosen] = self.item_begin[nth][instance] + runs.run_of[position] - first
        return items

    def _levels(self) -> list[Int]:
        """By class, the wave of each of its items.

        As `schedule.play` with actions of one unit of time each: an item is in the wave after those
        that it needs, and after the one before it on its class.
        """
        count = len(self.program.classes)
        needs: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in range(count)]
        sent, received = self.messages.sent.of, self.messages.received.of
        pairs = np.stack(
            [received[:, 0], self._item(received), sent[:, 0], self._item(sent)], axis=1
        )
        distinct: list[list[int]] = np.unique(pairs, axis=0).tolist()
        for c, item, other, needed in distinct:
            needs[c][item].append((other, needed))
        slots: list[list[int]] = []
        stops: list[list[int]] = []
        for nth in range(count):
            table, runs = self.tables[self.table_of[nth]], self.runs[self.table_of[nth]]
            rows = table.rules.rows
            slot = np.array([
                int(table.actions.tasks.slot[rows[run.begin]]) if run.meets else -1
                for run in runs.runs
            ] or [-1])[self.item_run[nth]]  # fmt: skip
            slots.append(slot.tolist())
            stops.append(sorted({*np.flatnonzero(slot >= 0).tolist(), *needs[nth]}))
        levels = [[-1] * len(run) for run in self.item_run]
        at, now, stopped = [0] * count, [0] * count, [0] * count
        met: dict[tuple[int, int], int] = defaultdict(int)
        came: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        waiting: list[dict[int, list[int]]] = [{} for _ in range(count)]
        stuck: dict[int, tuple[int, int] | tuple[int, int, int]] = {}
        ready = [*range(count)][::-1]

        def advance(c: int, end: int) -> None:
            """Put the items of a class up to `end` into waves, one after another."""
            if end > at[c]:
                levels[c][at[c] : end] = range(now[c], now[c] + end - at[c])
                now[c] += end - at[c]
                at[c] = end
                if waiting[c]:
                    for item in [i for i in waiting[c] if i < end]:
                        ready.extend(waiting[c].pop(item))

        while ready:
            c = ready.pop()
            stuck.pop(c, None)
            while True:
                stop = stops[c][stopped[c]] if stopped[c] < len(stops[c]) else len(levels[c])
                advance(c, stop)
                if stop == len(levels[c]):
                    break
                latest, missing = now[c], None
                for other, item in needs[c].get(stop, ()):
                    level = levels[other][item]
                    if level < 0:
                        missing = other, item
                        break
                    latest = max(latest, level + 1)
                if missing is not None:
                    waiting[missing[0]].setdefault(missing[1], []).append(c)
                    stuck[c] = missing
                    break
                now[c] = latest
                slot = slots[c][stop]
                if slot < 0:
                    stopped[c] += 1
                    advance(c, stop + 1)
                    continue
                home = self.connected[slot]
                key = slot, int(home[c]), met[c, slot]
                here = came[key]
                here.append(c)
                if len(here) < int((home == home[c]).sum()):
                    stuck[c] = key
                    break
                latest = max(now[member] for member in here)
                for member in here:
                    now[member] = latest
                    met[member, slot] += 1
                    stopped[member] += 1
                    stuck.pop(member, None)
                    advance(member, at[member] + 1)
                    if member != c:
                        ready.append(member)
        if any(a < len(of) for a, of in zip(at, levels, strict=True)):
            raise UserError(self._deadlock(at, stuck, came))
        return [np.array(of, dtype=np.int64) for of in levels]

    def _deadlock(
        self, at: Sequence[int], stuck: dict[int, tuple[int, int] | tuple[int, int, int]],
        came: dict[tuple[int, int, int], list[int]],
    ) -> str:  # fmt: skip
        """Which rank waits for which, until the circle closes."""
        chain: list[int] = []
        words: list[str] = []
        nth = min(c for c, of in enumerate(self.item_run) if at[c] < len(of))
        while nth in stuck and nth not in chain:
            chain.append(nth)
            key = stuck[nth]
            if len(key) == 3:
                home = self.connected[key[0]]
                members = np.flatnonzero(home == key[1]).tolist()
                missing = next(c for c in members if c not in came[key])
                task = self._task(nth, at[nth])
                words.append(f"waits in {task} for rank {self._rank(missing)}")
            else:
                missing, item = key
                task = self._task(missing, item)
                words.append(f"waits for {task} from rank {self._rank(missing)}")
            nth = missing
        story = ", which ".join(words)
        if nth not in stuck:
            story += ", which has ended"
        return f"deadlock: rank {self._rank(chain[0])} {story}; change the order of the schedule"

    def begin(self, batch: RunBatch) -> Int:
        """The first position of each run of a batch."""
        runs = self.runs[batch.table]
        begin = np.array([run.begin for run in runs.runs])
        return begin[runs.groups[batch.group].runs[batch.run]]

    def _rank(self, nth: int) -> int:
        """The first rank of a class, for messages."""
        return int(self.program.classes[nth].ranks[0])

    def _task(self, nth: int, item: int) -> str:
        """What an item of a class sends, or where it meets, as people call it."""
        t = self.table_of[nth]
        runs = self.runs[t]
        run = runs.runs[int(self.item_run[nth][item])]
        instance = int(np.searchsorted(self.item_begin[nth], item, side="right")) - 1
        sends = [p for p in range(run.begin, run.end) if runs.connections.sends[p]]
        position = sends[-1] if sends and not run.meets else run.begin
        row = int(self.expanded_rows(nth, np.array([instance]), np.array([position]))[0])
        tasks = self.program.classes[nth].tasks
        name, microbatch = tasks.names[int(tasks.name[row])], int(tasks.microbatch[row])
        return f"{name} of microbatch {microbatch}" if microbatch >= 0 else name

    def expanded_rows(self, nth: int, instances: Int, positions: Int) -> Int:
        """Rows of a class's expanded tasks; instances and positions are broadcast."""
        table, sequence = self.tables[self.table_of[nth]], self.sequence[nth]
        order = self.program.classes[nth].work.order
        copy = sequence.copies[instances, table.rules.member[positions]]
        offset = table.rules.rows[positions] - table.actions.begin[order.action[copy]]
        return order.begin[copy] + offset

    def _place(self) -> None:
        """Put all items into waves, with the slots that they read and write."""
        self._items()
        levels = self._levels()
        self.arrivals = self._flat(self.messages.sent.of, self.messages.sent.lane)
        received = self.messages.received.of
        arrival: dict[tuple[int, int], Int] = {}
        for nth in range(len(self.program.classes)):
            messages_of = np.flatnonzero(received[:, 0] == nth)
            for position in distinct_values(received[messages_of, 2]):
                arrival[nth, position] = messages_of[received[messages_of, 2] == position]
        parts: dict[tuple[int, int, bool], list[_Items]] = defaultdict(list)
        group_of: list[dict[int, int]] = [
            {n: g for g, group in enumerate(runs.groups) for n in group.runs.tolist()}
            for runs in self.runs
        ]
        for nth, level in enumerate(levels):
            t = self.table_of[nth]
            runs, sequence = self.runs[t], self.sequence[nth]
            opened = self.opened(nth)
            for unit in distinct_values(sequence.unit):
                instances = np.flatnonzero(sequence.unit == unit)
                for k, number in enumerate(runs.of_unit[unit]):
                    run = runs.runs[number]
                    items = self.item_begin[nth][instances] + k
                    placed = self._slots_of(nth, number, instances, level[items], opened, arrival)
                    parts[t, group_of[t][number], run.meets].append(placed)
        last = 1 + max((int(level.max(initial=-1)) for level in levels), default=-1)
        self.batches = [
            RunBatch.of(t, group, self.runs[t].groups[group], meets, items, last, self)
            for (t, group, meets), items in sorted(parts.items(), key=lambda part: part[0])
        ]
        self.count = last

    def opened(self, nth: int) -> dict[int, Bool]:
        """By kind of transfer, by instance: whether a group of transfers is open as it begins."""
        sequence, found = self.sequence[nth], dict[int, Bool]()
        for limits in self.tables[self.table_of[nth]].rules.limits:
            after = limits.open_at_end[sequence.unit]
            at = np.maximum.accumulate(np.where(after >= 0, np.arange(len(after)), -1))
            before = np.concatenate([[-1], at[:-1]]) if len(at) else at
            found[limits.kind] = (before >= 0) & (after[before] > 0)
        return found

    def _slots_of(
        self, nth: int, number: int, instances: Int, level: Int, opened: dict[int, Bool],
        arrival: dict[tuple[int, int], Int],
    ) -> _Items:  # fmt: skip
        """One run of all instances of its unit on all lanes of a class."""
        t = self.table_of[nth]
        rules, run = self.tables[t].rules, self.runs[t].runs[number]
        lanes, width = self.lanes.by_class[nth], int(self.width[nth])
        registers = len(rules.registers)
        shape = len(instances), width
        each = np.arange(width)

        def flat(slot: Int) -> Int:
            return self.base[nth] + slot[:, None] * width + each

        def register(which: int) -> Int:
            _, kind, stream = rules.registers[which]
            awaited = rules.register((Register.AWAITED, kind, stream))
            freed = rules.register((Register.FREED, kind, stream))
            return flat(np.where(opened[kind][instances], awaited, freed))

        def of_lane(ports: Sequence[Port]) -> tuple[Int, Int, Int]:
            """Kinds and numbers of ports, and slots: of registers and ends within the unit."""
            what, number_of = np.array(ports, dtype=np.int64).T
            within = what == LOCAL
            fixed = np.where(within, registers + self.local[t][within * number_of], number_of)
            slots = np.empty((*shape, len(ports)), np.int64)
            slots[:] = self.base[nth] + fixed * width + each[:, None]
            return what, number_of, slots

        what, number_of, ins = of_lane(run.inputs)
        for column in np.flatnonzero(what == REGISTER).tolist():
            if rules.registers[int(number_of[column])][0] == Register.OPENED:
                ins[:, :, column] = register(int(number_of[column]))
        columns = np.flatnonzero(what == CARRIED)
        if len(columns):
            first = np.searchsorted(rules.unit[rules.carried.at], run.unit)
            where, position = (
                of[:, number_of[columns] - first] for of in self.carried[nth][run.unit]
            )
            slot = self.first[nth][where] + self.stored[t][position]
            ins[:, :, columns] = self.base[nth] + slot[:, None] * width + each[:, None]
        for column in np.flatnonzero(what == MESSAGE).tolist():
            rows = arrival[nth, int(number_of[column])]
            received = self.messages.received
            instance: Int = received.of[rows, 1]
            at = np.searchsorted(instances, instance)
            ins[at, received.lane[rows], column] = self.arrivals[rows]
        what, number_of, outs = of_lane(run.outputs)
        columns = np.flatnonzero(what >= MESSAGE)
        if len(columns):
            slot = self.first[nth][instances][:, None] + self.stored[t][number_of[columns]]
            outs[:, :, columns] = self.base[nth] + slot[:, None] * width + each[:, None]
        meeting, group = 0, lanes
        if run.meets:
            slot = int(self.tables[t].actions.tasks.slot[rules.rows[run.begin]])
            meeting = slot * len(self.connected[slot]) + int(self.connected[slot][nth])
            of = self.lanes.groups[slot][lanes]
            group = np.where(of < 0, self.lanes.count + lanes, of)
        columns = (
            np.repeat(level, width), np.full(len(instances) * width, number),
            np.tile(lanes, len(instances)), np.repeat(instances, width),
            np.full(len(instances) * width, meeting), np.tile(group, len(instances)),
        )  # fmt: skip
        return _Items(*columns, ins.reshape(-1, ins.shape[2]), outs.reshape(-1, outs.shape[2]))


class _Items(NamedTuple):
    """Runs on lanes, a row each."""

    level: Int
    run: Int
    lane: Int
    instance: Int
    meeting: Int
    """Equal for lanes whose classes meet."""
    group: Int
    """Equal for lanes that meet in one group."""
    ins: Int
    outs: Int


@dataclass(frozen=True, slots=True, eq=False)
class RunBatch:
    """Runs of one table that are executed together in each wave; rows are sorted by wave."""

    table: int
    group: int
    """Of `Runs.groups`."""
    meets: bool
    wave: Int
    """[waves + 1]: where the rows of each begin."""
    run: Int
    """Which run of the group each row is."""
    lane: Int
    instance: Int
    meeting: Int
    together: Int
    """Equal for lanes that meet in one group."""
    ins: Int
    """[rows, inputs]: slots, padded with that of no time."""
    outs: Int
    """[rows, outputs]: slots, padded with the unused one."""

    @classmethod
    def of(
        cls, table: int, number: int, group: RunGroup, meets: bool, items: Sequence[_Items],
        count: int, waves: Waves,
    ) -> RunBatch:  # fmt: skip
        """Join runs of a group, whose inputs and outputs are padded."""

        def padded(columns: Sequence[Int], width: int, value: int) -> Int:
            joined = np.full((sum(map(len, columns)), width), value)
            at = 0
            for rows in columns:
                joined[at : at + len(rows), : rows.shape[1]] = rows
                at += len(rows)
            return joined

        level, run, lane, instance, meeting, together = (
            np.concatenate(column) for column in zip(*(part[:6] for part in items), strict=True)
        )
        order = np.argsort(level, kind="stable")
        ins = padded([part.ins for part in items], group.inputs, waves.nothing)[order]
        outs = padded([part.outs for part in items], group.outputs, waves.unused)[order]
        wave = np.searchsorted(level[order], np.arange(count + 1))
        place = np.argsort(group.runs)
        run = place[np.searchsorted(group.runs[place], run)]
        columns = run[order], lane[order], instance[order], meeting[order], together[order]
        return cls(table, number, meets, wave, *columns, ins, outs)
