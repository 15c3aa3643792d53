"""Reading and checking traces, whoever wrote them.

In: files of ranks, bundles, or programs. Out: findings (what is wrong, where), summaries of what a
trace holds, and differences between two of them.
"""
