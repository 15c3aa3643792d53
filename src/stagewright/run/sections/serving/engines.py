"""Engines: how many there are, and how each decides what to compute; names are vLLM's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import (
    Count,
    Number,
    Share,
    Switch,
    Text,
    real,
    setting,
    whole,
)

Positive = Annotated[float, real(gt=0, le=1e9)]
Fraction = Annotated[float, real(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """Number of instances, and how the engine of each replica decides what to compute."""

    instances: Annotated[int, whole(1, 100_000)] = setting(
        1, "Instances, each with all ranks of the layout."
    )
    router: Text = setting(
        "round_robin", "Router of requests: round_robin, least_loaded, session or kv_aware."
    )
    scheduler: Text = setting(
        "vllm", "Scheduler: vllm, sglang, tensorrt-llm, static, or an entry point.", metavar="NAME"
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "vllm: first come first served, or lowest priority value first."
    )
    max_num_batched_tokens: Count | None = setting(
        None, "Maximum tokens of a step.", unset="8192 from 70 GiB on (A100: 2048), else 2048"
    )
    max_num_seqs: Count | None = setting(
        None, "Maximum requests of a step.", unset="1024 from 70 GiB on (A100: 256), else 256"
    )
    long_prefill_token_threshold: Number = setting(
        0, "Maximum tokens of one prompt in a step; 0: no limit."
    )
    enable_chunked_prefill: Switch | None = setting(
        None, "Split prompts over several steps.", unset="on; tensorrt-llm: off"
    )
    chunked_prefill_size: Count | None = setting(
        None,
        "sglang: maximum prompt tokens of a step.",
        unset="2048 below 20 GiB, 4096 below 60, 8192 below 160, else 16384",
    )
    max_prefill_tokens: Count = setting(
        16384, "sglang: maximum prompt tokens of a step, chunked or not."
    )
    schedule_conservativeness: Positive = setting(
        1.0, "sglang: share of the remaining output tokens that blocks are reserved for."
    )
    schedule_policy: Literal["fcfs", "lpm"] = setting(
        "fcfs",
        "sglang: order of waiting requests: first come first served, or longest cached prefix.",
    )
    enable_mixed_chunk: Switch = setting(False, "sglang: decode in the same step as prompt chunks.")
    ignore_eos: Switch = setting(
        False, "sglang: clients request all their output tokens, so blocks are reserved for them."
    )
    scheduler_recv_interval: Count = setting(
        1, "sglang: decode steps between two looks for new requests."
    )
    capacity_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = setting(
        "guaranteed_no_evict", "tensorrt-llm: reserve blocks to a request's end, or pause requests."
    )
    batch_wait_timeout_iters: Number = setting(
        0, "tensorrt-llm: maximum steps that prompts wait for others."
    )
    batch_wait_max_tokens_ratio: Fraction = setting(
        0.0, "tensorrt-llm: prompts wait below this share of max-num-batched-tokens."
    )
    scheduler_reserve_full_isl: Switch = setting(
        True, "Admit a request only if free blocks suffice for its whole prompt."
    )
    async_scheduling: Switch = setting(
        True, "Schedule a step when the step before begins; not with pp."
    )
    """vLLM does so since 0.14, but with pipelines (release notes of v0.14.0); so do SGLang
    (`disable_overlap_schedule`) and TensorRT-LLM (`disable_overlap_scheduler`) by default."""
    speculative_method: Literal["ngram", "mtp", "eagle", "eagle3", "draft_model"] | None = setting(
        None,
        "Speculative decoding: drafter, as in vLLM's speculative-config.",
        unset="drafts take no time",
    )
    speculative_model: Text | None = setting(
        None, "Speculative decoding: draft model or head, by name or config.json.", metavar="MODEL"
    )
    acceptance_length: Positive | None = setting(
        None, "Speculative decoding: mean output tokens of a request per step."
    )
    acceptance_rate: Fraction | None = setting(
        None,
        "Speculative decoding: probability that a draft token is accepted, if those before it are.",
    )
    enable_prefix_caching: Switch = setting(True, "Reuse cached prompt prefixes.")
    gpu_memory_utilization: Share = setting(0.9, "Share of a GPU's memory that an instance uses.")
    free_gpu_memory_fraction: Share | None = setting(
        None,
        "Share of the memory beside weights and activations that the KV cache takes.",
        unset="--gpu-memory-utilization, a share of all memory",
    )
    """TensorRT-LLM's `kv_cache_config`, by default 0.9."""
    num_gpu_blocks: Count | None = setting(
        None, "Number of blocks of the KV cache.", unset="all that fit"
    )
