"""The space of a search: what it holds, what it removes and says, and what it refuses."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from columns import candidates_of
from helpers import cases
from stagewright import arrays
from stagewright.errors import UserError
from stagewright.model.catalog import resolve as model_of
from stagewright.run.experiment import Experiment
from stagewright.run.rules import check
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run, usual_batch
from stagewright.searching.candidates import Column
from stagewright.searching.defaults import (
    default_axes,
    default_constraints,
    families_of,
    family_axes,
)
from stagewright.searching.estimate import estimate
from stagewright.searching.lists import values_of
from stagewright.searching.machines import Fleet, varied
from stagewright.searching.request import search_request
from stagewright.searching.space import Space
from stagewright.time.hardware import resolve

H100 = resolve("h100-sxm")


@cases
def test_published_weights_in_fp8_give_the_recipe(
    precision: str | None, recipes: tuple[str | None, ...]
):
    asked: dict[str, Any] = {"model": "deepseek-v3", "precision": precision}
    axes = search_request(asked, hardware=["h100-sxm"], gpus=512).space.axes
    assert axes["fp8_recipe"] == recipes
    assert axes["recompute_modules"][1] == ("norm", "moe_act", "mla_up_proj")


def space(axes: dict[str, Any], gpus: int | None = 8, **settings: Any) -> Space:
    values: dict[str, Any] = {"model": "gpt2", "global_batch_size": 16, **settings}
    run = Run(**values)
    return Space.of(Experiment(run, ClusterSection(), Execution()), [Fleet(H100, gpus)], axes)


def test_candidates_are_the_combinations_that_run():
    axes = {
        "tp": (1, 2, 3, 4), "pp": (1, 2, 4), "vpp": (1, 2), "micro_batch_size": (1, 2, 16),
        "schedule": ("1f1b", "interleaved"), "recompute": ("none", "full"),
    }  # fmt: skip
    result = space(axes).enumerate()
    model = model_of("gpt2")
    expected: list[str] = []
    for values in itertools.product(*axes.values()):
        given: dict[str, Any] = dict(zip(axes, values, strict=True))
        dp, rest = divmod(8, given["tp"] * given["pp"])
        if rest or (given["pp"] == 1 and given["schedule"] != "1f1b"):
            continue
        given |= {"dp": dp, "global_batch_size": 16}
        run = Run(model="gpt2", **given)
        try:
            check(run.resolved(model), model)
        except UserError:
            continue
        expected.append(run.describe())
    got = [result.candidates.run(row).describe() for row in range(len(result.candidates))]
    assert sorted(got) == sorted(expected)
    assert len(expected) > 10
    assert result.combinations == len(result.candidates) + sum(
        each.count for each in result.removed
    )


def test_a_setting_that_does_nothing_is_tried_once():
    result = space({"tp": (1, 2), "sequence_parallel": (True, False)}, gpus=2).enumerate()
    runs = [result.candidates.run(row) for row in range(len(result.candidates))]
    assert [(run.tp, run.sequence_parallel) for run in runs] == [(1, False), (2, False), (2, True)]


def test_a_setting_that_does_nothing_anywhere_is_not_spread_out():
    result = space({"zero": (0, 1), "prefetch": tuple(range(3, 10_003))}, gpus=2).enumerate()
    assert len(result.candidates) == 2
    assert result.combinations == 20_000
    assert [(each.requirement, each.count) for each in result.removed] == [
        ("prefetch changes something", 19_998)
    ]


def test_listed_dp_is_kept_to():
    result = space({"tp": (1, 2, 4), "dp": (2,)}).enumerate()
    assert [result.candidates.run(row).describe() for row in range(len(result.candidates))] == [
        "gpt2 tp=4 dp=2 global_batch_size=16"
    ]


def test_constraints_look_at_many_batches_at_once():
    batches, sizes = tuple(range(1, 201)), tuple(range(1, 101))
    axes = {"global_batch_size": batches, "micro_batch_size": sizes}
    result = space(axes, gpus=2, layers=2).enumerate()
    runs = [result.candidates.run(row) for row in range(len(result.candidates))]
    assert {(run.global_batch_size, run.micro_batch_size) for run in runs} == {
        (batch, size) for batch in batches for size in sizes if batch % (2 * size) == 0
    }
    assert result.combinations == len(runs) + sum(each.count for each in result.removed)
    assert result.removed[0].example.startswith("global_batch_size=1 is not divisible by")


def test_too_many_checks_are_refused_with_their_number():
    lengths, sizes = tuple(range(1, 1001)), tuple(range(1, 1001))
    axes = {"seq_length": lengths, "micro_batch_size": sizes, "global_batch_size": (None,)}
    of = space(axes, gpus=None, global_batch_size=None)
    with pytest.raises(
        UserError, match=r"1e\+06 combinations: micro_batch_size x seq_length alone"
    ):
        of.enumerate()


def test_machines_that_differ_in_memory_alone_are_evaluated_once():
    vary = {"memory.gb": "2.5,3,80", "scale_up.size": "4,8"}
    given = {"model": "gpt2", "layers": 2, "tp": "1,2", "pp": 1, "zero": 3, "recompute": "none"}
    own = {"micro_batch_size": "8,16", "global_batch_size": 64, "sequence_parallel": False}
    rows = (
        search_request(given | own, hardware=[H100], gpus=4, vary=vary).space.enumerate().candidates
    )
    assert len(rows.merge_memory_sizes().columns["hardware"].values) == 2
    result = estimate(rows)
    assert {*result.device_memory.tolist()} == {2_500_000_000, 3_000_000_000, 80_000_000_000}
    last = rows.take(slice(len(rows) - 1, len(rows)))
    assert result.seconds[-1] == estimate(last).seconds[0]
    assert result.peak[-1] == estimate(last).peak[0]


def test_hardware_is_an_axis():
    systems = [
        Fleet(of, 8) for of, _ in varied(H100, {"memory.gb": "80:96:16", "scale_up.size": 4})
    ]
    base = Experiment(Run(model="gpt2", global_batch_size=16), ClusterSection(), Execution())
    result = Space.of(base, systems, {"tp": (1, 2)}).enumerate()
    held = [result.candidates.hardware(row).memory_gb for row in range(len(result.candidates))]
    assert held == [80, 80, 96, 96]
    assert {result.candidates.hardware(row).scale_up.gpus for row in range(4)} == {4}
    assert result.candidates.hardware(0).name == "h100-sxm memory.gb=80, scale_up.size=4"


def test_figures_below_others_are_replaced():
    ((result, _),) = varied(H100, {"gemm.bf16.fraction": "0.5", "scale-out.bandwidth_gb_s": "25"})
    assert result.gemm["bf16"] == H100.gemm["bf16"].model_copy(update={"fraction": 0.5})
    assert result.gemm["fp8"] == H100.gemm["fp8"]
    assert result.scale_out == H100.scale_out.model_copy(update={"bandwidth_gb_s": 25})


def test_the_default_space_of_experts_runs():
    run, model = Run(model="mixtral-8x7b", global_batch_size=64), model_of("mixtral-8x7b")
    systems = [Fleet(H100, 8)]
    axes = default_axes(run, model, systems) | {"recompute": ("full",), "zero": (1,), "vpp": (1,)}
    base = Experiment(run, ClusterSection(), Execution())
    rows = (
        Space.of(base, systems, axes, extra_constraints=default_constraints([]))
        .enumerate()
        .candidates
    )
    etp = {(rows.run(row).etp, rows.run(row).tp) for row in range(len(rows))}
    assert all(size in (1, tp) for size, tp in etp)
    assert len(rows) > 100


@cases
def test_spaces_that_are_refused(axes: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        space(axes).enumerate()


def test_a_space_that_is_too_large_is_refused():
    bytes_ = range(10**6, 10**6 + 500)
    axes = {"seq_length": range(1, 501), "memory_allowance": bytes_, "device_memory": bytes_}
    with pytest.raises(UserError, match=r"about 1.2e.08 candidates, wanted at most 30,000,000"):
        space(axes).enumerate()


@cases
def test_lists_that_are_refused(kind: str, value: object, said: str):
    kinds: dict[str, Any] = {of.__name__: of for of in (int, float, bool, tuple, frozenset, dict)}
    value = [*map(list, value[:1]), *value[1:]] if isinstance(value, tuple) and value else value
    with pytest.raises(UserError, match=said):
        values_of(kinds.get(kind, ("none", "full")), value, "x")


@cases
def test_figures_that_no_hardware_has(given: dict[str, str], said: str):
    with pytest.raises(UserError, match=said):
        varied(H100, given)


@cases
def test_nothing_that_is_asked_for_is_passed_over(given: dict[str, Any], said: str):
    own: dict[str, Any] = {"gpus": 8, **given}
    vary, gpus = own.pop("vary", {}), own.pop("gpus")
    with pytest.raises(UserError, match=said):
        search_request({"model": "gpt2", **own}, hardware=[H100], gpus=gpus, vary=vary)


def test_a_run_file_may_say_how_many_gpus_and_figures_of_hardware(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nhardware: h100-sxm\ngpus: 4,8\nmemory.gb: [80, 141]\ntp: 1:2\n")
    fleets = search_request({}, path).space.fleets
    assert [(of.hardware.memory_gb, of.gpus) for of in fleets] == [
        (80, 4), (80, 8), (141, 4), (141, 8)
    ]  # fmt: skip
    over = search_request({}, path, gpus=2, vary={"memory_gb": "96"})
    assert [(of.hardware.memory_gb, of.gpus) for of in over.space.fleets] == [(96, 2)]
    assert over.space.axes["tp"] == (1, 2)


@cases
def test_what_a_run_file_says_wrong_is_told_with_its_name(tmp_path: Path, text: str, said: str):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\nhardware: h100-sxm\n{text}\n")
    with pytest.raises(UserError, match=said):
        search_request({}, path, gpus=None if "gpus" in text else 4)


def test_none_in_a_list_is_what_follows_where_nothing_is_given():
    of = search_request(
        {"model": "gpt2", "schedule": "none,gpipe", "no_overlap": "none/dp", "dp_shard": "none"},
        hardware=[H100], gpus=8,
    )  # fmt: skip
    axes = of.space.axes
    assert axes["schedule"] == (None, "gpipe")
    assert axes["no_overlap"] == (frozenset(), frozenset({"dp"}))
    assert of.space.base.run.dp_shard is None


def test_dp_of_any_number_of_gpus_divides_the_batch_by_default():
    gpt2 = model_of("gpt2")
    for gpus in (1, 7, 12, 96, 1000, 12_288):
        batch = usual_batch(Run(model="gpt2"), gpt2, [gpus])
        assert all(batch % (gpus // pp) == 0 for pp in (1, 2, 4) if gpus % pp == 0)
    assert usual_batch(Run(model="gpt2"), gpt2, [64, 96, 160]) % 15 == 0


def test_the_batch_by_default_is_of_the_longest_sequence():
    of = search_request({"model": "gpt2", "seq_length": "256,512"}, hardware=[H100], gpus=4)
    assert of.space.axes["global_batch_size"] == (8192,)
    assert "(4,194,304 tokens)" in of.notes[0]


def test_orders_that_number_ranks_alike_are_tried_once():
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-tp-ep-dp-pp", "ep-dp-tp-cp-pp")
    result = space({"tp": (1, 2), "pp": (1, 2), "order": orders}).enumerate()
    runs = [result.candidates.run(row) for row in range(len(result.candidates))]
    assert [(run.tp, run.pp, run.order) for run in runs] == [
        (1, 1, orders[0]),
        (2, 1, orders[0]), (2, 1, orders[3]),
        (1, 2, orders[0]), (1, 2, orders[1]),
        (2, 2, orders[0]), (2, 2, orders[1]), (2, 2, orders[3]),
    ]  # fmt: skip
    assert result.combinations == len(runs) + sum(each.count for each in result.removed)


def test_layers_that_ends_count_for_are_tried_once_where_one_stage_has_all():
    ends = {"first_stage_less_layers": (0, 1), "last_stage_less_layers": (0, 1)}
    result = space({"tp": (1,), "pp": (1,), **ends}).enumerate()
    assert len(result.candidates) == 1
    assert sum(each.count for each in result.removed) == 3


def test_a_dp_that_does_not_fill_the_gpus_is_told_beside_those_asked_for():
    with pytest.raises(UserError, match=r"dp is \d+, which fills \d+ GPUs, and not 7 or 11"):
        space({"tp": (1,), "pp": (1,), "dp": (7, 11)}).enumerate()


def test_families_add_settings_and_copies_of_sharded_states_fill_domains():
    base = Run(model="gpt2", global_batch_size=64)
    added = family_axes(families_of("hsdp,stages"), base, model_of("gpt2"), [Fleet(H100, 32)])
    assert added["first_stage_less_layers"] == (0, 1)
    of = Experiment(base, ClusterSection(), Execution())
    axes = {"tp": (1, 2), "zero": (0, 3), "dp_shard": added["dp_shard"]}
    result = Space.of(
        of, [Fleet(H100, 32)], axes, extra_constraints=default_constraints({"zero"})
    ).enumerate()
    runs = [result.candidates.run(row) for row in range(len(result.candidates))]
    assert {(run.tp, run.zero, run.dp_shard) for run in runs} == {
        (1, 0, None), (1, 3, None), (1, 3, 8), (1, 3, 16),
        (2, 0, None), (2, 3, None), (2, 3, 4), (2, 3, 8),
    }  # fmt: skip
    with pytest.raises(UserError, match="did you mean 'offload'"):
        families_of("ofload")
    with pytest.raises(UserError, match="--space: got 'hsdp,', in which a word is empty"):
        families_of("hsdp,")
    with pytest.raises(UserError, match="of training, got mode=decode"):
        family_axes(families_of("full"), Run(model="gpt2", mode="decode"), model_of("gpt2"), [])


def test_what_contradicts_is_told_in_all_words():
    of = space({"pp": (1, 2), "vpp": (2, 3), "schedule": ("1f1b",)})
    with pytest.raises(UserError, match=r"got pp=1.*\(2 such\); schedule 1f1b has one stage"):
        of.enumerate()


def test_the_size_of_a_large_space_is_known_at_once():
    of = space({"zero": (0, 1, 2, 3), "micro_batch_size": (1, 2, 4), "tp": (1, 2, 4)})
    many = {"prefetch": tuple(range(10_000)), "memory_allowance": tuple(range(100_000))}
    of = replace(of, axes={**of.axes, **many})
    assert of.combinations == 36 * 10**9
    with pytest.raises(UserError, match=r"about [0-9.]+e\+09 candidates.*give fewer"):
        of.enumerate()


def test_loads_of_experts_that_a_run_refuses_are_removed():
    """The busiest of several ranks says nothing of one alone, which stays."""
    settings = {
        "model": "mixtral-8x7b", "layers": 2, "seq_length": 128, "global_batch_size": 16, "zero": 1,
        "tp": 1, "pp": 1, "cp": 1, "ep": "1,2,4", "expert_load": "2.5", "recompute": "none",
    }  # fmt: skip
    result = search_request(settings, hardware=["h100-sxm"], gpus=4).space.enumerate()
    assert {*result.candidates.numbers("ep").tolist()} == {1, 4}
    assert any("here from 1 to 2" in removed.example for removed in result.removed)


@pytest.mark.parametrize(
    ("model", "settings", "modules"),
    [
        ("llama3-8b", {}, {("norm",)}),
        ("llama3-8b", {"framework": "torchtitan"}, {("norm", "activation")}),
        ("mixtral-8x7b", {}, {("norm", "moe_act")}),
        ("llama3-8b", {"flash_attention": False}, {("core_attn",)}),
        ("llama3-8b", {"recompute_modules": "core_attn"}, {("core_attn",)}),
        ("llama3-8b", {"recompute": "none"}, set()),
    ],
)
def test_selective_recomputation_saves_memory(
    model: str, settings: dict[str, Any], modules: set[tuple[str, ...]]
):
    fixed: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "zero": 1, "global_batch_size": 16}
    request = search_request({"model": model, **fixed, **settings}, hardware=["h100-sxm"], gpus=4)
    rows = request.space.enumerate().candidates
    runs = [rows.run(index) for index in range(len(rows))]
    assert {run.recompute_modules for run in runs if run.recompute == "selective"} == modules


# ---- candidates ----------------------------------------------------------------------------------


BASE = Experiment(Run(model="gpt2", layers=4), ClusterSection(), Execution(prefetch=2))


def test_without_a_batch_there_are_as_many_microbatches_as_a_run_has():
    columns = {
        "pp": Column.of([1, 4, 4, 2, 4, 4]),
        "schedule": Column.of([None, None, "zbv", "dualpipe", None, None]),
        "vpp": Column.of([1, 1, 2, 1, 2, 1]),
        "microbatch_group_size_per_vp_stage": Column.of([None, None, None, None, 6, None]),
        "dp": Column.of([2, 1, 1, 1, 1, 1]),
        "global_batch_size": Column.of([None, None, None, None, None, 12]),
    }
    candidates = candidates_of(BASE, columns)
    assert candidates.microbatches.tolist() == [
        candidates.run(row).microbatches for row in range(6)
    ]


@pytest.mark.parametrize("keys", [0, 1 << 14])
def test_distinct_tuples_are_numpys(keys: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "_KEYS_OF_A_ROW", keys)
    draw = np.random.default_rng(3)
    sizes = {"tp": 3, "cp": 700, "dp": 2, "pp": 900}
    columns = {
        name: Column.of(draw.integers(0, size, 500).tolist()) for name, size in sizes.items()
    }
    first, of = candidates_of(BASE, columns).distinct(*columns)
    tuples = np.stack([column.numbers() for column in columns.values()], axis=1)
    assert len(first) == len(np.unique(tuples, axis=0))
    assert (tuples[first][of] == tuples).all()
    assert (first[of] <= np.arange(500)).all()
