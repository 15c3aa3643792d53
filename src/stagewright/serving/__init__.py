"""Requests over time on many engines: arrivals, schedulers, KV caches, routers and what users see.

A workload (`workloads/`) is columns of requests. A scheduler (`schedulers/`) decides what each step
of an engine computes; the engine (`engines/engine.py`) goes from one change of its batch to the
next, with the step times of a compiled model (`step_times.py`) or any `engines.times.BatchTimes`.
`cluster.py` deals requests to engines, `metrics.py` says what came out.
"""
