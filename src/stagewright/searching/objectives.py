"""Objectives of a search: least time, memory, cost or energy, or highest MFU.

Steps of different sizes (batch, sequence length, number of GPUs) are compared per token. Several
objectives make a Pareto front: the candidates that no other beats in all of them.

>>> values = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [3.0, 3.0], [1.0, 3.0]])
>>> front(values).tolist()
[True, True, True, False, False]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.errors import UserError, did_you_mean, either
from stagewright.searching.figures import Figures


def _tokens(figures: Figures) -> Float:
    return np.maximum(figures.tokens, 1).astype(np.float64)


def _memory(figures: Figures) -> Float:
    return np.where(np.isnan(figures.seconds), np.nan, figures.peak)


OBJECTIVES: Mapping[str, Callable[[Figures], Float]] = {
    "time": lambda figures: figures.seconds / _tokens(figures),
    "memory": _memory,
    "days": lambda figures: figures.seconds / _tokens(figures) / figures.useful,
    "cost": lambda figures: figures.usd / _tokens(figures) / figures.useful,
    "energy": lambda figures: figures.joules / _tokens(figures),
    "mfu": lambda figures: -figures.mfu,
}
"""Columns to minimize, per token."""

MISSING: Mapping[str, str] = {
    "time": "no time is known",
    "memory": "no memory is known",
    "days": "no time is known",
    "cost": "{hardware}: no price is known; give --price or --costs",
    "energy": "{hardware}: no figures of power are known",
    "mfu": "only training has an MFU; use --objective time",
}
"""Reasons why an objective is missing."""
_MAX_NAMES = 3
"""Limit of hardware names in a reason."""


def missing_reason(name: str, hardware: Iterable[str]) -> str:
    """Reason why candidates on some hardware lack an objective.

    >>> missing_reason("cost", ["a100", "b200", "a100"])
    'a100 and b200: no price is known; give --price or --costs'
    """
    names = [*dict.fromkeys(hardware)]
    if len(names) > _MAX_NAMES:
        names = [*names[:_MAX_NAMES], f"{len(names) - _MAX_NAMES:,} others"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return MISSING[name].format(hardware=listed)


def check_objectives(names: Sequence[str]) -> tuple[str, ...]:
    """Names of objectives without repetition; UserError for an unknown one."""
    for name in names:
        words = [word.strip() for word in name.split(",")]
        if len(words) > 1 and all(word in OBJECTIVES for word in words):
            repeated = " ".join(f"--objective {word}" for word in words)
            raise UserError(f"--objective {name}: one name each; give {repeated}")
        if name not in OBJECTIVES:
            raise UserError(
                f"--objective {name}: wanted {either(OBJECTIVES)}{did_you_mean(name, OBJECTIVES)}"
            )
    return tuple(dict.fromkeys(names)) or ("time",)


def values(figures: Figures, names: Sequence[str]) -> Float:
    """Objectives to minimize [candidates, objectives]; infinite where missing."""
    columns = np.stack([OBJECTIVES[name](figures) for name in names], axis=1)
    return np.where(np.isnan(columns), np.inf, columns)


def front(values: Float) -> Bool:
    """Mask of Pareto-optimal rows: the first of equal rows, none with an infinite value."""
    order = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    on_front = np.zeros(len(values), dtype=bool)
    if values.shape[1] == 2:  # sorted by the first, each must be better in the second
        second = values[order, 1]
        best = np.minimum.accumulate(np.concatenate([[np.inf], second[:-1]]))
        on_front[order[(second < best) & np.isfinite(values[order, 0])]] = True
        return on_front
    optimal: list[Float] = []
    for row in order.tolist():
        value = values[row]
        if np.isfinite(value).all() and not any((other <= value).all() for other in optimal):
            optimal.append(value)
            on_front[row] = True
    return on_front
