"""Metrics of candidates as columns: time, memory, utilization, energy and cost of a step.

>>> import numpy as np
>>> two = np.array([2.0, 1.0])
>>> figures = Figures(two, {"parameters": np.array([10, 30])}, np.array([20, 20]), {}, 0 * two,
...     np.array([8, 8]), 0.4 * two, 0.3 * two, 400 * two, 700 * two, 3 * two, two > 1)
>>> figures.peak.tolist(), figures.fits.tolist(), figures.tokens_per_second.tolist()
([10, 30], [True, False], [4.0, 8.0])
>>> merged = Figures.concatenated([figures.take([1]), figures])
>>> merged.seconds.tolist()
[1.0, 2.0, 1.0]
>>> merged.put(np.array([2, 0]), figures)
>>> merged.seconds.tolist(), merged.memory["parameters"].tolist()
([1.0, 2.0, 2.0], [30, 10, 10])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.searching.candidates import Candidates
from stagewright.time.ownership import costs_of

_BY_NAME = ("memory", "exposed")
"""Fields with one column per category or axis."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Metrics of candidates [candidates], defined as in `SimulatedStep`; NaN where unknown."""

    seconds: Float
    """Step time."""
    memory: dict[str, Int]
    """Peak bytes of the fullest rank by category: `program.columns.CATEGORIES`, `allowance`."""
    device_memory: Int
    """Bytes that a rank may use."""
    exposed: dict[str, Float]
    """Seconds of a step in which the mean GPU waits for communication, by axis."""
    bubble: Float
    """Seconds of a step in which the mean GPU waits for other ranks."""
    tokens: Int
    """New tokens of a step over all ranks."""
    mfu: Float
    """Model FLOPs utilization, attention counted in full."""
    mfu_causal: Float
    """Model FLOPs utilization, attention counted without masked pairs."""
    tflops: Float
    """Model TFLOP/s of a GPU; `mfu` times the peak."""
    joules: Float
    """Energy of a step over all GPUs."""
    usd: Float
    """Cost of a step over all GPUs; NaN without a price."""
    exact: Bool
    """True for metrics of `simulate`, false for estimates."""

    def __len__(self) -> int:
        return len(self.seconds)

    def __repr__(self) -> str:
        return f"<figures of {len(self)} candidates, {int(self.exact.sum())} exact>"

    @property
    def peak(self) -> Int:
        """Peak bytes of the fullest rank, all categories in total."""
        return sum(self.memory.values(), np.zeros(len(self), dtype=np.int64))

    @property
    def fits(self) -> Bool:
        """Mask of candidates whose fullest rank fits into its memory."""
        return self.peak <= self.device_memory

    @property
    def tokens_per_second(self) -> Float:
        """Tokens per second of all GPUs in total."""
        return self.tokens / self.seconds

    def take(self, indices: Sequence[int] | Int | Bool) -> Self:
        """Metrics of the selected candidates, in the order of `indices`."""
        at = np.asarray(indices)
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: {k: v[at] for k, v in column.items()} if name in _BY_NAME else column[at]
            for name, column in columns.items()
        }
        return type(self)(**taken)

    def put(self, indices: Int, source: Figures) -> None:
        """Overwrite metrics of candidates, in the order of `indices`.

        A category or axis that `source` lacks becomes 0 for these; a new one is 0 for the others.
        """
        for field in fields(self):
            target, values = getattr(self, field.name), getattr(source, field.name)
            if field.name not in _BY_NAME:
                target[indices] = values
                continue
            for column in target.values():
                column[indices] = 0
            for name, column in values.items():
                if name not in target:
                    target[name] = np.zeros(len(self), dtype=column.dtype)
                target[name][indices] = column

    def extrapolated(self, other: Figures, times: Float) -> Self:
        """Estimates: these metrics plus `times` the difference to `other`; absent columns are 0."""

        def column(start: Any, end: Any) -> Any:
            values = start + times * (end - start)
            return values if start.dtype.kind == "f" else np.ceil(values).astype(start.dtype)

        columns: dict[str, Any] = {}
        for field in fields(self):
            start, end = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("exact", "tokens", "device_memory"):
                columns[field.name] = start & False if field.name == "exact" else start
            elif field.name in _BY_NAME:
                zeros = {name: 0 * values for name, values in (start | end).items()}
                start, end = zeros | start, zeros | end
                columns[field.name] = {name: column(start[name], end[name]) for name in zeros}
            else:
                columns[field.name] = column(start, end)
        return type(self)(**columns)

    @classmethod
    def concatenated(cls, batches: Sequence[Figures]) -> Self:
        """Concatenate metrics of several candidate batches; a category that one lacks is 0."""
        columns: dict[str, Any] = {}
        for field in fields(cls):
            parts: list[Any] = [getattr(batch, field.name) for batch in batches]
            if field.name not in _BY_NAME:
                columns[field.name] = np.concatenate(parts)
                continue
            names = dict.fromkeys(name for part in parts for name in part)
            columns[field.name] = {
                name: np.concatenate(
                    [p.get(name, 0 * b.tokens) for p, b in zip(parts, batches, strict=True)]
                )
                for name in names
            }
        return cls(**columns)

    @classmethod
    def missing(cls, count: int) -> Self:
        """Metrics of candidates that were neither estimated nor simulated: NaN, or 0."""
        names = "seconds", "bubble", "mfu", "mfu_causal", "tflops", "joules", "usd"
        columns: dict[str, Any] = {name: np.full(count, np.nan) for name in names}
        columns |= {name: np.zeros(count, dtype=np.int64) for name in ("device_memory", "tokens")}
        return cls(**columns, memory={}, exposed={}, exact=np.zeros(count, dtype=bool))


def with_costs(candidates: Candidates, figures: Figures) -> Figures:
    """Metrics with USD by the cost file, if the cluster has one; power is mean power of a step."""
    cluster = candidates.base.cluster
    costs = costs_of(cluster.price, cluster.costs)
    if costs is None:
        return figures
    gpus = candidates.world_size + candidates.prefill_gpus
    hourly = costs.usd_per_gpu_hour(figures.joules / (figures.seconds * gpus))
    return replace(figures, usd=np.asarray(hourly * gpus * figures.seconds / 3600))
