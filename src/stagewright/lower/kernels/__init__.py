"""From one sharded block to the kernels and messages of one rank: sizes become numbers.

In: a sharded `Graph`, an `Extent` with the sizes on one rank. Out: `Kernel`s in execution order,
their dependencies, and the values they make and read.
"""
