"""Time of kernels and collectives on a machine, and of the steps that consist of them.

In: a `Program`, hardware and how a framework executes. Out: a duration for every task, a timeline
of every class of ranks, step time, power and cost.
"""
