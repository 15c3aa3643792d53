"""The graph of one block for one device, and the passes that rebuild it.

In: ops on symbolic shapes. Out: the same graph with its gradient, with what is recomputed, and
sharded: with a layout for every value and the collectives between layouts. Knows no model.
"""

from stagewright.graph import ops as ops  # the rows of the table
