r"""Text of others, for people: a line that a terminal, a script's comment or a log may be given.

>>> printable("h100\n\x1b[2Jrm -rf ~")
'h100\\n\\x1b[2Jrm -rf ~'
"""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped_controls(text: str) -> str:
    """A text of any kind without control characters but tabs and the ends of lines."""
    return _CONTROLS.sub(lambda found: _escaped(found[0]), text)


def printable(value: object, most: int | None = None) -> str:
    """A value as one line: characters that are not printed are written as Python escapes them.

    A longer text is cut to `most` characters. Line ends, the escape of terminals, characters that
    turn the direction of text, and lone surrogates, which no file in UTF-8 can hold, are escaped.
    """
    text = str(value)
    if most is not None and len(text) > most:
        text = text[: most - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """A text of several lines, each of them printable."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
