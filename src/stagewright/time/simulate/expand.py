"""All tasks of a rank class in issue order, for reports; the step time does not need them.

Breakdown, critical path and pictures read every task with its dependencies and its ties to other
ranks. The time of a step follows from distinct units alone (`plan`, `execute`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_values, offsets
from stagewright.time.simulate.messages import MessageEnds
from stagewright.time.simulate.order import Edges
from stagewright.time.simulate.plan import ClassPlan, StepPlan
from stagewright.time.simulate.rules import without_implied


@dataclass(frozen=True, slots=True, eq=False)
class IssueOrder:
    """Tasks of a rank in issue order, with streams and dependencies.

    Issue index `i` holds row `rows[i]` of the rank's `Tasks`. It waits for the issue indices
    `deps[pointer[i]:pointer[i + 1]]` (CSR), all of them earlier; dependencies that follow from
    others are omitted. `stream[i]` is `COMPUTE_STREAM`, a positive number, or `NO_STREAM`.
    """

    rows: Int
    stream: Int
    pointer: Int
    deps: Int

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, rows: Int, stream: Int, is_kernel: Bool, edges: Edges) -> IssueOrder:
        """Issue order of rows, with dependencies that others imply left out."""
        waiter, dep = without_implied(edges, stream, is_kernel)
        return cls(rows, stream, offsets(np.bincount(waiter, minlength=len(rows))), dep)


def expand_issue_order(plan: ClassPlan) -> IssueOrder:
    """Issue order of all tasks of a class."""
    sequence, rules, carried = plan.sequence, plan.table.rules, plan.table.rules.carried
    begin = np.searchsorted(rules.unit, np.arange(len(plan.table.units.actions) + 1))
    counts = np.diff(begin)[sequence.unit]
    instance = np.repeat(np.arange(len(counts)), counts)
    shift = offsets(counts)[:-1] - begin[sequence.unit]  # from positions to issue indices
    position = np.arange(len(instance)) - shift[instance]
    holders = _register_holders(plan, shift)
    waiters, deps = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for unit, instances in plan.instances.items():
        unit_shift = shift[instances, None]
        in_unit = rules.unit[rules.edges.waiter] == unit
        waiters.append((rules.edges.waiter[in_unit] + unit_shift).ravel())
        deps.append((rules.edges.dep[in_unit] + unit_shift).ravel())
        positions, registers = rules.reads
        in_unit = rules.unit[positions] == unit
        waiters.append((positions[in_unit] + unit_shift).ravel())
        deps.append(holders[instances][:, registers[in_unit]].ravel())
        if unit in plan.carried:
            source_instance, source = plan.carried[unit]
            in_unit = rules.unit[carried.waiter] == unit
            waiters.append((carried.waiter[in_unit] + unit_shift).ravel())
            deps.append((source + shift[source_instance]).ravel())
    waiter, dep = np.concatenate(waiters), np.concatenate(deps)
    return IssueOrder.of(
        plan.expanded_rows(instance, position), rules.stream[position], rules.is_kernel[position],
        Edges(waiter[dep >= 0], dep[dep >= 0]),
    )  # fmt: skip


def _register_holders(plan: ClassPlan, shift: Int) -> Int:
    """Issue index held by each register at instance begin: [instances, registers]; -1: none.

    `shift` by instance: from positions to issue indices.
    """
    sequence, rules = plan.sequence, plan.table.rules
    updates = {
        unit: [
            [c[units == unit] for c in columns] for units, *columns in (rules.moves, rules.writes)
        ]
        for unit in plan.instances
    }
    holders = np.full((len(sequence.unit) + 1, len(rules.registers)), -1)
    for instance, unit in enumerate(sequence.unit.tolist()):
        begin, end = holders[instance], holders[instance + 1]
        end[:] = begin
        (moved, source), (written, position) = updates[unit]
        end[moved] = begin[source]
        end[written] = position + shift[instance]
    return holders[:-1]


class Endpoints(NamedTuple):
    """Messages and collectives that connect lanes, by issue index."""

    messages: Int
    """[messages, 4]: receiving lane, issue index of the receive, sending lane, index of the send;
    rows ascend."""
    shared: Mapping[tuple[int, int], Mapping[int, int]]
    """By class and issue index of a collective of several classes, its issue index by class."""


def endpoints(
    plan: StepPlan, shared_collectives: Sequence[Sequence[tuple[int, int, int]]],
    issues: Sequence[IssueOrder],
) -> Endpoints:  # fmt: skip
    """Messages and shared collectives of all lanes, given the issue order of each class.

    `shared_collectives`: as in `Executed`.
    """
    index_of_row = [np.argsort(order.rows) for order in issues]
    first_lane = np.array([int(lanes[0]) for lanes in plan.lanes.by_class])

    def issue_index(class_id: int, instances: Int, positions: Int) -> Int:
        return index_of_row[class_id][plan.classes[class_id].expanded_rows(instances, positions)]

    def lanes_and_indices(ends: MessageEnds) -> tuple[Int, Int]:
        class_of, instance, position = ends.location.T
        index = np.zeros(len(class_of), np.int64)
        for class_id in distinct_values(class_of):
            mask = class_of == class_id
            index[mask] = issue_index(class_id, instance[mask], position[mask])
        return first_lane[class_of] + ends.lane, index

    received, sent = plan.messages.received, plan.messages.sent
    parts = [np.stack([*lanes_and_indices(received), *lanes_and_indices(sent)], axis=1)]
    for class_id, class_plan in enumerate(plan.classes):
        edges, unit_of = plan.messages.within[class_plan.table_number], class_plan.table.rules.unit
        for unit, instances in class_plan.instances.items():
            in_unit = unit_of[edges.waiter] == unit
            receives, sends = (
                issue_index(class_id, instances[:, None], end[in_unit]).ravel() for end in edges
            )
            for lane in plan.lanes.by_class[class_id].tolist():
                lanes = np.full(len(receives), lane)
                parts.append(np.stack([lanes, receives, lanes, sends], axis=1))
    messages = np.concatenate(parts)
    shared: dict[tuple[int, int], dict[int, int]] = {}
    for members in shared_collectives:
        indices = {
            class_id: int(issue_index(class_id, np.array(instance), np.array(position)))
            for class_id, instance, position in sorted(members)
        }
        shared |= dict.fromkeys(indices.items(), indices)
    return Endpoints(messages[np.lexsort((messages[:, 1], messages[:, 0]))], shared)
