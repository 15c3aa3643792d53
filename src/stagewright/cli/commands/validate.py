"""The command that compares predictions with measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.option_types import WholeNumber
from stagewright.cli.options import JSON
from stagewright.cli.progress import shown
from stagewright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from stagewright.evidence.rows import NotCompared, Prediction, Row
    from stagewright.texttable import Table

NEEDS_REASON = 0.25
"""Absolute error above which a prediction is printed with its reason."""


@command(
    110,
    "stagewright validate --source bloomberg",
    "stagewright validate --source nccl-tests",
    "stagewright validate --source korthikanti --json",
    "stagewright validate --serving --every 100",
)
@click.option("--source", metavar="TEXT", help="Only measurements of this source. [all]")
@click.option("--rows", "path", metavar="FILE", help="Only your own measurements (CSV).")
@click.option("--list", "listed", is_flag=True, help="Print each row, too. [with a source or rows]")
@click.option(
    "--every",
    metavar="N",
    type=WholeNumber(1),
    default=1,
    help="Only every Nth row of each table. [1: all rows]",
)
@click.option("--serving", is_flag=True, help="Servers under load, simulated request by request.")
@click.option("--jobs", metavar="N", type=WholeNumber(1), help="Processes. [one per core]")
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
    """Compare predictions with published measurements: errors by group.

    --source, --rows or --list also print each row. All rows take some minutes. Errors in tables of
    groups are those of the time of a step: + is predicted slow.

    With --serving: TTFT, TPOT, E2E and tokens per second that clients measured, compared with the
    same load simulated request by request.
    """
    from stagewright.evidence.rows import Prediction, compare
    from stagewright.evidence.training import not_compared
    from stagewright.executors import cores

    tables = _tables(path, serving)
    rows = [row for table in tables for row in table(source)[::every]]
    with shown("rows") as bar:
        outcomes = list(compare(rows, jobs=jobs or cores(), progress=bar))
    predictions = [o for o in outcomes if isinstance(o, Prediction)]
    refused = [o for o in outcomes if not isinstance(o, Prediction)]
    if path is not None and refused:
        raise UserError(f"{refused[0].source}, {refused[0].row}: {refused[0].reason}")
    if path is None and not serving:
        refused += not_compared(source)
    if not predictions and not refused:
        known = dict.fromkeys(row.source for table in tables for row in table(None))
        raise UserError(
            f"no measurements of source {source!r}{did_you_mean(str(source), known)}; "
            f"known: {'; '.join(known)}"
        )
    if as_json:
        output.print_json(_as_json(predictions, refused))
        return
    selected = source is not None or path is not None
    items: list[str | Table] = []
    if listed or serving or selected:
        whole = serving or source is not None
        items += _row_tables([o for o in predictions if whole or o.traits is not None])
    items += _error_tables(predictions, by_group=not selected, serving=serving)
    items += _reasons(refused)
    if path is not None:
        items.append(
            "to see where a row's time goes: `stagewright simulate` with its settings; to replace "
            "kernels by measured ones: --durations"
        )
    output.print_result(lambda: items)


def _tables(path: str | None, serving: bool) -> list[Callable[[str | None], Sequence[Row]]]:
    """The tables of rows that are compared, each a function of the source."""
    from stagewright.evidence import kernels, servers, training
    from stagewright.evidence.rows import within

    if serving:
        return [servers.rows]
    if path is not None:
        own = training.load(path)
        return [lambda source: [row for row in own if within(row.source, source)]]
    return [training.rows, kernels.rows, servers.rows]


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


def _row_tables(predictions: Sequence[Prediction]) -> Iterator[str | Table]:
    """The rows of each source, with what is assumed of all of them and reasons of large errors."""
    from stagewright.evidence.statistics import table
    from stagewright.evidence.training import sources

    by_source: dict[str, list[Prediction]] = {}
    for o in predictions:
        by_source.setdefault(o.source, []).append(o)
    for source, rows in by_source.items():
        columns = ("row", "quantity", "measured", "predicted", "error", "fitted")
        yield table(rows, source).only(*columns)
        if (entry := sources().get(source)) is not None:
            for name, assumption in entry.assumed.items():
                yield f"  assumed: {name} {assumption.value}: {assumption.reason}"
            yield from (f"  {note}" for note in entry.notes)
        for o in rows:
            if abs(o.error) > NEEDS_REASON and o.quantity != "us" and o.reason:
                yield f"  {o.error:+.0%} {o.row}: {o.reason}"


def _error_tables(
    predictions: Sequence[Prediction], *, by_group: bool, serving: bool
) -> Iterator[str | Table]:
    """Errors by group of training steps, and by source of other quantities."""
    from stagewright.evidence.servers import PEERS
    from stagewright.evidence.statistics import GROUPS, errors_by_group, totals

    steps = [o for o in predictions if o.traits is not None]
    others = [o for o in predictions if o.traits is None]
    if steps:
        yield from (errors_by_group(steps, by) for by in (GROUPS if by_group else ["source"]))
    if others:
        quantities = Counter(source for source, _ in {(o.source, o.quantity) for o in others})
        yield totals(
            o._replace(source=f"{o.source}, {o.quantity}") if quantities[o.source] > 1 else o
            for o in sorted(others, key=lambda o: (o.source, o.quantity))
        )
    if serving:
        yield PEERS


def _reasons(refused: Sequence[NotCompared]) -> Iterator[str]:
    """Number of rows without a prediction, by source and reason."""
    if refused:
        yield f"{len(refused):,} published rows are not compared:"
    for (source, reason), rows in Counter((o.source, o.reason) for o in refused).most_common():
        yield f"  {rows} of {source}: {reason}"
