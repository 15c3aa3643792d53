"""Random runs of every model are sound; `sweep` draws them, and says how to try more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from helpers import times
from stagewright.model.presets import PRESETS
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from sweep import RUNS, draw, sweep


@pytest.mark.parametrize("chunk", range(times(1)))
def test_random_runs(chunk: int, tmp_path: Path) -> None:
    refused = sweep(f"sweep {chunk}", RUNS, tmp_path)
    # Or the draws are of no use. Over 30 seeds the rules refuse 12 to 48 draws for 25 runs, 31 in
    # the mean, and compiling some more.
    assert refused < 3 * RUNS


def test_draws_reach_everything() -> None:
    """Every model and every choice of a setting comes up among runs that are possible."""
    dice = random.Random("reach")
    seen: dict[str, set[Any]] = {}
    for _ in range(3000):
        for name, value in draw(dice).items():
            seen.setdefault(name, set()).add(value)
    assert seen["model"] == set(PRESETS)
    assert seen["zero"] == {0, 1, 2, 3}
    assert {"p2p", "all_gather", "a2a"} == seen["cp_comm_type"]
    assert seen["schedule"] == set(SCHEDULES)
    unseen = {"make_vocab_size_divisible_by", "strategy", "requests", "max_model_len"}  # of files
    unseen |= {"as_family", "output_length"}  # of a config.json; of words only
    assert set(seen) == set(Run.model_fields) - unseen
