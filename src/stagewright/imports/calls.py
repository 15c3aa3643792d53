"""A forward pass in ops of the table, each with the indices of its operands' dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.imports.trace.recording import Extent

Label = int | str
"""An index of one call: dims with the same label have the same extent, or an extent of 1."""
Labels = tuple[Label, ...]

LEAVES = frozenset({"param", "buffer", "input", "constant"})
VIEWS = frozenset({"view", "reshape"})


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operation of the model.

    `view` renames, reorders, adds and drops dims; `reshape` splits and joins them. All others are
    ops that a `.stg` text may name.
    """

    name: str
    op: str
    shape: tuple[Extent, ...]
    dtype: str
    operands: tuple[str, ...] = ()
    ins: tuple[Labels, ...] = ()
    out: Labels = ()
    whole: frozenset[Label] = frozenset()
    """Labels that the op needs all of."""
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: str = ""
    source: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """All but the names: what makes two calls the same."""
        return (
            self.op, self.shape, self.dtype, self.ins, self.out, self.whole,
            tuple(sorted(self.attrs.items(), key=lambda item: item[0])),
        )  # fmt: skip


def leaves_and_views(op: str) -> bool:
    """Whether a call stands in no statement of a text."""
    return op in LEAVES or op in VIEWS
