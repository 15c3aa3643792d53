"""Power and cost of a step, to first order: utilization and TDP, and a price per GPU-hour.

>>> from stagewright.time.hardware import resolve
>>> spent = expense(resolve("h100-sxm"), gpus=8, seconds=10.0, tokens=10**6, busy=0.5, price=2.0)
>>> spent.watts_per_gpu, spent.joules, round(spent.usd_per_million_tokens or 0, 4)
(420.0, 33600.0, 0.0444)
"""

from __future__ import annotations

from typing import NamedTuple

from stagewright.time.hardware import Hardware

IDLE_FRACTION = 0.2
"""Power of a GPU that waits over its TDP, where its file gives no `idle_w`: an assumption."""


class Expense(NamedTuple):
    """Energy and cost of a step."""

    watts_per_gpu: float
    """Mean over the step, of the GPU and its share of the node (`node_overhead_w`)."""
    joules: float
    """Energy of all GPUs."""
    joules_per_token: float
    usd_per_million_tokens: float | None
    """None without a price."""


def expense(
    hardware: Hardware, *, gpus: int, seconds: float, tokens: int, busy: float,
    price: float | None = None,
) -> Expense:  # fmt: skip
    """Energy and cost of a step that takes `seconds` on `gpus` GPUs.

    The power of a GPU grows linearly from idle to TDP with `busy`, the share of the step, 0 to 1,
    in which the kernels of the mean GPU run. `price` is in USD per GPU and hour; None takes the
    hardware's. Kernels that wait for memory draw less than the TDP, so the estimate is rather high.
    """
    idle = hardware.idle_w if hardware.idle_w is not None else IDLE_FRACTION * hardware.tdp_w
    watts = idle + (hardware.tdp_w - idle) * busy + hardware.node_overhead_w
    joules = watts * gpus * seconds
    price = hardware.price_usd_per_gpu_hour if price is None else price
    usd = None if price is None else price * gpus * seconds / 3600 / tokens * 1e6
    return Expense(watts, joules, joules / tokens, usd)
