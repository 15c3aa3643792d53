"""Errors for users: one line with what is wrong and where, what was wanted, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONG_WORD = re.compile(r"\S{300,}")  # no name, and hardly a path
_ENDINGS = "'\",;:.)]"


class UserError(Exception):
    """Input that cannot be used. The command line prints it as one line and exits with code 2."""

    def __init__(self, message: str) -> None:
        """A word of `message` that is too long to be read is cut.

        >>> str(UserError(f"no schedule {'x' * 3000}"))[-30:]
        'xxxxxxxx... (3,000 characters)'
        """
        super().__init__(shorten(message))


def shorten(message: str) -> str:
    """A message in which words too long to be read are cut."""

    def cut(match: re.Match[str]) -> str:
        word = match[0].rstrip(_ENDINGS) or match[0]
        return f"{word[:60]}... ({len(word):,} characters){match[0][len(word) :]}"

    return _LONG_WORD.sub(cut, message)


class Stopped(KeyboardInterrupt):
    """Ctrl-C of the user; the message says what was written and how to continue."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name, or an empty string: `"; did you mean 'llama3-8b'?"`.

    The shortest name that begins as typed goes before one that only looks like it.

    >>> did_you_mean("lama3-8b", ["llama3-8b", "gpt2"])
    "; did you mean 'llama3-8b'?"
    >>> did_you_mean("h100", ["h100-sxm", "h200"])
    "; did you mean 'h100-sxm'?"
    >>> did_you_mean("h200_sxm", ["h100-sxm", "h200"])
    "; did you mean 'h200'?"
    """
    names = list(known)
    longer = [name for name in names if len(got) > 2 and name.startswith(got)]
    first = _first_word(got)
    # A name with digits in its first word is a product or a model: the rest of it is a variant.
    variants = [name for name in names if _first_word(name) == first and re.search(r"\d", first)]
    close = (
        sorted(longer, key=len)
        or difflib.get_close_matches(got, variants, n=1, cutoff=0.5)
        or difflib.get_close_matches(got, names, n=1)
    )
    return f"; did you mean {close[0]!r}?" if close else ""


def _first_word(name: str) -> str:
    return re.split(r"[-_. ]", name, maxsplit=1)[0]


def hint_of_thousands(got: str) -> str:
    """A hint for an integer that is written with a `k`, or an empty string.

    >>> hint_of_thousands("8k")
    '; write 8192 or 8000, since k may be either'
    """
    if not re.fullmatch(r"\d{1,9}[kK]", got):
        return ""
    count = int(got.rstrip("kK"))
    return f"; write {count * 1024} or {count * 1000}, since k may be either"


def divisors(n: int, limit: int = 12) -> str:
    """The divisors of `n` in words, for errors about degrees: `1, 2, 4 or 8`.

    >>> divisors(8)
    '1, 2, 4 or 8'
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return either(sorted({*small, *(n // d for d in small)})[:limit])


def either(choices: Iterable[object]) -> str:
    """Alternatives in words, joined by commas and `or`.

    >>> either([1, 2, 5])
    '1, 2 or 5'
    """
    words = [str(x) for x in choices]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
