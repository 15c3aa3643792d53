"""The end of every block: what follows from its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.blocks import inference, training
from stagewright.blocks.builder import Block, Builder
from stagewright.graph.node import Node


def finish(
    name: str,
    b: Builder,
    x: Node | None,
    y: Node | None,
    *,
    is_loss: bool = False,
    passes: bool = False,
    others: Sequence[Node] = (),
) -> Block:
    """Gradients and optimizer step as in `training.finish`, or nothing more in inference."""
    if b.recipe.inference:
        return inference.finish(name, b, y)
    return training.finish(name, b, x, y, is_loss=is_loss, passes=passes, others=others)
