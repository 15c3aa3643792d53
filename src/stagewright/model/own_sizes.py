"""Sizes in which some layers of a model differ from its others.

>>> OwnSizes(num_query_groups=4, kv_channels=512).given
{'num_query_groups': 4, 'kv_channels': 512}
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from stagewright.model.fields import FRACTION, Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSizes:
    """What replaces the model's fields of these names in some layers; None: as the model has it."""

    num_attention_heads: Annotated[int | None, Count(1, 2**16)] = None
    num_query_groups: Annotated[int | None, Count(1, 2**16)] = None
    kv_channels: Annotated[int | None, Count(1, 2**16)] = None
    ffn_hidden_size: Annotated[int | None, Count(1, 2**26)] = None
    rotary_fraction: Annotated[float | None, FRACTION] = None
    keys_are_values: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are replaced."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
