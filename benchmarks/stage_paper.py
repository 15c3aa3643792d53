"""Writes docs/stage-paper.md: the tables of STAGE's paper beside figures that Stagewright computes.

    python benchmarks/stage_paper.py

`data/stage-paper.yaml` has the paper's figures and, for each case, its run, what the run assumes,
and why a computed figure differs. A test computes the page again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import yaml

from stagewright.evidence.training import run_of_values
from stagewright.graph.node import BYTES
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind

FIGURES = Path(__file__).parent / "data" / "stage-paper.yaml"
PAGE = Path(__file__).parent.parent / "docs" / "stage-paper.md"

VOLUMES = {
    "send": ("send", "all_to_all"),
    "recv": ("recv", "all_to_all"),
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
}
"""Columns of Table VII and the operations that each counts: an all-to-all is its messages."""
TABLES = {
    "VII": "millions of elements that a rank of the first stage communicates in a step",
    "V": "GB at the peak of a rank of the last stage",
    "I": "operations of a rank of the first stage in a step",
}


class Case(NamedTuple):
    """A model and its parallelism: the name in the paper, and the run that stands for it."""

    name: str
    run: str
    assumed: str
    """Settings that the paper does not print, and what they follow from."""


class Row(NamedTuple):
    """A figure: computed here, measured (None: the paper prints one only) and computed by STAGE."""

    table: str
    row: str
    quantity: str
    ours: float
    measured: float | None
    stage: float
    why: str
    """Why the figure computed here differs, if it does."""

    @property
    def error(self) -> float | None:
        """Relative error to the measured figure, or else to STAGE's; None where that is 0."""
        return _error(self.ours, self.stage if self.measured is None else self.measured)

    @property
    def error_of_stage(self) -> float | None:
        """Relative error of STAGE's figure to the measured one."""
        return None if self.measured is None else _error(self.stage, self.measured)

    @property
    def same(self) -> bool:
        """Whether the figure computed here equals the printed one, to its last digit."""
        figure = self.stage if self.measured is None else self.measured
        return round(self.ours, 1) == figure


def _error(value: float, figure: float) -> float | None:
    return value / figure - 1 if figure else None


def paper() -> dict[str, Any]:
    """The contents of the file of figures."""
    return yaml.safe_load(FIGURES.read_text(encoding="utf-8"))


def stage_paper() -> Iterator[tuple[Case, list[Row]]]:
    """Each case of the paper with its rows, in the order of its tables."""
    for case in paper()["cases"]:
        yield _case(case)


def _case(case: Mapping[str, Any]) -> tuple[Case, list[Row]]:
    run, model = run_of_values({**case["run"], **case.get("model", {})})
    compiled = compile(run, model)
    program = compiled.program
    why = case.get("why", {})
    rows: list[Row] = []
    printed = cast("Mapping[str, list[float]]", case.get("volume", {}))
    counts = {**VOLUMES, **case.get("counts", {})}
    ours = volumes(program, data_parallel=case.get("data_parallel", False)) if printed else {}
    for quantity in VOLUMES if printed else ():
        amount = sum(ours.get(op, 0) for op in counts[quantity]) / 1e6
        measured, stage = printed.get(quantity, (0, 0))
        rows.append(Row("VII", case["name"], quantity, amount, measured, stage, ""))
    if "memory" in case:
        measured, stage = case["memory"]
        peak = program.classes[-1].memory["peak"] / 1e9
        measured -= case.get("context", 0)
        rows.append(Row("V", case["name"], "memory", peak, measured, stage, ""))
    for quantity, figure in case.get("operations", {}).items():
        kinds = program.classes[0].tasks.kind
        amount = int(np.count_nonzero((kinds == TaskKind.COMPUTE) == (quantity == "compute")))
        rows.append(Row("I", case["name"], quantity, amount, None, figure, ""))
    rows = [row._replace(why=str(why.get(row.quantity, ""))) for row in rows]
    changed = (f"{field}={value}" for field, value in case.get("model", {}).items())
    description = " ".join([compiled.run.describe(), *changed])
    return Case(case["name"], description, case["assumed"]), rows


def volumes(program: Program, data_parallel: bool) -> dict[str, int]:
    """Elements that a rank of the first stage communicates, by operation.

    With `data_parallel`, collectives over dp count too. All-gathers count the input shard.
    """
    tasks = program.classes[0].tasks
    over = set(dict(program.mesh.groups).get("dp", ("dp",)))
    held = [data_parallel or not over & {*c.axes} for c in program.communicators]
    collective = tasks.kind == TaskKind.COLLECTIVE
    exchange = tasks.ops.index("all_to_all") if "all_to_all" in tasks.ops else -1
    counted = np.isin(tasks.kind, (TaskKind.SEND, TaskKind.RECV)) | (tasks.op == exchange)
    counted[collective] |= np.array(held, bool)[tasks.slot[collective]]
    sizes = np.array([BYTES[dtype] for dtype in tasks.dtypes])[tasks.dtype]
    elements = np.where(counted, tasks.comm_bytes // sizes, 0)
    return {op: int(elements[tasks.op == i].sum()) for i, op in enumerate(tasks.ops)}


# ---- as text -------------------------------------------------------------------------------------

_INTRODUCTION = """\
# STAGE's tables, reproduced

What stagewright computes beside what {paper} ({url})
measured and computed. Written by `python benchmarks/stage_paper.py`; figures and runs are in
`benchmarks/data/stage-paper.yaml`.

An all-gather counts its input shard, a reduce-scatter its whole input, an all-to-all is sends and
receives. What is reduced over data parallelism is in no column of the paper but for FSDP=8 and
DeepSeek-MoE 16B, and is counted there only. Memory is less the GB of context that the paper takes
off dense rows; the allocation of ours is ideal. Table I has one figure for each; our compute tasks
are fused kernels.
"""


def markdown(cases: list[tuple[Case, list[Row]]]) -> str:
    """The tables as a page."""
    lines = [_INTRODUCTION.format(**paper())]
    for table, what in TABLES.items():
        shown = [r for _, rows in cases for r in rows if r.table == table and shows(r)]
        lines += [f"## Table {table}: {what}", "", _HEAD[table != "I"]]
        lines += [f"| {' | '.join(cells(row))} |" for row in shown]
        lines += ["", *(f"- {r.row}, {r.quantity}: {r.why}." for r in shown if r.why), ""]
    lines += ["## What is assumed", ""]
    lines += [f"- {case.name}: {case.assumed}. `{case.run}`" for case, _ in cases]
    return "\n".join(lines) + "\n"


_HEAD = (
    "| case | quantity | ours | printed | error |\n|---|---|---:|---:|---:|",
    "| case | quantity | ours | measured | STAGE | error | STAGE's |\n"
    "|---|---|---:|---:|---:|---:|---:|",
)


def shows(row: Row) -> bool:
    """Whether a row is worth printing: volumes that are zero everywhere are not."""
    return max(row.ours, row.measured or 0, row.stage) >= 0.05


def cells(row: Row) -> list[str]:
    """Cells of a row: case, quantity, the figures (here, measured, STAGE's), and both errors."""
    form = "{:,.0f}" if row.table == "I" else "{:,.1f}" if row.table == "VII" else "{:,.2f}"
    printed = [row.stage] if row.measured is None else [row.measured, row.stage]
    errors = [_percent(row.error, row.same)]
    if row.measured is not None:
        errors.append(_percent(row.error_of_stage, row.stage == row.measured))
    return [row.row, row.quantity, *(form.format(n) for n in (row.ours, *printed)), *errors]


def _percent(error: float | None, same: bool) -> str:
    if same:
        return "same"
    return "" if error is None else f"{error:+.2%}"


if __name__ == "__main__":
    PAGE.write_text(markdown(list(stage_paper())), encoding="utf-8")
