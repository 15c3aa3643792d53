"""Files and texts of a search: checked before it, written and printed at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from stagewright.cli import shared
from stagewright.errors import Stopped, UserError
from stagewright.printable import printable

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.api.searched_serving import ServingSearch
    from stagewright.searching.ranking import NothingFound
    from stagewright.time.hardware import Hardware

# ---- before the search ---------------------------------------------------------------------------


def check_outputs(paths: Sequence[str], given: object, *, force: bool) -> None:
    """Raise a UserError for a file that cannot be written, or must not be replaced.

    `given`: settings, some texts of which are paths of files that the search reads. `force`: files
    of an earlier search may be replaced.
    """
    from stagewright.api.endings import OF_SEARCH, check_ending, check_extra
    from stagewright.files import check_can_be_written, check_output_file

    for path in paths:
        check_ending(path, OF_SEARCH)
        check_extra(path)
    present = [path for path in paths if os.path.lexists(path)]
    read = {os.path.realpath(path) for path in _files_read(given)} if present else set[str]()
    for path in present:
        if os.path.realpath(path) in read:
            raise UserError(
                f"{path}: would replace a file that this search reads; choose another name"
            )
    known: dict[str, str] = {}
    for path in paths:
        check_output_file(path, force=force)
        check_can_be_written(path)
        place = os.path.realpath(path)
        if place in known:
            same = "" if known[place] == path else f", as {known[place]}, too"
            raise UserError(f"{path}: would be written twice{same}; choose another name")
        known[place] = path


def check_hardware_files(
    paths: Sequence[str], given: object, systems: Iterable[Hardware], *, force: bool
) -> None:
    """Check files of hardware next to run files, too, if some hardware takes them."""
    from stagewright.searching.run_file import hardware_path, is_packaged

    if not all(map(is_packaged, systems)):
        beside = [str(hardware_path(path)) for path in paths if is_run_file(path)]
        check_outputs([*paths, *beside], given, force=force)


def is_run_file(path: str) -> bool:
    """True if a run is written there, and not all candidates."""
    from stagewright.api.endings import RUN_FILE, ending_of

    return ending_of(path) == RUN_FILE


def _files_read(given: object) -> Iterator[str]:
    """Files that some texts name, and those that these name: run files, hardware and its base."""
    from stagewright.run.files import read_settings

    known, remaining = set[str](), [*_texts_in(given)]
    while remaining:
        path = remaining.pop()
        if path in known:
            continue
        known.add(path)
        if os.path.isdir(path):  # of a model
            yield from map(str, Path(path).glob("*.json"))
        elif os.path.isfile(path):
            yield path
            if path.lower().endswith((".yaml", ".yml", ".json")):
                try:
                    texts = [*_texts_in(read_settings(path))]
                except UserError:
                    continue  # the search reports it
                remaining += texts + [os.path.join(os.path.dirname(path), text) for text in texts]


def _texts_in(value: object) -> Iterator[str]:
    """All texts in a value of settings, at any depth; a list in a text is its parts, too."""
    if isinstance(value, str):
        yield value
        if "," in value:
            yield from (part.strip() for part in value.split(","))
        if "=" in value:
            yield from _texts_in(value.partition("=")[2])
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in cast("Iterable[Any]", value):
            yield from _texts_in(item)


# ---- after the search ----------------------------------------------------------------------------


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

    `listed_row`: row of the best whose run is written, or printed without a run file; `flags` are
    printed instead. In JSON both are fields. Errors are raised at the end: a search may take hours,
    and what can be printed or written is.
    """
    errors: list[Exception] = []
    printed: dict[str, Any] = {}

    def add_printed() -> None:
        if flags is not None:
            printed["flags"] = [*flags()]
        elif listed_row is not None and len(result.ranking.best) and not any(map(is_run_file, out)):
            printed["run_file"] = result.run_file(listed_row)

    def print_result() -> None:
        if as_json:
            shared.print_json({**result.summary(), **printed})
        else:
            report()

    _attempt(add_printed, errors)
    _attempt(print_result, errors)
    _write(result, out, listed_row or 1, errors)
    if not as_json:
        for text in printed.values():
            shared.say(text.rstrip("\n") if isinstance(text, str) else "\n".join(text))
    _raise(errors)
    return shared.INTERRUPTED if result.ranking.stopped else 0


def end_without_best(result: Search, why: NothingFound, out: Sequence[str]) -> int:
    """Write the files of all candidates, and say why nothing was found; returns the exit code."""
    errors: list[Exception] = []
    _write(result, [path for path in out if not is_run_file(path)], 1, errors)
    errors.append(why)
    errors += [
        UserError(f"{path}: not written, since there is no run to write")
        for path in filter(is_run_file, out)
    ]
    stopped = result.ranking.stopped
    try:
        _raise(errors)
    except UserError as error:
        if not why.too_large and not stopped:
            raise
        kind = "" if stopped else "error: "
        click.echo(f"stagewright: {kind}{printable(str(error))}", err=True)
    return shared.INTERRUPTED if stopped else shared.DOES_NOT_FIT


def _attempt(action: Callable[[], None], errors: list[Exception]) -> None:
    """Do something; keep its error. Ctrl-C goes on."""
    try:
        action()
    except Exception as error:
        errors.append(error)


def _raise(errors: Sequence[Exception]) -> None:
    """Raise all errors of the user as one; before these the first other one, if there is any."""
    for error in errors:
        if not isinstance(error, UserError):
            raise error
    if errors:
        raise UserError("; ".join(dict.fromkeys(map(str, errors))))


def _write(
    result: Search | ServingSearch, out: Sequence[str], listed_row: int, errors: list[Exception]
) -> None:
    """Write each of the files, whatever becomes of the others."""
    upto = ", as far as the search had come" if result.ranking.stopped else ""
    written: list[str] = []
    try:
        for path in out:
            try:
                names = result.write(path, listed_row)
            except OSError as error:
                message = f"{path}: cannot be written: {error.strerror or error}"
                errors.append(UserError(message))
            except Exception as error:
                errors.append(error)
            else:
                written += names
                click.echo(f"stagewright: wrote {', '.join(names)}{upto}", err=True)
    except KeyboardInterrupt:
        if not written:
            raise
        raise Stopped(f"stopped; written: {', '.join(written)}, and no other file") from None
