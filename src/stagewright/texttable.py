"""A table of columns with units, which prints as text and HTML and converts to data frames.

>>> print(Table("Memory", {"stage": [0, 1], "peak": [81_000_000_000, 2_000]}, {"peak": "B"}))
Memory
stage   peak
0      81 GB
1       2 kB
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.errors import UserError
from stagewright.numbers import duration, quantity

SHOWN = 30
"""Rows shown in a notebook."""


STYLE = (
    "<style>table.stagewright :is(td,th){text-align:left;padding:.15em .8em .15em 0}"
    "table.stagewright .n{text-align:right}table.stagewright caption{text-align:left}</style>"
)
"""Style of tables in a notebook, which has none of its own for them."""


def _share(value: float) -> str:
    return f"{value:.1%}"


def _whole_share(value: float) -> str:
    return f"{value:.0%}"


def _error(value: float) -> str:
    return f"{value:+.1%}"


def _figure(value: float) -> str:
    return f"{value:.4g}"


_FORMATS: dict[str, Callable[[float], str]] = {
    **{"s": duration, "share": _share, "whole share": _whole_share},
    **{"error": _error, "figure": _figure},
}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length. `None` is an empty cell."""

    title: str
    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    """Unit by column. `B` and `FLOP` are shown with prefixes, `s` as a duration, `share` in
    percent, `error` in percent with its sign, `figure` in four digits; numbers of a column with
    the unit `""` are shown unchanged."""
    grouped: str = ""
    """A column whose value is shown only where it differs from the row above."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """For each row a mapping from column to value."""
        values = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in values]

    def only(self, *names: str) -> Table:
        """The table with only these columns."""
        return replace(self, columns={name: self.columns[name] for name in names})

    def is_number(self, column: str) -> bool:
        """Whether a column holds numbers, which are aligned right."""
        return column in self.units

    def cells(self, column: str) -> list[str]:
        """The formatted values of a column."""
        unit = self.units.get(column, "")
        return [_cell(value, unit) for value in self.columns[column]]

    def text_rows(self) -> list[tuple[str, ...]]:
        """The formatted cells, row by row; those of the grouped column only where they change."""
        by_column = {name: self.cells(name) for name in self.columns}
        if self.grouped:
            cells = by_column[self.grouped]
            by_column[self.grouped] = [
                cell if nth == 0 or cells[nth - 1] != cell else "" for nth, cell in enumerate(cells)
            ]
        return list(zip(*by_column.values(), strict=True))

    def ends(self) -> list[bool]:
        """For each row, whether a group ends with it."""
        if not self.grouped:
            return [False] * len(self)
        values = self.columns[self.grouped]
        return [nth + 1 == len(values) or values[nth + 1] != v for nth, v in enumerate(values)]

    def __str__(self) -> str:
        return self._text(self.text_rows())

    def __repr__(self) -> str:
        left = len(self) - SHOWN
        return self._text(self.text_rows()[:SHOWN]) + (f"\n{left:,} more rows" if left > 0 else "")

    def _text(self, cells: Sequence[tuple[str, ...]]) -> str:
        rows = [tuple(self.columns), *cells]
        wide = [max(len(row[nth]) for row in rows) for nth in range(len(self.columns))]
        right = [self.is_number(name) for name in self.columns]
        lines = [
            "  ".join(
                cell.rjust(w) if r else cell.ljust(w)
                for cell, w, r in zip(row, wide, right, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def html(self, most: int | None = None) -> str:
        """The table as HTML; after `most` rows, a line says how many are left out."""
        marks = [' class="n"' if self.is_number(name) else "" for name in self.columns]
        head = "".join(
            f'<th scope="col"{mark}>{html.escape(name)}</th>'
            for name, mark in zip(self.columns, marks, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)
            )
            + "</tr>"
            for row in self.text_rows()[:most]
        )
        if most is not None and len(self) > most:
            left = f"{len(self) - most:,} more rows; to_pandas() and to_polars() have them all"
            body += f'<tr><td colspan="{len(self.columns)}">{left}</td></tr>'
        return (
            f'<table class="stagewright"><caption>{html.escape(self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return STYLE + self.html(SHOWN)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of the unformatted values; needs the extra `pandas`."""
        with _extra("pandas"):
            library = importlib.import_module("pandas")
        return library.DataFrame({k: list(v) for k, v in self.columns.items()})

    def to_polars(self) -> Any:
        """A polars.DataFrame of the unformatted values; needs the extra `polars`."""
        with _extra("polars"):
            library = importlib.import_module("polars")
        return library.DataFrame({k: list(v) for k, v in self.columns.items()})


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return quantity(value, unit) if unit else str(value)


@contextmanager
def _extra(name: str) -> Generator[None]:
    """Turn a failed import of an extra into a UserError that says how to install the extra."""
    try:
        yield
    except ImportError:
        raise UserError(
            f"this needs {name}, which is not installed; pip install 'stagewright[{name}]'"
        ) from None
