"""What a search answers: the best as simulated, how sure, and run files that say the same."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.explore import exact as simulated
from stagewright.explore import lots
from stagewright.explore.answer import promising
from stagewright.search.objectives import front
from stagewright.explore.answer.ranking import NothingFound, Ranking, Wanted
from stagewright.search.run_file import (
    hardware_file,
    printed_run_file,
    run_file,
    write_run_file,
)
from stagewright.explore.answer.search import search
from stagewright.search.candidates import HARDWARE, Candidates, Column
from stagewright.explore.evaluate import Evaluated, LeftOut, evaluate
from stagewright.search.simulated import exact, unknown
from stagewright.search.figures import Figures
from stagewright.explore.shared.tuples import Shared
from stagewright.search.request import asked
from stagewright.search.machines import varied, with_figure
from stagewright.run.experiment import Experiment
from stagewright.run.files import flat, read_settings
from stagewright.run.sections.cluster import ClusterSection
from stagewright.time.hardware import resolve
from stagewright.views.search import best, certainty, left, limit, listed, nearly_full, words
from stagewright.views.search_columns import COLUMNS

FIXED: dict[str, Any] = {
    "model": "gpt2", "layers": 2, "seq_length": 128, "pp": 1, "vpp": 1, "zero": 1,
    "recompute": "none", "schedule": "1f1b", "sequence_parallel": False, "cp": 1,
    "global_batch_size": 32, "micro_batch_size": 8,
}  # fmt: skip


def candidates(**settings: Any) -> Candidates:
    of = asked({**FIXED, **settings}, hardware=["h100-sxm"], gpus=4)
    return of.space.candidates().rows


def made(seconds: list[float], peak: list[int], *, exact: bool = False) -> Figures:
    """Figures of which only time and memory count."""
    count = len(seconds)
    one = unknown(count)
    return Figures(
        seconds=np.array(seconds), memory={"parameters": np.array(peak)},
        device_memory=np.full(count, 10), exposed={}, bubble=one.bubble,
        tokens=np.ones(count, dtype=np.int64), mfu=one.mfu, joules=one.joules, usd=one.usd,
        exact=np.full(count, exact),
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[float, int]]:
    """Simulated seconds and bytes by micro-batch size, without a simulation."""
    truth = {1: (4.0, 5), 2: (3.0, 6), 4: (2.0, 7), 8: (1.0, 20)}

    def fake(job: Any) -> Any:
        seconds, peak = truth[job.candidate.run(0).micro_batch_size]
        return simulated._Result(job.row, made([seconds], [peak], exact=True), "")  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(simulated, "_simulated", fake)
    return truth


def test_the_best_is_the_fastest_that_fits(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    found = search(rows)
    sizes = [rows.run(row).micro_batch_size for row in found.best.tolist()]
    assert sizes == [4, 2, 1]
    assert found.simulated == len(told)
    assert search(rows, Wanted(any_memory=True)).best.tolist()[0] == sizes.index(1) + 1


def test_columns_choose_what_is_simulated(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    columns = made([4.2, 2.9, 3.0, 1.1], [5, 6, 7, 20])
    found = search(rows, Wanted(top=1), evaluate=lambda of: Evaluated(columns, []))
    assert found.simulated == 1
    assert rows.run(int(found.best[0])).micro_batch_size == 2
    # Columns were 3% too fast at micro_batch_size=2, and 4 may be as far off the other way.
    assert found.open == 0
    found = search(rows, Wanted(top=2), evaluate=lambda of: Evaluated(columns, []))
    assert rows.run(int(found.best[0])).micro_batch_size == 4
    assert found.gaps.tolist() == pytest.approx([3.0 / 2.9, 2.0 / 3.0])
    assert found.open == 0
    assert told


def test_a_front_of_two_objectives(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    found = search(rows, Wanted(("time", "memory")))
    assert [rows.run(row).micro_batch_size for row in found.best.tolist()] == [4, 2, 1]
    assert told


def test_what_no_column_can_say_is_simulated_by_bounds(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4], tp=1)
    found = search(rows, Wanted(most=2))
    assert found.simulated == 2
    assert found.unseen == 1
    assert found.open == 1
    proven = search(rows, Wanted(most=1, prove=True))
    assert (proven.simulated, proven.open, proven.proven) == (3, 0, True)
    assert told


def test_ctrl_c_keeps_what_was_found(
    told: dict[int, tuple[float, int]], monkeypatch: pytest.MonkeyPatch
):
    real = simulated._simulated  # pyright: ignore[reportPrivateUsage]

    def stopping(job: Any) -> Any:
        if job.row == 2:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(simulated, "_simulated", stopping)
    found = search(candidates(micro_batch_size=[1, 2, 4, 8], tp=1))
    assert found.stopped
    assert found.simulated == 2
    assert not found.proven
    assert told


def test_ctrl_c_keeps_the_lots_that_were_evaluated(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(recompute=["none", "full"], tp=[1, 2])
    seen: list[int] = []

    def evaluated(of: Candidates, shared: Shared) -> Evaluated:
        if seen:
            raise KeyboardInterrupt
        seen.append(len(of))
        return Evaluated(made([1.0] * len(of), [5] * len(of)), [])

    monkeypatch.setattr(lots, "evaluate", evaluated)
    assert len(lots.in_lots(rows).left) == 0  # few candidates are one lot
    seen.clear()
    monkeypatch.setattr(lots, "FEW", 0)
    found = lots.in_lots(rows)
    assert np.isnan(found.figures.seconds).sum() == 2
    assert [(each.reason, len(each.candidates)) for each in found.left] == [(lots.STOPPED, 2)]
    result = search(rows, Wanted(top=1), evaluate=lambda of: found)
    assert result.stopped
    assert result.simulated == 1
    assert left(result) == ["2 candidates left out by Ctrl-C"]


def test_a_second_ctrl_c_ends_with_what_was_simulated(
    told: dict[int, tuple[float, int]], monkeypatch: pytest.MonkeyPatch
):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    left_out = [LeftOut(np.array([3]), lots.STOPPED, True)]
    columns = made([4.0, 3.0, 2.0, np.nan], [5, 6, 7, 0])
    heard: list[int] = []
    real = simulated._simulated  # pyright: ignore[reportPrivateUsage]
    ends = [1]

    def stopping(job: Any) -> Any:
        if job.row == ends[0]:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(simulated, "_simulated", stopping)

    def found() -> Ranking:
        return search(
            rows, evaluate=lambda _: Evaluated(columns, left_out), stopping=heard.append
        )  # fmt: skip

    result = found()
    assert (result.stopped, result.simulated, heard) == (True, 1, [3])
    assert "1 candidate was neither estimated nor simulated; any could still be" in certainty(
        result
    )
    ends[0] = 0  # before any is simulated, estimates are kept
    with pytest.raises(NothingFound, match="stopped by Ctrl-C after 3 of 4 candidates were eval"):
        found()
    with pytest.raises(KeyboardInterrupt):
        search(rows)
    assert told


def test_ctrl_c_between_two_lots_keeps_the_first(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=[1, 2], zero=[0, 1])
    monkeypatch.setattr(promising, "FEW", 0)
    asked_for: list[int] = []

    def evaluated(of: Candidates) -> Evaluated:
        if asked_for:
            raise KeyboardInterrupt
        asked_for.append(len(of))
        return Evaluated(made([1e9] * len(of), [5] * len(of)), [])  # others may be better

    found = promising.promising(rows, evaluated, 1, any_memory=False)
    (left_out,) = found.evaluated.left
    assert left_out.reason == lots.STOPPED
    assert len(left_out.candidates) == len(rows) - asked_for[0]


def test_lots_that_share_have_the_figures_of_each_alone():
    rows = candidates(recompute=["none", "selective", "full"], tp=[1, 2, 4], zero=[0, 1])
    shared = Shared()
    for lot in (rows.take(slice(0, 9)), rows.take(slice(9, None))):
        together, alone = evaluate(lot, shared).figures, evaluate(lot).figures
        assert together.seconds.tobytes() == alone.seconds.tobytes()
        assert together.joules.tobytes() == alone.joules.tobytes()
        assert np.array_equal(together.peak, alone.peak)


def test_nothing_fits_or_runs(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[8], tp=1)
    with pytest.raises(UserError, match="none of the 1 candidates evaluated fits: the least takes"):
        search(rows)
    with pytest.raises(UserError, match="--exact proves the least time"):
        search(rows, Wanted(("memory",), prove=True))
    assert told


def test_where_no_estimate_fits_the_nearest_are_simulated(monkeypatch: pytest.MonkeyPatch):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    columns = made([1.0, 2.0, 3.0, 4.0], [14, 11, 13, 11])
    asked_for: list[int] = []

    def exactly(some: Candidates, *_: object) -> simulated.Exact:
        asked_for.extend(some.numbers("micro_batch_size").tolist())
        peak = [12 if each == 2 else 10 for each in asked_for]
        figures = made([1.0] * len(some), peak, exact=True)
        return simulated.Exact(np.arange(len(some)), figures, {}, {}, False)

    monkeypatch.setattr("stagewright.explore.answer.search.exact", exactly)
    found = search(rows, evaluate=lambda _: Evaluated(columns, []))
    assert asked_for == [2, 8]  # 10% too large by their estimates; the others are 30% and more
    assert found.rows.run(int(found.best[0])).micro_batch_size == 8


def test_a_space_that_cannot_fit_is_not_evaluated():
    rows = asked({"model": "llama3.1-405b"}, hardware=["h100-sxm"], gpus=8).space.candidates().rows

    def evaluated(_: Candidates) -> Evaluated:
        raise AssertionError("bounds of memory say enough")

    with pytest.raises(NothingFound, match=r"candidates fits: the least takes 913.2 GB of 80 GB"):
        search(rows, evaluate=evaluated)


def test_a_candidate_is_described_with_its_execution():
    rows = candidates(overlap_param_gather=[True], no_overlap="dp", tp=1, zero=1)
    words = "gpt2 dp=4 layers=2 micro_batch_size=8 seq_length=128 zero=1"
    assert rows.describe(0) == f"{words} no_overlap=dp overlap_param_gather"


def test_splits_that_put_the_same_layers_on_each_stage_are_one_candidate():
    ends = {"first_stage_less_layers": [0, 1], "last_stage_less_layers": [0, 1]}
    found = asked(
        {**FIXED, "layers": 8, "pp": 2, "tp": 2, "vpp": 2, "schedule": None, **ends},
        hardware=["h100-sxm"], gpus=4,
    ).space.candidates()  # fmt: skip
    runs = [found.rows.run(row) for row in range(len(found.rows))]
    splits = [run.resolved(found.rows.model).layers_per_stage for run in runs]
    assert len({*splits}) == len(splits) == 3
    assert "the same as without first_stage_less_layers" in found.removed[-1].example


def test_a_best_that_leaves_little_memory_is_told(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    assert not nearly_full(search(rows))  # 7 of 10
    told[4] = 2.0, 10
    (sentence,) = nearly_full(search(rows))
    assert "take 100% of the memory" in sentence
    assert limit(search(rows), int(search(rows).best[0])).endswith("memory 100%")
    left = candidates(micro_batch_size=[1, 2, 4, 8], tp=1, memory_allowance="1GB")
    assert not nearly_full(search(left))  # whoever says what the rest needs is not asked to


def test_what_does_not_fit_is_said_so_and_the_allowance_is_no_tensor(
    told: dict[int, tuple[float, int]],
):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    found = search(rows, Wanted(any_memory=True))
    assert nearly_full(found) == ["the best does not fit: needs 20 B of 10 B"]
    best = int(found.best[0])
    assert limit(found, best).endswith("%, does not fit: needs 20 B of 10 B")
    told[4] = 2.0, 10
    found = search(rows)
    best = int(found.best[0])
    assert limit(found, best).endswith("memory 100%")
    split = {"parameters": 0 * found.figures.peak + 6, "allowance": 0 * found.figures.peak + 4}
    kept = replace(found, figures=replace(found.figures, memory=split))
    assert limit(kept, best).endswith("%")
    assert "memory" not in limit(kept, best)


def test_fronts_of_three_are_those_of_two_with_a_constant():
    draw = np.random.default_rng(1)
    values = draw.integers(0, 12, (60, 2)).astype(float)
    wide = np.concatenate([values, np.zeros((60, 1))], axis=1)
    assert (front(values) == front(wide)).all()


def test_a_front_is_called_one_and_what_is_not_listed_is_said(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    both = search(rows, Wanted(("time", "memory")))
    assert best(both).title == "Pareto front of time and memory, by time"
    assert listed(both) == "3 of 4 simulated candidates are listed: 1 does not fit"
    told[1] = 9.0, 9
    assert listed(search(rows, Wanted(("time", "memory")))) == (
        "2 of 4 simulated candidates are listed: 1 does not fit, 1 is not on the front"
    )
    columns = made([2.4, 2.5, 2.6, 9.0], [5, 5, 5, 20])
    some = search(rows, Wanted(top=2), evaluate=lambda _: Evaluated(columns, []))
    assert best(some).title == "Best"
    assert listed(some) == (
        "1 of 2 simulated candidates are listed: 1 is behind a candidate that is only estimated"
    )
    alone = search(rows, Wanted(top=4), evaluate=lambda _: Evaluated(columns, []))
    assert listed(alone) == ""  # the fourth cannot fit, and was not simulated
    assert best(alone).units["tokens/s per GPU"] == "rate"


def test_a_candidate_of_which_nothing_varies_is_as_given():
    assert words(candidates(tp=1), 0) == "as given"


def test_what_limits_the_answer_is_said():
    rows = candidates(micro_batch_size=[4, 8], tp=1)
    fast = made([1.0, 2.0], [5, 5])
    columns = replace(fast, usd=np.array([np.nan, 3.0]))
    found = search(rows, Wanted(("cost",)), evaluate=lambda of: Evaluated(columns, []))
    assert found.without("cost").tolist()[0]
    assert left(found)[-1] == (
        "1 candidate left aside, of which cost is not known: h100-sxm: no price is known; give "
        "--price or --costs"
    )
    with pytest.raises(UserError, match="--objective mfu: only training"):
        search(asked({"model": "gpt2", "mode": "decode", "tp": 1, "pp": 1}, hardware=["h100-sxm"],
                     gpus=1).space.candidates().rows, Wanted(("mfu",)))  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top": 0}, "--top: got 0, wanted a whole number, 1 or more"),
        ({"sample": 1.5}, "--sample: got 1.5"),
        ({"space": 3}, "space is 3, wanted words"),
        ({"space": ["hsdp", "ofload"]}, "--space ofload.*did you mean 'offload'"),
    ],
)
def test_what_python_is_asked_is_checked_like_options(given: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        sw.search("gpt2", "h100-sxm", gpus=1, **given)


def test_words_leave_out_what_other_settings_imply():
    rows = candidates(pp=[1, 2], schedule=["1f1b", "gpipe"])
    said = {words(rows, row) for row in range(len(rows)) if rows.run(row).tp == 1}
    assert said == {"dp=4", "pp=2 dp=2", "pp=2 dp=2 schedule=gpipe"}


def test_run_files_name_hardware_by_name_only_where_the_name_says_all(tmp_path: Path):
    larger = with_figure(resolve("h100-sxm"), "memory_gb", 96).model_copy(
        update={"name": "h100-sxm"}
    )
    rows = candidates(tp=1)
    for hardware, said in ((resolve("h100-sxm"), "h100-sxm"), (larger, "h100-sxm.yaml")):
        column = Column(np.zeros(1, dtype=np.uint8), (hardware,))
        of = replace(rows, columns={**rows.columns, HARDWARE: column})
        assert f"hardware: {said}\n" in run_file(of, 0)
        (printed := tmp_path / "printed.yaml").write_text(printed_run_file(of, 0))
        read = Experiment.of(flat(read_settings(printed), printed), {}, printed)
        step = sw.simulate(read.run, read.cluster)
        assert step.machine.hardware.memory_gb == hardware.memory_gb
        assert step.seconds == exact(of).figures.seconds[0]
        files = write_run_file(of, 0, tmp_path / "best.yaml")
        assert len(files) == (1 if hardware is not larger else 2)
    assert resolve(files[1]).memory_gb == 96


def test_every_column_is_described_and_varied_figures_are_numbers():
    asked: dict[str, Any] = {**FIXED, "layers": 1, "tp": [1, 2], "top": 1, "bounded": False}
    found = sw.search(
        asked.pop("model"), "h100-sxm", gpus=2, memory_allowance="1GB",
        vary={"memory.gb": [70, 80]}, **asked,
    )  # fmt: skip
    table = found.every()
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
        hardware = varied(of, {"memory.gb": 96, "scale_up.size": 16})[0]
        text = hardware_file(hardware)
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
    of = asked(given, hardware=["h100-sxm"], gpus=4).space.candidates().rows
    found = search(of, Wanted(("cost",)), evaluate=evaluate)
    assert [each.reason for each in found.left] == ["stragglers"]
    step = sw.simulate(
        of.run(0), ClusterSection(hardware="h100-sxm", costs=str(costs), stragglers={1: 1.5})
    )
    expected = step.expense().usd_per_million_tokens
    assert expected is not None
    assert found.figures.seconds[0] == step.seconds
    assert found.figures.usd[0] == pytest.approx(expected * step.tokens / 1e6)


@pytest.mark.numerics
def test_figures_are_those_of_simulate():
    rows = candidates(tp=[1, 2])
    found = exact(rows)
    for row in range(2):
        step = sw.simulate(rows.run(row), "h100-sxm")
        of = found.figures
        assert of.seconds[row] == step.seconds
        assert of.peak[row] == step.fit.peak
        assert of.mfu[row] == step.mfu
        assert of.bubble[row] == step.mean.bubble
        assert of.joules[row] == step.expense().joules
        assert found.launches[row] == step.mean.launches
    assert not found.refused
    best_row = int((result := search(rows)).best[0])
    launches = result.launches[best_row] / result.figures.seconds[best_row]
    assert limit(result, best_row) == f"launches {launches:.0%}"


def test_how_sure_the_answer_is_is_said_of_what_is_looked_for(told: dict[int, tuple[float, int]]):
    rows = candidates(micro_batch_size=[1, 2, 4, 8], tp=1)
    columns = made([4.0, 3.0, 2.5, 9.9], [5, 6, 8, 20])

    def said(*names: str, top: int = 1) -> str:
        return certainty(
            search(rows, Wanted(names, top), evaluate=lambda _: Evaluated(columns, []))
        )

    assert said("memory") == (
        "simulated memory is 0.0% off the estimate; no candidate beyond those simulated can take "
        "less memory, unless its estimate is further off"
    )
    assert said("time") == (
        "simulated times are -20.0% off the estimate; no candidate beyond those simulated can be "
        "faster, unless its estimate is further off"
    )
    both = said("time", "memory")
    assert both.startswith("simulated times are -20.0% off the estimate; simulated memory is -12.5")
    assert both.endswith(
        "2 candidates beyond those simulated could still join the front of time and memory, if "
        "estimates were as far off; a larger --top tells"
    )
    assert certainty(search(rows, Wanted(("memory",), most=2))).endswith(
        "2 candidates beyond those simulated could still take less memory; a larger --most "
        "simulates more"
    )
    assert certainty(search(rows)) == "all candidates have been simulated"
    assert told
