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
    from stagewright.evidence.measurements import Measurement, NotCompared
    from stagewright.evidence.predictions import Prediction


@command
@click.option("--source", metavar="TEXT", help="Only measurements of this source. [all]")
@click.option("--rows", metavar="FILE", help="Measurements of your own (CSV), and no others.")
@click.option("--list", "listed", is_flag=True, help="Print each row, too. [with a source or rows]")
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    help="Only every Nth row of steps, spread over all sources. [1: all rows]",
)
@click.option("--serving", is_flag=True, help="Servers under load, served request by request.")
@click.option("--jobs", metavar="N", type=click.IntRange(1), help="Processes. [one per core]")
@JSON
def validate(
    source: str | None,
    rows: str | None,
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
    tokens per second, beside those of the same load served request by request.
    """
    from stagewright.evidence import inference, measurements, validate
    from stagewright.evidence import kernels as validate_kernels
    from stagewright.evidence.predictions import Prediction
    from stagewright.executors import cores

    if serving:
        _serving(source, every=every, as_json=as_json)
        return
    own = None if rows is None else measurements.load(rows)
    kernels = list(validate_kernels.validate(source)) if own is None else []
    carried = measurements.measurements(source) if own is None else own
    chosen = measurements.select(carried, source)[::every]
    with _progress() as progress:
        outcomes = list(validate.compare(chosen, progress=progress, jobs=jobs or cores()))
        if own is None:
            served = inference.validate(
                source, every=every, jobs=jobs or cores(), progress=progress
            )
            kernels += served
    predictions = [o for o in outcomes if isinstance(o, Prediction)]
    refused = [o for o in outcomes if not isinstance(o, Prediction)]
    if own is not None and refused:
        raise UserError(f"{refused[0].source}, {refused[0].row}: {refused[0].reason}")
    if own is None:
        refused += measurements.not_compared(source)
    if not kernels and not predictions and not refused:
        raise _unknown(source, own)
    if as_json:
        shared.print_json(_as_json([*predictions, *kernels], refused))
        return
    shown = [*predictions, *kernels] if source is not None else predictions
    if listed or source is not None or own is not None:
        _print_predictions(shown)
    _print_groups(predictions, whole=source is None)
    _print_totals(kernels)
    _print_not_compared(refused)


def _serving(source: str | None, *, every: int, as_json: bool) -> None:
    """Prints servers under load beside what their clients measured."""
    from stagewright.evidence import closed_loops, serving
    from stagewright.evidence.measurements import NotCompared
    from stagewright.evidence.predictions import totals
    from stagewright.texttable import print_table

    with _progress() as progress:
        outcomes: list[Prediction | NotCompared] = [
            *serving.validate(source, every=every, progress=progress),
            *closed_loops.validate(source, every=every, progress=progress),
        ]
    found = [o for o in outcomes if not isinstance(o, NotCompared)]
    refused = [o for o in outcomes if isinstance(o, NotCompared)]
    if not outcomes:
        loops = closed_loops.sources(closed_loops.closed_loops())
        known = dict.fromkeys([*(server.source for server in serving.servers()), *loops])
        raise UserError(f"no servers of source {source!r}; known: {'; '.join(known)}")
    if as_json:
        shared.print_json(_as_json(found, refused))
        return
    _print_predictions(found)
    _print_not_compared(refused)
    each = [o._replace(source=f"{o.source}, {o.quantity}") for o in found]
    print_table(totals(sorted(each, key=lambda o: o.source)), shared.console())
    shared.console().print(serving.PEERS)


def _unknown(source: str | None, own: Iterable[Measurement] | None) -> UserError:
    from stagewright.evidence import inference, kernels
    from stagewright.evidence.sources import sources

    if own is None:
        others = (*kernels.validate(), *inference.rows())
        known = dict.fromkeys([*sources(), *(o.source for o in others)])
    else:
        known = dict.fromkeys(m.source for m in own)
    return UserError(
        f"no measurements of source {source!r}{did_you_mean(str(source), known)}; "
        f"known: {'; '.join(known)}"
    )


def _as_json(rows: Sequence[Prediction], refused: Sequence[NotCompared]) -> dict[str, Any]:
    from stagewright.evidence.predictions import GROUPS, grouped

    keys = ("source", "row", "quantity", "measured", "predicted", "error", "fitted", "reason")
    listed = [
        {k: getattr(o, k) for k in keys} | {"traits": o.traits._asdict() if o.traits else None}
        for o in rows
    ]
    groups = [
        {
            "by": each.by,
            "group": each.group,
            "all": each.every._asdict(),
            "held_out": each.held_out._asdict() if each.held_out else None,
        }
        for by in GROUPS
        for each in grouped(rows, by)
    ]
    return {"rows": listed, "groups": groups, "not_compared": [o._asdict() for o in refused]}


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
        _print_assumptions(source)
        for o in some:
            if abs(o.error) > NEEDS_REASON and o.quantity != "us" and o.reason:
                out.print(f"  {o.error:+.0%} {o.row}: {o.reason}")


def _print_assumptions(source: str) -> None:
    """What is assumed of all rows of a source, or known of their errors."""
    from stagewright.evidence.sources import sources

    entry = sources().get(source)
    if entry is None:
        return
    out = shared.console()
    for name, each in entry.assumed.items():
        out.print(f"  assumed: {name} {each.value}: {each.reason}")
    for note in entry.notes:
        out.print(f"  {note}")


def _print_groups(predictions: Sequence[Prediction], *, whole: bool) -> None:
    from stagewright.evidence.predictions import GROUPS, errors_by_group
    from stagewright.texttable import print_table

    for by in GROUPS if whole else ["source"]:
        if predictions:
            print_table(errors_by_group(predictions, by), shared.console())


def _print_totals(predictions: Sequence[Prediction]) -> None:
    from stagewright.evidence.predictions import totals
    from stagewright.texttable import print_table

    if predictions:
        print_table(totals(predictions), shared.console())


def _print_not_compared(refused: Sequence[NotCompared]) -> None:
    """How many rows have no prediction, by source and reason."""
    if not refused:
        return
    out = shared.console()
    out.print(f"{len(refused):,} published rows are not compared:")
    for (source, reason), rows in Counter((o.source, o.reason) for o in refused).most_common():
        out.print(f"  {rows} of {source}: {reason}")


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
        "stagewright validate --source bloomberg",
        "stagewright validate --source nccl-tests",
        "stagewright validate --source korthikanti --json",
        "stagewright validate --serving --every 100",
    ),
)
