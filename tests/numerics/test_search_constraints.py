"""Constraints of a search against the checks of runs: the same verdicts, in the same words.

A constraint checks one run for all candidates with the same values of the settings that it says it
reads. Here every candidate is checked by itself: one that a constraint read too little for would be
let pass or refused wrongly.
"""

from typing import Any

import numpy as np
import pytest

from columns import candidates_of
from helpers import EFFORT, cases, table_of
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.run.experiment import Experiment
from stagewright.run.rules import check
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.searching.constraints import constraints

pytestmark = pytest.mark.numerics

AXES: dict[str, tuple[Any, ...]] = table_of("test_search_constraints", "axes")
USUAL = table_of("test_search_constraints", "usual")
"""The probability of a setting's first value, so that some runs have no mistake."""


def drawn(model: str, count: int, seed: int, **settings: Any) -> Candidates:
    """Candidates at random, most of which cannot be run."""
    draw = np.random.default_rng(seed)
    columns: dict[str, Column] = {}
    for name, values in AXES.items():
        code = draw.integers(0, len(values), count)
        code[draw.random(count) < USUAL.get(name, 0)] = 0
        columns[name] = Column(code.astype(np.uint8), values)
    base = Experiment(Run(model=model, layers=8, **settings), ClusterSection(), Execution())
    return candidates_of(base, columns)


def refusals(rows: Candidates) -> list[str]:
    """What the first constraint that refuses a candidate asks for; empty: it passes."""
    first = [""] * len(rows)
    for constraint in constraints("train", rows.model):
        for row in np.flatnonzero(constraint.refused(rows) >= 0).tolist():
            first[row] = first[row] or constraint.requirement
    return first


@cases
def test_constraints_refuse_what_runs_refuse(model: str):
    rows = drawn(model, 400 * EFFORT, 5)
    by_name = {
        constraint.requirement: constraint for constraint in constraints("train", rows.model)
    }
    passed = 0
    for row, why in enumerate(refusals(rows)):
        run = rows.run(row)
        try:
            check(run.resolved(rows.model), rows.model)
            told = ""
        except UserError as error:
            told = str(error)
        if told:
            assert why, f"{run.describe()} is refused, but no constraint removes it: {told}"
            with pytest.raises(UserError) as refused:
                by_name[why].check(rows, row)
            assert str(refused.value) == told
        elif why:  # what only compiling asks for
            assert why.startswith(("axes of experts", "the hardware has"))
            with pytest.raises(UserError):
                by_name[why].check(rows, row)
        else:
            passed += 1
    assert passed


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_candidates_that_pass_compile(model: str):
    rows = drawn(model, 3000, 8)
    passed = [row for row, why in enumerate(refusals(rows)) if not why]
    assert len(passed) > 20
    for row in passed[: 6 * EFFORT]:
        compiled = compile(rows.run(row))
        assert compiled.run.world_size == rows.world_size[row]


def test_every_row_has_hardware():
    assert HARDWARE in drawn("gpt2", 3, 1).columns
