"""Printing: notes, results as text or JSON, tables."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from stagewright.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console


def show_notes(notes: Iterable[str]) -> None:
    """Print notes to stderr: assumptions, and what was ignored."""
    for note in notes:
        click.echo(f"stagewright: note: {printable(note)}", err=True)


def say(text: str) -> None:
    """Print lines, with control characters escaped."""
    click.echo(printable_lines(text))


def print_texts(texts: Iterable[str | list[str]]) -> None:
    """Print texts after a result: a run file, or lines of flags."""
    for text in texts:
        say(text.rstrip("\n") if isinstance(text, str) else "\n".join(text))


def print_json(value: object) -> None:
    """Print a result as JSON; numbers that are not finite are null."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=2, allow_nan=False)
    click.echo(text)


def _finite(value: Any) -> Any:
    """The value, with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {key: _finite(item) for key, item in entries.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


def print_result(make: Callable[[], object], alarm: str = "", *, to_stderr: bool = False) -> None:
    """Print a result: lines and tables, or JSON; the line `alarm` is red.

    With `to_stderr`, lines and tables go there, since stdout is a file of another tool.
    """
    from stagewright.texttable import Table, print_table

    result = make()
    if isinstance(result, dict):
        print_json(cast("object", result))
        return
    out = console(to_stderr=to_stderr)
    for item in cast("Iterable[str | Table]", result):
        if isinstance(item, Table):
            print_table(item, out)
        else:
            out.print(item, style="red" if alarm and item == alarm else None)


def console(*, to_stderr: bool = False) -> Console:
    """Console for tables, as wide as the terminal, or COLUMNS; else 80 characters.

    In a pipe or a file lines of text are not broken. No text is markup, or moves the cursor.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainTextConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable_lines(segment.text), segment.style)

    columns = os.environ.get("COLUMNS", "")
    return PlainTextConsole(
        stderr=to_stderr,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not (sys.stderr if to_stderr else sys.stdout).isatty(),
        width=80 if columns.isdecimal() and not int(columns) else None,
    )
