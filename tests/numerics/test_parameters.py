"""The graph has the checkpoint's parameters: every preset against the published count."""

from __future__ import annotations

import csv

import pytest

from helpers import DATA
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS

TABLE = DATA / "published_parameters.csv"
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))


OURS = [r for r in ROWS if r["model"] in PRESETS]


@pytest.mark.parametrize("row", OURS, ids=lambda r: r["model"])
def test_graph_has_the_published_parameters(row: dict[str, str]) -> None:
    published, tolerance = int(row["parameters"]), int(row["tolerance"] or 0)
    total, active = parameters(PRESETS[row["model"]])
    assert abs(total - published) <= tolerance
    assert active <= total


def test_every_preset_is_compared() -> None:
    beyond = {n for n, c in PRESETS.items() if c.vision or c.tower}
    assert set(PRESETS) - beyond <= {r["model"] for r in ROWS}
