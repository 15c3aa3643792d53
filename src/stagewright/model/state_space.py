"""Sizes of the layers that carry a state along the sequence: state-space models, linear attention.

>>> StateSpace(heads=80, head_width=64, state=128, groups=1, chunk=256).inner
5120
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.model.fields import Count

InnerNorms = Literal["none", "plain", "weighted"]
Width = Annotated[int, Count(0, 2**24)]
HeadWidth = Annotated[int, Count(1, 2**16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Widths of one kind of state layer; a model has one kind, named in its `mixers`.

    The state of a head is `state` x `head_width` numbers. Keys and queries (of a state-space model,
    B and C) are shared by the heads of a group. Mamba-1's channels are heads of width 1.
    """

    heads: Annotated[int, Count(1)]
    """Value heads."""
    head_width: HeadWidth = 1
    """Width of a value head."""
    state: HeadWidth
    """Width of keys and queries: the state size N of a state-space model."""
    groups: Annotated[int, Count(1)] = 1
    """Key and query heads, each shared by heads / groups value heads."""
    conv: Annotated[int, Count(0, 64)] = 4
    """Taps of the causal convolution before the recurrence; 0: there is none."""
    conv_bias: bool = True
    dt_rank: Width = 0
    """Mamba-1: rank of the projection that makes time steps."""
    inner_norms: InnerNorms = "none"
    """Mamba-1: RMSNorms of the inputs of time steps, B and C (Jamba; plain: without weights)."""
    gated_norm: bool = True
    """Mamba-2: an RMSNorm, over the heads of a group, of the gated output."""
    gate_rank: Width = 0
    """Kimi's delta attention: rank of the projections that make decays and output gates."""
    chunk: Annotated[int, Count(1)] = 256
    """Tokens per chunk of the kernel (Mamba-1's kernel goes token by token)."""

    @property
    def inner(self) -> int:
        """Width of all value heads together."""
        return self.heads * self.head_width
