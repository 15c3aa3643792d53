"""The graph of one block for one device, and the passes that rebuild it.

In: ops on symbolic shapes. Out: the same graph with its gradient, with what is recomputed, and
sharded: with a layout for every value and the collectives between layouts. Knows no model.

A graph is immutable nodes in execution order (`node`), made by `make` of ops, leaves and moves. An
op is a row of the `table`, from families in `ops`: shape, layout, FLOPs and bytes follow from its
index expression (`cost`). A `parameter` declares the degrees that split its dims; `roles` say what
a node is in the model. Passes: `gradient`, `recompute`, `shard`; `verify` checks a graph between
them.
"""

from stagewright.graph import ops as ops  # the rows of the table
