"""What candidates take at least.

In: candidates and the templates of their structures. Out: `bounds.bounds`.
"""
