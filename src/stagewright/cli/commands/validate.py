"""The command that puts predictions beside measurements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON
from stagewright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from stagewright.evidence.predictions import Prediction


@command
@click.option("--source", metavar="TEXT", help="Only measurements of this source. [all]")
@click.option("--rows", metavar="FILE", help="Measurements of your own (CSV), and no others.")
@JSON
def validate(source: str | None, rows: str | None, as_json: bool) -> None:
    """Print predictions beside published measurements, and their errors per source.

    The many rows of kernels and collectives are listed only where --source names their source.
    """
    from stagewright.evidence import kernels as validate_kernels
    from stagewright.evidence import validate

    own = None if rows is None else validate.load(rows)
    kernels = list(validate_kernels.validate(source)) if own is None else []
    with _progress() as progress:
        predictions = list(validate.validate(source, progress=progress, rows=own))
    if not kernels and not predictions:
        carried = validate.measurements() if own is None else own
        known = dict.fromkeys(m.source for m in carried)
        known |= dict.fromkeys(o.source for o in validate_kernels.validate() if own is None)
        raise UserError(
            f"no measurements of source {source!r}{did_you_mean(str(source), known)}; "
            f"known: {'; '.join(known)}"
        )
    if as_json:
        keys = ("source", "row", "quantity", "measured", "predicted", "error", "fitted")
        listed = [{k: getattr(o, k) for k in keys} for o in (*predictions, *kernels)]
        shared.print_json({"rows": listed})
        return
    _print_predictions(predictions if source is None else [*predictions, *kernels])
    _print_totals([*predictions, *kernels])


def _print_predictions(predictions: Iterable[Prediction]) -> None:
    from stagewright.evidence.predictions import table
    from stagewright.evidence.validate import NEEDS_REASON
    from stagewright.texttable import print_table

    out = shared.console()
    by_source: dict[str, list[Prediction]] = {}
    for o in predictions:
        by_source.setdefault(o.source, []).append(o)
    shown = ("row", "quantity", "measured", "predicted", "error", "fitted")
    for source, some in by_source.items():
        print_table(table(some, source).only(*shown), out)
        for o in some:
            if abs(o.error) > NEEDS_REASON and o.quantity != "us":
                out.print(f"  {o.error:+.0%} {o.row}: {o.reason or 'no reason known'}")


def _print_totals(predictions: Iterable[Prediction]) -> None:
    from stagewright.evidence.predictions import totals
    from stagewright.texttable import print_table

    print_table(totals(predictions), shared.console())


@contextmanager
def _progress() -> Generator[Callable[[int, int], None] | None]:
    """Shows, on a terminal, how many rows of how many are predicted."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


ENTRY = Entry(
    110,
    validate,
    (
        "stagewright validate --source nccl-tests",
        "stagewright validate --source korthikanti --json",
    ),
)
