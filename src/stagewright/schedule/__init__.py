"""Pipeline schedules: which rank runs forward or backward of which stage, in which order.

In: pipeline ranks, microbatches, virtual stages, or a CSV of actions such as `2F0`. Out: an order
per rank that is proven to end, from which sends and receives follow.
"""
