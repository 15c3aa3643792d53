"""Sizes of the layers that carry a state along the sequence: state-space models, linear attention.

>>> StateSpace(heads=80, head_width=64, state=128, groups=1, chunk=256).inner
5120
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InnerNorms = Literal["none", "plain", "weighted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Widths of one kind of state layer; a model has one kind, named in its `mixers`.

    The state of a head is `state` x `head_width` numbers. Keys and queries (of a state-space model,
    B and C) are shared by the heads of a group. Mamba-1's channels are heads of width 1.
    """

    heads: int
    """Value heads."""
    head_width: int = 1
    """Of a value head."""
    state: int
    """Width of keys and queries: the state size N of a state-space model."""
    groups: int = 1
    """Key and query heads, each shared by heads / groups value heads."""
    conv: int = 4
    """Taps of the causal convolution before the recurrence; 0: there is none."""
    conv_bias: bool = True
    dt_rank: int = 0
    """Mamba-1: width that time steps are made of."""
    inner_norms: InnerNorms = "none"
    """Mamba-1: RMSNorms of what time steps, B and C are made of (Jamba; plain: without weights)."""
    gated_norm: bool = True
    """Mamba-2: an RMSNorm, over the heads of a group, of what the gate lets pass."""
    gate_rank: int = 0
    """Kimi's delta attention: width that decays and output gates are made of."""
    chunk: int = 256
    """Tokens that a kernel takes at a time (Mamba-1: it takes one by one)."""

    @property
    def inner(self) -> int:
        """Width of all value heads together."""
        return self.heads * self.head_width
