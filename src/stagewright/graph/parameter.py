"""Declaration of a parameter: its name, and the degrees that split its dims.

A declaration is an annotation, like the logical axis names of JAX's models. The model's code reads
no degree of parallelism and does not depend on one; the same block serves one device and 100,000.
`parallel.plan.Plan.layout` turns a declaration into axes of a run's mesh.
"""

from __future__ import annotations

from typing import NamedTuple

from stagewright.algebra.notation import Tensor, tensor
from stagewright.algebra.size import Size, size
from stagewright.stored import Stored

HEADS = frozenset(size(name) for name in ("A", "G", "Group", "Head"))
"""Sizes that count heads: a matrix that leads to heads has the rows of all their channels."""


_INDEX_HEADS = size("IndexHeads")


class Parameter(NamedTuple):
    """A parameter's declaration, in the binding of every node that belongs to it.

    Those are the parameter itself, its casts, its gradient on the way to the optimizer, and the
    optimizer's states. Its name is that of its own block alone: other blocks may have a parameter
    of the same name with another placement.
    """

    name: str
    placement: Tensor
    """Its dims and the degrees that split each, in the paper's notation: `[M, A/tp, D]`."""
    rows: int = -1
    """The dim that PyTorch has first and FSDP2 shards: what a matrix leads to, entries of a table.
    """
    stored: Stored | None = None
    """Storage of a matrix in fewer bits than it is computed in."""

    @property
    def of_expert(self) -> bool:
        """True for a weight of routed experts, of which a token uses `top_k`."""
        return "ep" in self.placement.axes[0] if self.placement.axes else False

    def inputs(self) -> tuple[int, ...]:
        """Dims of a matrix that its product sums over; the others are outputs, and experts.

        >>> Parameter.declare("wo", "A/tp", "D", "M").inputs()
        (0, 1)
        >>> Parameter.declare("we_up", "E/ep", "M", "X/etp").inputs()
        (1,)
        >>> Parameter.declare("lm_head", "V/tp", "M", rows=0).inputs()
        (1,)
        """
        dims = [size(text) for text in self.placement.dims]
        if self.rows == 0 and not self.of_expert:
            return tuple(range(1, len(dims)))
        first = len(dims) - 1
        while first and dims[first - 1] in (*HEADS, _INDEX_HEADS):
            first -= 1
        return tuple(range(int(self.of_expert), first))

    @classmethod
    def declare(cls, name: str, *dims: str | Size, rows: int = -1) -> Parameter:
        """A parameter from dims such as "A/tp", the size and what splits it.

        >>> Parameter.declare("wq", "M", "A/tp", "D").placement.axes
        ((), ('tp',), ())
        >>> Parameter.declare("we_up", "E/ep", "M", "X/etp").rows
        0
        """
        placed = tensor(f"[{', '.join(map(str, dims))}]")
        # PyTorch's grouped products have experts first, as torchtitan's GroupedExperts.
        return cls(name, placed, 0 if placed.axes and "ep" in placed.axes[0] else rows)
