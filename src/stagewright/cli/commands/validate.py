"""The command that puts predictions beside measurements."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON
from stagewright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from stagewright.evidence.rows import NotCompared, Prediction, Row

NEEDS_REASON = 0.25
"""Absolute error beyond which a prediction is printed with its reason."""


@command
@click.option("--source", metavar="TEXT", help="Only measurements of this source. [all]")
@click.option("--rows", "path", metavar="FILE", help="Measurements of your own (CSV) alone.")
@click.option("--list", "listed", is_flag=True, help="Print each row, too. [with a source or rows]")
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    help="Only every Nth row of each table. [1: all rows]",
)
@click.option("--serving", is_flag=True, help="Servers under load, simulated request by request.")
@click.option("--jobs", metavar="N", type=click.IntRange(1), help="Processes. [one per core]")
@JSON
def validate(
    source: str | None,
    path: str | None,
    listed: bool,
    every: int,
    serving: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Print predictions beside published measurements, and their errors by group.

    The thousands of rows are listed only where --source or --list asks for them. All rows take
    some minutes. Errors in tables of groups are those of the time of a step: + is predicted slow.

    With --serving: times to the first token, per token and to the last that clients measured, and
    tokens per second, beside those of the same load simulated request by request.
    """
    from stagewright.evidence.rows import Prediction, compare
    from stagewright.evidence.training import not_compared
    from stagewright.executors import cores

    rows = [row for table in _tables(path, serving) for row in table(source)[::every]]
    with _progress() as progress:
        # Loads of one server share a table of step times, which one process keeps.
        processes = 1 if serving else jobs or cores()
        outcomes = list(compare(rows, jobs=processes, progress=progress))
    predictions = [o for o in outcomes if isinstance(o, Prediction)]
    refused = [o for o in outcomes if not isinstance(o, Prediction)]
    if path is not None and refused:
        raise UserError(f"{refused[0].source}, {refused[0].row}: {refused[0].reason}")
    if path is None and not serving:
        refused += not_compared(source)
    if not predictions and not refused:
        raise _unknown(source, path, serving)
    if as_json:
        shared.print_json(_as_json(predictions, refused))
        return
    steps = [o for o in predictions if o.traits is not None]
    others = [o for o in predictions if o.traits is None]
    if listed or serving or source is not None or path is not None:
        _print_predictions(predictions if serving or source is not None else steps)
    _print_groups(steps, whole=source is None)
    if serving:
        named = [o._replace(source=f"{o.source}, {o.quantity}") for o in others]
        others = sorted(named, key=lambda o: o.source)
    _print_totals(others)
    _print_not_compared(refused)
    if serving:
        from stagewright.evidence.servers import PEERS

        shared.console().print(PEERS)


def _tables(path: str | None, serving: bool) -> list[Callable[[str | None], Sequence[Row]]]:
    """The tables of rows that are compared, each a function of the source."""
    from stagewright.evidence import inference, kernels, servers, training
    from stagewright.evidence.rows import within

    if serving:
        return [servers.rows]
    if path is not None:
        own = training.load(path)
        return [lambda source: [row for row in own if within(row.source, source)]]
    return [training.rows, kernels.rows, inference.rows]


def _unknown(source: str | None, path: str | None, serving: bool) -> UserError:
    known = dict.fromkeys(row.source for table in _tables(path, serving) for row in table(None))
    return UserError(
        f"no measurements of source {source!r}{did_you_mean(str(source), known)}; "
        f"known: {'; '.join(known)}"
    )


def _as_json(rows: Sequence[Prediction], refused: Sequence[NotCompared]) -> dict[str, Any]:
    from stagewright.evidence.statistics import GROUPS, grouped

    keys = ("source", "row", "quantity", "measured", "predicted", "error", "fitted", "reason")
    listed = [
        {k: getattr(o, k) for k in keys} | {"traits": o.traits._asdict() if o.traits else None}
        for o in rows
    ]
    groups = [
        {
            "by": group.by,
            "group": group.group,
            "all": group.every._asdict(),
            "held_out": group.held_out._asdict() if group.held_out else None,
        }
        for by in GROUPS
        for group in grouped(rows, by)
    ]
    return {"rows": listed, "groups": groups, "not_compared": [o._asdict() for o in refused]}


def _print_predictions(predictions: Iterable[Prediction]) -> None:
    from stagewright.evidence.statistics import table
    from stagewright.texttable import print_table

    out = shared.console()
    by_source: dict[str, list[Prediction]] = {}
    for o in predictions:
        by_source.setdefault(o.source, []).append(o)
    shown = ("row", "quantity", "measured", "predicted", "error", "fitted")
    for source, rows in by_source.items():
        print_table(table(rows, source).only(*shown), out)
        _print_assumptions(source)
        for o in rows:
            if abs(o.error) > NEEDS_REASON and o.quantity != "us" and o.reason:
                out.print(f"  {o.error:+.0%} {o.row}: {o.reason}")


def _print_assumptions(source: str) -> None:
    """Print what is assumed of all rows of a source, or known of their errors."""
    from stagewright.evidence.training import sources

    entry = sources().get(source)
    if entry is None:
        return
    out = shared.console()
    for name, assumption in entry.assumed.items():
        out.print(f"  assumed: {name} {assumption.value}: {assumption.reason}")
    for note in entry.notes:
        out.print(f"  {note}")


def _print_groups(predictions: Sequence[Prediction], *, whole: bool) -> None:
    from stagewright.evidence.statistics import GROUPS, errors_by_group
    from stagewright.texttable import print_table

    for by in GROUPS if whole else ["source"]:
        if predictions:
            print_table(errors_by_group(predictions, by), shared.console())


def _print_totals(predictions: Sequence[Prediction]) -> None:
    from stagewright.evidence.statistics import totals
    from stagewright.texttable import print_table

    if predictions:
        print_table(totals(predictions), shared.console())


def _print_not_compared(refused: Sequence[NotCompared]) -> None:
    """Print how many rows have no prediction, by source and reason."""
    if not refused:
        return
    out = shared.console()
    out.print(f"{len(refused):,} published rows are not compared:")
    for (source, reason), rows in Counter((o.source, o.reason) for o in refused).most_common():
        out.print(f"  {rows} of {source}: {reason}")


@contextmanager
def _progress() -> Generator[Callable[[int, int], None] | None]:
    """Show, on a terminal, how many rows of how many are predicted."""
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
        "stagewright validate --source bloomberg",
        "stagewright validate --source nccl-tests",
        "stagewright validate --source korthikanti --json",
        "stagewright validate --serving --every 100",
    ),
)
