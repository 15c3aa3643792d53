"""Single-device model code: the blocks of a model, each with its gradients and optimizer step.

The code of a block reads no degree of parallelism. It names values, which a strategy may place, and
each weight declares the dims that degrees may split, `b.weight("wq", "M", "A/tp", "D")`: an
annotation, as logical axis names are elsewhere. A model is a chain of blocks that meet in the
residual stream; blocks of equal shape are built once, however many layers use them.
"""

from stagewright.blocks.builder import Block
from stagewright.blocks.chain import BLOCKS, chain
from stagewright.blocks.recipe import (
    EVERYTHING,
    FP8_RECIPES,
    PRECISIONS,
    Adapter,
    ExpertRecipe,
    GradientHabits,
    Inference,
    OperatorHabits,
    OptimizerHabits,
    Precision,
    Recipe,
    Tie,
    Training,
)
from stagewright.blocks.sizes import sizes

__all__ = [
    "BLOCKS", "EVERYTHING", "FP8_RECIPES", "PRECISIONS", "Adapter", "Block", "ExpertRecipe",
    "GradientHabits", "Inference", "OperatorHabits", "OptimizerHabits", "Precision", "Recipe",
    "Tie", "Training", "chain", "sizes",
]  # fmt: skip
