"""Durations of a step with any batch, from rows timed for many batches.

In: a `Run` of inference and its machine. Out: `StepTimes`, a function of new tokens, query-key
pairs, cached keys and requests that an event loop asks in a few microseconds. `rows` times the
kernels of a step, `table_builder` sums them up to a `step_table`, `step_times` reads the tables.
"""
