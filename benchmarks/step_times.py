"""Simulates published training runs; writes what docs/time.md and docs/regret.md say of the errors.

    python benchmarks/step_times.py [--jobs N] [--tables]

Writes docs/step-times.csv, a line for each row, and from it the tables of both pages; `--tables`
writes the tables only. All rows take some minutes; tests simulate a sample of them, and hold the
tables against the file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import regret
from stagewright.evidence import training
from stagewright.evidence.rows import Prediction, Traits, compare, prediction
from stagewright.evidence.statistics import GROUPS, errors_by_group
from stagewright.evidence.training import Measurement, not_compared
from stagewright.executors import cores

ROOT = Path(__file__).parent.parent
STEPS = ROOT / "docs" / "step-times.csv"
PAGE = ROOT / "docs" / "time.md"
COLUMNS = ("source", "row", "quantity", "measured", "predicted", "error of time")
CHOICES = ROOT / "docs" / "regret.md"
BEGIN, END = "<!-- step times -->", "<!-- end of step times -->"

SHARE, SMALL = 1.0, 40
"""The share of rows, by a hash of their names, that the file has, and the number of rows below
which it has all rows of a source."""


def chosen() -> list[Measurement]:
    """The rows of the file, in the order of the hash."""
    rows = training.rows()
    of_source = Counter(m.source for m in rows)
    some = (m for m in rows if place(m) < SHARE or of_source[m.source] < SMALL)
    return sorted(some, key=place)


def sample(one_of: int) -> list[Measurement]:
    """One of so many rows of the file, by a hash of their names."""
    return [m for m in chosen() if int(place(m) * 2**20) % one_of == 0]


def place(m: Measurement) -> float:
    """A number from 0 to 1 that follows from the name of a row."""
    name = f"{m.source}, {m.row}"
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12


def written(outcomes: Iterable[Prediction]) -> str:
    """The file of all rows."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    for o in outcomes:
        error = f"{o.error_of_time:+.1%}"
        lines.writerow(
            (o.source, o.row, o.quantity, f"{o.measured:g}", f"{o.predicted:.6g}", error)
        )
    return out.getvalue()


def predictions() -> list[Prediction]:
    """The predictions of the file, with what their rows are grouped by."""
    rows = {(m.source, m.row): m for m in training.rows()}
    found: list[Prediction] = []
    for line in csv.DictReader(STEPS.read_text(encoding="utf-8").splitlines()):
        m = rows.get((line["source"], line["row"]))
        if m is not None:
            found.append(prediction(m, float(line["predicted"])))
    return found


def refused() -> dict[tuple[str, str], str]:
    """Why rows have no prediction: what no setting expresses, and rows that are not in the file."""
    there = {(o.source, o.row) for o in predictions()}
    why = {(o.source, o.row): o.reason for o in not_compared()}
    rows = ((m.source, m.row) for m in chosen())
    return why | {row: "its settings cannot be combined" for row in rows if row not in there}


KNOWN: dict[str, Callable[[Prediction, Traits], bool]] = {
    "Steps of mixtures": lambda _, t: t.experts,
    "Published steps of B200": lambda o, _: o.source == "SimuMax",
    "Six rows of DeepSpeed": lambda o, _: o.source == "DeepSpeed ZeRO-3 in SC21",
}
"""The rows that sentences of `views/deviations.py` are of, by how these begin."""


def known_errors(begin: str) -> list[float]:
    """The errors of time of the rows that such a sentence is of."""
    rows = [o for o in predictions() if o.traits and not o.traits.low_utilization]
    return [o.error_of_time for o in rows if o.traits and KNOWN[begin](o, o.traits)]


def tables() -> str:
    """The tables of docs/time.md, between their marks."""
    rows = predictions()
    lines = [BEGIN, ""]
    if SHARE < 1:
        held = f"The tables hold {len(rows):,} rows: all of small sources"
        lines += [f"{held}, of others {SHARE:.0%}, by a hash of their names.", ""]
    for by in GROUPS:
        table = errors_by_group(rows, by)
        lines += [*markdown(list(table.columns), table.text_rows()), ""]
    why = Counter((source, reason) for (source, _), reason in refused().items())
    lines += [f"{why.total()} published rows are not compared:", ""]
    lines += markdown(
        ["source", "rows", "why"], [(s, str(n), reason) for (s, reason), n in why.most_common()]
    )
    return "\n".join([*lines, "", END])


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of Markdown whose columns but the first, and reasons, are numbers."""
    align = ["---" if n == 0 or title == "why" else "---:" for n, title in enumerate(titles)]
    return [f"| {' | '.join(cells)} |" for cells in (titles, align, *rows)]


def regrets() -> str:
    """The tables of docs/regret.md, between their marks."""
    found = {(o.source, o.row): o for o in predictions()}
    pairs = [(m, o) for m in training.rows() if (o := found.get((m.source, m.row)))]
    jobs, held_out = regret.regrets(pairs), regret.regrets(pairs, only_held_out=True)
    lines = [BEGIN, ""]
    for table in (
        regret.totals(jobs),
        regret.totals(held_out).only(*regret.OF_ALL),
        regret.listed(jobs),
    ):
        lines += [*markdown(list(table.columns), table.text_rows()), ""]
    return "\n".join([*lines, END])


def page(text: str, written: Callable[[], str] = tables) -> str:
    """The text of docs/time.md, or with `regrets` of docs/regret.md, with tables of the file."""
    head, rest = text.split(BEGIN)
    return head + written() + rest.split(END)[1]


PAGES = ((PAGE, tables), (CHOICES, regrets))
"""Pages with tables of the file, and what writes these."""


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tables", action="store_true")
    asked.add_argument("--jobs", type=int, default=cores())
    options = asked.parse_args()
    if not options.tables:
        outcomes = compare(chosen(), jobs=options.jobs)
        STEPS.write_text(written(o for o in outcomes if isinstance(o, Prediction)), "utf-8")
    for path, write in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8"), write), encoding="utf-8")
