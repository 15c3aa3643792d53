"""Storage of matrices in few bits, and of all matrices of a published checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from stagewright.errors import UserError

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

CACHES = ("", "bf16", "fp8")
"""Data types of a cache that a checkpoint may ask for; empty: it asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the matrices of each layer are stored, and the output projection.

    A layer has one of the `kinds`, since most layers are alike.
    """

    method: str
    """What the checkpoint calls the way in which its weights were quantized, such as `mxfp4`."""
    kinds: tuple[Storage, ...] = ()
    layers: tuple[int, ...] = ()
    """The index in `kinds` of each layer."""
    head: Storage = ()
    """The output projection's storage."""
    file: str = field(default="", compare=False)
    """The config.json that says so; empty: a preset."""
    kv_cache: str = ""
    """The data type of the KV cache that the checkpoint has scales for; empty: it has none."""

    def __post_init__(self) -> None:
        """Take lists for tuples, as JSON has them; refuse what is no storage."""
        put = object.__setattr__
        put(self, "kinds", tuple(_storage(kind) for kind in self.kinds))
        put(self, "head", _storage(self.head))
        put(self, "layers", tuple(self.layers))
        known = range(len(self.kinds))
        if not all(type(nth) is int and nth in known for nth in self.layers):
            raise UserError(f"quantization: layers is {self.layers}, wanted indices of kinds")
        if self.kv_cache not in CACHES:
            raise UserError(f"quantization: kv_cache is {self.kv_cache!r}, wanted bf16 or fp8")

    def of_layer(self, index: int) -> Storage:
        """The storage of a layer's matrices; layers behind the last are like the last."""
        return self.kinds[self.layers[min(index, len(self.layers) - 1)]] if self.layers else ()

    @property
    def formats(self) -> tuple[Stored, ...]:
        """All ways in which some matrix is stored."""
        rows = [row for kind in (*self.kinds, self.head) for row in kind]
        return tuple(dict.fromkeys(stored for _, stored in rows if stored is not None))


def _storage(rows: Any) -> Storage:
    """Storage from tuples or lists; TypeError or UserError where it is none."""
    return tuple((str(name), None if row is None else _stored(*row)) for name, row in rows)


def _stored(
    values: str, scale_bits: int = 0, rows: int = 0, columns: int = 0, product: str = ""
) -> Stored:
    if values not in VALUES or (product and product not in VALUES):
        raise UserError(f"quantization: {values!r} or {product!r} is no data type")
    if any(type(n) is not int or n < 0 for n in (scale_bits, rows, columns)):
        raise UserError(f"quantization: a group of {rows!r} x {columns!r} is none")
    return Stored(values, scale_bits, rows, columns, product)
