"""Meaning of each op in numpy, on one rank's arrays: the truth that tests hold the graph to.

A module here has the meaning of the rows in the module of the same name in `graph.ops`. A function
is called with a `shared.Context`, which tells a rank where it is and has the node's attributes, and
the rank's parts of the operands. Nothing but tests runs these functions.
"""
