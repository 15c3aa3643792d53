"""Lower bounds of candidates beside their figures in columns, and searches with both."""

import numpy as np
import pytest

from effort import times
from stagewright.explore.answer import promising
from stagewright.explore.answer.ranking import Wanted
from stagewright.explore.answer.search import search
from stagewright.explore.bounding.bounds import bounds, rough_bounds
from stagewright.explore.evaluate import evaluate
from stagewright.explore.lots import in_lots
from stagewright.search.defaults import default_axes
from stagewright.search.space import Space
from stagewright.search.machines import Fleet
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as model_of
from stagewright.run.experiment import Experiment
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.time.simulate.step import simulate

ORDERS = {
    "order": ["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp", "pp-tp-cp-ep-dp", "cp-ep-dp-pp-tp"],
    "no_overlap": [frozenset(), frozenset({"dp"})],
    "overlap_param_gather": [False, True],
}
# Without recomputation, the host holds more, and kernels wait for what it sends.
OFFLOADED = {"cpu_offloading_num_layers": [7], "recompute": ["full"], "tp": [1, 2], "cp": [1]}
# FSDP never holds whole gradients of a step, and adds parts of them.
SPLIT_GRADIENTS = {"zero": [2], "tp": [8], "cp": [2], "pp": [1], "micro_batch_size": [1]}

# Transfers take longer than kernels: what they bring comes far behind the order of issue.
LATE_TRANSFERS = {"sequence_parallel": [True], "tp": [2, 4], "cp": [1], "pp": [1], "zero": [1, 2]}
SMALL = {"layers": 1, "vocab": 1000, "gpus": 8, "batch": 32}


def space(model, gpus=32, batch=128, axes=(), **settings):
    """The candidates of a space by default."""
    run = Run(model=model, global_batch_size=batch, **settings)
    of = model_of(model).with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    fleets = [Fleet(resolve("h100-sxm"), gpus)]
    every = default_axes(run, of, fleets) | dict(axes)
    base = Experiment(run, ClusterSection(), Execution())
    return Space.of(base, fleets, every).candidates().rows


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("model", "axes", "settings"),
    [
        ("llama3-8b", {"dp_shard": [None, 2], **ORDERS}, {"layers": 8}),
        ("mixtral-8x7b", {"tp": [1, 2], "recompute": ["none"], "cp": [1]}, {"layers": 4}),
        ("llama3-8b", SPLIT_GRADIENTS, {"layers": 9, "gpus": 16, "framework": "torchtitan"}),
        ("llama3-8b", OFFLOADED, {"layers": 8, "gpus": 8, "batch": 32}),
        ("gpt2", {"schedule": ["zb-h1", "zbv", "gpipe"], "vpp": [1, 2], "cp": [1]}, {}),
        ("gpt2", {"schedule": ["zb-h2", "v-min", "dualpipe"], "vpp": [1, 2], "cp": [1]}, {}),
    ],
)
def test_no_candidate_takes_less_than_its_bounds(model, axes, settings):
    rows = space(model, axes=axes, **settings)
    draw = np.random.default_rng(0).permutation(len(rows))
    rows = rows.take(np.sort(draw[: times(2)]))
    figures, least, rough = evaluate(rows).figures, bounds(rows), rough_bounds(rows)
    seen = ~np.isnan(figures.seconds)
    assert seen.any()
    assert (least.seconds <= figures.seconds)[seen].all()
    assert (least.bytes <= figures.peak)[seen].all()
    assert np.median((least.seconds / figures.seconds)[seen]) > 0.5
    assert (rough.seconds <= least.seconds).all()
    assert (rough.bytes <= least.bytes).all()


@pytest.mark.numerics
def test_no_step_holds_less_than_its_bound_however_late_transfers_begin():
    rows = space("opt-125m", axes=LATE_TRANSFERS, **SMALL)
    assert (bounds(rows).bytes <= evaluate(rows).figures.peak).all()
    least = bounds(rows, simulated=True).bytes
    held = np.array([
        simulate(compile(rows.run(row), rows.model), rows.machine(row)).fit.peak
        for row in range(len(rows))
    ])  # fmt: skip
    assert (least <= held).all()
    assert np.median(least / held) > 0.8


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("model", "axes", "settings"),
    [
        ("llama3-8b", {"zero": [0, 3]}, {"framework": "torchtitan"}),
        ("mixtral-8x7b", {"overlap_moe_expert_parallel_comm": [True], "zero": [1]}, {}),
        ("mixtral-8x7b", {"moe_flex_dispatcher": [True], "zero": [1]}, {}),
    ],
)
def test_no_candidate_simulated_alone_takes_less_than_its_bounds(model, axes, settings):
    """Also of candidates that columns leave."""
    axes |= {"pp": [1, 2], "tp": [1, 2], "cp": [1], "micro_batch_size": [4], "vpp": [1, 2]}
    rows = space(model, gpus=8, batch=32, axes=axes, layers=4, **settings)
    draw = np.random.default_rng(0).permutation(len(rows))
    rows = rows.take(np.sort(draw[: times(2)]))
    least = bounds(rows)
    for row in range(len(rows)):
        compiled = compile(rows.run(row), rows.model)
        step = simulate(compiled, rows.machine(row), rows.execution(row))
        assert least.seconds[row] <= step.seconds
        assert least.bytes[row] <= step.fit.peak
    assert (least.seconds > 0).all()


@pytest.mark.slow
def test_the_answer_of_a_search_is_that_of_evaluating_all(monkeypatch):
    axes = {"zero": [1], "recompute": ["none", "full"], "tp": [1], "vpp": [1, 2]}
    rows = space("gpt2", gpus=4, batch=32, axes=axes, layers=4)
    every = search(rows, Wanted(top=3, bounded=False), evaluate=in_lots)
    monkeypatch.setattr(promising, "FEW", 0)
    found = search(rows, Wanted(top=3), evaluate=in_lots)
    assert found.bounded_out > len(rows) // 3
    names = [[of.rows.run(row).describe() for row in of.best.tolist()] for of in (found, every)]
    assert names[0] == names[1]
    assert found.figures.seconds[found.best].tolist() == every.figures.seconds[every.best].tolist()
    assert found.open == every.open == 0
    assert found.evaluated + found.bounded_out + found.unseen == len(rows) == found.candidates
