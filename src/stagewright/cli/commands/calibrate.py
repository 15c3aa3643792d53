"""The command that makes a hardware file of recorded kernels."""

from __future__ import annotations

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.options import FORCE, JSON, output_file


@command(47, "stagewright calibrate recorded --base h100-sxm -o mine.yaml --durations kernels.csv")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--base", required=True, metavar="NAME", help="Hardware, by name or .yaml file.")
@output_file("-o", "--out", help="The hardware file: mine.yaml.")
@output_file("--durations", help="Measured kernels and collectives, for simulate: kernels.csv.")
@FORCE
@JSON
def calibrate(
    traces: tuple[str, ...], base: str, out: str | None, durations: str | None, as_json: bool
) -> None:
    """Fit the figures of a machine to a step that PyTorch's profiler recorded.

    TRACE is a file of Kineto's JSON, plain or compressed, or an archive or a folder of these, one
    per rank. What the traces do not tell stays as in --base, and is said.
    """
    from stagewright.api.calibrated import calibrate as run
    from stagewright.api.result import check_suffix

    for path, suffix in ((out, ".yaml"), (durations, ".csv")):
        if path is not None:
            check_suffix(path, (suffix,))
    result = run(traces, base)
    output.show_notes(result.notes)
    output.print_result(result.to_dict if as_json else result.text)
    for path in (out, durations):
        if path is not None:
            result.write(path)
