"""Search the best execution of a model on a machine.

`space` and `enumeration` make candidates, `block_costs` and `estimate` estimate their steps,
`search` simulates the best, and `ranking` holds the result.
"""
