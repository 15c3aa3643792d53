"""Execution of a plan: all classes issue their fragments in order, each when its inputs are there.

A fragment multiplies its input times by its transfer matrix, on all lanes of its class at once. A
class stops at a message that has not been sent, and at a rendezvous until all classes have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.program.columns import Program
from stagewright.time.simulate.plan import ClassPlan, FragmentCopies, RendezvousMembers, StepPlan
from stagewright.time.simulate.transfer import NEVER, TransferMatrix

Progress = Callable[[int, int], None]
"""Called with the number of finished tasks and the number of all tasks, of all classes."""

_NOT_SENT = np.iinfo(np.int64).min
"""Arrival of a message that has not been sent."""


class TaskTicks(NamedTuple):
    """Durations and launches of the positions of a table, in ticks: [sets, positions]."""

    duration: Int
    """Of a receive that of its message."""
    launch: Int | None
    """Cost of the launch of each; None: launches take no time."""
    waits: Bool | None
    """The host waits for the end of each."""
    set_of_lane: Int
    """Duration set of each lane of the program; any number for lanes of other tables."""


@dataclass(frozen=True, slots=True, eq=False)
class ExecutedFragment:
    """Times of a fragment in all instances of its unit, on the lanes of a class."""

    copies: FragmentCopies
    transfer: TransferMatrix
    durations: Int
    """[sets, positions]"""
    sets: Int
    """Duration set of each lane."""
    matrix: Int
    """[lanes, outputs, inputs]"""
    inputs: Int
    """[copies, lanes, inputs]"""
    rendezvous: Int
    """[copies, lanes, 3]: when a rendezvous is ready, begins and ends; else without entries."""
    longest: int
    """Longest duration of a rendezvous among the lanes."""
    waits: Bool | None
    """Lanes whose host waits for the end of a rendezvous; None: no host does."""

    @classmethod
    def of(
        cls, copies: FragmentCopies, transfer: TransferMatrix, ticks: TaskTicks, lanes: Int
    ) -> ExecutedFragment:
        """Empty times of a fragment."""
        sets, begin, end = ticks.set_of_lane[lanes], copies.fragment.begin, copies.fragment.end
        longest, waits = 0, None
        if copies.rendezvous is not None:
            longest = int(ticks.duration[sets, begin].max())
            if ticks.waits is not None and ticks.waits[sets, begin].any():
                waits = ticks.waits[sets, begin]
        num_times = 0 if copies.rendezvous is None else 3
        return cls(
            copies, transfer, ticks.duration[:, begin:end], sets, transfer.outputs[sets],
            np.empty_like(copies.inputs), np.empty((*copies.inputs.shape[:2], num_times), np.int64),
            longest, waits,
        )  # fmt: skip


class FragmentTimes(NamedTuple):
    """Times of a fragment on one lane: ticks, [instances, positions]."""

    executed: ExecutedFragment
    lane: int
    """Lane within its class."""

    @property
    def instances(self) -> Int:
        """Instances of the unit."""
        return self.executed.copies.instances

    @property
    def positions(self) -> Int:
        """Positions of the fragment."""
        return np.arange(self.executed.copies.fragment.begin, self.executed.copies.fragment.end)

    def ready(self, selected: Int) -> Int:
        """Ready times of selected positions, given as indices."""
        if self.executed.copies.rendezvous is not None:
            return self.executed.rendezvous[:, self.lane, :1]
        return self._propagate(self.executed.transfer.ready[selected, self._set])

    def end(self, selected: Int) -> Int:
        """Ends of selected positions, given as indices."""
        if self.executed.copies.rendezvous is not None:
            return self.executed.rendezvous[:, self.lane, 2:]
        return self._propagate(self.executed.transfer.ends[selected, self._set])

    def elapsed(self) -> Int:
        """Durations of all positions; of a receive that of its message."""
        if self.executed.copies.rendezvous is not None:
            times = self.executed.rendezvous[:, self.lane]
            return times[:, 2:] - times[:, 1:2]
        durations = self.executed.durations[self._set]
        return np.broadcast_to(durations, (len(self.instances), len(durations)))

    @property
    def _set(self) -> int:
        return int(self.executed.sets[self.lane])

    def _propagate(self, matrix: Int) -> Int:
        """Multiply the inputs by rows of a transfer matrix."""
        inputs = self.executed.inputs[:, self.lane]
        always = np.flatnonzero((matrix > NEVER).all(axis=0))
        first = int(always[np.argmax(inputs[:, always].sum(axis=0))]) if len(always) else 0
        latest = inputs[:, first, None] + matrix[:, first]
        # Skip inputs that cannot exceed the first.
        lead = (inputs - inputs[:, first, None]).max(axis=0)
        lead += (matrix - matrix[:, first, None]).max(axis=0, initial=NEVER)
        for column in np.flatnonzero((lead > 0) & (matrix > NEVER).any(axis=0)).tolist():
            np.maximum(latest, inputs[:, column, None] + matrix[:, column], out=latest)
        return latest


class Executed(NamedTuple):
    """Times of a step, in ticks."""

    ends: Int
    """End of each lane."""
    fragments: list[dict[int, ExecutedFragment]]
    """By class, and index into `Fragments.fragments`."""
    shared: list[list[tuple[int, int, int]]]
    """Collectives of several classes: class, instance and position of each member."""


class _Arrival(NamedTuple):
    """A class that has arrived at a rendezvous."""

    class_id: int
    fragment: int
    copy: int
    outputs: Int
    """[lanes, outputs]: output times if the rendezvous took no time, and nobody was late."""


class _StepExecution:
    """State of an execution."""

    def __init__(self, plan: StepPlan, fragments: list[dict[int, ExecutedFragment]]) -> None:
        self.plan, self.fragments = plan, fragments
        self.times = np.zeros(plan.num_times, np.int64)
        self.times[plan.arrivals] = _NOT_SENT
        self.issued = [_issued(class_plan) for class_plan in plan.classes]
        self.num_issued = [0] * len(plan.classes)
        self.shared: list[list[tuple[int, int, int]]] = []
        self.waiting: dict[int, int] = {}
        """Classes that wait for a message, by the time index of its arrival."""
        self.arrived: dict[RendezvousMembers, list[_Arrival]] = defaultdict(list)
        """Classes that wait in a rendezvous."""
        self.ready = [*range(len(plan.classes))][::-1]
        """Classes that can go on."""

    def advance(self, c: int) -> int:
        """Issue fragments of a class until it has to wait; returns the number of their tasks."""
        times, fragments, issued = self.times, self.fragments[c], self.issued[c]
        finished = 0
        while self.num_issued[c] < len(issued):
            f, copy = issued[self.num_issued[c]]
            fragment = fragments[f]
            copies = fragment.copies
            inputs = times[copies.inputs[copy]]
            if copies.receives and inputs.min() == _NOT_SENT:
                missing = copies.inputs[copy][inputs == _NOT_SENT]
                self.waiting[int(missing[0])] = c
                break
            fragment.inputs[copy] = inputs
            outputs = np.maximum.reduce(fragment.matrix + inputs[:, None], axis=2)
            self.num_issued[c] += 1
            finished += len(copies.fragment)
            if copies.rendezvous is not None:
                if not self._arrive(copies.rendezvous, _Arrival(c, f, copy, outputs)):
                    break
                continue
            indices = copies.outputs[copy]
            times[indices] = outputs
            if len(copies.sends):
                for sent in indices[:, copies.sends].ravel().tolist():
                    if sent in self.waiting:
                        self.ready.append(self.waiting.pop(sent))
        return finished

    def _arrive(self, rendezvous: RendezvousMembers, arrival: _Arrival) -> bool:
        """Let a class arrive at a rendezvous; True if it is the last one."""
        arrivals = self.arrived[rendezvous]
        arrivals.append(arrival)
        if len(arrivals) < len(rendezvous.classes):
            return False
        self.ready += [other.class_id for other in arrivals if other is not arrival]
        del self.arrived[rendezvous]
        self._complete(rendezvous, sorted(arrivals, key=lambda arrival: arrival.class_id))
        return True

    def _complete(self, rendezvous: RendezvousMembers, arrivals: Sequence[_Arrival]) -> None:
        """Complete a rendezvous: a group begins with its latest lane, and takes the longest."""
        fragments = [self.fragments[c][f] for c, f, *_ in arrivals]
        ready = np.concatenate([arrival.outputs[:, 1] for arrival in arrivals])
        latest = np.zeros(rendezvous.num_groups, np.int64)
        np.maximum.at(latest, rendezvous.group, ready)
        begin = latest[rendezvous.group]
        end = begin + max(fragment.longest for fragment in fragments)
        times, first = np.stack([ready, begin, end], axis=1), 0
        for (*_, copy, outputs), fragment in zip(arrivals, fragments, strict=True):
            lanes = slice(first, first + len(outputs))
            first += len(outputs)
            fragment.rendezvous[copy] = times[lanes]
            outputs[:, 1:] = end[lanes, None]
            if fragment.waits is not None:
                launched = outputs[:, 0]
                outputs[:, 0] = np.where(fragment.waits, np.maximum(launched, end[lanes]), launched)
            self.times[fragment.copies.outputs[copy]] = outputs
        if len(arrivals) > 1:
            self.shared.append([self._location(arrival) for arrival in arrivals])

    def _location(self, arrival: _Arrival) -> tuple[int, int, int]:
        """Class, instance and position of a rendezvous."""
        c, f, copy, _ = arrival
        copies = self.fragments[c][f].copies
        return c, int(copies.instances[copy]), copies.fragment.begin

    def ends(self) -> Int:
        """End of each lane: max over its registers, `LAUNCHED` excluded."""
        ends = np.zeros(self.plan.lanes.count, np.int64)
        for class_plan, lanes in zip(self.plan.classes, self.plan.lanes.by_class, strict=True):
            registers = np.arange(1, len(class_plan.table.rules.registers))[:, None]
            held = self.times[class_plan.time_index(registers, np.arange(class_plan.num_lanes))]
            ends[lanes] = held.max(axis=0, initial=0)
        return ends

    def deadlock(self, program: Program) -> str:
        """Message that names each rank of a deadlock and the task it waits for."""
        ranks = [int(rank_class.ranks[0]) for rank_class in program.classes]
        waits: dict[int, tuple[int, str]] = {}
        for index, c in self.waiting.items():
            message = int(np.flatnonzero(self.plan.arrivals == index)[0])
            sender, *location = self.plan.messages.sent.location[message].tolist()
            waits[c] = sender, f"for {self._task(program, sender, *location)} from"
        for rendezvous, arrivals in self.arrived.items():
            present = {arrival.class_id for arrival in arrivals}
            missing = next(c for c in rendezvous.classes if c not in present)
            for arrival in arrivals:
                task = self._task(program, *self._location(arrival))
                waits[arrival.class_id] = missing, f"in {task} for"
        c, visited = min(waits), list[int]()
        clauses: list[str] = []
        while c in waits and c not in visited:
            visited.append(c)
            c, clause = waits[c]
            clauses.append(f"waits {clause} rank {ranks[c]}")
        story = ", which ".join(clauses) + ("" if c in visited else ", which has ended")
        return f"deadlock: rank {ranks[visited[0]]} {story}; change the order of the schedule"

    def _task(self, program: Program, c: int, instance: int, position: int) -> str:
        """Name of a task, and its microbatch."""
        row = int(self.plan.classes[c].expanded_rows(np.array(instance), np.array(position)))
        tasks = program.classes[c].tasks
        name, microbatch = tasks.names[int(tasks.name[row])], int(tasks.microbatch[row])
        return f"{name} of microbatch {microbatch}" if microbatch >= 0 else name


def _issued(class_plan: ClassPlan) -> list[tuple[int, int]]:
    """Fragments that a class issues, in order: each its index, and the number of its copy."""
    copies: dict[int, int] = defaultdict(int)
    issued: list[tuple[int, int]] = []
    units: list[int] = class_plan.sequence.unit.tolist()
    for unit in units:
        issued += [(f, copies[unit]) for f in class_plan.fragments.by_unit[unit]]
        copies[unit] += 1
    return issued


def execute(
    program: Program, plan: StepPlan, duration_sets: Sequence[TaskTicks],
    matrices: Sequence[Sequence[TransferMatrix]], progress: Progress | None = None,
) -> Executed:  # fmt: skip
    """Execute all fragments; `duration_sets` are by table, `matrices` by table and fragment.

    Raises UserError where ranks wait for each other in a circle.
    """
    fragments = [
        {
            f: ExecutedFragment.of(
                copies, matrices[class_plan.table_number][f],
                duration_sets[class_plan.table_number], lanes,
            )
            for f, copies in class_plan.copies.items()
        }
        for class_plan, lanes in zip(plan.classes, plan.lanes.by_class, strict=True)
    ]  # fmt: skip
    execution = _StepExecution(plan, fragments)
    total = sum(int(class_plan.order.begin[-1]) for class_plan in plan.classes)
    finished = 0
    while execution.ready:
        finished += execution.advance(execution.ready.pop())
        if progress is not None:
            progress(finished, total)
    if execution.waiting or execution.arrived:
        raise UserError(execution.deadlock(program))
    return Executed(execution.ends(), fragments, execution.shared)
