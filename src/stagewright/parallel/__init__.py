"""From degrees of parallelism to the layout of every value.

In: a `Run` and a `ModelConfig`. Out: the mesh of ranks and a `Plan`, the use of each axis of the
mesh (`degrees`, `plan`); from it the layout of each named value and weight (`placement`, with the
rows of `activations`). The collectives follow in `graph.shard`.
"""
