"""Requests over time on many engines: arrivals, schedulers, KV caches, routers and latencies.

A `workload` is columns of requests (`workloads/` reads and draws them), and a `deployment` groups
of instances (`instance`) with an engine for each replica. The `simulation` has one heap of
`events`: it lets requests arrive through the `host`, a router (`routers`) chooses an engine, and an
`engine` advances from batch to batch as its scheduler (`schedulers/`) and its `kv_cache` allow, for
as long as `steps/` says. docs/internals/architecture.md follows a request to its last token.

Further ways: `stages` before the prompt, `disaggregation` and `kv_transfer` between prefill and
decode, `lockstep` where replicas (dp) share experts, `operation` where instances fail. `metrics`
sums up the records that `steadiness` selects, with gaps between tokens from the engines'
`step_log`, and `energy` the joules of the GPUs; `search` looks for the cheapest deployment. `batch`
has the batch of a step and its durations, `speculative` the drafts in it. `capture` makes a run of
a batch that an engine had, `compare_log` sets a server's log beside the simulation, and
`command_lines` writes the engines' own command lines.
"""
