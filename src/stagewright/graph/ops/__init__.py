"""The rows of the op table by family: what an op computes in numpy, its gradient and its costs.

In: ways to make nodes (`graph.make`). Out: `OPS`, filled. `dense`: products, element-wise ops,
norms. `streams`: several residual streams. `attention`, with its caches, and the `indexer` that
chooses its keys. `state`: recurrences. `experts`: routing and copies. `vocabulary`: embedding and
loss. `general`: convolutions, and ops of which only bytes count. `step`: once per step, such as
optimizers. `shared` has helpers of several families.
"""

from stagewright.graph.ops import (
    attention,
    dense,
    experts,
    general,
    indexer,
    state,
    step,
    streams,
    vocabulary,
)
from stagewright.graph.table import OPS

FAMILIES = (dense, streams, attention, indexer, state, experts, vocabulary, general, step)
"""Modules of rows, in the order of the table."""

for _family in FAMILIES:
    OPS.update(_family.ROWS)
