"""The pages on accuracy follow from the tables of predictions, and say what these give."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import accuracy
import choices
import predictions
from helpers import cases
from stagewright.evidence.memory import BETWEEN_STEPS
from stagewright.evidence.statistics import LOW, grouped
from stagewright.evidence.training import BEYOND, sources
from stagewright.views.accuracy import expected
from stagewright.views.accuracy import table as lines

FIGURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(%|x)(?!\w)")
CONSTANTS = {
    "2%",  # `searching.ranking.TIE`
    "25%",  # `training.BEYOND`
    "5%",  # `accuracy.EQUAL`, and the memory that a search leaves free
    "70%",  # `training.FITTED_TENTHS`
    "30%",
}
"""Figures of pages that are settings of ours and no errors."""


@pytest.fixture(scope="module")
def pages(request: pytest.FixtureRequest) -> dict[Path, str]:
    texts = accuracy.pages()
    if request.config.getoption("--bless"):
        accuracy.write(texts)
    return texts


def test_pages_are_those_of_the_tables(pages: dict[Path, str]) -> None:
    old = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert not old, "run python benchmarks/accuracy.py, or pytest --bless"
    assert {*accuracy.ERRORS.glob("*.md")} <= pages.keys()


@pytest.mark.parametrize("path", sorted(accuracy.PAGES.glob("*.md")), ids=lambda path: path.name)
def test_figures_of_sentences_stand_in_tables(path: Path) -> None:
    """Or in a paragraph that cites its source."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = text.splitlines()
    tables = "\n".join(line for line in lines if line.startswith("|"))
    listed = {(float(number), unit) for number, unit in FIGURE.findall(tables)}
    prose = "\n".join("" if line.startswith("|") else line for line in lines)
    for paragraph in re.split(r"\n\s*\n|\n- ", prose):
        if "](https://" in paragraph:
            continue
        for number, unit in FIGURE.findall(paragraph):
            decimals = len(number.partition(".")[2])
            near = {round(value, decimals) for value, other in listed if other == unit}
            above = {math.ceil(value) for value, other in listed if other == unit}
            known = float(number) in near | above or f"{number}{unit}" in CONSTANTS
            assert known, (f"{number}{unit}", paragraph)


def test_sources_of_rows_that_are_far_off_name_the_reason() -> None:
    far = {
        row.source
        for row, p in predictions.read("training")
        if row and abs(p.error_of_time) > BEYOND
    }
    assert not [source for source in sorted(far) if not sources()[source].beyond]


@pytest.mark.parametrize("name", predictions.TABLES)
def test_every_row_has_its_prediction(name: str) -> None:
    """But those of servers that cannot be simulated."""
    lines = predictions.path(name).read_text(encoding="utf-8").splitlines()
    assert len(predictions.read(name)) == len(lines) - 1
    if name in predictions.ROWS:
        refused = len(predictions.ROWS[name]()) - len(lines) + 1
        assert 0 <= refused <= (6 if name == "serving" else 0)


def test_the_package_has_the_figures_of_the_pages() -> None:
    for answer in accuracy.ANSWERS:
        figures = accuracy.errors(answer.key)
        assert expected()[answer.key][:7] == pytest.approx(figures[:7], abs=5e-5)
        assert expected()[answer.key].sources == figures.sources


def test_groups_of_steps_are_those_of_validate() -> None:
    """But for rows below a tenth of the peak."""
    names = {"train-dense": "dense", "train-moe": "MoE", "train-lora": "LoRA"}
    steps = [c.prediction for c in accuracy.table("training")]
    listed = {of.group: of.every.rows for of in grouped(steps, "accelerator and precision")}
    listed.pop(LOW)
    whole = {
        f"{group}, {names[answer]}": errors.rows
        for (answer, group), errors in lines().items()
        if answer in names and ", " in group
    }
    assert whole == listed


def test_groups_of_servers_hold_all_of_their_rows() -> None:
    for answer in accuracy.GROUPED:
        engines = [errors for (key, group), errors in lines().items()
                   if key == answer and group and ", " not in group]  # fmt: skip
        assert sum(of.rows for of in engines) == sum(1 for _ in accuracy.GROUPED[answer]())


def test_statistics_of_errors() -> None:
    errors = accuracy.statistics([-0.1, 0.3, 0.2])
    assert errors[:3] == pytest.approx((3, 0.2, 0.2))
    assert errors[4:7] == pytest.approx((0.4 / 3, -0.1, 0.3))


# ---- limits that the predictions are held to -----------------------------------------------------

LIMITS = {
    "train-dense": 0.07,
    "train-moe": 0.15,
    "train-lora": 0.08,
    "layout": 0.03,
    "memory": 0.05,
    "decode": 0.13,
    "serve-tpot": 0.13,
    "power": 0.1,
}
"""The largest mean error that an answer may have."""


@pytest.mark.parametrize("answer", LIMITS)
def test_mean_errors_are_within_limits(answer: str) -> None:
    assert accuracy.errors(answer).error < LIMITS[answer]


def test_choices_lose_little() -> None:
    assert max(job.regret for job in accuracy.jobs()) < 0.25
    spearman = [job.spearman for job in accuracy.jobs()]
    assert sum(spearman) / len(spearman) > 0.8


@cases
def test_memory_is_within_limits(source: str, quantity: str, mean: float) -> None:
    errors = [
        c.error for c in accuracy.table("memory") if (c.source, c.quantity) == (source, quantity)
    ]
    assert accuracy.statistics(errors).error < mean


def test_peaks_that_are_off_have_a_reason() -> None:
    for c in accuracy.table("memory"):
        assert c.quantity == BETWEEN_STEPS or abs(c.error) < 0.08 or c.prediction.reason, c


def test_published_layouts_are_near_the_best() -> None:
    assert len(choices.by_run()) == len(choices.JOBS)
    longer = [layout.longer for layout in accuracy.published()]
    assert sum(value < accuracy.EQUAL for value in longer) >= 9
    assert max(longer) < 0.15
