"""Steps of serving: prefill and decode, on the same ranks or disaggregated.

In: requests by rank, and the blocks that `lower.blocks` shards. Out: programs whose ranks may serve
different requests, the memory of weights and KV caches, and the number of requests that fit.
"""
