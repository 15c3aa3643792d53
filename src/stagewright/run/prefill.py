"""The setting `prefill`: a second group of ranks, as text or as settings by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from reprlib import repr as shown
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stagewright.errors import UserError
from stagewright.run.sections.inference import PrefillRanks
from stagewright.run.validation import describe_error

_RANKS = TypeAdapter(PrefillRanks)


def read_prefill(value: object) -> object:
    """A mapping as ranks; text, ranks and None as they are."""
    if not isinstance(value, Mapping):
        return value
    try:
        return _RANKS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [of.name for of in fields(PrefillRanks)]
        raise UserError(f"prefill: {describe_error(first, names)}") from None


def ranks_of_text(text: str) -> PrefillRanks:
    """Ranks from text.

    >>> ranks_of_text("tp=4,pp=2").world_size
    8
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, number in pairs:
        number = number.strip()
        if not (equals and number.isdecimal() and number.isascii() and len(number) < 12):
            raise UserError(f"prefill: {shown(name)} is no setting; wanted such as tp=4,pp=2")
    settings: dict[str, Any] = {name.strip(): int(number) for name, _, number in pairs}
    ranks = read_prefill(settings)
    assert isinstance(ranks, PrefillRanks)
    return ranks
