"""From one sharded block to the kernels and collectives of one rank: sizes become numbers.

In: a sharded `Graph`, an `Extent` with the sizes on one rank (`extent`). Out: `LoweredTask`s
(`kernel`) in execution order, their dependencies, and the values they make and read. `lowering`
fuses operations and makes collectives, `rings` those of ring attention; `live_values` are what
blocks exchange.
"""
