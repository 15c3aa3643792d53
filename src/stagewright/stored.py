"""Storage of a matrix in few bits."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

VALUES = ("fp8", "int8", "fp6", "fp4", "int4", "int3", "int2")
"""Data types of values in few bits; `graph.node.BYTES` has their bytes."""


class Stored(NamedTuple):
    """Storage of a matrix: the data type of its values, and the scales of groups of them.

    `Stored("fp4", 8, 1, 16)` is NVFP4: 16 values of a row share a scale of 8 bits.
    """

    values: str
    """The data type of the values, one of `VALUES`."""
    scale_bits: int | Fraction = 0
    """Bits of a group's scale, and of its zero point where there is one."""
    rows: int = 0
    """Outputs of the matrix that share a scale; 0: all of them."""
    columns: int = 0
    """Inputs of the matrix that share a scale; 0: all of them."""
    product: str = ""
    """The data type to which inputs are cast, and in which the product runs; empty: that of the
    computation."""


Storage = tuple[tuple[str, Stored | None], ...]
"""Storage of matrices by name, or by scope for its other matrices; None: in the data type of the
computation."""
