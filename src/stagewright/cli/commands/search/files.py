"""Files of a search: checked before it, written after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from stagewright.cli.options import check_output
from stagewright.errors import Stopped, UserError

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.api.searched_serving import ServingSearch
    from stagewright.time.hardware import Hardware


def check_outputs(paths: Sequence[str], given: object) -> None:
    """Raise a UserError for a file that cannot be written, or must not be replaced.

    `given`: settings, some texts of which are paths of files that the search reads.
    """
    from stagewright.api.result import OF_SEARCH, check_package, check_suffix
    from stagewright.files import check_can_be_written

    for path in paths:
        check_suffix(path, OF_SEARCH)
        check_package(path)
    present = [path for path in paths if os.path.lexists(path)]
    read = {os.path.realpath(path) for path in _files_read(given)} if present else set[str]()
    for path in present:
        if os.path.realpath(path) in read:
            raise UserError(
                f"{path}: would replace a file that this search reads; choose another name"
            )
    outputs: dict[str, str] = {}
    for path in paths:
        check_output(path, outputs)
        check_can_be_written(path)


def check_hardware_files(paths: Sequence[str], given: object, systems: Iterable[Hardware]) -> None:
    """Check files of hardware next to run files, too, if some hardware takes them."""
    from stagewright.searching.run_file import hardware_path, is_packaged

    if not all(map(is_packaged, systems)):
        hardware = [str(hardware_path(path)) for path in paths if is_run_file(path)]
        check_outputs([*paths, *hardware], given)


def check_files_of_instances(
    paths: Sequence[str], given: object, systems: Iterable[Hardware]
) -> None:
    """Check files next to the run files of a search for serving: groups, and their hardware."""
    from stagewright.searching.run_file import is_packaged
    from stagewright.serving.search.run_files import pools_path, prefill_hardware_path

    systems, run_files = [*systems], [path for path in paths if is_run_file(path)]
    check_hardware_files(paths, given, systems)
    further = [pools_path(path) for path in run_files]
    if not all(map(is_packaged, systems)):
        further += [prefill_hardware_path(path) for path in run_files]
    check_outputs([*paths, *map(str, further)], given)


def is_run_file(path: str) -> bool:
    """True if a run is written there, and not all candidates."""
    from stagewright.api.result import RUN_FILE, suffix_of

    return suffix_of(path) == RUN_FILE


def _files_read(given: object) -> Iterator[str]:
    """Files that some texts name, and those that these name: run files, hardware and its base."""
    from stagewright.run.files import read_settings

    seen, remaining = set[str](), [*_texts_in(given)]
    while remaining:
        path = remaining.pop()
        if path in seen:
            continue
        seen.add(path)
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


def write_files(result: Search | ServingSearch, paths: Sequence[str], row: int) -> list[str]:
    """Write each of the files that can be written; returns the errors of the others."""
    from stagewright.files import replaced_together

    until = ", as far as the search had come" if result.ranking.stopped else ""
    errors: list[str] = []
    written: list[str] = []
    try:
        with replaced_together():
            for path in paths:
                try:
                    written.append(", ".join(result.write(path, row)))
                except UserError as error:
                    errors.append(str(error))
                except OSError as error:
                    errors.append(f"{path}: cannot be written: {error.strerror or error}")
    except KeyboardInterrupt:
        raise Stopped("stopped; no file was written") from None
    for names in written:
        click.echo(f"stagewright: wrote {names}{until}", err=True)
    return errors
