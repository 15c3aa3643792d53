"""Search over configurations: many runs at once, a column for each setting that differs.

In: a run with lists in place of settings, hardware. Out: the figures of every candidate, the best
of them simulated exactly. Nothing here has a model of its own: what is computed in columns follows
from the definitions that `lower` and `time` compute one run with.
"""
