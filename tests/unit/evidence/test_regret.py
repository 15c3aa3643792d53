"""Choices by prediction in jobs that were measured in several layouts."""

from __future__ import annotations

import numpy as np
import pytest

import regret
from stagewright.evidence.rows import Prediction, prediction
from stagewright.evidence.statistics import LOW, SWEEP
from stagewright.evidence.training import Measurement, read

HEADER = (
    "source,row,hardware,quantity,measured,low_utilization,model,layers,tp,dp,pp,"
    "global_batch_size,seq_length"
)
LAYOUTS = ((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 4, 2))
MEASURED = (4.0, 2.0, 3.0, 8.0, 5.0)


def rows(
    source: str = "mine", quantity: str = "step_s", batch: int = 16, low: str = ""
) -> list[Measurement]:
    """A job in five layouts."""
    lines = [
        f"{source},row {n},h100-sxm,{quantity},{1 / seconds if quantity != 'step_s' else seconds},"
        f"{low},llama3-8b,2,{tp},{dp},{pp},{batch},1024"
        for n, ((tp, dp, pp), seconds) in enumerate(zip(LAYOUTS, MEASURED, strict=True))
    ]
    return read("\n".join([HEADER, *lines]), "rows.csv")


def predicted(
    found: list[Measurement], seconds: tuple[float, ...]
) -> list[tuple[Measurement, Prediction]]:
    return [(m, _prediction(m, s)) for m, s in zip(found, seconds, strict=True)]


def _prediction(m: Measurement, seconds: float) -> Prediction:
    return prediction(m, seconds if m.quantity == "step_s" else 1 / seconds)


@pytest.mark.parametrize("quantity", ["step_s", "tokens_s_gpu"])
def test_the_regret_of_a_choice(quantity: str) -> None:
    """The third layout is predicted shortest; the second was measured shortest."""
    (found,) = regret.regrets(predicted(rows(quantity=quantity), (5, 3, 2, 8, 6)))
    assert found.regret == pytest.approx(3 / 2 - 1)
    assert (found.rank, found.picked, found.best) == (2, "row 2", "row 1")
    assert found.error_of_picked == pytest.approx(2 / 3 - 1)
    assert found.error_of_best == pytest.approx(3 / 2 - 1)
    # Ranks by prediction 2 1 0 4 3 and by measurement 2 0 1 4 3: 1 - 6 * 2 / (5 * 24).
    assert found.spearman == pytest.approx(1 - 6 * 2 / 120)
    assert (found.gpus, found.layouts, found.model) == (8, 5, "2 x 4096")


def test_spearman_with_equal_values() -> None:
    """Equal values share the mean of their places."""
    spearman = regret._spearman
    assert spearman(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(3**0.5 / 2)
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) == 0


def test_totals_by_source() -> None:
    order = (5.0, 3.0, 2.0, 8.0, 6.0)
    pairs = predicted(rows(), order) + predicted(rows(SWEEP), MEASURED)
    pairs += predicted(rows("slow", low="true"), order)
    names = [name for name, _ in regret.by_source(regret.regrets(pairs))]
    assert names == ["mine", SWEEP, f"all but {SWEEP}", "all", f"slow, {LOW}"]
    assert regret.summary(regret.regrets(pairs)[:2]).mean == pytest.approx(0.25)
    assert "2 x 4096" in str(regret.listed(regret.regrets(pairs)))
