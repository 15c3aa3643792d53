"""Formats quantities, counts, durations and ranks for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def quantity(number: int, unit: str, digits: int = 3) -> str:
    """A quantity with a decimal prefix, in `digits` significant digits.

    >>> quantity(141_107_412_992, "B"), quantity(999, "B"), quantity(0, "FLOP")
    ('141 GB', '999 B', '0')
    """
    if not number:
        return "0"
    value, power = float(number), 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.{digits}g} {_PREFIXES[power]}{unit}" if power else f"{number} {unit}"


def side_by_side(first: int, second: int, unit: str) -> tuple[str, str]:
    """Two quantities in enough digits to be distinct.

    >>> side_by_side(80_012_000_000, 80_000_000_000, "B"), side_by_side(5000, 5000, "B")
    (('80.01 GB', '80 GB'), ('5 kB', '5 kB'))
    """
    for digits in range(3, 17):
        words = quantity(first, unit, digits), quantity(second, unit, digits)
        if words[0] != words[1]:
            return words
    return quantity(first, unit), quantity(second, unit)


_NAMES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))


def count(number: int) -> str:
    """A count; from a million on in three digits and words.

    >>> count(405_853_388_800), count(117_760), count(124_439_808)
    ('406 billion', '117,760', '124 million')
    """
    for scale, name in _NAMES:
        if number >= scale:
            return f"{number / scale:.3g} {name}"
    return f"{number:,}"


def parameters(number: int) -> str:
    """A number of parameters in three digits with K, M, B or T, as in the names of models.

    >>> parameters(70_553_706_496), parameters(124_439_808), parameters(999)
    ('70.6B', '124M', '999')
    """
    value, unit = float(number), ""
    for unit in ("", "K", "M", "B", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}" if unit else f"{number}"


def spans(ranks: Sequence[int], limit: int = 4) -> str:
    """Ascending ranks as ranges, at most `limit` of them.

    >>> spans([0, 1, 2, 3, 8, 9, 12]), spans(list(range(0, 100, 2)), limit=2)
    ('0-3, 8-9, 12', '0, 2, ...')
    """
    edges = [i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1] + 1]
    words: list[str] = []
    for first, last in zip([0, *edges], [*edges, len(ranks)], strict=True):
        if len(words) == limit:
            words.append("...")
            break
        low, high = ranks[first], ranks[last - 1]
        words.append(str(low) if low == high else f"{low}-{high}")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """A duration in hours, minutes, seconds, milliseconds or microseconds.

    >>> duration(12.3456), duration(0.0123456), duration(2.5e-5)
    ('12.35 s', '12.35 ms', '25.00 us')
    >>> duration(1144), duration(11131)
    ('19.07 min', '3.09 h')
    """
    for unit, scale, least in (("h", 3600.0, 7200.0), ("min", 60.0, 600.0)):
        if seconds >= least:
            return f"{seconds / scale:.2f} {unit}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def plural(number: int, singular: str, several: str) -> str:
    """A count with its noun, in the singular for 1.

    >>> plural(1, "rank", "ranks"), plural(2048, "rank", "ranks")
    ('1 rank', '2,048 ranks')
    """
    return f"{number:,} {singular if number == 1 else several}"


def finite(value: float | None) -> float | None:
    """A figure that tables and JSON can show; None: there is none (NaN), or it has no bound."""
    return value if value is not None and math.isfinite(value) else None
