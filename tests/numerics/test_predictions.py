"""The tables of docs/accuracy/data have today's predictions."""

from __future__ import annotations

import pytest

import predictions
from helpers import cases
from stagewright.evidence.rows import Prediction, compare


def _are_current(name: str, one_of: int, within: float) -> None:
    """Simulate one of `one_of` rows; those of one experiment are equal within rounding."""
    written = {
        (p.source, p.row, p.quantity, p.measured): p.predicted for _, p in predictions.read(name)
    }
    outcomes = [*compare(predictions.sample(name, one_of))]
    assert outcomes
    for p in outcomes:
        if isinstance(p, Prediction):
            old = written[p.source, p.row, p.quantity, p.measured]
            assert p.predicted == pytest.approx(old, rel=within), (
                f"run python benchmarks/predictions.py {name}"
            )


@pytest.mark.numerics
@cases
def test_few_predictions_are_those_of_the_tables(name: str, one_of: int) -> None:
    """Within 2%: what changes less need not simulate all rows again."""
    _are_current(name, one_of, 0.02)


@pytest.mark.slow
@cases
def test_many_predictions_are_those_of_the_tables(name: str, one_of: int) -> None:
    _are_current(name, one_of, 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", predictions.OTHERS)
def test_figures_of_other_programs_are_those_of_the_tables(name: str) -> None:
    text = predictions.path(name).read_text(encoding="utf-8")
    assert predictions.written(name, predictions.predict(name)) == text, (
        f"run python benchmarks/predictions.py {name}"
    )
