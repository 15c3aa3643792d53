"""The command that puts published tables beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, Word, command
from stagewright.cli.options import JSON
from stagewright.cli.writing import output_file

if TYPE_CHECKING:
    from stagewright.evidence.reproduce import Case, Row


@command
@click.argument("tables", metavar="stage-paper", type=Word(("stage-paper",)))
@output_file("-o", "--out", help="Write the page (Markdown) and print nothing.")
@JSON
def reproduce(tables: str, out: str | None, as_json: bool) -> None:
    """Print the tables of STAGE's paper beside what we compute.

    Volumes of communication (Table VII), memory (Table V) and operations (Table I), with what the
    paper leaves to be assumed.
    """
    from stagewright.evidence import reproduce

    cases = list(reproduce.stage_paper())
    if out is not None:
        from stagewright.files import write_text

        write_text(out, reproduce.markdown(cases))
    elif as_json:
        result = {name: text for name, text in reproduce.paper().items() if name != "cases"}
        result["cases"] = [case._asdict() for case, _ in cases]
        result["rows"] = [row._asdict() | {"error": row.error} for _, rows in cases for row in rows]
        shared.print_json(result)
    else:
        _print(cases)


def _print(cases: list[tuple[Case, list[Row]]]) -> None:
    from stagewright.evidence import reproduce
    from stagewright.texttable import Table, print_table

    out = shared.console()
    for name, what in reproduce.TABLES.items():
        printed_rows = [
            row for _, rows in cases for row in rows if row.table == name and reproduce.shows(row)
        ]
        printed = ("measured", "STAGE") if name != "I" else ("printed",)
        errors = ("error", "STAGE's") if name != "I" else ("error",)
        heads = ("case", "", "ours", *printed, *errors)
        columns = zip(heads, zip(*map(reproduce.cells, printed_rows), strict=True), strict=True)
        print_table(
            Table(f"Table {name}: {what}", dict(columns), dict.fromkeys(heads[2:], "")), out
        )
        for row in printed_rows:
            if row.why:
                out.print(f"  {row.row}, {row.quantity}: {row.why}")
    out.print("\nWhat is assumed", style="bold")
    for case, _ in cases:
        out.print(f"  {case.name}: {case.assumed}")


ENTRY = Entry(
    120,
    reproduce,
    (
        "stagewright reproduce stage-paper",
        "stagewright reproduce stage-paper -o stage-paper.md",
    ),
)
