"""How a search ends, for the best step and for serving alike: what is printed and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.api.searched_serving import ServingSearch


def end(
    result: Search | ServingSearch,
    report: Callable[[], None],
    out: Sequence[str],
    place: int | None,
    *,
    as_json: bool,
    flags: Sequence[str] | None = None,
) -> int:
    """Print the result as JSON or as a report, write its files; returns the exit code.

    `place` is the one of the best whose run is written, or printed where no run file is; `flags`
    are printed in its place. In JSON both are fields. Where nothing was found, only that is said.
    """
    from stagewright.api.endings import RUN_FILE, ending_of

    printed: Mapping[str, Any] = {}
    writes = any(ending_of(path) == RUN_FILE for path in out)
    if flags is not None:
        printed = {"flags": [*flags]}
    elif place is not None and len(result.ranking.best) and not writes:
        printed = {"run_file": result.run_file(place)}
    if as_json:
        shared.print_json({**result.summary(), **printed})
    else:
        report()
    for path in out:
        written = result.write(path, place or 1)
        upto = ", as far as the search had come" if result.ranking.stopped else ""
        click.echo(f"stagewright: wrote {', '.join(written)}{upto}", err=True)
    if not as_json:
        for text in printed.values():
            shared.say(text.rstrip("\n") if isinstance(text, str) else "\n".join(text))
    return shared.INTERRUPTED if result.ranking.stopped else 0
