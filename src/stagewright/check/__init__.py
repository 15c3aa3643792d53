"""Reading and checking traces, whoever wrote them.

In: files of ranks, bundles, or programs. Out: findings (what is wrong, where: `report`), summaries
of what a trace holds, and differences between two of them. `verify` checks traces, each file and
all ranks together, and `program` what is about to be written by the same rules; `regenerate`
compiles the run of a manifest again to compare with. `inspect` prints a trace, `diff` compares two.
`files` reads Chakra files for all of these.
"""
