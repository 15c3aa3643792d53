"""Results of the public functions: text, tables by name, one object for JSON, and files."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, ClassVar, cast

from stagewright.errors import UserError, did_you_mean, either
from stagewright.files import atomic, write_text
from stagewright.texttable import Table, escaped
from stagewright.time.hardware import Hardware
from stagewright.views.pages.html import Chart, fragment

RUN_FILE = ".yaml"
OF_SEARCH = (".csv", ".parquet", ".json", ".html", RUN_FILE)
"""Suffixes of files that a search writes."""
HARDWARE_TYPES = (str, Hardware, list, tuple)
"""Types of the hardware of a search."""
OF_SERVING = (".csv", ".json", ".html")
"""Suffixes of files that `serve` writes."""


class PublicResult:
    """A result: `print` shows what the command prints; `table`, `to_dict` and `write` give data."""

    __slots__ = ()

    suffixes: ClassVar[Sequence[str]] = ()
    """Suffixes of the files that `write` takes."""

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        raise NotImplementedError

    def text(self) -> Iterable[str | Table]:
        """Lines and tables of the printed result; functions of `views` make them."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self.text()))

    def markdown(self) -> str:
        """The printed result as Markdown: for a comment, or the summary of a job."""
        parts = (x.markdown() if isinstance(x, Table) else escaped(x) for x in self.text())
        return "\n\n".join(parts)

    def _charts(self) -> Sequence[Chart]:
        """Charts that a notebook shows below the printed result."""
        return ()

    def _repr_html_(self) -> str:
        return fragment([*self.text(), *self._charts()])

    def table(self, name: str, **options: Any) -> Table:
        """One of the tables by name; an unknown name raises a UserError that lists them."""
        check_type(name, "the name of a table", str)
        if name not in self.tables:
            known = either(self.tables)
            raise UserError(f"no table {name!r}; wanted {known}{did_you_mean(name, self.tables)}")
        for option, value in options.items():
            kind = str if option == "log" else int
            check_type(value, f"{option} as {'a path' if kind is str else 'a number'}", kind)
        return self.tables[name](**options)

    def to_dict(self) -> dict[str, Any]:
        """The result as one object for JSON: the one that the command prints with `--json`."""
        raise NotImplementedError

    def _rows(self) -> Table:
        """The table that `write` writes."""
        raise NotImplementedError

    def _json_rows(self) -> dict[str, Any]:
        """What `.json` has besides the keys of `to_dict`."""
        return {}

    def page(self) -> str:
        """The result as a page of HTML."""
        raise NotImplementedError

    def write(self, path: str | os.PathLike[str]) -> list[str]:
        """Write a file in the format of its suffix; returns the names of files.

        `.csv` and `.parquet` (needs the extra `polars`): all rows; `.json`: everything; `.html`:
        a page.
        """
        check_suffix(path_text(path), self.suffixes)
        out, suffix = os.fspath(path), suffix_of(path)
        if suffix == ".parquet":
            check_package(path)
            with atomic(out) as temporary:
                columns = self._rows().columns
                frame = importlib.import_module("polars").DataFrame(
                    {name: list(values) for name, values in columns.items()}
                )
                frame.write_parquet(temporary)
        elif suffix == ".csv":
            write_text(out, self._rows().to_csv())
        elif suffix == ".html":
            write_text(out, self.page())
        else:
            write_text(out, json.dumps(self.to_dict() | self._json_rows(), indent=1) + "\n")
        return [out]


def known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Row without unknown values, and without numbers that JSON cannot write."""
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def path_text(path: object, wanted: str = "a path") -> str:
    """A path as text; raises a UserError for a value of another type, such as a descriptor."""
    check_type(path, wanted, str, os.PathLike)
    return os.fspath(cast("os.PathLike[str]", path))


def check_type(value: object, wanted: str, *types: type) -> None:
    """Raise a UserError for an argument of another type; a truth value is no number."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UserError(f"got {shown(value)}, wanted {wanted}")


def check_names(values: object, wanted: str) -> None:
    """Raise a UserError for anything but None or a mapping whose keys are names."""
    keys = [*cast("Mapping[object, Any]", values)] if isinstance(values, Mapping) else [values]
    if values is not None and not all(isinstance(key, str) for key in keys):
        raise UserError(f"got {shown(cast('object', values))}, wanted {wanted} by name")


def suffix_of(path: str | os.PathLike[str]) -> str:
    """The suffix of a file's name in small letters; `.yaml` also of `.yml`."""
    suffix = Path(path).suffix.lower()
    return RUN_FILE if suffix == ".yml" else suffix


def check_suffix(path: str | os.PathLike[str], suffixes: Sequence[str]) -> None:
    """Raise a UserError for a file whose suffix does not say what to write.

    >>> check_suffix("found.txt", OF_SERVING)
    Traceback (most recent call last):
        ...
    stagewright.errors.UserError: found.txt: wanted a name that ends in .csv, .json or .html
    """
    if suffix_of(path) not in suffixes:
        raise UserError(f"{path}: wanted a name that ends in {either(suffixes)}")


def check_package(path: str | os.PathLike[str]) -> None:
    """Raise a UserError for a file that needs a package which is not installed."""
    if suffix_of(path) != ".parquet":
        return
    try:
        importlib.import_module("polars")
    except ImportError:
        raise UserError(
            f"{path}: .parquet needs the package polars, which is not installed; pip install "
            "'stagewright[polars]', or write .csv"
        ) from None


def no_such_row(row: int, count: int, *, more: bool = False) -> UserError:
    """Error for a row that the list of the best lacks; `more`: others were not simulated.

    >>> str(no_such_row(9, 7, more=True))
    '--run 9: there are runs 1 to 7; give one of these, or a larger --top'
    """
    if count > 1:
        only = f"there are runs 1 to {count:,}; give one of these"
    else:
        only = "there is one run; give --run 1" if count else "there is no run"
    return UserError(f"--run {row}: {only}{', or a larger --top' if more else ''}")
