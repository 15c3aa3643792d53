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
from collections.abc import Callable, Collection, Mapping, Sequence
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
MIN_TEXT = 28
"""Columns of text below which text is not folded."""

STYLE = (
    "<style>table.stagewright :is(td,th){text-align:left;padding:.15em .8em .15em 0}"
    "table.stagewright .n{text-align:right}table.stagewright caption{text-align:left}</style>"
)
"""Style of tables in a notebook."""


_FORMATS: dict[str, Callable[[Any], str]] = {
    "s": duration,
    "parameters": lambda value: parameters(int(value)),
    "share": "{:.1%}".format,
    "whole share": "{:.0%}".format,
    "error": "{:+.1%}".format,
    "figure": "{:.4g}".format,
    "exact": "{:.10g}".format,
    "count": "{:,}".format,
    "rate": "{:,.1f}".format,
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
        """Return True for a column of numbers, which are aligned right."""
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
                "" if above == cell else cell
                for above, cell in zip([None, *cells], cells, strict=False)
            ]
        return list(zip(*by_column.values(), strict=True))

    def ends(self) -> list[bool]:
        """Return True for each row with which a group ends."""
        if not self.grouped:
            return [False] * len(self)
        values = self.columns[self.grouped]
        changes = [value != after for value, after in itertools.pairwise(values)]
        return [*changes, True] if len(values) else []

    def __str__(self) -> str:
        return self._text(self.text_rows())

    def __repr__(self) -> str:
        hidden = len(self) - SHOWN
        text = self._text(self.text_rows()[:SHOWN])
        return text + (f"\n{hidden:,} more rows" if hidden > 0 else "")

    def _text(self, cells: Sequence[tuple[str, ...]]) -> str:
        rows = [tuple(self.columns), *cells]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligns = [str.rjust if self.is_number(name) else str.ljust for name in self.columns]
        lines = [
            "  ".join(
                align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)
            )
            for row in rows
        ]
        return "\n".join([self.title, *map(str.rstrip, lines)])

    def blocks(self, width: int) -> list[Table]:
        """Split into tables of at most `width` columns of text, each with the leading labels.

        A number is never cut; text that does not fit is for the caller to fold.

        >>> table = Table("", {"rank": ["a"], "sent": [1], "got": [2]}, {"sent": "", "got": ""})
        >>> [list(block.columns) for block in table.blocks(12)]
        [['rank', 'sent'], ['rank', 'got']]
        >>> table = Table("", {"#": [1], "sent": [1], "got": [2]}, {"#": "", "sent": "", "got": ""})
        >>> [list(block.columns) for block in table.blocks(9)]
        [['#', 'sent'], ['#', 'got']]
        """
        widths = {name: self._width(name) + GAP for name in self.columns}
        if sum(widths.values()) - GAP <= width:
            return [self]
        names = list(self.columns)
        labels = list(itertools.takewhile(self._is_label, names))
        while len(labels) > 1 and sum(widths[name] for name in labels) > 2 * width // 3:
            labels.pop()
        room = width + GAP - sum(widths[name] for name in labels)
        others = {name: widths[name] for name in names[len(labels) :]}
        pieces = _pieces(others, room)
        # Make the pieces equally wide.
        while len(narrower := _pieces(others, room - 1)) == len(pieces) and room > 1:
            pieces, room = narrower, room - 1
        first, *following = [self.only(*labels, *piece) for piece in pieces]
        return [first, *(replace(table, title="") for table in following)]

    def _is_label(self, name: str) -> bool:
        return name == "#" or not self.is_number(name)

    def _width(self, name: str) -> int:
        """Columns of text that a column needs at least: text may be folded."""
        widest = max(map(len, (name, *self.cells(name))))
        return widest if self.is_number(name) else max(len(name), min(widest, MIN_TEXT))

    def html(self, limit: int | None = None, bad: Collection[int] = ()) -> str:
        """The table as HTML; after `limit` rows, a line says how many are left out.

        Rows whose index is in `bad` have that class.
        """
        marks = [' class="n"' if self.is_number(name) else "" for name in self.columns]
        head = "".join(
            f'<th scope="col"{mark}>{html.escape(name)}</th>'
            for name, mark in zip(self.columns, marks, strict=True)
        )
        body = "".join(
            ('<tr class="bad">' if i in bad else "<tr>")
            + "".join(
                f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)
            )
            + "</tr>"
            for i, row in enumerate(self.text_rows()[:limit])
        )
        if limit is not None and len(self) > limit:
            note = f"{len(self) - limit:,} more rows; to_pandas() and to_polars() have them all"
            body += f'<tr><td colspan="{len(self.columns)}">{note}</td></tr>'
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
        try:
            library = importlib.import_module("pandas")
        except ImportError:
            raise _missing("pandas") from None
        return library.DataFrame({name: list(values) for name, values in self.columns.items()})

    def to_polars(self) -> Any:
        """A polars.DataFrame of the unformatted values; needs the extra `polars`."""
        try:
            library = importlib.import_module("polars")
        except ImportError:
            raise _missing("polars") from None
        return library.DataFrame({name: list(values) for name, values in self.columns.items()})


def _missing(library: str) -> UserError:
    hint = f"pip install 'stagewright[{library}]'"
    return UserError(f"this needs {library}, which is not installed; {hint}")


def _pieces(widths: Mapping[str, int], room: int) -> list[list[str]]:
    """Split names in order into pieces that are no wider than the room if no name is."""
    pieces: list[list[str]] = [[]]
    for name, width in widths.items():
        if pieces[-1] and sum(widths[other] for other in pieces[-1]) + width > room:
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
