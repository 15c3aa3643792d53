"""Results as files: the ending of a file's name says what is written."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.errors import UserError, either
from stagewright.files import atomic, write_text
from stagewright.texttable import Table

RUN_FILE = ".yaml"
OF_SEARCH = (".csv", ".parquet", ".json", ".html", RUN_FILE)
"""Endings of the files that a search writes."""
OF_SERVING = (".csv", ".json", ".html")
"""Endings of the files that `serve` writes."""


def ending_of(path: str | os.PathLike[str]) -> str:
    """The ending of a file's name in small letters; `.yaml` also of `.yml`."""
    ending = Path(path).suffix.lower()
    return RUN_FILE if ending == ".yml" else ending


def check_ending(path: str | os.PathLike[str], known: Sequence[str]) -> None:
    """Raise a UserError for the name of a file of which the ending does not say what to write.

    >>> check_ending("found.txt", OF_SERVING)
    Traceback (most recent call last):
        ...
    stagewright.errors.UserError: found.txt: wanted a name that ends in .csv, .json or .html
    """
    if ending_of(path) not in known:
        raise UserError(f"{path}: wanted a name that ends in {either(known)}")


def check_extra(path: str | os.PathLike[str]) -> None:
    """Raise a UserError for a file that takes a package to write which is not installed."""
    if ending_of(path) != ".parquet":
        return
    try:
        importlib.import_module("polars")
    except ImportError:
        raise UserError(
            f"{path}: .parquet needs the package polars, which is not installed; pip install "
            "'stagewright[polars]', or write .csv"
        ) from None


def no_such_place(place: int, count: int, *, more: bool = False) -> str:
    """What is said of a place among the best that none has; `more`: others were not simulated.

    >>> no_such_place(9, 7, more=True)
    '--run 9: there are runs 1 to 7; give one of these, or a larger --top'
    """
    if count > 1:
        only = f"there are runs 1 to {count:,}; give one of these"
    else:
        only = "there is one run; give --run 1" if count else "there is no run"
    return f"--run {place}: {only}{', or a larger --top' if more else ''}"


class ResultFile(NamedTuple):
    """What a result is as a file of each kind; made when it is written."""

    rows: Callable[[], Table]
    """For .csv and .parquet (needs the extra `polars`)."""
    entry: Callable[[], Mapping[str, Any]]
    """For .json."""
    page: Callable[[], str]
    """For .html."""
    run_file: Callable[[str], list[str]] | None = None
    """For `RUN_FILE`: writes the run file at a path, and what belongs to it; returns the names."""

    def write(self, path: str | os.PathLike[str]) -> list[str]:
        """Write the file, and return the names of all that were written."""
        where, ending = os.fspath(path), ending_of(path)
        if self.run_file is not None and ending == RUN_FILE:
            return self.run_file(where)
        if ending == ".parquet":
            check_extra(path)
            with atomic(where) as place:
                self.rows().to_polars().write_parquet(place)
        elif ending == ".csv":
            write_text(where, self.rows().to_csv())
        elif ending == ".html":
            write_text(where, self.page())
        else:
            write_text(where, json.dumps(self.entry(), indent=1) + "\n")
        return [where]
