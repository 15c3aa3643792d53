"""The commands about time: the hardware known, and predictions beside measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from stagewright.cli.trace import JSON
from stagewright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.evidence.predictions import Prediction


@click.command()
@click.argument("name", required=False)
@JSON
def hardware(name: str | None, as_json: bool) -> None:
    """List the hardware known by name, or print all figures of one with their sources.

    NAME is one of the list, or the path of a YAML file.
    """
    from stagewright.time import hardware

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
    console().print(table)


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
@click.option("--rows", metavar="FILE", help="Measurements of your own (CSV), and no others.")
@JSON
def validate(source: str | None, rows: str | None, as_json: bool) -> None:
    """Print predictions beside published measurements, and their errors per source.

    Rows of kernels and collectives are many: they are listed where --source names them.
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
            f"known: {', '.join(known)}"
        )
    if as_json:
        keys = ("source", "row", "quantity", "measured", "predicted", "error", "fitted")
        listed = [{k: getattr(o, k) for k in keys} for o in (*predictions, *kernels)]
        click.echo(json.dumps({"rows": listed}, indent=2))
        return
    _print_predictions(predictions if source is None else [*predictions, *kernels])
    _print_totals([*predictions, *kernels])


def _print_predictions(predictions: Iterable[Prediction]) -> None:
    from stagewright.evidence.predictions import table
    from stagewright.evidence.validate import NEEDS_REASON
    from stagewright.views.tables import rich

    out = console()
    by_source: dict[str, list[Prediction]] = {}
    for o in predictions:
        by_source.setdefault(o.source, []).append(o)
    shown = ("row", "quantity", "measured", "predicted", "error", "fitted")
    for source, some in by_source.items():
        out.print(rich(table(some, source).only(*shown)))
        for o in some:
            if abs(o.error) > NEEDS_REASON and o.quantity != "us":
                out.print(f"  {o.error:+.0%} {o.row}: {o.reason or 'no reason known'}")


def _print_totals(predictions: Iterable[Prediction]) -> None:
    from stagewright.evidence.predictions import totals
    from stagewright.views.tables import rich

    console().print(rich(totals(predictions)))


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


def console() -> Console:
    """Where tables go."""
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


COMMANDS = (hardware, validate)
