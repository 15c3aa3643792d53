"""The commands about time: the hardware known, and predictions beside measurements."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from stagewright.cli_trace import JSON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from stagewright.validate import Outcome


@click.command()
@click.argument("name", required=False)
@JSON
def hardware(name: str | None, as_json: bool) -> None:
    """List the hardware known by name, or print all figures of one with their sources.

    NAME is one of the list, or the path of a YAML file.
    """
    from stagewright import hardware

    if name is not None:
        found = hardware.resolve(name).model_dump(mode="json", exclude_none=True)
        if as_json:
            click.echo(json.dumps(found, indent=2))
        else:
            _print_figures(found)
        return
    all_ = [hardware.resolve(n) for n in hardware.names()]
    if as_json:
        click.echo(json.dumps([h.model_dump(mode="json") for h in all_], indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("name", "bf16 TFLOP/s", "GB", "GB/s", "scale-up", "GB/s", "NIC GB/s", "W"):
        table.add_column(title, justify="left" if title in ("name", "scale-up") else "right")
    for h in all_:
        up = f"{h.scale_up.topology} of {h.scale_up.gpus}"
        numbers = (h.peak_bf16_tflops, h.memory_gb, h.memory_bandwidth_gb_s)
        links = (h.scale_up.bandwidth_gb_s, h.scale_out.bandwidth_gb_s, h.tdp_w)
        table.add_row(h.name, *(f"{x:g}" for x in numbers), up, *(f"{x:g}" for x in links))
    _console().print(table)


def _print_figures(found: dict[str, object], prefix: str = "") -> None:
    sources = found.pop("sources", {})
    assert isinstance(sources, dict)

    def walk(values: dict[str, object], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")  # pyright: ignore
            else:
                source = sources.get(prefix + key, "")  # pyright: ignore
                click.echo(f"{prefix}{key}: {value}" + (f"  # {source}" if source else ""))

    walk(found, prefix)


@click.command()
@click.option("--source", metavar="TEXT", help="Only measurements of this source. [all]")
@JSON
def validate(source: str | None, as_json: bool) -> None:
    """Print predictions beside published measurements, and their errors per source."""
    from stagewright import validate

    outcomes = list(validate.validate(source))
    if as_json:
        rows = [outcome._asdict() for outcome in outcomes]
        totals = [s._asdict() for s in validate.summary(outcomes)]
        click.echo(json.dumps({"rows": rows, "summary": totals}, indent=2))
    else:
        _print_outcomes(outcomes)


def _print_outcomes(outcomes: Iterable[Outcome]) -> None:
    from rich import box
    from rich.table import Table

    from stagewright.validate import NEEDS_REASON, summary

    outcomes = list(outcomes)
    out = _console()
    for total in summary(outcomes):
        table = Table(box=box.SIMPLE_HEAD, title=total.source, title_justify="left")
        for title in ("row", "quantity", "measured", "predicted", "error", "fitted"):
            right = title in ("measured", "predicted", "error")
            table.add_column(title, justify="right" if right else "left", overflow="fold")
        some = [o for o in outcomes if o.source == total.source]
        for o in some:
            numbers = (f"{o.measured:.4g}", f"{o.predicted:.4g}", f"{o.error:+.1%}")
            table.add_row(o.row, o.quantity, *numbers, o.fitted)
        out.print(table)
        for o in some:
            if abs(o.error) > NEEDS_REASON:
                out.print(f"  {o.row}: {o.reason or 'no reason known'}")
    for total in summary(outcomes):
        row, error = total.worst
        out.print(
            f"{total.source}: {total.rows} rows, mean error {total.mape:.1%}, "
            f"median {total.median:.1%}, bias {total.bias:+.1%}, worst {error:+.1%} ({row})"
        )


def _console() -> Console:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


COMMANDS = (hardware, validate)
