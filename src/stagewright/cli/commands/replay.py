"""The command that executes a recorded step again."""

from __future__ import annotations

from collections.abc import Sequence

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.option_types import WholeNumber
from stagewright.cli.options import JSON
from stagewright.errors import UserError


@command(
    45,
    "stagewright replay trace.json.gz --step 6 --without host",
    "stagewright replay ranks --link x2 --straggler 1=1.2 --json",
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--step", type=WholeNumber(0), metavar="N", help="Only ProfilerStep#N. [all]")
@click.option("--annotation", metavar="NAME", help="Only a record_function of this name. [all]")
@click.option(
    "--without",
    multiple=True,
    metavar="host|waiting",
    help="Leave out the time of the CPU, or waiting for other ranks; repeatable.",
)
@click.option(
    "--scale",
    multiple=True,
    metavar="FAMILY=F",
    help="Kernels of a family take F times as long, such as gemm=0.9; repeatable.",
)
@click.option("--link", metavar="xF", help="Links between ranks have F times the bandwidth.")
@click.option(
    "--straggler",
    multiple=True,
    metavar="RANK=F",
    help="The kernels of a rank take F times as long; repeatable.",
)
@JSON
def replay(
    traces: tuple[str, ...],
    step: int | None,
    annotation: str | None,
    without: tuple[str, ...],
    scale: tuple[str, ...],
    link: str | None,
    straggler: tuple[str, ...],
    as_json: bool,
) -> None:
    """Execute a step that PyTorch's profiler recorded again, as it was or with a change.

    TRACE is a file of Kineto's JSON, plain or compressed, an archive or a folder of these, one per
    rank. Spans are from the start of the first kernel to the end of the last.
    """
    from stagewright.api.replayed import replay as run

    result = run(
        traces,
        step=step,
        annotation=annotation,
        without=without,
        scale=_factors("--scale", scale, "FAMILY=F, such as gemm=0.9"),
        link=1.0 if link is None else _number("--link", link.removeprefix("x"), "x2"),
        stragglers={
            int(_number("--straggler", rank, "RANK=F, such as 3=1.2", whole=True)): factor
            for rank, factor in _factors("--straggler", straggler, "RANK=F, such as 3=1.2").items()
        },
    )
    output.show_notes(result.notes)
    output.print_result(result.to_dict if as_json else result.text)


def _factors(option: str, texts: Sequence[str], wanted: str) -> dict[str, float]:
    """Factors by name, written `name=factor`; a colon may stand for the sign."""
    factors: dict[str, float] = {}
    for text in texts:
        name, separator, factor = text.replace(":", "=", 1).partition("=")
        if not separator or not name.strip():
            raise UserError(f"{option} is {text!r}, wanted {wanted}")
        factors[name.strip()] = _number(option, factor, wanted)
    return factors


def _number(option: str, text: str, wanted: str, *, whole: bool = False) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise UserError(f"{option} is {text!r}, wanted {wanted}") from None
