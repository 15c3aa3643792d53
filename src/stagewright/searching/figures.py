"""Metrics of candidates as columns: time, memory, utilization, energy and cost of a step.

>>> import numpy as np
>>> two = np.array([2.0, 1.0])
>>> figures = Figures(two, {"parameters": np.array([10, 30])}, np.array([20, 20]), {}, 0 * two,
...     np.array([8, 8]), 0.4 * two, 0.3 * two, 400 * two, 700 * two, 3 * two,
...     two > 0, two > 1)
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.lower.checkpoint import checkpoint
from stagewright.lower.compile import compile
from stagewright.searching.candidates import HARDWARE, Candidates, names_in
from stagewright.time.job import goodput_with
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
    useful: Float
    """Useful share of the time of the job, with its checkpoints and failures; 1 without."""
    simulated: Bool
    """True for metrics of `simulate`, false for estimates."""

    def __len__(self) -> int:
        return len(self.seconds)

    def __repr__(self) -> str:
        return f"<figures of {len(self)} candidates, {int(self.simulated.sum())} simulated>"

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
        return self._of({name: column[at] for name, column in self._columns().items()})

    def put(self, indices: Int, source: Figures) -> None:
        """Overwrite metrics of candidates, in the order of `indices`.

        A category or axis that `source` lacks becomes 0 for these; a new one is 0 for the others.
        """
        columns, values = self._columns(), source._columns()
        for field, key in {**columns, **values}:
            if (field, key) not in columns:
                zeros = np.zeros(len(self), dtype=values[field, key].dtype)
                columns[field, key] = getattr(self, field)[key] = zeros
            columns[field, key][indices] = values.get((field, key), 0)

    def extrapolated(self, other: Figures, times: Float) -> Self:
        """Estimates: these metrics plus `times` the difference to `other`; absent columns are 0."""
        columns, ends, zeros = self._columns(), other._columns(), 0 * self.tokens
        for name in {**columns, **ends}:
            if name[0] not in ("simulated", "tokens", "device_memory", "useful"):
                start, end = columns.get(name, zeros), ends.get(name, zeros)
                values = start + times * (end - start)
                columns[name] = np.ceil(values).astype(np.int64) if name[0] == "memory" else values
        columns["simulated", ""] = np.zeros(len(self), dtype=bool)
        return self._of(columns)

    @classmethod
    def concatenated(cls, batches: Sequence[Figures]) -> Self:
        """Concatenate metrics of several candidate batches; a category that one lacks is 0."""
        parts = [batch._columns() for batch in batches]
        names = dict.fromkeys(name for part in parts for name in part)
        return cls._of({
            name: np.concatenate(
                [part.get(name, 0 * of.tokens) for part, of in zip(parts, batches, strict=True)]
            )
            for name in names
        })  # fmt: skip

    def _columns(self) -> dict[tuple[str, str], Any]:
        """All columns by field, and category or axis if the field has several."""
        named = {of.name: getattr(self, of.name) for of in fields(self)}
        return {
            (field, key): column
            for field, values in named.items()
            for key, column in (values if field in _BY_NAME else {"": values}).items()
        }

    @classmethod
    def _of(cls, columns: Mapping[tuple[str, str], Any]) -> Self:
        """Metrics from `_columns`."""
        values: dict[str, Any] = {name: {} for name in _BY_NAME}
        for (field, key), column in columns.items():
            if field in _BY_NAME:
                values[field][key] = column
            else:
                values[field] = column
        return cls(**values)

    @classmethod
    def missing(cls, count: int) -> Self:
        """Metrics of candidates that were neither estimated nor simulated: NaN, or 0."""
        names = "seconds", "bubble", "mfu", "mfu_causal", "tflops", "joules", "usd", "useful"
        columns: dict[str, Any] = {name: np.full(count, np.nan) for name in names}
        columns |= {name: np.zeros(count, dtype=np.int64) for name in ("device_memory", "tokens")}
        return cls(**columns, memory={}, exposed={}, simulated=np.zeros(count, dtype=bool))


def with_useful_shares(candidates: Candidates, figures: Figures) -> Figures:
    """Estimates with the useful share of the job; checkpoints have the size of the first's."""
    cluster = candidates.base.cluster
    if not cluster.failures or not len(candidates):
        return figures
    memory = candidates.hardware(0).memory
    size = checkpoint(compile(candidates.run(0), candidates.model, device_memory=memory))
    gpus, dp = candidates.world_size, candidates.numbers("dp")

    def useful_share(index: int) -> float:
        even = replace(size, by_pipeline_rank=(size.bytes / int(gpus[index]),))
        return goodput_with(
            candidates.cluster(index), candidates.hardware(index), even,
            gpus=int(gpus[index]), replicas=int(dp[index]),
        ).useful_share  # fmt: skip

    names = (
        "tp",
        "cp",
        "dp",
        "pp",
        HARDWARE,
        *sorted(candidates.columns.keys() & names_in("cluster")),
    )
    return replace(figures, useful=candidates.map_distinct(names, useful_share))


def with_costs(candidates: Candidates, figures: Figures) -> Figures:
    """Metrics with USD by the cost file, if the cluster has one; power is mean power of a step."""
    cluster = candidates.base.cluster
    costs = costs_of(cluster.price, cluster.costs)
    if costs is None:
        return figures
    gpus = candidates.world_size + candidates.prefill_gpus
    hourly = costs.usd_per_gpu_hour(figures.joules / (figures.seconds * gpus))
    return replace(figures, usd=np.asarray(hourly * gpus * figures.seconds / 3600))
