"""How a search ends, for the best step and for serving alike: what is printed and written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared
from stagewright.cli.commands.search.outputs import is_run_file
from stagewright.errors import Stopped, UserError
from stagewright.printable import printable

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.api.searched_serving import ServingSearch
    from stagewright.searching.ranking import NothingFound


def end(
    result: Search | ServingSearch,
    report: Callable[[], None],
    out: Sequence[str],
    listed_row: int | None,
    *,
    as_json: bool,
    flags: Callable[[], Sequence[str]] | None = None,
) -> int:
    """Print the result as JSON or as a report, write its files; returns the exit code.

    `listed_row` is the row of the best whose run is written, or printed without a run file; `flags`
    are printed instead of it. In JSON both are fields. Where nothing was found, only that is said.
    What fails is told at the end: a search may have taken hours, and all else of it is kept.
    """
    failures = Failures()
    printed: Mapping[str, Any] = {}
    with failures:
        if flags is not None:
            printed = {"flags": [*flags()]}
        elif listed_row is not None and len(result.ranking.best) and not any(map(is_run_file, out)):
            printed = {"run_file": result.run_file(listed_row)}
    with failures:
        if as_json:
            shared.print_json({**result.summary(), **printed})
        else:
            report()
    write(result, out, listed_row or 1, failures)
    with failures:
        if not as_json:
            for text in printed.values():
                shared.say(text.rstrip("\n") if isinstance(text, str) else "\n".join(text))
    failures.tell()
    return shared.INTERRUPTED if result.ranking.stopped else 0


def end_without_best(result: Search, why: NothingFound, out: Sequence[str]) -> int:
    """Write the files of all candidates, and say why nothing was found; returns the exit code."""
    failures = Failures()
    write(result, [path for path in out if not is_run_file(path)], 1, failures)
    with failures:
        raise why
    for path in filter(is_run_file, out):
        with failures:
            raise UserError(f"{path}: not written, since there is no run to write")
    stopped = result.ranking.stopped
    try:
        failures.tell()
    except UserError as error:
        if not why.too_large and not stopped:
            raise
        kind = "" if stopped else "error: "
        click.echo(f"stagewright: {kind}{printable(str(error))}", err=True)
    return shared.INTERRUPTED if stopped else shared.DOES_NOT_FIT


class Failures:
    """Collects what goes wrong in the blocks that it is the context of, which end there."""

    def __init__(self) -> None:
        """None yet."""
        self._words: dict[str, None] = {}
        self._other: BaseException | None = None

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep an error; Ctrl-C goes on."""
        if isinstance(error, UserError):
            self._words[str(error)] = None
        elif isinstance(error, Exception):
            self._other = self._other or error
        return isinstance(error, Exception)

    def tell(self) -> None:
        """Raise what was kept, if anything was: words for the user in one line."""
        if self._other is not None:
            raise self._other
        if self._words:
            raise UserError("; ".join(self._words))


@contextmanager
def _named(path: str) -> Generator[None]:
    """Say which file it is that the system does not write."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def write(
    result: Search | ServingSearch, out: Sequence[str], listed_row: int, failures: Failures
) -> None:
    """Write each of the files, whatever becomes of the others."""
    upto = ", as far as the search had come" if result.ranking.stopped else ""
    every: list[str] = []
    try:
        for path in out:
            with failures:
                with _named(path):
                    written = result.write(path, listed_row)
                every += written
                click.echo(f"stagewright: wrote {', '.join(written)}{upto}", err=True)
    except KeyboardInterrupt:
        if not every:
            raise
        raise Stopped(f"stopped; written: {', '.join(every)}, and no other file") from None
