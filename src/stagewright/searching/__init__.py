"""Search the best execution of a model on a machine.

A candidate's way: `space` and `enumeration` make it, `block_costs` and `estimate` say about how
long its step takes, `search` simulates the best of all, and `ranking` holds the answer.
"""
