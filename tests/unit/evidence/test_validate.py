"""Predictions beside measurements: rows from one CSV line, quantities, the rows we carry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers import cases
from stagewright.cli.main import commands
from stagewright.errors import UserError
from stagewright.evidence import kernels, training
from stagewright.evidence.rows import NotCompared, Prediction, compare, prediction
from stagewright.evidence.statistics import LOW, errors_by_source, grouped
from stagewright.evidence.training import Assumption, Source, held_out, sources
from stagewright.time import hardware

HEADER = "source,row,url,hardware,quantity,measured,model,layers,tp,dp,global_batch_size,seq_length"
ROW = "mine,small,https://example.org,h100-sxm,{quantity},2.0,llama3-8b,1,2,4,8,1024"


def row(quantity: str, header: str = HEADER) -> training.Measurement:
    (found,) = training.read(f"{header}\n{ROW.format(quantity=quantity)}", "rows.csv")
    return found


def test_wrong_columns_and_quantities_are_refused() -> None:
    with pytest.raises(UserError, match="unknown column 'tpp'; did you mean 'tp'"):
        row("step_s", HEADER.replace(",tp,", ",tpp,"))
    with pytest.raises(UserError, match="line 2: quantity is 'step'; did you mean 'step_s'"):
        row("step")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\n{ROW.format(quantity='step_s')}\n")
    result = CliRunner().invoke(commands, ["validate", "--rows", str(path), "--json"])
    (found,) = json.loads(result.output)["rows"]
    assert (found["source"], found["measured"]) == ("mine", 2.0)
    assert found["predicted"] > 0
    printed = (
        CliRunner(env={"COLUMNS": "120"}).invoke(commands, ["validate", "--rows", str(path)]).stdout
    )
    assert printed.count("mean error") == 1
    path.write_text(f"{HEADER}\n{ROW.format(quantity='step_s').replace('2.0', 'two')}\n")
    with pytest.raises(UserError, match="line 2: measured is 'two', wanted a number above 0"):
        training.load(path)
    path.write_text(f"{HEADER},pp\n{ROW.format(quantity='step_s')},2\n")
    result = CliRunner().invoke(commands, ["validate", "--rows", str(path)])
    with pytest.raises(UserError, match=r"mine, small: .*layers"):
        raise result.exception or AssertionError
    path.write_text("source,row\na,b\n")
    with pytest.raises(UserError, match="lacks columns hardware, quantity"):
        training.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        training.load(tmp_path / "none.csv")


@pytest.mark.numerics
def test_carried_rows_have_sources_and_known_hardware() -> None:
    rows = training.rows()
    assert len(rows) > 1900
    for m in rows:
        assert m.url.startswith("https://"), m.row
        assert m.hardware in hardware.names()
    others = training.not_compared()
    assert len({(m.source, m.row) for m in (*rows, *others)}) == len(rows) + len(others)
    assert {m.source for m in rows} <= set(sources())


@pytest.mark.numerics
def test_rows_without_a_prediction_say_why() -> None:
    others = training.not_compared()
    assert len(others) < 330
    assert all(o.reason for o in others)


@pytest.mark.numerics
def test_seven_tenths_of_the_configurations_may_be_fitted_to() -> None:
    rows = training.rows()
    held = sum(held_out(m) for m in rows) / len(rows)
    assert held == pytest.approx(0.3, abs=0.05)


def test_rows_of_one_run_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def step_seconds(m: training.Measurement, machine: object) -> float:
        runs.append(m.row)
        return 4.0

    monkeypatch.setattr(training, "step_seconds", step_seconds)
    rows = [row("step_s"), replace(row("step_s"), row="of another release", measured=4.0)]
    errors = [o.error for o in compare(rows) if isinstance(o, Prediction)]
    assert errors == pytest.approx([1.0, 0.0])
    assert runs == ["of another release"]


def test_a_row_that_no_program_is_made_of_is_counted() -> None:
    header = f"{HEADER},pp"
    text = f"{header}\n{ROW.format(quantity='step_s')},2"
    rows = training.read(text, "rows.csv")
    (outcome,) = compare(rows)
    assert isinstance(outcome, NotCompared)
    assert "layers" in outcome.reason
    (left,) = [*training.read(f"{HEADER},not_compared\n{ROW.format(quantity='step_s')},", "r")]
    assert left.row == "small"
    assert not training.read(f"{HEADER},not_compared\n{ROW.format(quantity='step_s')},why", "r")


def test_a_source_fills_cells_that_its_rows_leave_open() -> None:
    source = Source("https://x/", {"recompute": Assumption("full", "as its scripts set")}, ())
    assert source.complete({"recompute": "", "url": "y"}) == {
        "recompute": "full",
        "url": "https://x/y",
    }
    assert source.complete({"recompute": "none", "url": "https://z"})["recompute"] == "none"


def test_a_network_of_its_own() -> None:
    header = f"{HEADER},network_gb_s"
    (m,) = training.read(f"{header}\n{ROW.format(quantity='step_s')},6.25", "rows.csv")
    assert training.machine_of(m).hardware.scale_out.bandwidth_gb_s == 6.25
    with pytest.raises(UserError, match="line 2: network_gb_s is '-1', wanted a number above 0"):
        training.read(f"{header}\n{ROW.format(quantity='step_s')},-1", "rows.csv")


def test_groups_count_errors_of_time_and_set_low_utilization_apart() -> None:
    """A rate that is predicted twice as high is a time that is predicted half as long."""
    fast = replace(row("tokens_s_gpu"), measured=1.0)
    low = replace(row("step_s"), row="low", low_utilization=True)
    (rate, time) = (prediction(m, m.predict(512.0)) for m in (fast, low))
    assert (rate.error, rate.error_of_time) == pytest.approx((1.0, -0.5))
    by_source = grouped([rate, time], "source")
    assert [g.group for g in by_source] == ["mine, dense", f"mine, dense, {LOW}"]
    assert [g.every.bias for g in by_source] == pytest.approx([-0.5, 255.0])
    (sized, apart) = grouped([rate, time], "tokens of a kernel")
    assert (sized.group, apart.group) == ("up to 1,024", LOW)
    assert sum(g.held_out is not None for g in by_source) in (0, 2)


def test_few_microbatches_stand_for_many() -> None:
    """Once the pipeline is full, a step is linear in its microbatches."""
    settings = "tp,dp,pp,global_batch_size,seq_length,layers,model,source,row,url,hardware,quantity"
    values = "1,1,2,8,512,4,llama3-8b,s,r,https://x,h100-sxm,step_s"
    (m,) = training.read(f"{settings},measured\n{values},1", "rows.csv")
    whole = m.run.model_copy(update={"global_batch_size": 4})
    machine = training.machine_of(m)
    eight = training.step_seconds(m, machine)
    object.__setattr__(m, "run", whole)
    four = training.step_seconds(m, machine)
    object.__setattr__(m, "run", whole.model_copy(update={"global_batch_size": 2}))
    two = training.step_seconds(m, machine)
    assert eight == pytest.approx(four + 2 * (four - two))


def test_summary_counts_per_source() -> None:
    rows = [Prediction("a", str(e), "s", 1.0, 1.0 + e) for e in (0.1, -0.3, 0.2)]
    (total,) = errors_by_source(rows)
    assert (total.rows, total.worst) == (3, ("-0.3", pytest.approx(-0.3)))
    assert total.mape == pytest.approx(0.2)
    assert total.median == pytest.approx(0.2)
    assert total.bias == pytest.approx(0.0)


@pytest.mark.numerics
@cases
def test_held_out_kernels_are_near(source: str, most: float) -> None:
    """Half of the rows that nothing was fitted to are within the error that we state."""
    name = f"aiconfigurator, {source}"
    outcomes = compare(kernels.rows(name))
    every = errors_by_source(o for o in outcomes if isinstance(o, Prediction))
    (total,) = [found for found in every if source == "NCCL" or found.source == name]
    assert total.median <= most


def test_json_has_the_keys_it_promises() -> None:
    result = CliRunner().invoke(commands, ["validate", "--source", "nccl-tests", "--json"])
    found = json.loads(result.output)
    assert set(found) == {"rows", "groups", "not_compared"}
    wanted = {"source", "row", "quantity", "measured", "predicted", "error", "fitted"}
    wanted |= {"reason", "traits"}
    assert found["rows"]
    assert all(set(row) == wanted for row in found["rows"])
