"""Sources of requests: recorded traces, and sampled arrivals and lengths.

`synthetic` draws requests. `traces` reads recorded ones, `clients` the results of benchmark
clients, `weka` conversations of coding agents.
"""
