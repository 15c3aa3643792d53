"""docs/step-times.csv has today's predictions; two pages, the tables that follow from it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paths import ROOT
from stagewright.evidence.rows import Prediction, compare
from stagewright.views import deviations

SPEC = importlib.util.spec_from_file_location("step_times", ROOT / "benchmarks" / "step_times.py")
assert SPEC
assert SPEC.loader
step_times = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step_times)
TOLD = "run python benchmarks/step_times.py, which simulates all rows"


def _are_current(one_of: int, within: float) -> None:
    written = {(o.source, o.row): o.predicted for o in step_times.predictions()}
    chosen = step_times.sample(one_of)
    assert chosen
    for o in compare(chosen):
        if isinstance(o, Prediction):
            assert o.predicted == pytest.approx(written[o.source, o.row], rel=within), TOLD
        else:
            assert (o.source, o.row) not in written, TOLD


@pytest.mark.numerics
def test_few_predictions_are_those_of_the_file() -> None:
    """Within 2%: what changes less need not simulate all rows again."""
    _are_current(1200, 0.02)


@pytest.mark.slow
def test_many_predictions_are_those_of_the_file() -> None:
    _are_current(400, 0.001)


@pytest.mark.parametrize(("path", "write"), step_times.PAGES)
def test_tables_are_those_of_the_file(
    path: Path, write: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    text = path.read_text(encoding="utf-8")
    new = step_times.page(text, write)
    if request.config.getoption("--bless"):
        path.write_text(new, encoding="utf-8")
    else:
        assert new == text, "run python benchmarks/step_times.py --tables, or pytest --bless"


@pytest.mark.parametrize("begin", step_times.KNOWN)
def test_known_deviations_say_what_the_rows_give(begin: str) -> None:
    """Within three points, so that the sentences need not change with every prediction."""
    (sentence,) = [d.sentence for d in deviations.DEVIATIONS if d.sentence.startswith(begin)]
    errors = step_times.known_errors(begin)
    bias, mean = sum(errors) / len(errors), sum(map(abs, errors)) / len(errors)
    fast = [int(n) for n in re.findall(r"([0-9]+)% fast", sentence)]
    off = [int(n) for n in re.findall(r"off by ([0-9]+)%", sentence)]
    near = [n / 100 + bias for n in fast] + [n / 100 - mean for n in off]
    assert any(abs(difference) < 0.03 for difference in near), (len(errors), bias, mean, sentence)
