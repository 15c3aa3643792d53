"""The command that checks the installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stagewright.cli import output
from stagewright.cli.command import Entry, command
from stagewright.cli.options import JSON

if TYPE_CHECKING:
    from stagewright.evidence.doctor import Examination, Package


@command
@click.argument("directory", default=".")
@JSON
@click.option(
    "--speed/--no-speed", default=True, help="Write traces of 64 ranks and remove them. [on]"
)
def doctor(directory: str, as_json: bool, speed: bool) -> int:
    """Report what is installed and missing, and how fast this machine writes traces.

    DIRECTORY is where traces would be written. [.] The exit code is 1 if a required package is
    missing, else 0.
    """
    from stagewright.evidence.doctor import examine

    examination = examine(directory, speed=speed)
    if as_json:
        output.print_json(examination.to_json())
    else:
        _print(examination)
    return int(bool(examination.problems))


def _print(examination: Examination) -> None:
    from stagewright.evidence.doctor import USES
    from stagewright.numbers import quantity

    click.echo(f"stagewright {examination.stagewright}  {examination.location}")
    click.echo(f"python      {examination.python}")
    click.echo(f"system      {examination.system}, {examination.cores} cores")
    for package in examination.packages:
        click.echo(f"{_mark(package.ok)} {_describe(package)}")
    for name, packages in examination.extras.items():
        missing = [package for package in packages if not package.ok]
        click.echo(f"{_mark(not missing, 'yellow')} extra {name}: {USES.get(name, '')}")
        if missing:
            names = ", ".join(map(_describe, missing))
            click.echo(f"        missing: {names}; pip install 'stagewright[{name}]'")
    speed = examination.speed
    if speed is not None:
        click.echo(
            f"compile     {speed.compile_seconds:.2f} s for 64 ranks of llama3.1-70b\n"
            f"generate    {speed.nodes_per_second / 1e6:.2f} million nodes/s, "
            f"{quantity(round(speed.bytes_per_second), 'B/s')} in {speed.directory}, with "
            f"checksums; {quantity(speed.free_bytes, 'B')} free"
        )
    for note in examination.notes:
        click.echo(f"note: {note}")
    for problem in examination.problems:
        click.echo(f"{_mark(False)} {problem}")
    click.echo("something is missing" if examination.problems else "all that is needed is here")


def _mark(ok: bool, color: str = "red") -> str:
    return click.style("ok     " if ok else "MISSING", fg="green" if ok else color)


def _describe(package: Package) -> str:
    return f"{package.name} {package.version or '-'} (wanted {package.wanted or 'any'})"


ENTRY = Entry(
    130,
    doctor,
    (
        "stagewright doctor",
        "stagewright doctor --no-speed --json",
    ),
)
