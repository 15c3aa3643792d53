"""What a search answers: the best as simulated, how sure, and run files that say the same."""

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.run.experiment import Experiment
from stagewright.run.files import flat, read_settings
from stagewright.run.sections.cluster import ClusterSection
from stagewright.schedule.schedules import SCHEDULES
from stagewright.searching import block_costs, simulated
from stagewright.searching import search as searching
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.searching.estimate import estimate
from stagewright.searching.figures import Figures
from stagewright.searching.machines import varied
from stagewright.searching.objectives import front
from stagewright.searching.pipelines import Pipeline
from stagewright.searching.ranking import NothingFound, SearchOptions
from stagewright.searching.request import search_request
from stagewright.searching.run_file import hardware_file, printed_run_file, run_file, write_run_file
from stagewright.searching.search import search
from stagewright.searching.sensitivity import sensitivities
from stagewright.searching.simulated import simulate_all
from stagewright.time.hardware import resolve
from stagewright.views.search import (
    COLUMNS,
    WHY,
    best,
    certainty,
    choices,
    headroom,
    limit,
    tie,
    without_objective,
    words,
)

FIXED: dict[str, Any] = {
    "model": "gpt2", "layers": 2, "seq_length": 128, "pp": 1, "vpp": 1, "zero": 1,
    "recompute": "none", "schedule": "1f1b", "sequence_parallel": False, "cp": 1,
    "global_batch_size": 32, "micro_batch_size": 8, "memory_allowance": 0,
}  # fmt: skip


def candidates(**settings: Any) -> Candidates:
    request = search_request({**FIXED, **settings}, hardware=["h100-sxm"], gpus=4)
    return request.space.enumerate().candidates


def figures(seconds: list[float], peak: list[int], *, simulated: bool = False) -> Figures:
    """Figures of which only time and memory count."""
    count = len(seconds)
    return replace(
        Figures.missing(count), seconds=np.array(seconds), memory={"parameters": np.array(peak)},
        device_memory=np.full(count, 10), bubble=np.zeros(count),
        tokens=np.ones(count, dtype=np.int64), simulated=np.full(count, simulated),
    )  # fmt: skip


def estimated(seconds: list[float], peak: list[int]) -> Callable[..., Figures]:
    """Estimates that are given."""
    return lambda *_: figures(seconds, peak)


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[float, int]]:
    """Simulated seconds and bytes by micro-batch size, without a simulation."""
    table = {1: (4.0, 5), 2: (3.0, 6), 4: (2.0, 7), 8: (1.0, 20)}

    def fake(job: Any) -> Any:
        number, candidate = job
        seconds, peak = table[candidate.run(0).micro_batch_size]
        return simulated._Result(number, figures([seconds], [peak], simulated=True), "")  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(simulated, "_simulate_job", fake)
    return table


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces of few candidates are estimated, too, and simulated one by one."""
    monkeypatch.setattr(searching, "SMALL", 0)
    monkeypatch.setattr(searching, "BATCH", 1)


def test_the_best_is_the_fastest_that_fits(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    result = search(rows)
    sizes = [rows.run(row).micro_batch_size for row in result.best.tolist()]
    assert sizes == [4, 2, 1]
    assert result.simulated == len(truth)
    assert search(rows, SearchOptions(allow_oom=True)).best.tolist()[0] == sizes.index(1) + 1


@pytest.mark.usefixtures("truth", "large")
def test_candidates_are_simulated_until_no_estimate_can_win():
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    result = search(rows, estimator=estimated([4.2, 2.9, 3.0, 9.1], [5, 6, 7, 20]))
    # 2.9 is simulated as 3.0, so that 3.0 may be the best; 4.2 cannot, and 9.1 does not fit.
    assert result.simulated == 2
    assert rows.run(int(result.best[0])).micro_batch_size == 4
    assert result.errors("time").tolist() == pytest.approx([3.0 / 2.9, 2.0 / 3.0])
    assert len(result.open) == 0
    # Once an estimate was 33% off, others may be, too.
    result = search(rows, estimator=estimated([2.9, 9.9, 3.0, 9.1], [5, 6, 7, 20]))
    assert result.simulated == 2
    result = search(
        rows, SearchOptions(most=1), estimator=estimated([2.9, 3.0, 3.0, 9.1], [5, 6, 7, 20])
    )
    assert (result.simulated, len(result.open)) == (1, 2)


@pytest.mark.usefixtures("truth", "large")
def test_candidates_whose_memory_is_nearly_too_large_are_simulated():
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1)
    result = search(rows, estimator=estimated([4.0, 3.0, 2.0], [5, 6, 11]))
    assert rows.run(int(result.best[0])).micro_batch_size == 2  # 11 of 10 is more than 5% too much
    result = search(rows, estimator=estimated([4.0, 3.0, 2.0], [5, 8, 11]))
    assert rows.run(int(result.best[0])).micro_batch_size == 4  # an estimate was 25% too large


def test_equal_candidates_are_told_apart_by_memory(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    assert tie(search(rows)) == ""
    truth[2] = 2.01, 3
    result = search(rows)
    assert [rows.run(row).micro_batch_size for row in result.best.tolist()] == [2, 4, 1]
    assert tie(result) == (
        "candidates within 1% count as equal: run 1 is 0.5% behind micro_batch_size=4 "
        "(not listed; --all-variants), and takes "
        "4 B less"
    )


@pytest.mark.usefixtures("truth")
def test_a_saving_below_a_percent_of_memory_breaks_no_tie(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[2, 4], tp=1)
    truth[2], truth[4] = (2.01, 7_000), (2.0, 7_009)
    result = search(rows, SearchOptions(allow_oom=True))
    assert rows.run(int(result.best[0])).micro_batch_size == 2
    device = replace(result.figures, device_memory=np.full(2, 1_000))
    result = replace(result, figures=device)
    assert rows.run(int(result.best[0])).micro_batch_size == 4
    assert tie(result) == ""


def test_a_row_of_a_layout_ties_by_memory(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1, recompute=["none", "full"])
    truth[4], truth[2], truth[1] = (2.0, 9), (2.01, 5), (4.0, 1)
    result = search(rows)
    assert [rows.run(row).micro_batch_size for row in result.listed.tolist()] == [2, 2]
    assert len(search(rows, SearchOptions(all_variants=True)).listed) == 6


@pytest.mark.usefixtures("large")
def test_a_smaller_variant_of_a_listed_layout_is_simulated(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1, recompute=["none", "full"])
    truth[4], truth[2] = (2.0, 9), (2.01, 5)
    slow = [2.02, 2.0, 2.0]
    columns = estimated([3.0, 2.0, 2.0, *slow], [5, 5, 9, 5, 5, 9])
    result = search(rows, estimator=columns)
    assert [rows.run(row).micro_batch_size for row in result.listed.tolist()] == [2, 2]


@pytest.mark.usefixtures("large", "truth")
def test_a_search_ends_where_two_batches_do_not_fit():
    rows = candidates(micro_batch_size=[8], tp=1, zero=[0, 1, 2], recompute=["none", "full"])
    columns = estimated([1.0] * 6, [14, 12, 13, 11, 15, 16])
    advice = "try --zero 3, a larger --tp, a larger --pp, --micro-batch-size 1, more GPUs or more"
    with pytest.raises(NothingFound, match=advice) as nothing:
        search(rows, estimator=columns)
    assert nothing.value.ranking.simulated == 2


def test_groups_of_interleaved_stages_follow_the_microbatches():
    settings: dict[str, Any] = {
        "model": "llama3-8b", "layers": 4, "seq_length": 128, "framework": "torchtitan", "pp": 2,
        "vpp": 2, "tp": 1, "cp": 1, "zero": 1, "global_batch_size": 8, "recompute": "none",
    }  # fmt: skip
    request = search_request(settings, hardware=["h100-sxm"], gpus=4)
    rows = request.space.enumerate().candidates
    assert len({*rows.microbatches.tolist()}) > 1
    assert np.isfinite(estimate(rows).seconds).all()


def test_orders_that_a_schedule_refuses_are_not_extrapolated():
    pipeline = Pipeline("zb-h1", 8, 1, None, ())
    for count in range(8, 200):
        if SCHEDULES["zb-h1"].takes(8, count):
            assert all(SCHEDULES["zb-h1"].takes(8, n) for n in pipeline.simulated_counts(count))


def test_candidates_whose_tiny_runs_are_refused_have_no_estimate(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise UserError("refused")

    rows = candidates(micro_batch_size=[1, 2], tp=[1, 2], recompute=["none", "full"])
    monkeypatch.setattr(block_costs, "compile", refuse)
    assert np.isnan(estimate(rows).seconds).all()


def test_sensitivities_have_two_sides():
    rows = candidates(micro_batch_size=[8], tp=1)
    changes = sensitivities(rows, 0)
    assert changes["memory_bandwidth_gb_s"].worse > 0 > changes["memory_bandwidth_gb_s"].better
    latencies = [change for path, change in changes.items() if path.endswith("_us")]
    assert all(change.worse >= 0 >= change.better for change in latencies)


@pytest.mark.usefixtures("truth")
def test_zero_1_is_preferred_among_equal_candidates():
    rows = candidates(micro_batch_size=[4], zero=[0, 1, 2], tp=1)
    assert rows.run(int(search(rows).best[0])).zero == 1


@pytest.mark.usefixtures("truth")
def test_numbers_of_gpus_are_layouts():
    settings = {**FIXED, "micro_batch_size": [1, 4], "tp": 1, "zero": 0}
    rows = search_request(settings, hardware=["h100-sxm"], gpus="2,4").space.enumerate().candidates
    ranking = search(rows)
    assert sorted(rows.world_size[ranking.listed].tolist()) == [2, 4]
    assert [rows.run(row).micro_batch_size for row in ranking.listed.tolist()] == [4, 4]


@pytest.mark.usefixtures("truth")
def test_variants_of_one_layout_are_one_row():
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1, zero=[0, 1])
    result = search(rows)
    assert [rows.run(row).zero for row in result.listed.tolist()] == [1, 0]
    assert len(search(rows, SearchOptions(all_variants=True)).listed) == 6


def test_a_front_of_two_objectives(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    result = search(rows, SearchOptions(("time", "memory")))
    assert [rows.run(row).micro_batch_size for row in result.best.tolist()] == [4, 2, 1]
    assert best(result).title == "Pareto front of time and memory, by time"
    assert truth


@pytest.mark.usefixtures("truth", "large")
def test_every_candidate_below_its_bound_is_simulated(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1)
    monkeypatch.setattr(searching, "lower_bounds", lambda _: np.array([3.5, 0.5, 1.9]))
    result = search(
        rows, SearchOptions(exact=True, most=1), estimator=estimated([4.0, 3.0, 9.0], [5, 5, 5])
    )
    assert (result.simulated, result.proven) == (2, True)
    assert rows.run(int(result.best[0])).micro_batch_size == 4


@pytest.mark.usefixtures("truth")
def test_ctrl_c_keeps_what_was_simulated(monkeypatch: pytest.MonkeyPatch):
    real = simulated._simulate_job  # pyright: ignore[reportPrivateUsage]
    ends = [2]

    def stopping(job: Any) -> Any:
        if job[0] == ends[0]:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(simulated, "_simulate_job", stopping)
    result = search(candidates(micro_batch_size=[1, 2, 4, 8], tp=1))
    assert (result.stopped, result.simulated, result.proven) == (True, 2, False)
    assert "2 candidates were neither estimated nor simulated" in certainty(result)
    ends[0] = 0
    with pytest.raises(NothingFound, match="stopped before any candidate was simulated"):
        search(candidates(micro_batch_size=[1, 2, 4, 8], tp=1))


def test_nothing_fits_or_runs(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[8], tp=1)
    with pytest.raises(UserError, match="none of the 1 candidates fits: the least takes"):
        search(rows)
    with pytest.raises(UserError, match="--exact proves the least time"):
        search(rows, SearchOptions(("memory",), exact=True))
    assert truth


@pytest.mark.usefixtures("truth", "large")
def test_where_no_estimate_fits_the_nearest_are_simulated():
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    result = search(rows, estimator=estimated([1.0, 2.0, 3.0, 4.0], [14, 12, 13, 11]))
    assert rows.run(int(result.best[0])).micro_batch_size == 4


def test_splits_that_put_the_same_layers_on_each_stage_are_one_candidate():
    ends = {"first_stage_less_layers": [0, 1], "last_stage_less_layers": [0, 1]}
    result = search_request(
        {**FIXED, "layers": 8, "pp": 2, "tp": 2, "vpp": 2, "schedule": None, **ends},
        hardware=["h100-sxm"], gpus=4,
    ).space.enumerate()  # fmt: skip
    runs = [result.candidates.run(row) for row in range(len(result.candidates))]
    splits = [run.resolved(result.candidates.model).layers_per_stage for run in runs]
    assert len({*splits}) == len(splits) == 3
    assert "the same as without first_stage_less_layers" in result.removed[-1].example


def test_fronts_of_three_are_those_of_two_with_a_constant():
    draw = np.random.default_rng(1)
    values = draw.integers(0, 12, (60, 2)).astype(float)
    wide = np.concatenate([values, np.zeros((60, 1))], axis=1)
    assert (front(values) == front(wide)).all()


@cases
def test_what_python_is_asked_is_checked_like_options(given: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        sw.search("gpt2", "h100-sxm", gpus=1, **given)


def test_words_leave_out_what_other_settings_imply():
    rows = candidates(pp=[1, 2], schedule=["1f1b", "gpipe"])
    said = {words(rows, row) for row in range(len(rows)) if rows.run(row).tp == 1}
    assert said == {"dp=4", "pp=2 dp=2", "pp=2 dp=2 schedule=gpipe"}


def test_run_files_name_hardware_by_name_only_where_the_name_says_all(tmp_path: Path):
    larger = resolve("h100-sxm").model_copy(update={"memory_gb": 96})
    rows = candidates(tp=1)
    for hardware, said in ((resolve("h100-sxm"), "h100-sxm"), (larger, "h100-sxm.yaml")):
        column = Column(np.zeros(1, dtype=np.uint8), (hardware,))
        of = replace(rows, columns={**rows.columns, HARDWARE: column})
        assert f"hardware: {said}\n" in run_file(of, 0)
        (printed := tmp_path / "printed.yaml").write_text(printed_run_file(of, 0))
        read = Experiment.of(flat(read_settings(printed), printed), {}, printed)
        step = sw.simulate(read.run, read.cluster)
        assert step.machine.hardware.memory_gb == hardware.memory_gb
        assert step.seconds == simulate_all(of).figures.seconds[0]
        files = write_run_file(of, 0, tmp_path / "best.yaml")
        assert len(files) == (1 if hardware is not larger else 2)
    assert resolve(files[1]).memory_gb == 96


def test_every_column_is_described_and_varied_figures_are_numbers():
    asked: dict[str, Any] = {**FIXED, "layers": 1, "tp": [1, 2], "top": 1}
    asked["memory_allowance"] = "1GB"
    result = sw.search(
        asked.pop("model"), "h100-sxm", gpus=2, vary={"memory.gb": [70, 80]}, **asked,
    )  # fmt: skip
    table = result.table("candidates")
    patterns = [re.sub(r"\b[A-Z]+|(?<=_)[A-Z]+", "*", name) for name in COLUMNS]
    settings = {"tp", "dp"}
    other = [name for name in table.columns
             if not any(fnmatchcase(name, each) for each in patterns[1:])]  # fmt: skip
    assert {*other} == settings
    assert {*table.columns["hardware.memory_gb"]} == {70, 80}
    assert {*table.columns["global_batch_size"]} == {32}
    for row in table.rows:
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
        of_memory = [value for name, value in row.items() if name.startswith("memory_")]
        assert row["peak"] == sum(of_memory)
        assert row["memory_allowance"] == 10**9


def test_files_of_varied_hardware_say_what_is_varied(tmp_path: Path):
    own = resolve("base: h100-sxm\nname: own\ndescription: Mine")
    for of, lines in ((resolve("h100-sxm"), 6), (own, 100)):
        ((hardware, specs),) = varied(of, {"memory.gb": 96, "scale_up.size": 16})
        columns = {HARDWARE: Column.constant(hardware, 1)}
        rows = replace(candidates(tp=1).take(slice(1)), columns=columns)
        text = hardware_file(replace(rows, varied={hardware.name: specs}), 0)
        assert (text.count("\n") <= lines) == (of is not own)
        assert text.startswith("base: h100-sxm\n") == (of is not own)
        read = resolve(text)
        assert (read.name, read.memory_gb, read.scale_up.gpus) == (hardware.name, 96, 16)
        assert read.description == (
            f"{of.description}; with memory_gb=96, scale_up.gpus=16 in place of its own"
        )
        said: dict[str, Any] = {"description": of.description, "sources": {}}
        assert read.model_copy(update=said) == hardware.model_copy(update=said)


@pytest.mark.numerics
def test_costs_and_stragglers_count(tmp_path: Path):
    costs = tmp_path / "costs.yaml"
    costs.write_text("gpu_usd: 30000\nyears: 4\nusd_per_kwh: 0.08\n")
    given: dict[str, Any] = {**FIXED, "costs": str(costs), "straggler": {1: 1.5}, "tp": 1}
    of = search_request(given, hardware=["h100-sxm"], gpus=4).space.enumerate().candidates
    result = search(of, SearchOptions(("cost",)))
    step = sw.simulate(
        of.run(0), ClusterSection(hardware="h100-sxm", costs=str(costs), stragglers={1: 1.5})
    )
    expected = step.expense().usd_per_million_tokens
    assert expected is not None
    assert result.figures.seconds[0] == step.seconds
    assert result.figures.usd[0] == pytest.approx(expected * step.tokens / 1e6)


@pytest.mark.numerics
def test_figures_are_those_of_simulate():
    rows = candidates(tp=[1, 2])
    result = simulate_all(rows)
    for row in range(2):
        step = sw.simulate(rows.run(row), "h100-sxm")
        of = result.figures
        assert of.seconds[row] == step.seconds
        assert of.peak[row] == step.fit.peak
        assert of.mfu[row] == step.mfu
        assert of.bubble[row] == step.mean.bubble
        assert of.joules[row] == step.expense().joules
        assert result.launches[row] == step.mean.launches
    assert not result.refused
    best_row = int((ranking := search(rows)).best[0])
    launches = ranking.launches[best_row] / ranking.figures.seconds[best_row]
    assert limit(ranking, best_row) == f"launches {launches:.0%}"


def test_what_memory_counts_beside_tensors_is_said(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    assert headroom(search(rows)) == ""  # 7 of 10
    truth[4] = 2.0, 10
    result = search(rows)
    assert "take 100% of the memory" in headroom(result)
    assert limit(result, int(result.best[0])).endswith("tensors 100% of memory")
    result = search(rows, SearchOptions(allow_oom=True))
    assert headroom(result) == "the best does not fit: needs 20 B of 10 B"
    request = search_request({**FIXED, "memory_allowance": None}, hardware=["h100-sxm"], gpus=4)
    assert request.space.enumerate().candidates.run(0).memory_allowance == "4GB"


def test_the_price_of_other_choices_is_listed(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1, zero=[1, 3])
    truth[4] = 2.0, 7
    table = choices(search(rows))
    assert table.columns["setting"] == ["zero", "zero"]
    assert table.columns["value"] == ["1", "3"]
    assert table.columns[WHY][0] == "the best"


@pytest.mark.usefixtures("large")
def test_choices_hold_simulated_figures(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(micro_batch_size=[4], tp=1, zero=[1, 2, 3])
    table = {1: (2.0, 5), 2: (5.0, 5), 3: (4.0, 20)}

    def fake(job: Any) -> Any:
        number, candidate = job
        seconds, peak = table[candidate.run(0).zero]
        return simulated._Result(number, figures([seconds], [peak], simulated=True), "")  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(simulated, "_simulate_job", fake)
    columns = estimated([2.0, 3.0, 4.0], [5, 5, 5])
    ranking = search(rows, estimator=columns)
    assert ranking.simulated == 3
    assert choices(ranking).columns["step"] == ["2.00 s", "5.00 s", "does not fit"]
    ranking = search(rows, SearchOptions(most=1, top=1), estimator=columns)
    assert choices(ranking).columns["step"] == ["2.00 s", "~3.00 s", "~4.00 s"]


def test_a_refused_choice_says_why(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(micro_batch_size=[4], tp=1, zero=[1, 3])

    def fake(job: Any) -> Any:
        number, candidate = job
        if candidate.run(0).zero == 3:
            return simulated._Result(number, Figures.missing(1), "zero=3: deadlock")  # pyright: ignore[reportPrivateUsage]
        return simulated._Result(number, figures([1.0], [5], simulated=True), "")  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(simulated, "_simulate_job", fake)
    table = choices(search(rows))
    assert table.columns["step"] == ["1.00 s", "refused"]
    assert table.columns[WHY][1] == "zero=3: deadlock"


def test_an_unknown_objective_is_explained(truth: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[4, 8], tp=1)
    with pytest.raises(NothingFound, match="no price is known; give --price or --costs"):
        search(rows, SearchOptions(("cost",)))
    result = search(rows)
    result = replace(result, options=SearchOptions(("cost",)))
    assert "no price is known" in without_objective(result)[0]
    settings = {"model": "gpt2", "mode": "decode", "tp": 1, "pp": 1}
    inference = search_request(settings, hardware=["h100-sxm"], gpus=1)
    with pytest.raises(UserError, match="--objective mfu: only training"):
        search(inference.space.enumerate().candidates, SearchOptions(("mfu",)))
    assert truth


@pytest.mark.usefixtures("truth", "large")
def test_how_sure_the_answer_is():
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    columns = estimated([4.0, 3.0, 2.5, 9.9], [5, 6, 8, 20])

    def said(*names: str, most: int = 200) -> str:
        return certainty(search(rows, SearchOptions(names, most=most), estimator=columns))

    assert said("memory") == (
        "estimated memory is 0.0% off the simulation; no proof: a candidate not simulated can take "
        "less memory only if its estimate is further off"
    )
    assert said("time") == (
        "estimated times are +25.0% off the simulation; no proof: a candidate not simulated can be "
        "faster only if its estimate is further off; --exact gives proof"
    )
    assert certainty(
        search(rows, estimator=columns, options=SearchOptions(top=9, most=9))
    ).startswith("estimated times are +25.0%")


@cases
def test_estimates_are_near_what_is_simulated(
    settings: dict[str, Any], gpus: int, count: int, within: float, peak_within: float
) -> None:
    rows = search_request(settings, hardware=["h100-sxm"], gpus=gpus).space.enumerate().candidates
    estimates, exact = estimate(rows), simulate_all(rows).figures
    known = ~np.isnan(exact.seconds)
    assert (len(rows), known.any()) == (count, True)
    ratio = estimates.seconds[known] / exact.seconds[known]
    assert ratio == pytest.approx(1.0, abs=within)
    assert estimates.peak[known] == pytest.approx(exact.peak[known], rel=peak_within)
    assert estimates.mfu[known] * ratio == pytest.approx(exact.mfu[known])


def test_days_and_costs_of_a_job_rank_candidates():
    from stagewright.api.searched import search

    job = {
        "tokens": "1T", "failures": 500, "storage_gb_s": 1, "detect": 60, "restart": 300,
    }  # fmt: skip
    axes = {"tp": [1, 2], "pp": [1, 2], "zero": 1, "recompute": "none", "global_batch_size": 64}
    found = search(
        "gpt2", "h100-sxm", gpus=8, seq_length=1024, objective=["days"], **axes, **job
    )  # fmt: skip
    best = found.table("candidates")
    assert "useful" in best.columns
    text = "\n".join(map(str, found.text()))
    assert "goodput" in text
    assert "take fewer days" in text
    with pytest.raises(UserError, match="needs the tokens of the job"):
        search("gpt2", "h100-sxm", gpus=8, objective=["days"])
