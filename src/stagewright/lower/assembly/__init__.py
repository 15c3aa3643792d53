"""From blocks as tasks and the order of a schedule to the program of every rank.

In: the kernels of each block (`lower.kernels`) in their places in the pipeline, an `Order` and the
habits of a framework. Out: a `Program`. The way: `stages` makes rows of blocks, `distinct_actions`
those of actions, `rank_order` is the copies that a rank executes, `live_ranges` what is in memory
when; `assemble` puts these together.
"""
