"""Energy and cost against their definitions."""

from __future__ import annotations

import pytest

from stagewright.time import hardware
from stagewright.time.power import IDLE_FRACTION, expense

H100 = hardware.resolve("h100-sxm")


@pytest.mark.parametrize(("busy", "watts"), [(0.0, IDLE_FRACTION * 700), (1.0, 700.0)])
def test_power_is_between_idle_and_tdp(busy: float, watts: float) -> None:
    spent = expense(H100, gpus=16, seconds=2.0, tokens=1000, busy=busy)
    assert spent.watts_per_gpu == pytest.approx(watts)
    assert spent.joules == pytest.approx(watts * 16 * 2)
    assert spent.joules_per_token == pytest.approx(watts * 32 / 1000)


def test_cost_is_gpu_hours_by_price() -> None:
    """1e6 tokens in an hour of 8 GPUs at 2 USD are 16 USD."""
    spent = expense(H100, gpus=8, seconds=3600.0, tokens=10**6, busy=1.0, price=2.0)
    assert spent.usd_per_million_tokens == pytest.approx(16)
    free = H100.model_copy(update={"price_usd_per_gpu_hour": None})
    unknown = expense(free, gpus=8, seconds=1.0, tokens=1, busy=1.0)
    assert unknown.usd_per_million_tokens is None


def test_what_a_node_draws_besides_is_added() -> None:
    more = H100.model_copy(update={"idle_w": 100.0, "node_overhead_w": 250.0})
    assert expense(more, gpus=1, seconds=1.0, tokens=1, busy=0.5).watts_per_gpu == 650
