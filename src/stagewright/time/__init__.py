"""How long it takes: kernels and collectives on a machine, and the step that they make.

In: a `Program`, hardware and how a framework executes. Out: a duration for every task, a timeline
of every class of ranks, step time, power and cost.
"""
