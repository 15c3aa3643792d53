"""Seconds of decode steps over the keys in the cache: pieces of lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Pieces(NamedTuple):
    """Seconds of decode steps of so many requests: piecewise linear in keys."""

    edges: list[float]
    """Keys at which the next piece begins; the first piece begins at no keys."""
    at_none: list[float]
    per_key: list[float]


def longest_pieces(
    knots: Sequence[float], values: Sequence[Sequence[float]], requests: int
) -> Pieces:
    """The longest of some ways, whose seconds at knots, keys of one request, are `values`."""
    if len(values) == 1:  # as most have: no lines cross
        both = zip(pairwise(knots), pairwise(values[0]), strict=True)
        alone = [_line(low, high, *ends) for (low, high), ends in both]
        inner = [knot * requests for knot in knots[1:-1]]
        return Pieces(inner, [a for a, _ in alone], [b / requests for _, b in alone])
    edges: list[float] = []
    at_none: list[float] = []
    per_key: list[float] = []
    for k, (low, high) in enumerate(pairwise(knots)):
        lines = [_line(low, high, way[k], way[k + 1]) for way in values]
        first = k == 0
        at, end = (-math.inf if first else low), (math.inf if k == len(knots) - 2 else high)
        x = low
        line = max(lines, key=lambda ab: (ab[0] + ab[1] * x, ab[1]))
        while True:
            if not first or at > -math.inf:
                edges.append(at * requests)
            at_none.append(line[0])
            per_key.append(line[1] / requests)
            steeper = [
                ((line[0] - other[0]) / (other[1] - line[1]), other)
                for other in lines
                if other[1] - line[1] > 1e-12 * abs(other[1])
            ]
            later = [(cross, other) for cross, other in steeper if x < cross < end]
            if not later:
                break
            at, line = min(later, key=lambda found: (found[0], -found[1][1]))
            x, first = at, False
    return Pieces(edges, at_none, per_key)


def _line(low: float, high: float, at_low: float, at_high: float) -> tuple[float, float]:
    """The value at 0 and the slope of a line through two points."""
    slope = (at_high - at_low) / (high - low)
    return at_low - slope * low, slope
