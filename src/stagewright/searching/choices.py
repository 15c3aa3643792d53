"""Rows of the second table of a search: each value of a setting, and the candidates with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool
from stagewright.run.sections.declare import text_of
from stagewright.searching.candidates import HARDWARE, Candidates

_COMPARED = ("tp", "pp", "cp", "ep", "etp", "zero", "recompute", "precision", HARDWARE)
"""Settings whose values are compared, besides those that the user varies."""
_VARIANTS = (
    *("dp", "vpp", "micro_batch_size", "schedule", "sequence_parallel", "cp_comm_type"),
    *("moe_flex_dispatcher", "fp8_recipe", "memory_allowance", "recompute_modules"),
)
"""Settings of variants of a layout, whose values are not compared."""


class ComparedValue(NamedTuple):
    """One value of a setting."""

    setting: str
    value: str
    mask: Bool
    """Candidates that have the value."""


def choices_of(candidates: Candidates) -> Iterator[ComparedValue]:
    """Values of settings that differ between candidates, in order; numbers of GPUs last."""
    names = [n for n in _COMPARED if n in candidates.columns]
    names += [n for n in candidates.columns if n not in {*_COMPARED, *_VARIANTS}]
    for name in names:
        column = candidates.columns[name]
        if len(column.values) < 2:
            continue
        order = sorted(range(len(column.values)), key=lambda code: _order(column.values[code]))
        for code in order:
            yield ComparedValue(name, _text(column.values[code]), column.codes == code)
    worlds = candidates.world_size
    for gpus in np.unique(worlds).tolist() if (worlds != worlds[0]).any() else ():
        yield ComparedValue("GPUs", f"{gpus:,}", worlds == gpus)


def _order(value: Any) -> tuple[bool, Any]:
    """Sort key: numbers by size, then other values by name."""
    number = isinstance(value, int | float)
    return (not number, value if number else _text(value))


def _text(value: Any) -> str:
    if hasattr(value, "scale_up"):
        return value.name
    return "on" if value is True else "off" if value is False else text_of(value)
