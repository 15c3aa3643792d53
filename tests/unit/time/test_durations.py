"""Measured durations: matched by kernel, shape and data type, written, and told where none is."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import stagewright as sw
from helpers import cases
from stagewright.check.files.reader import read_trace
from stagewright.cli.main import commands
from stagewright.errors import UserError
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.time.durations import task_seconds
from stagewright.time.measured import (
    collective_rows,
    collectives,
    describe_extents,
    kernels,
    load,
    measured,
    parse,
)

SETTINGS = {"model": "llama3.1-8b", "tp": 2, "pp": 2, "layers": 2, "seq_length": 128}


def filled(compiled: sw.Compiled, keep: str = "") -> str:
    """Every kernel (whose name holds `keep`) takes as many microseconds as its row's number."""
    text = io.StringIO()
    rows = kernels(compiled.program)
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    for nth, row in enumerate(rows):
        writer.writerow({**row, "duration_us": nth + 1 if keep in row["kernel"] else ""})
    return text.getvalue()


def test_all_kernels_get_theirs(tmp_path: Path) -> None:
    compiled = sw.compile(Run(**SETTINGS))
    path = tmp_path / "kernels.csv"
    path.write_text(filled(compiled))
    rows = kernels(compiled.program)
    order = {
        (r["kernel"], frozenset(r["shape"].split()), r["dtype"]): n + 1 for n, r in enumerate(rows)
    }
    program, coverage = measured(compiled.program, load(path))
    scalar = 0
    for c in program.classes:
        t = c.tasks
        assert t.duration is not None
        for i in np.flatnonzero(t.kind == TaskKind.COMPUTE):
            if t.shape[i] < 0:
                scalar += t.duration[i] == 0
                continue
            shape = t.shapes[t.shape[i]]
            extents = frozenset(f"{name}={n}" for name, n in shape.extents)
            assert t.duration[i] == order[shape.kernel, extents, t.dtypes[t.dtype[i]]] * 1000
        assert not t.duration[t.kind != TaskKind.COMPUTE].any()
    assert coverage.kernels == coverage.measured_kernels > 0
    assert not coverage.missing
    assert sum(r["count"] for r in rows) == 2 * coverage.kernels  # two ranks a class


def test_the_trace_has_microseconds_where_a_row_matches(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    compiled = sw.compile(Run(**SETTINGS))
    path.write_text(filled(compiled, keep="gemm"))
    options = ["--layers", "2", "--seq-length", "128", "--tp", "2", "--pp", "2"]
    arguments = ["generate", "llama3.1-8b", *options, "-o", str(tmp_path / "out")]
    told = CliRunner().invoke(commands, [*arguments, "--durations", str(path)]).output
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())["durations"]
    assert 0 < manifest["measured"] < manifest["kernels"]
    assert sum(manifest["missing"].values()) == manifest["kernels"] - manifest["measured"]
    assert f"durations of {manifest['measured']} of {manifest['kernels']} kernels; no row" in told
    program, _ = measured(compiled.program, load(path))
    wanted = [0 if d == 0 else d // 1000 for d in program.classes[0].tasks.duration.tolist()]
    trace = read_trace(tmp_path / "out" / "workload.0.et")
    assert trace.duration.tolist() == wanted
    plain = CliRunner().invoke(commands, [*arguments[:-1], str(tmp_path / "plain")])
    assert plain.exit_code == 0
    manifest_of_plain = json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert "durations" not in manifest_of_plain


def test_a_row_without_dtype_is_for_all_and_an_exact_one_wins() -> None:
    text = "kernel,shape,duration_us,dtype\nnorm,b=1 s=2,2,\nnorm,s=2 b=1,0.25,fp32\n"
    table = parse(text, "k.csv")
    from stagewright.program.columns import Shape

    norm = Shape("norm", (("b", 1), ("s", 2)))
    assert [table.of(norm, d) for d in ("bf16", "fp32")] == [2000, 250]
    assert table.of(Shape("norm", (("b", 1), ("s", 3))), "bf16") == 0


HEADER = "kernel,shape,dtype,duration_us\n"


@cases
def test_refuses(text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    path.write_text(text)
    with pytest.raises(UserError) as info:
        load(path)
    assert str(info.value).startswith(str(path))
    assert wanted in str(info.value)


def test_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        load(tmp_path / "k.csv")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "none.csv")


@pytest.mark.numerics
def test_a_simulation_takes_measured_kernels_and_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Durations as the model computes them change nothing; ten times as long make ten times."""
    run: dict[str, Any] = {"layers": 2, "seq_length": 256, "tp": 2, "dp": 2, "zero": 1}
    run["launch_mode"] = "ahead"  # launches have no measured durations
    found = sw.simulate("llama3.1-8b", "h100-sxm", **run)
    program = found.compiled.program
    seconds = dict(zip(map(id, program.classes), task_seconds(program, found.machine), strict=True))
    known: dict[Any, float] = {}
    for of in program.classes:
        for shape, _, rows in collective_rows(program, of):
            known[shape.kernel, describe_extents(shape)] = seconds[id(of)][rows[0]]
        for i in np.flatnonzero((of.tasks.kind == TaskKind.COMPUTE) & (of.tasks.shape >= 0)):
            shape = of.tasks.shapes[of.tasks.shape[i]]
            dtype = of.tasks.dtypes[of.tasks.dtype[i]]
            known[shape.kernel, describe_extents(shape), dtype] = seconds[id(of)][i]

    def times(factor: float, only: str = "") -> Path:
        path = tmp_path / f"{factor}{only}.csv"
        with path.open("w") as file:
            writer = csv.DictWriter(file, [*collectives(program)[0]])
            writer.writeheader()
            for row in collectives(program):
                took = known[row["kernel"], row["shape"]] * factor * 1e6
                writer.writerow(row | {"duration_us": took if only in row["shape"] else ""})
            for row in kernels(program):
                took = known[row["kernel"], row["shape"], row["dtype"]] * factor * 1e6
                writer.writerow(row | {"duration_us": took if took and not only else ""})
        return path

    again = sw.simulate("llama3.1-8b", "h100-sxm", **run, durations=str(times(1.0)))
    assert again.seconds == pytest.approx(found.seconds, rel=0.02)
    assert again.durations is not None
    assert again.durations.measured_kernels > again.durations.kernels / 2 > 0
    assert again.durations.measured_collectives == again.durations.collectives > 0
    slow = sw.simulate("llama3.1-8b", "h100-sxm", **run, durations=str(times(10.0)))
    assert slow.seconds == pytest.approx(10 * found.seconds, rel=0.05)
    # dp's groups alone: ranks 0 and 2 span three.
    dp = sw.simulate("llama3.1-8b", "h100-sxm", **run, durations=str(times(100.0, "span=3")))
    assert dp.mean.communication["dp"] > 50 * found.mean.communication["dp"]
    assert dp.mean.communication["tp"] == pytest.approx(found.mean.communication["tp"], rel=0.01)

    options = ["--layers", "2", "--seq-length", "256", "--tp", "2", "--dp", "2", "--zero", "1"]
    asked = ["llama3.1-8b", *options, "--hardware", "h100-sxm", "--durations", str(times(10.0))]
    told = CliRunner().invoke(commands, ["simulate", *asked])
    assert str(slow.durations) in told.stderr
    page = tmp_path / "run.html"
    assert CliRunner().invoke(commands, ["report", *asked, "-o", str(page)]).exit_code == 0
    assert f"--durations {times(10.0)}" in page.read_text()
