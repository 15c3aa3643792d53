"""Models that recommend: tables and MLPs, no transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stagewright.model.fields import Count


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Tables looked up by features, MLPs around them (DLRM, arXiv 1906.00091)."""

    rows: Annotated[tuple[int, ...], Count(1)]
    """Rows of each table."""
    dense: Annotated[int, Count(1)]
    """Number of numeric features."""
    bottom: Annotated[tuple[int, ...], Count(1)]
    """Widths of the MLP over the numeric features; the last is the width of a row."""
    top: Annotated[tuple[int, ...], Count(1)]
    """Widths of the MLP over the products of all pairs of rows; the last is 1."""
