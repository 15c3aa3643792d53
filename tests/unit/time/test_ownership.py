"""What a GPU-hour costs who owns the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.time.ownership import Ownership, load


def test_each_part_of_the_costs() -> None:
    """Capital over all hours, upkeep on top of capital, power through the building's overhead."""
    capital = Ownership(gpu_usd=8766, years=1, usd_per_kwh=0)
    assert capital.usd_per_gpu_hour(1000) == pytest.approx(1)
    more = {"network_usd": 4383, "building_usd_per_kw": 4383, "upkeep": 0.5}
    whole = capital.model_copy(update=more | {"utilization": 0.5})
    assert whole.usd_per_gpu_hour(1000) == pytest.approx(2 * 1.5 / 0.5)
    power = Ownership(gpu_usd=0, years=4, usd_per_kwh=0.1, pue=1.5)
    assert power.usd_per_gpu_hour(500) == pytest.approx(0.5 * 0.1 * 1.5)


@cases
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        load(path)


def test_a_step_with_a_file_of_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("gpu_usd: 30000\nyears: 4\nusd_per_kwh: 0.1\n")
    step = sw.simulate("llama3-8b", "h100-sxm", layers=1, seq_length=512, costs=str(path))
    spent = step.expense()
    price = 30000 / (4 * 8766) + 0.1 * spent.watts_per_gpu / 1000
    usd = price * step.seconds / 3600 / step.tokens * 1e6
    assert spent.usd_per_million_tokens == pytest.approx(usd)
    with pytest.raises(UserError, match="price and costs both say"):
        sw.simulate("llama3-8b", "h100-sxm", layers=1, costs=str(path), price=2)
