"""Requests over time on many engines: arrivals, schedulers, KV caches, routers and latencies.

A `workload` is columns of requests. A `deployment` makes engines of settings, and a `simulation`
routes each request through their pools, in one order of events. An `engine` runs the batches that
its scheduler (`schedulers/`) decides on, with blocks of a `kv_cache`, in the durations that
`steps/` (or any `batch.BatchTimes`) returns. `metrics` summarizes the records.
"""
