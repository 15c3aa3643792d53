"""Execution of a plan: all classes issue their fragments in order, each when its inputs are there.

A fragment multiplies its input times by its transfer matrix, on all lanes of its class at once. A
class stops at a message that has not been sent, and at a rendezvous until all classes have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.program.columns import Program
from stagewright.time.simulate.plan import ClassPlan, StepPlan
from stagewright.time.simulate.transfer import TransferMatrix

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


class Executed(NamedTuple):
    """Times of a step, in ticks."""

    ends: Int
    """End of each lane."""
    inputs: list[dict[int, Int]]
    """By class and fragment: [copies, lanes, inputs]."""
    rendezvous_times: list[dict[int, Int]]
    """By class and fragment: [copies, lanes, 3], when each is ready, begins and ends."""
    rendezvous: list[list[tuple[int, int, int]]]
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

    def __init__(
        self, plan: StepPlan, duration_sets: Sequence[TaskTicks],
        matrices: Sequence[Sequence[TransferMatrix]],
    ) -> None:  # fmt: skip
        self.plan, self.duration_sets = plan, duration_sets
        self.times = np.zeros(plan.num_times, np.int64)
        self.times[plan.arrivals] = _NOT_SENT
        self.issued = [_issued(class_plan) for class_plan in plan.classes]
        self.num_issued = [0] * len(plan.classes)
        self.inputs: list[dict[int, Int]] = []
        self.rendezvous_times: list[dict[int, Int]] = []
        self.matrices: list[dict[int, Int]] = []
        """By class and fragment: [lanes, outputs, inputs]."""
        for class_plan, lanes in zip(plan.classes, plan.lanes.by_class, strict=True):
            sets = duration_sets[class_plan.table_number].set_of_lane[lanes]
            of_table, copies = matrices[class_plan.table_number], class_plan.copies
            self.inputs.append({f: np.empty_like(c.inputs) for f, c in copies.items()})
            self.rendezvous_times.append({
                f: np.empty((*c.inputs.shape[:2], 3), np.int64)
                for f, c in copies.items()
                if c.fragment.is_rendezvous
            })  # fmt: skip
            self.matrices.append({f: of_table[f].outputs[sets] for f in copies})
        self.rendezvous: list[list[tuple[int, int, int]]] = []
        self.waiting: dict[int, int] = {}
        """Classes that wait for a message, by the time index of its arrival."""
        self.arrived: dict[tuple[int, int], list[_Arrival]] = {}
        """Classes that wait in a rendezvous, by communicator and first class."""
        self.ready = [*range(len(plan.classes))][::-1]
        """Classes that can go on."""

    def advance(self, c: int) -> int:
        """Issue fragments of a class until it has to wait; returns the number of their tasks."""
        times, issued, finished = self.times, self.issued[c], 0
        plan, matrices, all_inputs = self.plan.classes[c], self.matrices[c], self.inputs[c]
        while self.num_issued[c] < len(issued):
            f, copy = issued[self.num_issued[c]]
            copies = plan.copies[f]
            inputs = times[copies.inputs[copy]]
            if copies.receives and inputs.min() == _NOT_SENT:
                missing = copies.inputs[copy][inputs == _NOT_SENT]
                self.waiting[int(missing[0])] = c
                break
            all_inputs[f][copy] = inputs
            outputs = np.maximum.reduce(matrices[f] + inputs[:, None], axis=2)
            self.num_issued[c] += 1
            finished += len(copies.fragment)
            if copies.fragment.is_rendezvous:
                if not self._arrive(_Arrival(c, f, copy, outputs)):
                    break
                continue
            indices = copies.outputs[copy]
            times[indices] = outputs
            if len(copies.sends):
                for sent in indices[:, copies.sends].ravel().tolist():
                    if sent in self.waiting:
                        self.ready.append(self.waiting.pop(sent))
        return finished

    def _arrive(self, arrival: _Arrival) -> bool:
        """Let a class arrive at a rendezvous; True if it is the last one."""
        c, plan = arrival.class_id, self.plan
        slot = plan.classes[c].slot(arrival.fragment)
        first_class = plan.rendezvous_class[slot]
        key = slot, int(first_class[c])
        arrivals = self.arrived.setdefault(key, [])
        arrivals.append(arrival)
        if len(arrivals) < np.count_nonzero(first_class == first_class[c]):
            return False
        self._complete(slot, self.arrived.pop(key))
        self.ready += [other.class_id for other in arrivals if other is not arrival]
        return True

    def _complete(self, slot: int, arrivals: Sequence[_Arrival]) -> None:
        """Complete a rendezvous: a group begins with its latest lane, and takes the longest."""
        lanes = self.plan.lanes
        groups: list[Int] = []
        waits: list[Bool] = []
        duration = 0
        for c, f, *_ in arrivals:
            class_plan, class_lanes = self.plan.classes[c], lanes.by_class[c]
            ticks, position = self.duration_sets[class_plan.table_number], class_plan.begin(f)
            sets = ticks.set_of_lane[class_lanes]
            duration = max(duration, int(ticks.duration[sets, position].max()))
            group = lanes.groups[slot][class_lanes]
            groups.append(np.where(group < 0, lanes.count + class_lanes, group))
            no_waits = np.zeros(len(sets), dtype=bool)
            waits.append(no_waits if ticks.waits is None else ticks.waits[sets, position])
        ready = np.concatenate([arrival.outputs[:, 1] for arrival in arrivals])
        _, number = np.unique(np.concatenate(groups), return_inverse=True)
        latest = np.zeros(int(number.max()) + 1, np.int64)
        np.maximum.at(latest, number, ready)
        begin = latest[number]
        end = begin + duration
        columns = np.stack([ready, begin, end], axis=1)
        first = 0
        for (c, f, copy, outputs), host_waits in zip(arrivals, waits, strict=True):
            rows = slice(first, first + len(outputs))
            first += len(outputs)
            self.rendezvous_times[c][f][copy] = columns[rows]
            launched = outputs[:, 0]
            result = np.repeat(end[rows, None], outputs.shape[1], axis=1)
            result[:, 0] = np.where(host_waits, np.maximum(launched, end[rows]), launched)
            self.times[self.plan.classes[c].copies[f].outputs[copy]] = result
        if len(arrivals) > 1:
            self.rendezvous.append([
                (c, int(class_plan.copies[f].instances[copy]), class_plan.begin(f))
                for c, f, copy, _ in arrivals
                for class_plan in [self.plan.classes[c]]
            ])  # fmt: skip

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
        for (slot, first_class), arrivals in self.arrived.items():
            members = np.flatnonzero(self.plan.rendezvous_class[slot] == first_class).tolist()
            present = {arrival.class_id for arrival in arrivals}
            missing = next(c for c in members if c not in present)
            for c, f, copy, _ in arrivals:
                class_plan = self.plan.classes[c]
                instance = int(class_plan.copies[f].instances[copy])
                task = self._task(program, c, instance, class_plan.begin(f))
                waits[c] = missing, f"in {task} for"
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
    execution = _StepExecution(plan, duration_sets, matrices)
    total = sum(int(class_plan.order.begin[-1]) for class_plan in plan.classes)
    finished = 0
    while execution.ready:
        finished += execution.advance(execution.ready.pop())
        if progress is not None:
            progress(finished, total)
    if execution.waiting or execution.arrived:
        raise UserError(execution.deadlock(program))
    return Executed(
        execution.ends(), execution.inputs, execution.rendezvous_times, execution.rendezvous
    )
