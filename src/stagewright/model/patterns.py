"""Patterns of layers: what repeats, and the letters that Nemotron-H writes them with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", str, int)

LETTERS = {
    "M": ("mamba2", "none"),
    "*": ("global", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
"""Letters of Nemotron-H's `hybrid_override_pattern`: a layer has a mixer or an MLP, not both."""


def from_letters(letters: str) -> dict[str, Any]:
    """The fields of a model with these layers, a letter each.

    >>> from_letters("M-*-")["mixers"]
    ('mamba2', 'none', 'global', 'none')
    """
    mixers, mlps = zip(*(LETTERS[x] for x in letters), strict=True)
    return {"mixers": mixers, "mlps": mlps}


def every(period: int, offset: int, kind: str) -> tuple[str, ...]:
    """One period of layers, all of one kind but for global attention at `offset`.

    >>> every(3, 1, "mamba")
    ('mamba', 'global', 'mamba')
    """
    return tuple("global" if i == offset else kind for i in range(period))


def shortest(kinds: Sequence[_Kind]) -> tuple[_Kind, ...]:
    """The shortest pattern that repeats into these layers.

    >>> shortest(["mamba", "global", "mamba"])
    ('mamba', 'global')
    """
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if kinds[p:] == kinds[: n - p])
    return tuple(kinds[:period])
