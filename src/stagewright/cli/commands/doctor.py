"""The command that checks the installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.options import JSON

if TYPE_CHECKING:
    from stagewright.evidence.doctor import Examination, Package


@command(130, "stagewright doctor", "stagewright doctor --json")
@JSON
def doctor(as_json: bool) -> int:
    """Report the packages that are installed and missing.

    The exit code is 1 if a required package is missing, else 0.
    """
    from stagewright.evidence.doctor import examine

    examination = examine()
    if as_json:
        output.print_json(examination.to_json())
    else:
        _print(examination)
    return int(bool(examination.problems))


def _print(examination: Examination) -> None:
    from stagewright.evidence.doctor import USES

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
    for note in examination.notes:
        click.echo(f"note: {note}")
    for problem in examination.problems:
        click.echo(f"{_mark(False)} {problem}")
    click.echo("something is missing" if examination.problems else "all that is needed is here")


def _mark(ok: bool, color: str = "red") -> str:
    return click.style("ok     " if ok else "MISSING", fg="green" if ok else color)


def _describe(package: Package) -> str:
    return f"{package.name} {package.version or '-'} (wanted {package.wanted or 'any'})"
