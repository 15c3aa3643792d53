"""A table of columns with units, which prints as text, HTML and CSV.

>>> print(Table("Memory", {"stage": [0, 1], "peak": [81_000_000_000, 2_000]}, {"peak": "B"}))
Memory
stage   peak
0      81 GB
1       2 kB

`Table.columns` makes a data frame: `pandas.DataFrame(table.columns)`.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stagewright.numbers import duration, parameters, quantity

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 30
"""Rows shown in a notebook."""
MIN_TEXT = 28
"""Characters of a word of text above which a terminal may fold it."""

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
    secondary: Sequence[str] = ()
    """Columns that a terminal without room for all leaves out, the last first."""
    bad: Collection[int] = ()
    """Rows that a page marks, such as those of runs that do not fit."""

    @classmethod
    def of_rows(
        cls, title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], *more: Any
    ) -> Table:
        """A table from its rows; `more` are units and the grouped column."""
        columns = [*zip(*rows, strict=True)] or [()] * len(names)
        return cls(title, dict(zip(names, map(list, columns), strict=True)), *more)

    @classmethod
    def of_columns(
        cls,
        title: str,
        columns: Iterable[tuple[str, str | None, Sequence[Any], bool]],
        secondary: Sequence[str] = (),
    ) -> Table:
        """A table from columns: name, unit (None: text), cells, and True if the table has it."""
        shown = [(name, unit, cells) for name, unit, cells, is_shown in columns if is_shown]
        units = {name: unit for name, unit, _ in shown if unit is not None}
        by_name = {name: cells for name, _, cells in shown}
        return cls(title, by_name, units, secondary=[n for n in secondary if n in by_name])

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

    def html(self, limit: int | None = None) -> str:
        """The table as HTML; after `limit` rows, a line says how many are left out."""
        marks = [' class="n"' if self.is_number(name) else "" for name in self.columns]
        head = "".join(
            f'<th scope="col"{mark}>{html.escape(name)}</th>'
            for name, mark in zip(self.columns, marks, strict=True)
        )
        body = "".join(
            ('<tr class="bad">' if i in self.bad else "<tr>")
            + "".join(
                f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)
            )
            + "</tr>"
            for i, row in enumerate(self.text_rows()[:limit])
        )
        if limit is not None and len(self) > limit:
            note = f"{len(self) - limit:,} more rows; pandas.DataFrame(table.columns) has them all"
            body += f'<tr><td colspan="{len(self.columns)}">{note}</td></tr>'
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return (
            f'<table class="stagewright">{caption}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return STYLE + self.html(SHOWN)

    def markdown(self) -> str:
        """The table as Markdown of GitHub, below its title."""
        marks = ["---:" if self.is_number(name) else "---" for name in self.columns]
        head, *rows = [[*map(escaped, row)] for row in ([*self.columns], *self.text_rows())]
        lines = [f"| {' | '.join(row)} |" for row in (head, marks, *rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def to_csv(self) -> str:
        """The unformatted values as CSV, with a row of names first."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*self.columns.values(), strict=True))
        return text.getvalue()


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one line; `@name` calls nobody."""
    text = re.sub(r"[\\`*{}\[\]<>|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("@", "@&#8203;")


def print_table(table: Table, console: Console, title_style: str = "italic") -> None:
    """Print a table for people: names and text are folded, numbers are not.

    Without room for all columns, those that are secondary are left out, and a line names them; if
    that is not enough, the others follow below each other, each time after the leading labels.
    """
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    if table.title:
        console.print(Text(table.title, style=title_style))
    whole, least = dict[str, int](), dict[str, int]()
    for name in table.columns:
        cells = table.cells(name)
        words = {word for text in (name, *cells) for word in text.split()}
        whole[name] = max(map(len, (name, *cells)))
        least[name] = max(min(whole[name], 12), min(max(map(len, words), default=0), MIN_TEXT))
        if table.is_number(name):
            least[name] = max(map(len, (*name.split(), *cells)), default=0)
    shown, omitted = list(table.columns), list[str]()
    for name in reversed(table.secondary):
        if _width(least, shown) > console.width:
            shown.remove(name)
            omitted.insert(0, name)
    labels = list(itertools.takewhile(lambda name: not table.is_number(name), shown)) or shown[:1]
    room = console.width
    pieces = _pieces(shown, labels, least, room)
    while len(pieces) > 1 and len(even := _pieces(shown, labels, least, room - 1)) == len(pieces):
        pieces, room = even, room - 1
    groups = [*(table.columns[table.grouped] if table.grouped else [None] * len(table)), None]
    for piece in pieces:
        grid = Rich(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        folded = _width(whole, piece) > console.width
        more = {n: whole[n] - least[n] for n in piece if not (folded and table.is_number(n))}
        spare = max(0, console.width - _width(least, piece))
        for name in piece:
            number = table.is_number(name)
            width = least[name]
            if name in more:
                width += more[name] * min(spare, sum(more.values())) // max(1, sum(more.values()))
            words = textwrap.fill(name, width or 1)
            justify = "right" if number else "left"
            grid.add_column(Text(words), justify=justify, width=width, overflow="fold")
        for i, row in enumerate(table.only(*piece).text_rows()):
            grid.add_row(*map(Text, row), end_section=groups[i] != groups[i + 1])
        console.print(grid, soft_wrap=False)
        if piece is not pieces[-1]:
            console.print()
    if omitted:
        console.print(Text(f"{console.width} columns have no room for: {', '.join(omitted)}"))
    console.print()


def _pieces(
    names: Sequence[str], labels: Sequence[str], widths: Mapping[str, int], room: int
) -> list[list[str]]:
    """Names of columns in pieces that have room, each after the leading labels."""
    pieces = [[*labels]]
    for name in names[len(labels) :]:
        if _width(widths, [*pieces[-1], name]) > room and pieces[-1] != labels:
            pieces.append([*labels])
        pieces[-1].append(name)
    return pieces


def _width(widths: Mapping[str, int], names: Collection[str]) -> int:
    """Characters of some columns and the blanks between them."""
    return sum(widths[name] + 2 for name in names) - 2


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return quantity(value, unit) if unit else str(value)
