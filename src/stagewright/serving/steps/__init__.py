"""Durations of a step with any batch, from rows timed for many batches.

`rows` times the kernels of a step for batches of many sizes, `step_table` adds them up to plain
numbers for any batch, and `step_times` answers an event loop: `StepTimes`, of new tokens, pairs of
a query and a key, cached keys and requests, in a few microseconds.
"""
