"""From degrees of parallelism to where every value lives.

In: a `Run` and a `ModelConfig`. Out: the mesh of ranks and a `Plan`, which maps each named value
and weight to its layout. The collectives follow in `graph.shard`.
"""
