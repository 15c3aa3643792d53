"""The files that a search will write: all that can be known of them is checked before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.time.hardware import Hardware


@dataclass(frozen=True)
class Outputs:
    """The files that `-o` names, and the files read that they must not replace."""

    paths: tuple[str, ...]
    force: bool
    """Whether files of an earlier search may be replaced."""
    given: Sequence[str]
    """All texts that were given, of which some are paths of files that the search reads."""

    def check(self) -> None:
        """Raise a UserError for a file that could not be written, or that must not be replaced."""
        from stagewright.api.endings import OF_SEARCH, check_ending, check_extra

        for path in self.paths:
            check_ending(path, OF_SEARCH)
            check_extra(path)
        self._check_each(self.paths)
        self._refuse_twice(self.paths)

    def check_hardware(self, systems: Iterable[Hardware]) -> None:
        """The same for the files of hardware beside run files, where some hardware takes them."""
        from stagewright.searching.run_file import hardware_path, is_packaged

        if all(map(is_packaged, systems)):
            return
        beside = [str(hardware_path(path)) for path in self.paths if is_run_file(path)]
        self._check_each(beside)
        self._refuse_twice([*self.paths, *beside])

    def _check_each(self, paths: Sequence[str]) -> None:
        from stagewright.files import check_can_be_written, check_output_file

        present = [path for path in paths if os.path.lexists(path)]
        read = [*_files_read(self.given)] if present else []
        for path in present:
            if any(_same(path, each) for each in read):
                raise UserError(
                    f"{path}: would replace a file that this search reads; choose another name"
                )
        for path in paths:
            check_output_file(path, force=self.force)
            check_can_be_written(path)

    @staticmethod
    def _refuse_twice(paths: Sequence[str]) -> None:
        known: dict[str, str] = {}
        for path in paths:
            place = os.path.realpath(path)
            if place in known:
                same = "" if known[place] == path else f", as {known[place]}, too"
                raise UserError(f"{path}: would be written twice{same}; choose another name")
            known[place] = path


def is_run_file(path: str) -> bool:
    """Whether a run is written there, and not all candidates."""
    from stagewright.api.endings import RUN_FILE, ending_of

    return ending_of(path) == RUN_FILE


def texts_of(value: object) -> Iterator[str]:
    """All texts in a value of settings, at any depth; a list in a text is its parts, too."""
    if isinstance(value, str):
        yield value
        if "," in value:
            yield from (part.strip() for part in value.split(","))
        if "=" in value:
            yield from texts_of(value.partition("=")[2])
    elif isinstance(value, Mapping):
        for each in cast("Mapping[Any, Any]", value).values():
            yield from texts_of(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in cast("Iterable[Any]", value):
            yield from texts_of(each)


def _files_read(texts: Iterable[str]) -> Iterator[str]:
    """Files that some texts name, and those that these name: run files, hardware and its base."""
    known: set[str] = set()
    rest = [*texts]
    while rest:
        path = rest.pop()
        if path in known:
            continue
        known.add(path)
        if os.path.isdir(path):  # of a model
            yield from (str(each) for each in Path(path).glob("*.json"))
        elif os.path.isfile(path):
            yield path
            for text in _texts_in(path):
                rest += [text, os.path.join(os.path.dirname(path), text)]


def _texts_in(path: str) -> Iterator[str]:
    """What a file in YAML, or a manifest, says; of other files nothing."""
    from stagewright.run.files import read_settings

    if not path.lower().endswith((".yaml", ".yml", ".json")):
        return
    try:
        yield from texts_of(read_settings(path))
    except UserError:
        return  # whoever reads it for the search says what is wrong


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
