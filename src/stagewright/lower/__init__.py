"""From sharded graphs, a schedule and numbers to the program of every rank.

`compile.compile` resolves and checks a `Run`, and compiles it by the pipeline of its mode. The
result is a `CompiledRun` (`compiled_run`), whose `Program` has FLOPs and bytes of every kernel,
bytes and group of every collective, and the rows between which every value is live. Training's
pipeline stands on one screen (`training.compile_training`); serving's calls the same steps with
other blocks.

1. A model is a chain of blocks of few variants (`variants`). Each variant becomes one graph, built
   for one device, recomputed and sharded (`blocks.shard_block`): symbolic, so that runs share it.
2. With numbers (`kernels.extent.Extent`), a graph becomes a `LoweredBlock`: fused kernels,
   collectives and messages of one rank, with their dependencies and the values that they touch
   (`blocks.lower_block`, `kernels`).
3. Blocks, a schedule and a mesh become the program (`assembly.assemble`): rows of stages, of
   distinct actions, and per rank an order of copies of these.

Runs that differ in few settings share the results of each step; the memo of a step is keyed by all
that it reads. Where frameworks differ, `assembly.habit.Habit` has a method: Megatron-LM's way, that
the classes of `habits` and `fsdp` override. To see what a block became: `stagewright show MODEL
--graph`.

`serving_step` is the pipeline of serving (`disaggregated` joins two of these). Both read the
settings of `recipe`, the user's layouts of `strategy_table` and the trained `parameters`; `routing`
has the loads of experts, `offload` and `weight_storage` values in host memory and in few bits.
`checkpoint` has the bytes of a checkpoint. `traced_graph` makes a program of a graph that PyTorch
recorded.
"""
