"""The parts that all pages share: key figures, charts, and templates that escape their values.

Jinja is loaded when a page is made. Text that is HTML already says so by a method `__html__`, which
only functions that escape give their results: `svg.figure`, and `_Html` for files of the package.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from stagewright.texttable import STYLE, Table
from stagewright.version import __version__
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


class Chart(NamedTuple):
    """A picture with its caption and its numbers."""

    picture: Picture
    caption: str = ""
    numbers: Table | None = None
    live: str = ""
    """The id of the line in which the script describes the place under the cursor."""


class _Html(str):
    """Text of the package that a template takes as it is."""

    def __html__(self) -> str:
        return str(self)


def render(template: str, /, **values: Any) -> str:
    """The text of a template of this package for some values; a name that is missing raises."""
    package = {"style": "style.css", "script": "script.js"}
    texts = {name: _Html(_text(file)) for name, file in package.items()}
    common: dict[str, Any] = {"data": {}, "version": __version__, "table_style": _Html(STYLE)}
    return _environment().get_template(template).render({**texts, **common, **values})


def css_text(words: str) -> str:
    r"""Words as they stand between the quotes of a string of CSS, whatever they are.

    >>> css_text('</style>" a')
    '\\3c \\2f style\\3e \\22 \\20 a'
    """
    plain = (c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in words)
    return "".join(plain)


def _css(words: str) -> _Html:
    return _Html(css_text(words))


def _sentence(words: str) -> str:
    """Words with a capital, unless a setting such as tp=8 comes first."""
    return words if "=" in words.split(" ")[0] else words[:1].upper() + words[1:]


def _table(table: Table, limit: int | None = None, bad: Collection[int] = ()) -> _Html:
    """A table whose numbers stay in one line with their units."""
    text = table.html(limit, bad)
    return _Html(re.sub(r"(<td[^>]*>[^< ]*\d) (?=[^<])", "\\1\N{NO-BREAK SPACE}", text))


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
    environment.filters |= {"css": _css, "sentence": _sentence, "table": _table}
    return environment


def _text(name: str) -> str:
    return (files("stagewright.views.pages") / "templates" / name).read_text(encoding="utf-8")
