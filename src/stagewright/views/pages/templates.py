"""Pages are made of templates that escape what they are given: Jinja, loaded when a page is made.

What is HTML already says so by a method `__html__`, which only functions that escape give their
results: `svg.figure`, and `_Html` here for the files of the package.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from stagewright.texttable import STYLE

if TYPE_CHECKING:
    from jinja2 import Environment


class _Html(str):
    """Text of the package that a template takes as it is."""

    def __html__(self) -> str:
        return str(self)


def render(template: str, /, **values: Any) -> str:
    """The text of a template of this package for some values; a name that is missing raises."""
    package = {"style": "style.css", "script": "script.js"}
    texts = {name: _Html(_text(file)) for name, file in package.items()}
    made = _environment().get_template(template)
    return made.render({**texts, "table_style": _Html(STYLE), **values})


def css_text(words: str) -> str:
    r"""Words as they stand between the quotes of a string of CSS, whatever they are.

    >>> css_text('</style>" a')
    '\\3c \\2f style\\3e \\22 \\20 a'
    """
    plain = (c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in words)
    return "".join(plain)


def _css(words: str) -> _Html:
    return _Html(css_text(words))


@cache
def _environment() -> Environment:
    # Loading takes some 50 ms, and most commands make no page.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made = Environment(
        autoescape=True,
        loader=FunctionLoader(_text),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters["css"] = _css
    return made


def _text(name: str) -> str:
    return (files("stagewright.views.pages") / "templates" / name).read_text(encoding="utf-8")
