"""Chakra traces from any writer: reading, checking, summing up.

Imports go downwards: `reader` < `rules` < `rank` < `traces` (a file to columns, the rules of nodes,
one file, all files of a directory); and `dependency_graph` < `world` < `matching` < `hang` (the
dependencies of one rank, all ranks together, who meets whom, why a run does not end). `groups`
reads the communicators beside traces; `profile` sums up a trace by type, phase, op and group.
"""
