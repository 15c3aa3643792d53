"""Transformer blocks whose weights several layers share.

>>> SharedBlocks(layers=(0, 0, 1, 0, 2)).layers[4]
2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stagewright.model.fields import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Transformer blocks whose weights several layers share (Zamba2, arXiv 2411.15242, section II).

    A block reads the residual stream and, beside it, the embedded tokens. Its output is multiplied
    by a matrix of the layer and added to the input of the layer's mixer. Layers may have narrow
    adapters of their own beside the shared weights (LoRA, arXiv 2106.09685).
    """

    layers: Annotated[
        tuple[int, ...], Count(0, 10_000, "the number of a block for each layer, or 0")
    ]
    """The block of each layer, counted from 1 and repeated over the layers; 0: none."""
    adapter_rank: Annotated[int, Count(0, 2**24)] = 0
    """Rank of the adapters beside gate and up of the MLP; 0: there are none."""
    attention_adapter: bool = False
    """Queries, keys and values have such adapters, too."""
