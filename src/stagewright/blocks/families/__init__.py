"""Blocks that only some families of models have: towers, encoders, several tokens ahead, tables.

In: a `Builder`, as for every layer. Out: blocks by name for `blocks.chain`.
"""
