"""Chakra traces from any writer: reading, checking, summing up.

Imports go downwards: reader < rules < rank < templates (a file to columns, the rules of nodes, one
file, many files of one program); and dependency_graph < exchange < world < matching < hang (the
dependencies of one rank, all ranks together, who meets whom, why a run does not end).
"""
