"""What a search looks for: the least time, memory, cost or energy, or the most use of the GPUs.

Steps of different sizes (a batch, a length or a number of GPUs that is searched, too) are compared
by token. Several objectives make a front: the candidates that no other beats in all of them.

>>> values = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [3.0, 3.0], [1.0, 3.0]])
>>> front(values).tolist()
[True, True, True, False, False]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.errors import UserError, did_you_mean, either
from stagewright.searching.figures import Figures


class Objective(NamedTuple):
    """A figure, of which less is better."""

    column: Callable[[Figures], Float]
    name: str
    unit: str
    """Of the column, as `texttable.Table` prints it."""


def _tokens(of: Figures) -> Float:
    return np.maximum(of.tokens, 1).astype(np.float64)


def _time(of: Figures) -> Float:
    return of.seconds / _tokens(of)


def _memory(of: Figures) -> Float:
    return np.where(np.isnan(of.seconds), np.nan, of.peak)


def _cost(of: Figures) -> Float:
    return of.usd / _tokens(of)


def _energy(of: Figures) -> Float:
    return of.joules / _tokens(of)


def _idle(of: Figures) -> Float:
    return -of.mfu


OBJECTIVES: Mapping[str, Objective] = {
    "time": Objective(_time, "seconds per token", "s"),
    "memory": Objective(_memory, "bytes of the fullest rank", "B"),
    "cost": Objective(_cost, "USD per token", "figure"),
    "energy": Objective(_energy, "J per token", "figure"),
    "mfu": Objective(_idle, "MFU", "share"),
}


UNKNOWN: Mapping[str, str] = {
    "time": "no time is known",
    "memory": "no memory is known",
    "cost": "{hardware}: no price is known; give --price or --costs",
    "energy": "{hardware}: no figures of power are known",
    "mfu": "only training has an MFU; use --objective time",
}
"""Why the objective of a candidate that has been evaluated is not known, on which hardware."""


def why_unknown(name: str, hardware: Iterable[str]) -> str:
    """Why an objective is not known of candidates on some hardware.

    >>> why_unknown("cost", ["a100", "b200", "a100"])
    'a100 and b200: no price is known; give --price or --costs'
    """
    names = [*dict.fromkeys(hardware)]
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"{len(names) - _NAMED:,} others"]
    said = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return UNKNOWN[name].format(hardware=said)


_NAMED = 3
"""Hardware that is named; of more, the number is."""


def known(names: Sequence[str]) -> tuple[str, ...]:
    """The names of objectives, each once; UserError for another one."""
    for name in names:
        several = [word.strip() for word in name.split(",")]
        if len(several) > 1 and all(word in OBJECTIVES for word in several):
            repeated = " ".join(f"--objective {word}" for word in several)
            raise UserError(f"--objective {name}: one name each; give {repeated}")
        if name not in OBJECTIVES:
            raise UserError(
                f"--objective {name}: wanted {either(OBJECTIVES)}{did_you_mean(name, OBJECTIVES)}"
            )
    return tuple(dict.fromkeys(names)) or ("time",)


def values(figures: Figures, names: Sequence[str]) -> Float:
    """The objectives of candidates, of which less is better: [candidates, objectives].

    NaN, where nothing is known or the hardware has no price, is infinite: never the best.
    """
    columns = np.stack([OBJECTIVES[name].column(figures) for name in names], axis=1)
    return np.where(np.isnan(columns), np.inf, columns)


def front(values: Float) -> Bool:
    """Which rows no other row beats: none is as good in all columns and better in one.

    Of equal rows, the first. Rows with an infinite value are never part of it.
    """
    order = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    on_front = np.zeros(len(values), dtype=bool)
    kept: list[Float] = []
    if values.shape[1] == 1:
        finite = order[np.isfinite(values[order]).all(axis=1)]
        on_front[finite[:1]] = True
        return on_front
    if values.shape[1] == 2:  # in order of the first, each must be better in the second
        second = values[order, 1]
        best = np.minimum.accumulate(np.concatenate([[np.inf], second[:-1]]))
        on_front[order[(second < best) & np.isfinite(values[order, 0])]] = True
        return on_front
    for row in order.tolist():
        value = values[row]
        if np.isfinite(value).all() and not any((other <= value).all() for other in kept):
            kept.append(value)
            on_front[row] = True
    return on_front
