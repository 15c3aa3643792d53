"""Single-device model code: the blocks of a model, each with its gradients and optimizer step.

The code of a block reads no degree of parallelism. It names values, which a strategy may place, and
each weight declares the dims that degrees may split, `b.weight("wq", "M", "A/tp", "D")`: an
annotation, as logical axis names are elsewhere. A model is a chain of blocks that meet in the
residual stream (`chain`); blocks of equal shape are built once, however many layers use them.

A `Block` is written with a `builder`, whose `recipe` says what is trained or served, and `sizes`
what its letters stand for. `layers` puts norms and sums around a mixer (`attention`, with `indexer`
and `cache`; `ssm`) and an MLP (`mlp`, `experts`). `ends` has embedding, output projection and loss.
`adapters` names linear layers, and adds low-rank ones. A block ends in `training` or `inference`.
`families` has what few models have, and `text` reads modules that users write.
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
