"""Time that a choice of layout by prediction loses, where several layouts were measured.

    python benchmarks/regret.py FILE [--jobs N]

prints the jobs among the measurements of a file (the form of `stagewright validate --rows`).
`benchmarks/accuracy.py` has those of the package. Rows of one model, batch, precision, framework
and accelerator on equally many GPUs that differ in their layout are one job. The layout with the
shortest predicted step is picked; its regret is how much longer its measured step is than the
shortest measured one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.evidence import training
from stagewright.evidence.rows import RATES, Prediction, compare
from stagewright.evidence.statistics import LOW, SWEEP
from stagewright.evidence.training import Measurement, held_out
from stagewright.executors import cores
from stagewright.model.config import ModelConfig
from stagewright.run.sections import EXPERIMENT, RUN_SECTIONS
from stagewright.run.settings import Run
from stagewright.texttable import Table

FEWEST = 3
"""Layouts of a job from which a choice is one."""
_TRAINED_SECTIONS = ("model", "adapters", "precision")
TRAINED = frozenset(
    {
        *(f.name for key in _TRAINED_SECTIONS for f in fields(RUN_SECTIONS[key][1])),
        *("seq_length", "decoder_seq_length", "document_length", "global_batch_size", "framework"),
        *("moe_expert_capacity_factor", "params_dtype", "grad_reduce_dtype"),
    }
)
"""Settings that say what is trained; rows of one job are equal in them and may differ in others."""


class Regret(NamedTuple):
    """A job, and what its choice by prediction costs."""

    source: str
    model: str
    """Layers and hidden size."""
    hardware: str
    precision: str
    gpus: int
    global_batch_size: int
    seq_length: int
    layouts: int
    regret: float
    """Measured step of the picked layout / shortest measured step - 1."""
    rank: int
    """The place of the picked layout by measured time; 1: the shortest."""
    spearman: float
    """Correlation of the ranks by predicted and by measured time."""
    picked: str
    """The row of the picked layout."""
    best: str
    """The row of the layout with the shortest measured step."""
    error_of_picked: float
    """Error of the predicted time of the picked layout: negative where predicted fast."""
    error_of_best: float
    low_utilization: bool
    """Whether even the best layout reaches less than a tenth of the peak."""


class Summary(NamedTuple):
    """The regrets of several jobs."""

    jobs: int
    mean: float
    worst: float
    first: float
    """Share of the jobs whose best layout was picked."""
    spearman: float
    """Mean over jobs."""


_Pair = tuple[Measurement, Prediction]


def job(m: Measurement) -> str:
    """What a row trains, and on which GPUs and hosts: equal for the layouts of one job."""
    machine = (m.hardware, m.network_gb_s, m.run.world_size)
    same = (m.source, m.quantity, _stated(m.model), machine, _trained(m.run))
    hosts = (m.execution.collective_checks, m.execution.p2p_metadata_s)
    return repr((*same, hosts) if any(hosts) else same)


def _trained(run: Run) -> list[tuple[str, object]]:
    """What is trained, without defaults: a setting that is new to the package changes no job."""
    known = {
        name: EXPERIMENT[name].default_of(run.framework) for name in TRAINED if name in EXPERIMENT
    }
    values = ((name, getattr(run, name)) for name in sorted(TRAINED))
    return [(name, value) for name, value in values if value != known.get(name)]


def _stated(model: ModelConfig) -> list[tuple[str, object]]:
    """The fields of a model that are no defaults, in the order of their names; not its address."""
    values = ((f.name, getattr(model, f.name), f.default) for f in fields(model))
    values = (value for value in values if value[0] != "source")
    return sorted((name, value) for name, value, default in values if value != default)


def regrets(pairs: Iterable[_Pair], *, only_held_out: bool = False) -> list[Regret]:
    """The regret of each job among rows and their predictions, in the order of the rows.

    `only_held_out`: choices among those layouts alone to which no constant may be fitted.
    """
    jobs: dict[str, dict[str, list[_Pair]]] = {}
    for m, o in pairs:
        if not only_held_out or held_out(m):
            jobs.setdefault(job(m), {}).setdefault(_layout(m), []).append((m, o))
    return [_regret([*found.values()]) for found in jobs.values() if len(found) >= FEWEST]


def _layout(m: Measurement) -> str:
    return repr((m.run, m.execution, m.attention_kernel))


def _regret(layouts: Sequence[Sequence[_Pair]]) -> Regret:
    """The regret of a job; a layout that was measured several times counts with the mean."""
    rows = [pairs[0] for pairs in layouts]
    measured = np.array([fmean(_seconds(o, o.measured) for _, o in p) for p in layouts])
    predicted = np.array([_seconds(o, o.predicted) for _, o in rows])
    pick, best = int(predicted.argmin()), int(measured.argmin())
    m = rows[best][0]
    layers = m.run.layers or m.model.num_layers
    return Regret(
        source=m.source,
        model=f"{layers} x {m.model.hidden_size}",
        hardware=m.hardware,
        precision="mxfp8" if m.run.fp8_recipe == "mxfp8" else m.run.precision,
        gpus=m.run.world_size,
        global_batch_size=m.run.resolved(m.model).global_batch_size or 0,
        seq_length=m.run.seq_length or 0,
        layouts=len(layouts),
        regret=float(measured[pick] / measured[best] - 1),
        rank=int((measured < measured[pick]).sum()) + 1,
        spearman=_spearman(predicted, measured),
        picked=rows[pick][0].row,
        best=m.row,
        error_of_picked=float(predicted[pick] / measured[pick] - 1),
        error_of_best=float(predicted[best] / measured[best] - 1),
        low_utilization=m.low_utilization,
    )


def _seconds(o: Prediction, value: float) -> float:
    """A time in proportion to the seconds of a step, of a job whose rows have one quantity."""
    return 1 / value if o.quantity in RATES else value


def _spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson's correlation of the ranks; 0 where all values of one are equal.

    >>> _spearman(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 4.0]))
    0.5
    """
    a, b = (_ranks(values) - (len(values) - 1) / 2 for values in (one, other))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return round(float(a @ b) / scale, 12) if scale else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The place of each value from 0; equal values share the mean of their places."""
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[group]


def summary(jobs: Sequence[Regret]) -> Summary:
    """The statistics of at least one job."""
    regret = np.array([r.regret for r in jobs])
    return Summary(
        len(jobs),
        float(regret.mean()),
        float(regret.max()),
        fmean(r.rank == 1 for r in jobs),
        fmean(r.spearman for r in jobs),
    )


def by_source(jobs: Sequence[Regret]) -> list[tuple[str, list[Regret]]]:
    """The jobs of each source, then of several; those under a tenth of the peak behind."""
    groups: list[tuple[str, list[Regret]]] = []
    for low, words in ((False, ""), (True, f", {LOW}")):
        chosen = [r for r in jobs if r.low_utilization == low]
        named = {source: [r for r in chosen if r.source == source] for source in _sources(chosen)}
        if SWEEP in named and len(named) > 1:
            named[f"all but {SWEEP}"] = [r for r in chosen if r.source != SWEEP]
        if len(named) > 1:
            named["all"] = chosen
        groups += [(name + words, found) for name, found in named.items()]
    return groups


def _sources(jobs: Iterable[Regret]) -> list[str]:
    return sorted({r.source for r in jobs}, key=str.lower)


def listed(jobs: Sequence[Regret]) -> Table:
    """The jobs as a table, one row each."""
    names = ("source", "model", "hardware", "precision", "gpus", "global_batch_size", "layouts")
    columns = {name: [getattr(r, name) for r in jobs] for name in names}
    figures = {
        "regret": [r.regret for r in jobs],
        "rank": [r.rank for r in jobs],
        "Spearman": [round(r.spearman, 2) for r in jobs],
        "error of pick": [r.error_of_picked for r in jobs],
        "of best": [r.error_of_best for r in jobs],
    }
    units = {"gpus": "", "global_batch_size": "", "layouts": "", "regret": "share", "rank": ""}
    units |= {"Spearman": "", "error of pick": "error", "of best": "error"}
    shown = {"gpus": "GPUs", "global_batch_size": "batch"}
    columns = {shown.get(name, name): values for name, values in columns.items()}
    units = {shown.get(name, name): unit for name, unit in units.items()}
    return Table("", columns | figures, units)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="measurements of your own (CSV)")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    given = parser.parse_args()
    rows = training.load(given.file)
    outcomes = zip(rows, compare(rows, jobs=given.jobs), strict=True)
    found = regrets((m, outcome) for m, outcome in outcomes if isinstance(outcome, Prediction))
    if not found:
        parser.error(
            f"of {len(rows)} rows none are of one model, batch, precision and number of GPUs in "
            f"{FEWEST} layouts or more"
        )
    print(listed(found))
    print(f"time lost: {summary(found).mean:.1%} on average, {summary(found).worst:.1%} at most")
