"""Predictions beside measurements: rows from one CSV line, quantities, the rows we carry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagewright.cli.main import commands
from stagewright.errors import UserError
from stagewright.evidence import kernels as validate_kernels
from stagewright.evidence import validate
from stagewright.evidence.predictions import Prediction, errors_by_source
from stagewright.time import hardware

HEADER = "source,row,url,hardware,quantity,measured,model,layers,tp,dp,global_batch_size,seq_length"
ROW = "mine,small,https://example.org,h100-sxm,{quantity},2.0,llama3-8b,1,2,4,8,1024"


def row(quantity: str, header: str = HEADER) -> validate.Measurement:
    (found,) = validate.read(f"{header}\n{ROW.format(quantity=quantity)}", "rows.csv")
    return found


def test_one_line_is_a_row() -> None:
    m = row("step_s")
    assert (m.source, m.measured, m.run.world_size, m.run.layers) == ("mine", 2.0, 8, 1)
    assert validate.in_quantity(m, 0.5) == 0.5
    assert validate.in_quantity(row("tokens_s_gpu"), 0.5) == 8 * 1024 / 0.5 / 8


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
    path.write_text(f"{HEADER}\n{ROW.format(quantity='step_s').replace('2.0', 'two')}\n")
    with pytest.raises(UserError, match="line 2: measured is 'two', wanted a number above 0"):
        validate.load(path)
    path.write_text("source,row\na,b\n")
    with pytest.raises(UserError, match="the column hardware is missing"):
        validate.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        validate.load(tmp_path / "none.csv")


def test_carried_rows_have_sources_and_known_hardware() -> None:
    rows = validate.measurements()
    assert len(rows) > 100
    for m in rows:
        assert m.url.startswith("https://"), m.row
        assert m.hardware in hardware.names()
    assert len({(m.source, m.row) for m in rows}) == len(rows)


def test_predictions_may_come_from_elsewhere() -> None:
    outcomes = list(validate.validate("korthikanti", lambda m, machine: 2 * m.measured))
    assert len(outcomes) == 9
    assert all(o.error == pytest.approx(1.0) for o in outcomes)


def test_few_microbatches_stand_for_many() -> None:
    """Once the pipeline is full, a step is linear in its microbatches."""
    settings = "tp,dp,pp,global_batch_size,seq_length,layers,model,source,row,url,hardware,quantity"
    values = "1,1,2,8,512,4,llama3-8b,s,r,https://x,h100-sxm,step_s"
    (m,) = validate.read(f"{settings},measured\n{values},1", "rows.csv")
    whole = m.run.model_copy(update={"global_batch_size": 4})
    machine = validate.machine_of(m)
    eight = validate.step_seconds(m, machine)
    object.__setattr__(m, "run", whole)
    four = validate.step_seconds(m, machine)
    object.__setattr__(m, "run", whole.model_copy(update={"global_batch_size": 2}))
    two = validate.step_seconds(m, machine)
    assert eight == pytest.approx(four + 2 * (four - two))


def test_summary_counts_per_source() -> None:
    rows = [Prediction("a", str(e), "s", 1.0, 1.0 + e, e, "", "") for e in (0.1, -0.3, 0.2)]
    (total,) = errors_by_source(rows)
    assert (total.rows, total.worst) == (3, ("-0.3", -0.3))
    assert total.mape == pytest.approx(0.2)
    assert total.median == pytest.approx(0.2)
    assert total.bias == pytest.approx(0.0)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("source", "most"),
    [("matrix products", 0.1), ("attention", 0.1), ("experts", 0.1), ("NCCL", 0.15)],
)
def test_held_out_kernels_are_near(source: str, most: float) -> None:
    """Half of the rows that nothing was fitted to are within the error that we state."""
    (total,) = errors_by_source(validate_kernels.validate(f"aiconfigurator, {source}"))
    assert total.median <= most


def test_json_has_the_keys_it_promises() -> None:
    result = CliRunner().invoke(commands, ["validate", "--source", "nccl-tests", "--json"])
    found = json.loads(result.output)
    assert set(found) == {"rows"}
    wanted = {"source", "row", "quantity", "measured", "predicted", "error", "fitted"}
    assert found["rows"]
    assert all(set(row) == wanted for row in found["rows"])
