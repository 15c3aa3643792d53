"""The end of every block: what follows its forward pass, in training and in inference."""

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
    """Append gradients and optimizer step, as `training.finish` says; in inference nothing."""
    if b.recipe.inference:
        return inference.finish(name, b, y)
    return training.finish(name, b, x, y, is_loss=is_loss, passes=passes, others=others)
