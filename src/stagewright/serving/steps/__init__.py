"""Durations of a step with any batch, without a simulation for each.

The simulator of a step (`time.simulate`) is not run. `rows` lowers the step for a few batches
(`lower.serving_step`) and times its kernels and collectives for many (`time.durations`,
`time.engines`), and their launches (`time.simulate.launches`). `step_table` adds these up by the
rule that the simulation of one step follows: kernels are one chain, and none starts before its
launch. `step_times` is what engines call, with sums over the requests of a batch.

On random batches a step is within 1% of `simulate`, with pipelines within 2%
(`tests/numerics/test_serving_step_times.py`).
"""
