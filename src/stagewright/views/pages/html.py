"""A page as data: a title, parts at its head, sections of parts; two templates make HTML of it.

A part is a paragraph (`str`, in which `` `words` `` are code and `**words**` are bold), a `Table`,
or one of the classes below; `templates/parts.html` has a macro for each. Jinja escapes all text,
and is loaded when a page is made. Text that is HTML already says so by a method `__html__`, which
only functions that escape give their results: `svg.figure`, and `_Html` for files of the package.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from stagewright.texttable import STYLE, Table
from stagewright.version import __version__
from stagewright.views.advice import Remark
from stagewright.views.pictures.svg import Picture

if TYPE_CHECKING:
    from jinja2 import Environment


class Card(NamedTuple):
    """A key figure: its name, its value, and a line below in small letters."""

    name: str
    value: str
    more: str = ""
    state: str = ""
    """`problem`: the figure is why the run does not fit, or beyond a limit; `moot`: of a run that
    does not fit."""


class Cards(NamedTuple):
    """Key figures side by side."""

    cards: Sequence[Card]


class Remarks(NamedTuple):
    """A list of remarks, marked by their level."""

    remarks: Sequence[Remark]


class Paragraph(NamedTuple):
    """A paragraph with a look (`verdict`, `hint`), a heading (`h3`), or code (`pre`)."""

    words: str
    look: str = ""
    tag: str = "p"


class Chart(NamedTuple):
    """A picture with its caption, and its numbers, which are folded below."""

    picture: Picture
    caption: str = ""
    numbers: Table | None = None
    live: str = ""
    """The id of the line in which the script describes the place under the cursor."""


class Details(NamedTuple):
    """Parts that a click on their title opens; `bad`: of a run that does not fit."""

    title: str
    parts: Sequence[Part]
    id: str = ""
    bad: bool = False


class Tabs(NamedTuple):
    """Panels by their title, one of which is open; `name` begins their ids."""

    name: str
    label: str
    panels: Mapping[str, Sequence[Part]]


class Columns(NamedTuple):
    """Parts beside each other where there is room."""

    columns: Sequence[Sequence[Part]]


Part = str | Paragraph | Table | Cards | Remarks | Chart | Details | Tabs | Columns


class PageSection(NamedTuple):
    """A section; the list at the top of the page names it by its `short` title if it has one."""

    id: str
    title: str
    parts: Sequence[Part]
    short: str = ""
    moot: bool = False


HINT = Paragraph(
    "Point at a chart for its values, or focus one and use the arrow keys, Home and End; P goes to "
    "the peak.",
    "hint",
)


def render(
    title: str,
    head: Iterable[Part],
    sections: Iterable[PageSection],
    data: Mapping[str, Any] | None = None,
) -> str:
    """The page; `data` is what its script reads."""
    package = {name: _Html(_text(file)) for name, file in _FILES.items()}
    return _environment().get_template("page.html").render(
        title=title, head=[*head], sections=[*sections], data=data or {}, version=__version__,
        **package,
    )  # fmt: skip


def fragment(parts: Sequence[Part]) -> str:
    """Parts for a notebook, without the style and the script of a page."""
    return f"<div>{STYLE}{_environment().get_template('parts.html').module.show(parts)}</div>"  # pyright: ignore


def sentence(words: str) -> str:
    """Words with a capital, unless a setting such as tp=8 comes first."""
    return words if "=" in words.split(" ")[0] else words[:1].upper() + words[1:]


def css_text(words: str) -> str:
    r"""Words as they stand between the quotes of a string of CSS, whatever they are.

    >>> css_text('</style>" a')
    '\\3c \\2f style\\3e \\22 \\20 a'
    """
    plain = (c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in words)
    return "".join(plain)


class _Html(str):
    """Text that a template takes as it is."""

    def __html__(self) -> str:
        return str(self)


_FILES = {"style": "style.css", "script": "script.js"}


def _css(words: str) -> _Html:
    return _Html(css_text(words))


def _kind(part: Part) -> str:
    return type(part).__name__


def _prose(words: str) -> _Html:
    text = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(words))
    return _Html(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text))


def _table(table: Table) -> _Html:
    """A table whose numbers stay in one line with their units."""
    return _Html(re.sub(r"(<td[^>]*>[^< ]*\d) (?=[^<])", "\\1\N{NO-BREAK SPACE}", table.html()))


@cache
def _environment() -> Environment:
    # Loading takes some 50 ms, and most commands make no page.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(_text),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "css": _css,
        "kind": _kind,
        "prose": _prose,
        "sentence": sentence,
        "table": _table,
    }
    return environment


def _text(name: str) -> str:
    return (files("stagewright.views.pages") / "templates" / name).read_text(encoding="utf-8")
