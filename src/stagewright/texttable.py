"""A table as a value: columns with units, which prints, shows itself in a notebook, and converts.

>>> print(Table("Memory", {"stage": [0, 1], "peak": [81_000_000_000, 2_000]}, {"peak": "B"}))
Memory
stage   peak
0      81 GB
1       2 kB
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.errors import UserError
from stagewright.numbers import duration, quantity

SHOWN = 30
"""Rows, in a notebook."""


STYLE = (
    "<style>table.stagewright :is(td,th){text-align:left;padding:.15em .8em .15em 0}"
    "table.stagewright .n{text-align:right}table.stagewright caption{text-align:left}</style>"
)
"""Of tables in a notebook, which has none for them."""


def _share(value: float) -> str:
    return f"{value:.1%}"


def _whole_share(value: float) -> str:
    return f"{value:.0%}"


def _error(value: float) -> str:
    return f"{value:+.1%}"


def _figure(value: float) -> str:
    return f"{value:.4g}"


_TOLD = {
    **{"s": duration, "share": _share, "whole share": _whole_share},
    **{"error": _error, "figure": _figure},
}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length. `None` is an empty cell."""

    title: str
    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    """By column: `B` and `FLOP` are shown with prefixes, `s` as a duration, `share` in percent,
    `error` too, with its sign, `figure` in four digits; a column with `""` holds numbers that are
    shown as they are."""
    grouped: str = ""
    """A column whose value is shown only where it changes."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A mapping from columns to values for each row."""
        values = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in values]

    def only(self, *names: str) -> Table:
        """The table of some of its columns."""
        return replace(self, columns={name: self.columns[name] for name in names})

    def is_number(self, column: str) -> bool:
        """Whether a column holds numbers, which stand to the right."""
        return column in self.units

    def cells(self, column: str) -> list[str]:
        """The values of a column as people read them."""
        unit = self.units.get(column, "")
        return [_cell(value, unit) for value in self.columns[column]]

    def text_rows(self) -> list[tuple[str, ...]]:
        """All cells, row by row; those of the grouped column only where they change."""
        by_column = {name: self.cells(name) for name in self.columns}
        if self.grouped:
            of = by_column[self.grouped]
            by_column[self.grouped] = [
                word if nth == 0 or of[nth - 1] != word else "" for nth, word in enumerate(of)
            ]
        return list(zip(*by_column.values(), strict=True))

    def ends(self) -> list[bool]:
        """For each row, whether a group ends with it."""
        if not self.grouped:
            return [False] * len(self)
        of = self.columns[self.grouped]
        return [nth + 1 == len(of) or of[nth + 1] != value for nth, value in enumerate(of)]

    def __str__(self) -> str:
        return self._text(self.text_rows())

    def __repr__(self) -> str:
        left = len(self) - SHOWN
        return self._text(self.text_rows()[:SHOWN]) + (f"\n{left:,} more rows" if left > 0 else "")

    def _text(self, told: Sequence[tuple[str, ...]]) -> str:
        rows = [tuple(self.columns), *told]
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
        """A table for a page; of more than `most` rows, these and how many are left out."""
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
        """A pandas.DataFrame, with numbers as they are; needs the extra `pandas`."""
        with _extra("pandas"):
            library = importlib.import_module("pandas")
        return library.DataFrame({k: list(v) for k, v in self.columns.items()})

    def to_polars(self) -> Any:
        """A polars.DataFrame, with numbers as they are; needs the extra `polars`."""
        with _extra("polars"):
            library = importlib.import_module("polars")
        return library.DataFrame({k: list(v) for k, v in self.columns.items()})


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if unit in _TOLD:
        return _TOLD[unit](value)
    return quantity(value, unit) if unit else str(value)


@contextmanager
def _extra(name: str) -> Generator[None]:
    """Imports of an extra; without it, says how to get it."""
    try:
        yield
    except ImportError:
        raise UserError(
            f"this needs {name}, which is not installed; pip install 'stagewright[{name}]'"
        ) from None
