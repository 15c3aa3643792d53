"""Transformer blocks that several layers share: Zamba2 (arXiv 2411.15242), as transformers has it.

Each weight is a table with copies, like a tied embedding. The layers of one rank use one tensor, in
which their gradients add up; pipeline ranks have a copy each, whose gradients are summed once a
step.
"""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.attention import attention
from stagewright.blocks.builder import SHARED, Builder
from stagewright.blocks.ends import ORIGINAL
from stagewright.blocks.mlp import mlp
from stagewright.graph.make import add, join
from stagewright.graph.node import Node
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer

_TABLES = ("attn_norm.weight", "wq", "wk", "wv", "wo", "mlp_norm.weight", "w_up", "w_down")


def with_shared(b: Builder, x: Node, block: int) -> Node:
    """The stream plus a shared block's result, [B, S, M].

    The block reads the stream and the embedded tokens, joined to [B, S, 2 M]. Its attention and MLP
    follow each other without residual sums.
    """
    both = 2 * size("M")
    original = b.take(ORIGINAL, "B", "S", "M")
    b.block = block
    h = join(x, original, "bsM,bsN->bsK", both, name="beside_original", scope="attention")
    h = attention(b, b.norm(h, "attn_norm", both, scope="attention"))
    h = mlp(b, b.norm(h, "mlp_norm", scope="mlp"))
    b.block = 0
    w = b.weight("w_block", "M", "M", scope="mlp")
    return add(x, b.linear("bsm,mn->bsn", h, w, "block_out", scope="mlp"), name="with_block")


def shared_tables(config: ModelConfig, layer: Layer) -> list[str]:
    """The names of a shared block's weights, of which each layer that has it holds a copy."""
    names = (*_TABLES, "w_gate") if config.gated else _TABLES
    return [f"{SHARED}{layer.block}.{name}" for name in names]
