"""From sharded graphs, a schedule and numbers to the program of every rank.

In: a checked `Run` with its `ModelConfig`. Out: a `Program`; every kernel has FLOPs and bytes,
every collective its bytes and group, every value the rows between which it is live.
"""
