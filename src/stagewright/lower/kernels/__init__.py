"""From one sharded block to the kernels and collectives of one rank: sizes become numbers.

In: a sharded `Graph`, an `Extent` with the sizes on one rank. Out: `LoweredTask`s in execution
order, their dependencies, and the values they make and read.
"""
