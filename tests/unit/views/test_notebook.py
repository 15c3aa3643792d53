"""Python use: runs by name, results that show themselves, tables, and the example notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import EXAMPLES, cases, needed
from notebooks import execute, notebook, text
from pages import check
from stagewright.program.columns import TaskKind
from stagewright.texttable import SHOWN
from stagewright.views.pages.html import render
from stagewright.views.pictures import schedule

pytestmark = pytest.mark.numerics  # whole pages of compiled and simulated runs take seconds

SMALL: dict[str, Any] = {"layers": 4, "seq_length": 256, "tp": 2, "pp": 2, "dp": 2}


@pytest.fixture(scope="module")
def compiled() -> sw.Compiled:
    return sw.compile("llama3-8b", **SMALL)


@pytest.fixture(scope="module")
def found(compiled: sw.Compiled) -> Any:
    return sw.simulate(compiled, "h100-sxm")


# ---- runs by name --------------------------------------------------------------------------------


def test_a_name_with_settings_is_a_run(compiled: sw.Compiled):
    run = sw.Run(model="llama3-8b", **SMALL)
    assert compiled.run == sw.compile(run).run
    assert sw.compile(sw.Run(model="llama3-8b", tp=4), **SMALL).run == compiled.run


@cases
def test_wrong_settings_are_user_errors(settings: dict[str, Any], message: str):
    with pytest.raises(sw.UserError, match=message):
        sw.compile("llama3-8b", **settings)
    with pytest.raises(sw.UserError, match=message):
        sw.simulate("llama3-8b", "h100-sxm", **settings)


def test_execution_is_passed_on(compiled: sw.Compiled, found: Any):
    slow = sw.simulate(compiled, "h100-sxm", no_overlap=["tp", "dp"], stragglers={0: 1.5})
    assert slow.seconds > found.seconds
    with pytest.raises(sw.UserError, match="there is no axis 'xp'"):
        sw.simulate(compiled, "h100-sxm", no_overlap=["xp"])


# ---- what results look like ----------------------------------------------------------------------


def test_results_print_in_a_line(compiled: sw.Compiled, found: Any):
    for each in (compiled, found, compiled.program, *compiled.program.classes):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 200
    assert "8 ranks" in repr(compiled)
    across = sw.compile("llama3-8b", layers=2, mode="decode", prefill="tp=2", context_length=64)
    assert len(repr(across.program)) < 200


def test_results_show_themselves(compiled: sw.Compiled, found: Any):
    for each in (compiled, found, compiled.table("memory"), schedule.picture(compiled.order)):
        shown = each._repr_html_()
        frame = render("x", [], [])
        check(frame.rstrip().removesuffix("</body></html>") + shown + "</body></html>")
    assert compiled._repr_html_() == sw.compile("llama3-8b", **SMALL)._repr_html_()
    sparse = sw.simulate("mixtral-8x7b", "h100-sxm", mode="decode", ep=2, dp=2, layers=2)
    assert "<svg" in sparse._repr_html_()


# ---- tables --------------------------------------------------------------------------------------


def test_tables_hold_what_the_summary_says(compiled: sw.Compiled):
    told = compiled.to_dict()
    work = compiled.table("compute")
    assert work.columns["stage"] == [0, 1]
    assert work.columns["forward"] == [c["flops"]["forward"] for c in told["rank_classes"]]
    sent = [row for row in compiled.table("communication").rows if row["what"] == "send"]
    wanted = [row["bytes"] for each in told["rank_classes"] for row in each["sends"]]
    assert [row["bytes"] for row in sent] == wanted
    peaks = compiled.table("memory").columns["peak"]
    assert peaks == [each["memory"]["peak"] for each in told["rank_classes"]]


def test_tasks_are_those_of_the_rank(compiled: sw.Compiled):
    last = compiled.program.classes[1]
    rank = int(last.ranks[0])
    rows = compiled.table("tasks", rank=rank).rows
    assert len(rows) == len(last.tasks)
    assert sum(row["flops"] for row in rows) == int(last.tasks.flops.sum())
    sends = [row for row in rows if row["kind"] == "send"]
    assert len(sends) == int(np.count_nonzero(last.tasks.kind == TaskKind.SEND))
    assert {row["with"] for row in sends} == {"pp +1"}  # round the ring
    assert {row["with"] for row in rows if row["kind"] == "all_reduce"} == {"tp", "dp", "pp+tp"}
    with pytest.raises(sw.UserError, match="there is no rank 8; use 0 to 7"):
        compiled.table("tasks", rank=8)


def test_tasks_of_lanes_run_when_they_run(found: Any):
    rows = found.table("tasks", lane=1).rows
    assert max(row["end"] for row in rows) <= found.seconds
    assert all(row["begin"] <= row["end"] for row in rows)
    kernels = sum(r["end"] - r["begin"] for r in rows if r["phase"] == "forward" and r["flops"])
    assert kernels == pytest.approx(found.parts[1].kernels["forward"], rel=0.05)
    with pytest.raises(sw.UserError, match="there is no lane 2"):
        found.table("tasks", lane=2)


@pytest.mark.extra
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_columns_make_data_frames(library: str, compiled: sw.Compiled, found: Any):
    frame_of: Any = needed(library, library).DataFrame
    for each in (
        *(
            compiled.table("compute"),
            compiled.table("memory"),
            compiled.table("communication"),
            compiled.table("tasks", rank=5),
        ),
        *(found.table("parts"), found.table("transfers"), found.table("tasks")),
    ):
        frame = frame_of(each.columns)
        assert list(frame.columns) == list(each.columns)
        assert len(frame) == len(each)
    flops = compiled.table("tasks")
    frame = frame_of(flops.columns)
    assert int(frame["flops"].sum()) == int(compiled.program.classes[0].tasks.flops.sum())


def test_long_tables_are_cut_in_notebooks(compiled: sw.Compiled):
    tasks = compiled.table("tasks")
    shown = tasks._repr_html_()
    assert shown.count("<tr>") == SHOWN + 2
    assert f"{len(tasks) - SHOWN:,} more rows" in shown
    assert tasks.html().count("<tr>") == len(tasks) + 1


# ---- the example ---------------------------------------------------------------------------------

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_show_what_they_give(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """All cells run, in order, in one process; outputs are those in the file, to the byte."""
    needed("pandas", "pandas")
    monkeypatch.chdir(tmp_path)
    before = path.read_text(encoding="utf-8")
    after = text(execute(notebook(before)))
    if request.config.getoption("--bless"):
        path.write_text(after, encoding="utf-8")
        return
    cells = zip(json.loads(before)["cells"], json.loads(after)["cells"], strict=True)
    for nth, (had, has) in enumerate(cells):
        assert had == has, f"cell {nth} of {path.name}; pytest --bless writes what it gives now"
    assert before == after
