"""Errors to expect of answers, from published measurements: `data/accuracy.csv`.

`benchmarks/accuracy.py` writes the file, and the pages of docs/accuracy, from the same rows.

>>> expected()["train-moe"].rows
155
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

SOURCE = "docs/accuracy/limits.md"
"""The page that has the figures, with the rows that they are of."""


class ExpectedError(NamedTuple):
    """Errors of published rows, as shares."""

    rows: int
    error: float
    """Mean absolute error."""
    median: float
    """Median absolute error."""
    p90: float
    """Absolute error that nine tenths of the rows stay below."""
    bias: float
    """Mean signed error: negative is predicted too fast, or too small."""
    least: float
    most: float

    @property
    def fast(self) -> float:
        """Mean error where predictions are too fast."""
        return -self.bias

    @property
    def fastest(self) -> float:
        """Error of the prediction that is most too fast."""
        return -self.least


@cache
def expected() -> Mapping[str, ExpectedError]:
    """Expected errors by kind of answer."""
    text = (files("stagewright") / "data" / "accuracy.csv").read_text(encoding="utf-8")
    return {
        cells.pop("answer"): ExpectedError(
            int(cells.pop("rows")), *(float(value) for value in cells.values())
        )
        for cells in csv.DictReader(text.splitlines())
    }
