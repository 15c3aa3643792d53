"""Cost of ownership per GPU-hour: capital, power, network and building, over years.

>>> own = Ownership(gpu_usd=30_000, network_usd=4_000, years=4, usd_per_kwh=0.08, pue=1.2)
>>> round(own.usd_per_gpu_hour(watts=1000), 3)  # 34,000 USD over 35,064 hours, and 1.2 kWh
1.066
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from stagewright.arrays import Float
from stagewright.errors import UserError
from stagewright.files import from_yaml, read_text
from stagewright.time.hardware import FigureBlock, figure_error

HOURS_PER_YEAR = 8766.0

Watts = TypeVar("Watts", float, Float)


class Ownership(FigureBlock):
    """A cost file: USD per GPU, watts per GPU with its share of the node."""

    gpu_usd: float = Field(ge=0)
    """Price of a GPU with its share of the server."""
    network_usd: float = Field(ge=0, default=0)
    """Adapters, cables and switches of all tiers."""
    building_usd_per_kw: float = Field(ge=0, default=0)
    """Building, power distribution and cooling, per kW that the GPU draws."""
    upkeep: float = Field(ge=0, le=1, default=0)
    """Repairs, staff and software per year, as a share of all capital."""
    years: float = Field(gt=0)
    """Years after which the capital is written off."""
    utilization: float = Field(gt=0, le=1, default=1)
    """Share of the hours in which the machine does paid work; power is drawn in these alone."""
    usd_per_kwh: float = Field(ge=0)
    pue: float = Field(ge=1, default=1)
    """Power of the whole building over that of its computers."""

    def usd_per_gpu_hour(self, watts: Watts) -> Watts:
        """Cost of a paid GPU-hour at a power of `watts`; an array for an array."""
        capital = self.gpu_usd + self.network_usd + self.building_usd_per_kw * watts / 1000
        hours = self.years * HOURS_PER_YEAR * self.utilization
        power = watts / 1000 * self.pue * self.usd_per_kwh
        return capital * (1 + self.upkeep * self.years) / hours + power


def costs_of(price: float | None, path: str | None) -> Ownership | None:
    """Costs of a cluster that names a cost file; UserError if it also has a price."""
    if path is None:
        return None
    if price is not None:
        raise UserError("price and costs both say what a GPU-hour costs; give one of the two")
    return load(path)


def load(path: str | Path) -> Ownership:
    """The costs of a YAML file; every error is a UserError of one line."""
    raw = from_yaml(read_text(path, "costs in YAML"), path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: got {raw!r:.40}, wanted keys such as gpu_usd: 30000")
    try:
        return Ownership.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{path}: {figure_error(error, Ownership.model_fields)}") from None
