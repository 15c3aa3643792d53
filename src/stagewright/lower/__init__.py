"""From sharded graphs, a schedule and numbers to the program of every rank.

In: a checked `Run` with its `ModelConfig`. Out: a `Program`; every kernel has FLOPs and bytes,
every collective its bytes and group, every value the rows between which it is live.

`compile` calls `training` or `serving_step` (`disaggregated` joins two of these). Both place block
variants on stages (`variants`), build and shard each (`blocks`, with the settings of `recipe`, the
user's layouts of `strategy_table` and the trained `parameters`), lower it (`kernels/`) and assemble
actions and ranks (`assembly/`). `habits` and `fsdp` have what other frameworks do instead of
Megatron-LM, `routing` the loads of experts, `offload` and `weight_storage` values in host memory
and in few bits. `traced_graph` makes a program of a graph that PyTorch recorded.
"""
