"""Transformer blocks whose weights several layers share.

>>> SharedBlocks(layers=(0, 0, 1, 0, 2)).layers[4]
2
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Transformer blocks whose weights several layers share (Zamba2, arXiv 2411.15242, section II).

    A block reads the stream and, beside it, the stream as the embedding made it. What it makes of
    both is multiplied by a matrix of the layer and added to what the layer's mixer reads. Layers
    may have narrow adapters of their own beside the shared weights (LoRA, arXiv 2106.09685).
    """

    layers: tuple[int, ...]
    """The block of each layer, counted from 1 and repeated over the layers; 0: none."""
    adapter_rank: int = 0
    """Width of the adapters beside gate and up of the MLP; 0: there are none."""
    attention_adapter: bool = False
    """There are such adapters beside queries, keys and values, too."""
