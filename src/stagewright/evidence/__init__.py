"""Evidence: predictions beside published measurements, and this machine's state.

In: tables of measurements with their sources. Out: predictions, errors, and what `doctor` finds.
`rows` is the protocol of all tables: `training` steps, peaks of `memory`, `kernels` and
collectives, and `servers` under load. `statistics` sums up their errors.
"""
