"""Requests over time on many engines: arrivals, schedulers, KV caches, routers and latencies.

A request from its arrival to its last token:

1. A `workload` is columns of requests (`workloads/` reads and draws them).
2. `workload.accept` leaves out what no instance could serve, and ends outputs at `max_model_len`;
   each of the others has a row in `Records`.
3. A `deployment` has instances: groups of GPUs with a copy of the model in one layout (`instance`).
4. It makes one engine for each replica of an instance, and a pool of the engines of each role.
5. The request arrives (`events`): at its own time plus the seconds that the `host` takes (HTTP,
   tokenizer), which TTFT includes. The `simulation` has one heap of events; where the router reads
   no engine and nothing else couples engines, all requests are routed before the first event, and
   an event advances its engine through many batches, up to the next report of progress.
6. The `routers` choose its engine among those of the pool, and it enters the queue of that engine.
7. An `engine` advances from batch to batch: it applies the results of one, and its scheduler
   (`schedulers/vllm`) decides on the next: it admits the request, with a chunk of its prompt, or
   lets it wait. With `async_scheduling`, the default of vLLM, the next batch is decided when the
   last step begins: a request that comes during a step waits one step more.
8. The `kv_cache` finds the beginning of the prompt that is cached, and counts blocks for the rest.
9. `steps/step_times` returns the duration of the batch from sums over its requests, host time per
   step included.
10. With the last chunk the request has its first token; then all steps up to the next change of the
    batch are one event, whose duration is an arithmetic series.
11. At the step of its last token the engine releases its blocks and notes the time in its record.

With stages, remote caches or failures it takes further ways: `stages` before the prompt,
`disaggregation` and `kv_transfer` between prefill and decode, `lockstep` where replicas (dp) share
experts, `operation` where instances fail. `metrics` sums up the records that `steadiness` selects,
with gaps between tokens from the engines' `step_log`, and `energy` the joules of the GPUs; `search`
looks for the cheapest deployment. `batch` has the batch of a step and its durations, `speculative`
the drafts in it. `capture` makes a run of a batch that an engine had, `compare_log` sets a server's
log beside the simulation, and `command_lines` writes the engines' own command lines.
"""
