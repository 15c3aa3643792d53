r"""Escapes text of others for a terminal, a comment of a script or a log.

>>> printable("h100\n\x1b[2Jrm -rf ~")
'h100\\n\\x1b[2Jrm -rf ~'
"""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped_controls(text: str) -> str:
    """Text whose control characters, except tabs and line ends, are escaped."""
    return _CONTROLS.sub(lambda match: _escaped(match[0]), text)


def printable(value: object, limit: int | None = None) -> str:
    """A value as one line, whose characters that are not printable are escaped as in Python.

    A longer text is cut to `limit` characters. Line ends, the escape of terminals, characters that
    turn the direction of text, and lone surrogates, which no file in UTF-8 can hold, are escaped.
    """
    text = str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """Text of several lines, each of them printable."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
