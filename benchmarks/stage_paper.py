"""Writes the tables of docs/studies/stage-paper.md: STAGE's figures and those of Stagewright.

    python benchmarks/stage_paper.py

`data/stage-paper.yaml` has the paper's figures and, for each case, its run, what the run assumes,
and why a computed figure differs. The page has a summary and the figures that differ;
`stage-paper.csv` next to it has all of them. A test computes both again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import yaml

from stagewright.evidence.training import run_of_values
from stagewright.graph.node import BYTES
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind

FIGURES = Path(__file__).parent / "data" / "stage-paper.yaml"
STUDIES = Path(__file__).parent.parent / "docs" / "studies"
PAGE, FIGURES_CSV = STUDIES / "stage-paper.md", STUDIES / "stage-paper.csv"

VOLUMES = {
    "send": ("send", "all_to_all"),
    "recv": ("recv", "all_to_all"),
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
}
"""Columns of Table VII and the operations that each counts: an all-to-all is its messages."""
TABLES = {
    "VII": "elements communicated",
    "V": "peak memory",
    "I": "number of operations",
}


class Case(NamedTuple):
    """A model and its parallelism: the name in the paper, and the run that stands for it."""

    name: str
    run: str
    assumed: str
    """Settings that the paper does not print, and the figures that they follow from."""


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
        """True if the figure computed here equals the printed one, to its last digit."""
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

Cases = Sequence[tuple[Case, Sequence[Row]]]


def page(text: str, cases: Cases) -> str:
    """The page with its tables as of now, each between two marks."""
    for name, table in {"summary": summary, **dict.fromkeys(TABLES, differing)}.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, after = text.split(begin)
        lines = table(cases, name)
        text = f"{before}{begin}\n\n{chr(10).join(lines)}\n\n{end}{after.split(end)[1]}"
    return text


def shows(row: Row) -> bool:
    """True if a row is worth printing: volumes that are zero everywhere are not."""
    return max(row.ours, row.measured or 0, row.stage) >= 0.05


def _rows(cases: Cases, table: str) -> list[Row]:
    return [row for _, rows in cases for row in rows if row.table == table and shows(row)]


def summary(cases: Cases, _: str) -> list[str]:
    """Errors of each table: of Stagewright, and of STAGE where the paper has measured figures."""
    lines = [
        "| table | figures | equal, ours | equal, STAGE's | median error, ours | STAGE's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for table, quantity in TABLES.items():
        rows = _rows(cases, table)
        ours = [0.0 if row.same else abs(row.error or 0) for row in rows]
        equal, median = str(sum(row.same for row in rows)), f"{np.median(ours):.2%}"
        theirs = [abs(e) for row in rows if (e := row.error_of_stage) is not None]
        of_stage = ["", ""]
        if theirs:
            equal_of_stage = sum(row.stage == row.measured for row in rows)
            of_stage = [str(equal_of_stage), f"{np.median(theirs):.2%}"]
        cells = (f"{table}, {quantity}", str(len(rows)), equal, of_stage[0], median, of_stage[1])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def differing(cases: Cases, table: str) -> list[str]:
    """Rows of a table that differ from the measured figure, with the reason."""
    has_measured = table != "I"
    figures = ("ours", "measured", "STAGE", "error") if has_measured else ("ours", "STAGE", "error")
    lines = [
        f"| case | quantity | {' | '.join(figures)} | reason |",
        f"|---|---|{'---:|' * len(figures)}---|",
    ]
    for row in _rows(cases, table):
        if not row.same:
            lines.append(f"| {' | '.join((*cells(row), row.why))} |")
    return lines


def cells(row: Row) -> list[str]:
    """Cells of a row: case, quantity, the figures, and the error of ours."""
    form = "{:,.0f}" if row.table == "I" else "{:,.1f}" if row.table == "VII" else "{:,.2f}"
    printed = [row.stage] if row.measured is None else [row.measured, row.stage]
    error = "" if row.error is None else f"{row.error:+.2%}"
    return [row.row, row.quantity, *(form.format(n) for n in (row.ours, *printed)), error]


def figures_csv(cases: Cases) -> str:
    """All figures with the run and the assumptions of each, as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("table", "case", "quantity", "ours", "measured", "stage", "why", "run", "assumed")
    writer.writerow(names)
    for case, rows in cases:
        for row in filter(shows, rows):
            measured = "" if row.measured is None else f"{row.measured:.10g}"
            figures = (f"{row.ours:.10g}", measured, f"{row.stage:.10g}")
            writer.writerow((row.table, row.row, row.quantity, *figures, row.why, *case[1:]))
    return out.getvalue()


if __name__ == "__main__":
    computed = list(stage_paper())
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), computed), encoding="utf-8")
    FIGURES_CSV.write_text(figures_csv(computed), encoding="utf-8")
