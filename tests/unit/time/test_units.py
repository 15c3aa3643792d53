"""Units of issue: each row of a rank is in one, and needs what it needs in the program."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from stagewright.arrays import Int
from stagewright.lower.compile import compile
from stagewright.program.columns import KINDS, ActionOrder, Actions, Program
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.order import deferred_past_backward
from stagewright.time.simulate.rules import IssueTable, issue_rules, tables_of
from stagewright.time.simulate.units import Units, UnitSequence, units_of
from timed import MIXTRAL, RUNS, WAYS, one_unit

IN_TURNS = Execution(overlap_moe_expert_parallel_comm=True)
ALL: dict[str, dict[str, Any]] = RUNS | {
    "turns": MIXTRAL | {"layers": 4, "pp": 2, "vpp": 2, "dp": 2, "ep": 2, "global_batch_size": 8},
}


@cache
def program_of(run: str) -> Program:
    return compile(Run(**ALL[run])).program


def expanded(of: Actions, order: ActionOrder, copy: Int, row: Int) -> Int:
    """Rows of a rank's tasks, of rows of its actions in some copies."""
    return order.begin[copy] + row - of.begin[order.action[copy]]


def issued(table: IssueTable, nth: int, order: ActionOrder) -> Int:
    """Rows of the tasks of the nth class of a table, as its units issue them."""
    rules, sequence = table.rules, table.sequences[nth]
    rows: list[Int] = []
    for unit, copies in zip(sequence.unit.tolist(), sequence.copies, strict=True):
        at = np.flatnonzero(rules.unit == unit)
        rows.append(expanded(table.actions, order, copies[rules.member[at]], rules.rows[at]))
    return np.concatenate(rows)


def needs(actions: Actions, order: ActionOrder, units: Units, sequence: UnitSequence) -> Int:
    """Pairs of rows of a rank's tasks: one that needs, and what it needs."""
    pairs: list[Int] = []
    for unit, copies in zip(sequence.unit.tolist(), sequence.copies, strict=True):
        waiter, dep = (side[units.unit[units.edges[0]] == unit] for side in units.edges)
        pairs.append(np.stack([
            expanded(actions, order, copies[units.member[rows]], units.row[rows])
            for rows in (waiter, dep)
        ]))  # fmt: skip
        carried = units.carried.select(units.unit[units.carried.waiter] == unit)
        for at, member, entry, row in zip(*(column.tolist() for column in carried), strict=True):
            copy = int(copies[member])
            waits = expanded(actions, order, np.array([copy]), units.row[[at]])
            if entry < 0:
                source = np.array([copy]), np.array([row])
            else:
                action = int(order.action[copy])
                where = np.flatnonzero(order.action == action).tolist().index(copy)
                found = order.sources(action, np.array([entry]))
                source = found[0][where], found[1][where]
            pairs.append(np.stack([waits, expanded(actions, order, *source)]))
    return np.concatenate(pairs, axis=1)


@pytest.mark.parametrize("way", ["overlap", "one", "none", "turns"])
@pytest.mark.parametrize("run", ALL)
def test_units_issue_rows_in_the_order_of_the_whole_rank(run: str, way: str) -> None:
    program = program_of(run)
    how = IN_TURNS if way == "turns" else WAYS[way]
    for table in tables_of(program, how):
        for nth, number in enumerate(table.classes):
            work = program.classes[number].work
            rows = issued(table, nth, work.order)
            whole = issue_rules(program, one_unit(program, work.tasks, how), how)
            assert np.array_equal(rows, whole.rows)


@pytest.mark.parametrize("way", ["overlap", "none", "turns"])
@pytest.mark.parametrize("run", ["sp", "vpp", "zb", "dual", "tied", "zero2", "offload", "turns"])
def test_units_keep_every_need_of_every_row(run: str, way: str) -> None:
    program = program_of(run)
    how = IN_TURNS if way == "turns" else WAYS[way]
    for table in tables_of(program, how):
        for number, sequence in zip(table.classes, table.sequences, strict=True):
            work = program.classes[number].work
            found = needs(table.actions, work.order, table.units, sequence)
            assert sorted(zip(*found.tolist(), strict=True)) == sorted(
                zip(*(side.tolist() for side in work.tasks.reads), strict=True)
            )


def test_deferred_rows_are_in_the_last_unit() -> None:
    """Sequence parallelism reduces gradients of norms over tp after all backward passes."""
    program = program_of("sp")
    (of,) = program.classes
    actions, order = of.work.actions, of.work.order
    tasks = actions.tasks
    deferred = deferred_past_backward(program, tasks, Execution())
    assert deferred.any()
    units, (sequence,) = units_of(actions, [order], deferred, in_turns=False)
    last = int(sequence.unit[-1])
    assert (sequence.unit == last).sum() == 1
    assert set(units.unit[deferred[units.row]].tolist()) == {last}
    late = np.flatnonzero(sequence.deferred_member >= 0)
    (backward,) = late.tolist()
    assert KINDS[order.kind[backward, 0]] == "B"
    assert order.microbatch[backward, 0] == order.microbatch.max()
    end = len(order.action) - 1
    assert sequence.copies[-1].tolist() == [backward, end]
    assert sequence.instance[end] == len(sequence.unit) - 1
    assert sequence.instance[backward] == backward
    # The last unit has the deferred rows of the one, and all rows of the other.
    mine = units.unit == last
    counts = [int(deferred.sum()), int(np.diff(actions.begin)[order.action[end]])]
    assert np.bincount(units.member[mine]).tolist() == counts


def test_a_backward_and_the_forward_after_it_take_turns() -> None:
    (of,) = compile(Run(**MIXTRAL, dp=2, ep=2, global_batch_size=6)).program.classes
    actions, order = of.work.actions, of.work.order
    nothing = np.zeros(len(actions.tasks), dtype=bool)
    units, (sequence,) = units_of(actions, [order], nothing, in_turns=True)
    kinds = [
        "".join(KINDS[k] if k >= 0 else "." for k in order.kind[copies[copies >= 0], 0].tolist())
        for copies in sequence.copies
    ]
    assert kinds == ["F", "BF", "BF", "B", "."]
    # Units that are copies of each other have their rows once.
    pairs = sequence.unit[1:3].tolist()
    assert sorted({*sequence.unit.tolist()}) == list(range(len(units.actions)))
    assert [len(units.actions[unit]) for unit in pairs] == [2, 2]
    _, (alone,) = units_of(actions, [order], nothing, in_turns=False)
    assert alone.copies.tolist() == [[copy] for copy in range(len(order.action))]


def test_ranks_share_units() -> None:
    classes = program_of("pp").classes
    actions = classes[0].work.actions
    assert all(of.work.actions is actions for of in classes)
    nothing = np.zeros(len(actions.tasks), dtype=bool)
    orders = [of.work.order for of in classes]
    units, sequences = units_of(actions, orders, nothing, in_turns=False)
    used = [{*sequence.unit.tolist()} for sequence in sequences]
    assert set().union(*used) == set(range(len(units.actions)))
    assert used[1] & used[2]  # stages of equal layers


def test_units_without_rows_have_rules_too() -> None:
    """A stage of which nothing trains has actions without rows."""
    settings = {"layers": 4, "dp": 2, "zero": 2, "pp": 2, "schedule": "zb-h1", "clip_grad": False}
    frozen = {"trainable": ("layer[01].*",)}
    (table,) = tables_of(compile(Run(**RUNS["dp"] | settings | frozen)).program, Execution())
    count = len(table.units.actions)
    assert count - 1 not in table.units.unit
    assert table.rules.writes.size
    assert table.rules.writes[0].max() < count - 1
