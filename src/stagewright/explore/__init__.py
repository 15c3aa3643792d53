"""Search: many executions of a model on many machines, as columns of settings and of figures.

In: candidates, a column per setting. Out: the figures of each, as `simulate` finds them one by one.
"""
