"""Engines: how many there are, and how each decides what to compute; names are vLLM's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Number, Real, Share, Switch, Text, setting

Positive = Annotated[float, Real(gt=0, le=1e9)]
Fraction = Annotated[float, Real(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """Number of instances, and how the engine of each replica decides what to compute."""

    instances: Count = setting(
        1,
        "Instances, each with all ranks of the layout.",
        names=("decode-instances", "decode-workers"),
    )
    router: Text = setting(
        "round_robin",
        "Which engine a request goes to: round_robin, least_loaded, session or kv_aware.",
    )
    scheduler: Text = setting(
        "vllm",
        "What steps compute: vllm, sglang, tensorrt-llm, static, or an entry point of yours.",
        metavar="NAME",
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "vllm: whether who came first is served first, or who has the lowest priority."
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
    enable_chunked_prefill: Switch | None = setting(
        None,
        "Whether a prompt may be computed in several steps.",
        unset="on; tensorrt-llm: off",
        rare=True,
    )
    chunked_prefill_size: Count | None = setting(
        None,
        "sglang: most tokens of prompts in a step.",
        unset="2048 below 20 GiB, 4096 below 60, 8192 below 160, else 16384",
        rare=True,
    )
    max_prefill_tokens: Count = setting(
        16384, "sglang: most tokens of prompts in a step, chunks or not.", rare=True
    )
    schedule_conservativeness: Positive = setting(
        1.0, "sglang: how much of what requests may make is kept for them.", rare=True
    )
    schedule_policy: Literal["fcfs", "lpm"] = setting(
        "fcfs", "sglang: who comes first: who waits longest, or has most in the cache.", rare=True
    )
    enable_mixed_chunk: Switch = setting(
        False, "sglang: whether requests decode beside chunks of prompts.", rare=True
    )
    ignore_eos: Switch = setting(
        False, "sglang: whether clients ask for all their tokens, so that room is kept.", rare=True
    )
    scheduler_recv_interval: Count = setting(
        1, "sglang: requests are received in one of so many steps of decode.", rare=True
    )
    capacity_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = setting(
        "guaranteed_no_evict",
        "tensorrt-llm: blocks are kept to a request's end, or requests are paused for them.",
        rare=True,
    )
    batch_wait_timeout_iters: Number = setting(
        0, "tensorrt-llm: most steps for which prompts wait for others.", rare=True
    )
    batch_wait_max_tokens_ratio: Fraction = setting(
        0.0,
        "tensorrt-llm: prompts wait below this share of max-num-batched-tokens in a step.",
        rare=True,
    )
    scheduler_reserve_full_isl: Switch = setting(
        True, "Whether a request is admitted only if blocks suffice for its prompt.", rare=True
    )
    async_scheduling: Switch = setting(
        True,
        "Whether a step is decided when the one before begins; not with pp.",
        rare=True,
    )
    """vLLM does so since 0.14, but with pipelines (release notes of v0.14.0); so do SGLang
    (`disable_overlap_schedule`) and TensorRT-LLM (`disable_overlap_scheduler`) by default."""
    speculative_method: Literal["ngram", "mtp", "eagle", "eagle3", "draft_model"] | None = setting(
        None,
        "Speculative decoding: who drafts, as in vLLM's speculative-config.",
        unset="drafts take no time",
    )
    speculative_model: Text | None = setting(
        None,
        "Speculative decoding: the model or head that drafts, by name or config.json.",
        metavar="MODEL",
    )
    acceptance_length: Positive | None = setting(
        None, "Speculative decoding: tokens that a step gives a request, in the mean."
    )
    acceptance_rate: Fraction | None = setting(
        None, "Speculative decoding: how often a draft is right if those before it are.", rare=True
    )
    enable_prefix_caching: Switch = setting(
        True, "Whether what prompts have in common is computed once."
    )
    gpu_memory_utilization: Share = setting(0.9, "Share of a GPU's memory that an instance takes.")
    num_gpu_blocks: Count | None = setting(
        None,
        "Blocks of the KV cache.",
        unset="as many as fit",
        names=("num-gpu-blocks-override",),
        rare=True,
    )
