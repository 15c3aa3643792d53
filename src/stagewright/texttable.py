"""A table of columns with units, which prints as text and HTML and converts to data frames.

>>> print(Table("Memory", {"stage": [0, 1], "peak": [81_000_000_000, 2_000]}, {"peak": "B"}))
Memory
stage   peak
0      81 GB
1       2 kB
"""

from __future__ import annotations

import csv
import html
import importlib
import io
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stagewright.errors import UserError
from stagewright.numbers import duration, parameters, quantity

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 30
"""Rows shown in a notebook."""
GAP = 2
"""Blanks between columns of a terminal."""
FOLDED = 28
"""Text is not folded to fewer columns than this."""


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


def _exact(value: float) -> str:
    return f"{value:.10g}"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _count(value: float) -> str:
    return f"{value:,}"


_FORMATS: dict[str, Callable[[float], str]] = {
    **{"s": duration, "share": _share, "whole share": _whole_share},
    **{"error": _error, "figure": _figure, "exact": _exact, "count": _count},
    "rate": _rate,
    "parameters": lambda value: parameters(int(value)),
}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length. `None` is an empty cell."""

    title: str
    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    """Unit by column. `B` and `FLOP` are shown with prefixes, `s` as a duration, `share` in
    percent, `error` in percent with its sign, `figure` in four digits, `exact` in all, `count` with
    commas, `rate` with commas and a tenth, `parameters` as in `70.6B`; numbers with the unit `""`
    are shown unchanged."""
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

    def blocks(self, width: int) -> list[Table]:
        """The table in pieces of at most so many columns of text, each with the leading labels.

        A number is never cut; text that does not fit is for the caller to fold.

        >>> table = Table("", {"rank": ["a"], "sent": [1], "got": [2]}, {"sent": "", "got": ""})
        >>> [list(block.columns) for block in table.blocks(12)]
        [['rank', 'sent'], ['rank', 'got']]
        >>> table = Table("", {"#": [1], "sent": [1], "got": [2]}, {"#": "", "sent": "", "got": ""})
        >>> [list(block.columns) for block in table.blocks(9)]
        [['#', 'sent'], ['#', 'got']]
        """
        wide = {name: self._width(name) + GAP for name in self.columns}
        if sum(wide.values()) - GAP <= width:
            return [self]
        names = list(self.columns)
        labels = list(itertools.takewhile(self._is_label, names))
        while len(labels) > 1 and sum(wide[name] for name in labels) > 2 * width // 3:
            labels.pop()
        room = width + GAP - sum(wide[name] for name in labels)
        others = names[len(labels) :]
        pieces = _pieces(others, wide, room)
        while len(fewer := _pieces(others, wide, room - 1)) == len(pieces) and room > 1:
            pieces, room = fewer, room - 1  # as wide as each other
        first, *more = [self.only(*labels, *piece) for piece in pieces]
        return [first, *(replace(each, title="") for each in more)]

    def _is_label(self, name: str) -> bool:
        return name == "#" or not self.is_number(name)

    def _width(self, name: str) -> int:
        """Columns of text that a column needs; of text, that it is not folded below."""
        widest = max(map(len, (name, *self.cells(name))))
        return widest if self.is_number(name) else max(len(name), min(widest, FOLDED))

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

    def to_csv(self) -> str:
        """The unformatted values as CSV, with a row of names first."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*self.columns.values(), strict=True))
        return text.getvalue()

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


def _pieces(names: Sequence[str], wide: Mapping[str, int], room: int) -> list[list[str]]:
    """Names in order, in pieces that are no wider than the room if no name is."""
    pieces: list[list[str]] = [[]]
    for name in names:
        if pieces[-1] and sum(wide[each] for each in [*pieces[-1], name]) > room:
            pieces.append([])
        pieces[-1].append(name)
    return pieces


def print_table(table: Table, console: Console, title_style: str = "italic") -> None:
    """Print a table for people, in blocks if the console is too narrow for all columns."""
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    if table.title:
        console.print(Text(table.title, style=title_style))
    for block in table.blocks(console.width):
        shown = Rich(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0)
        )
        for name in block.columns:
            if block.is_number(name):
                shown.add_column(Text(name), justify="right", no_wrap=True)
            else:
                shown.add_column(Text(name), overflow="fold")
        for row, last in zip(block.text_rows(), block.ends(), strict=True):
            shown.add_row(*map(Text, row), end_section=last)
        console.print(shown, soft_wrap=False)
        console.print()


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
