"""Program of every rank as columns of numbers, between lowering and all its readers.

In: rows from `lower`. Out: a `Program`: per class of ranks its tasks and values, its communicators
and peers, and the memory that follows from them.
"""
