"""Requests over time, and the engines that serve them: settings of `stagewright serve`.

Names are vLLM's where it has one, of its server and of its benchmark's client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from stagewright.run.sections.declare import (
    Count,
    Number,
    Real,
    Setting,
    Share,
    Switch,
    Text,
    setting,
    settings_of,
)

Positive = Annotated[float, Real(gt=0, le=1e9)]
Seconds = Annotated[float, Real(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class WorkloadSection:
    """Which requests arrive, and when: a trace, a profile, or drawn ones."""

    requests: Text | None = setting(
        None,
        "A trace: .jsonl or .csv (.gz), Mooncake's, Azure's or with columns arrival, prompt, "
        "output; or inference-perf's profile (.yaml).",
        metavar="FILE",
    )
    rate: Positive | None = setting(None, "Requests (or sessions) per second.", metavar="R")
    concurrency: Count | None = setting(
        None,
        "Users, each of whom sends the next request when one is done (a closed loop).",
        names=("max-concurrency",),
    )
    isl: Count | None = setting(
        None, "Tokens of a prompt; of sessions, of a question.", names=("input-len",)
    )
    osl: Count | None = setting(None, "Tokens of an output.", names=("output-len",))
    num_requests: Count | None = setting(
        None,
        "Requests, or the first ones of a trace; of sessions, how many.",
        unset="1000; a trace: all",
        names=("num-prompts",),
    )
    range_ratio: Share = setting(
        1.0, "Lengths are uniform in [X, 1] of isl and osl.", names=("random-range-ratio",)
    )
    arrival: Literal["poisson", "gamma", "constant"] = setting(
        "poisson", "How requests of --rate arrive."
    )
    burstiness: Positive = setting(
        1.0, "Shape of gamma arrivals: below 1 in bursts, 1 is Poisson.", rare=True
    )
    burst_size: Count = setting(1, "Requests that arrive at one moment.", rare=True)
    turns: Count = setting(1, "Turns of a session: each prompt has all that was said before.")
    think_time: Seconds = setting(
        0.0, "Mean seconds between an answer and the next question.", metavar="S", rare=True
    )
    system_prompt: Number = setting(0, "Tokens that all sessions begin with.", rare=True)
    speed: Positive = setting(1.0, "A trace's requests come X times as fast.")
    seed: Number = setting(0, "Of what is drawn: the same seed gives the same bytes.")
    ttft: Positive | None = setting(
        None, "Most milliseconds to the first token of a good request.", metavar="MS"
    )
    tpot: Positive | None = setting(
        None, "Most milliseconds per further token of a good request.", metavar="MS"
    )
    e2e: Positive | None = setting(
        None, "Most milliseconds to the last token of a good request.", metavar="MS"
    )


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """How many engines there are, and how each decides what to compute."""

    instances: Count = setting(1, "Engines, each with all ranks of the layout.")
    router: Text = setting(
        "round_robin",
        "Which engine a request goes to: round_robin, least_loaded, session or kv_aware.",
    )
    scheduler: Text = setting(
        "vllm", "What steps compute: vllm, or your own as MODULE:CLASS.", metavar="NAME"
    )
    max_num_batched_tokens: Count | None = setting(
        None, "Most tokens of a step.", unset="8192 from 70 GiB on, A100 but 2048; else 2048"
    )
    max_num_seqs: Count | None = setting(
        None, "Most requests of a step.", unset="1024 from 70 GiB on, A100 but 256; else 256"
    )
    long_prefill_token_threshold: Number = setting(
        0, "Most tokens of one prompt in a step; 0: any.", rare=True
    )
    enable_chunked_prefill: Switch = setting(
        True, "Whether a prompt may be computed in several steps.", rare=True
    )
    scheduler_reserve_full_isl: Switch = setting(
        True, "Whether a request is admitted only if blocks suffice for its prompt.", rare=True
    )
    enable_prefix_caching: Switch = setting(
        True, "Whether what prompts have in common is computed once."
    )
    gpu_memory_utilization: Share = setting(0.9, "Share of a GPU's memory that an engine takes.")
    num_gpu_blocks: Count | None = setting(
        None,
        "Blocks of the KV cache.",
        unset="as many as fit",
        names=("num-gpu-blocks-override",),
        rare=True,
    )


SERVING_SECTIONS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {"workload": ("Requests", WorkloadSection), "engines": ("Engines", EngineSection)}
)
"""Title and class by key."""

SERVING: Mapping[str, Setting] = MappingProxyType(
    {of.name: of for key, (_, each) in SERVING_SECTIONS.items() for of in settings_of(each, key)}
)
"""Settings of serving by name, in order."""

OF_ONE_STEP = frozenset(
    {"mode", "batch_size", "prompt_length", "context_length", "output_length", "source_length"}
    | {"requests", "prefill", "nodes"}
)
"""Settings of a run that the requests over time decide, or that `instances` does."""
