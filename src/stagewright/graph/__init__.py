"""The graph of one block for one device, and the passes that rebuild it.

In: ops on symbolic shapes. Out: the same graph with its gradient, with what is recomputed, and
sharded: with a layout for every value and the collectives between layouts. Knows no model.

A `node.Graph` never changes; `make` has the ways to make a `node.Node`, which may have a role
(`roles`) and belong to a declared weight (`parameter`). `table` says what an op is: a row with its
index expression's rules, its gradient and its costs; the rows are in `ops`, by family. `cost` has
the FLOPs and bytes of a node. The passes, in order: `gradient` adds backward, on one device;
`recompute` repeats parts of forward in backward; `shard` gives layouts and adds collectives.
`verify` checks a graph between two passes.
"""

from stagewright.graph import ops as ops  # the rows of the table
