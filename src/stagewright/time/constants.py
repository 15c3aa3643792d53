"""Blocks of figures in a hardware file: constants of kernels for `roofline`.

>>> tiles = GemmFit(fraction=0.8, tile_factor=0, tile_us=0.6, quantization=0, split_us=0,
...     launch_us=2, memory_fraction=0.8, sharpness=3)
>>> tiles.slowed(0.5).fraction
0.4
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class FigureBlock(BaseModel):
    """A block of figures in a hardware file: finite, and of keys that are known."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject texts and switches instead of numbers, which pydantic would convert.

        YAML 1.1 reads 1e3 as text.
        """
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value):
            return value
        if isinstance(value, str | bool) and wanted in _NUMBERS:
            raise PydanticCustomError("float_type", "wanted a number")
        return value

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        """Reject figures beyond those of any device: their products are infinite."""
        if isinstance(value, int | float) and abs(value) > MOST:
            most = f"wanted at most {MOST:g}; check the unit"
            raise PydanticCustomError("beyond_reason", "{most}", {"most": most})
        return value


def wanted_of(message: str) -> str:
    """Message of pydantic on a figure, in the terms of our errors.

    >>> wanted_of("Input should be greater than 0"), wanted_of("Input should be a finite number")
    ('wanted a number greater than 0', 'wanted a finite number')
    """
    text = message.removeprefix("Value error, ")
    return text.replace("Input should be a ", "wanted a ").replace(
        "Input should be", "wanted a number"
    )


_NUMBERS: tuple[Any, ...] = (float, int, float | None, int | None)
"""The types of fields that are numbers."""
MOST = 1e12
"""The largest figure of a device that is believed, whatever its unit."""


class GemmFit(FigureBlock):
    """Constants of matrix products in one precision; see `roofline.gemm_seconds`."""

    fraction: float = Field(gt=0, le=1.2)
    """Share of the peak that tiles of 128 x 256 reach, apart from all other terms."""
    tile_factor: float = Field(ge=0)
    tile_us: float = Field(ge=0)
    """Time to start and end a tile."""
    quantization: float = Field(ge=0, le=1)
    """1: the last wave of tiles counts whole; 0: by the share of it that is filled."""
    split_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    memory_fraction: float = Field(gt=0, le=1.2)
    sharpness: float = Field(ge=1)

    def slowed(self, clock: float) -> GemmFit:
        """These constants with compute units at a part of their clock."""
        tile = {"tile_us": self.tile_us / clock, "fraction": self.fraction * clock}
        return self.model_copy(update=tile)


class AttentionFit(FigureBlock):
    """Constants of fused attention; see `roofline.attention_seconds`."""

    fraction: float = Field(gt=0, le=3)
    """Share of the peak that products reach, apart from the exponential."""
    softmax_ps: float = Field(ge=0)
    """Time of one exponential on one compute unit."""
    tile_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    traffic_factor: float = Field(ge=0)
    """Exposed traffic of device memory, over the bytes of operands and results."""
    bwd_ratio: float = Field(gt=0, le=1.5)
    """FLOP/s of backward over those of forward."""
    fp8: AttentionFit | None = None
    """Constants for operands in fp8; None: these, with the peak of fp8."""

    def slowed(self, clock: float) -> AttentionFit:
        """These constants with compute units at a part of their clock."""
        tile = {"tile_us": self.tile_us / clock, "softmax_ps": self.softmax_ps / clock}
        fp8 = self.fp8 and self.fp8.slowed(clock)
        return self.model_copy(update={**tile, "fraction": self.fraction * clock, "fp8": fp8})


class ExpertFit(FigureBlock):
    """Constants of the kernels around the products of experts; see `roofline.copies_seconds`."""

    routing_us: float = Field(ge=0)
    """Time of the small kernels that choose experts and sort tokens by expert."""
    routing_ns: float = Field(ge=0)
    """Time that these kernels take per choice of an expert by a token."""
    copy_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that kernels reach which copy rows by index."""
    gemm: Mapping[str, GemmFit] = Field(default_factory=dict)
    """Grouped products, by precision; a precision without constants takes those of products."""
