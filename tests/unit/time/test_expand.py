"""The issue order expanded from units, beside the one made of all rows of a rank."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.arrays import Bool
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.time.simulate.expand import IssueOrder
from stagewright.time.simulate.order import crosses_actions
from stagewright.time.simulate.rules import issue_rules
from stagewright.time.simulate.timeline import timeline
from timed import RUNS, WAYS, one_unit


def closure(issue: IssueOrder) -> Bool:
    """All that each task waits for, directly or through others: [tasks, tasks] by row."""
    reached = np.eye(len(issue), dtype=bool)
    for index in range(len(issue)):
        deps = issue.deps[issue.pointer[index] : issue.pointer[index + 1]]
        assert (deps < index).all(), "tasks wait for tasks that are issued before"
        reached[index] |= reached[deps].any(axis=0)
    by_row = np.empty_like(reached)
    by_row[np.ix_(issue.rows, issue.rows)] = reached
    return by_row


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_tasks_of_a_rank_wait_for_what_they_wait_for_row_by_row(run: str, way: str) -> None:
    """No wait is lost where registers imply it in some copies of an action, and not in all."""
    program, how = compile(Run(**RUNS[run])).program, WAYS[way]
    if any(crosses_actions(of.work.actions.tasks, how) for of in program.classes):
        pytest.skip("all rows are one unit")
    seconds = [np.full(len(of.work.actions.tasks), 1e-6) for of in program.classes]
    for of, issue in zip(program.classes, timeline(program, seconds, how).issues, strict=True):
        rules = issue_rules(program, one_unit(of.work.tasks, how), how)
        whole = IssueOrder.of(rules.rows, rules.stream, rules.is_kernel, rules.edges)
        assert np.array_equal(issue.rows, whole.rows)
        assert (closure(issue) == closure(whole)).all()
