"""Requests of an inference step, the cache that holds their tokens, and weights as they are stored.

Names are vLLM's where it has one.
"""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from stagewright.run.sections.declare import Count, Number, Switch, Text, of_inference, whole


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are alike; None where a run says it for all."""

    count: int = 1
    context_length: int | None = None
    """Tokens of each in the cache before the step."""
    new_tokens: int | None = None
    """Tokens of each that the step computes."""


@dataclass(frozen=True, kw_only=True)
class PrefillRanks:
    """A second group of ranks, for the prompts of a decode step's requests: settings by name."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    tp: Count = 1
    dp: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    sequence_parallel: Switch = False
    layers_per_stage: tuple[Number, ...] | None = None
    num_redundant_experts: Number = 0
    mla: Literal["naive", "absorb"] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    def settings(self) -> dict[str, Any]:
        """Fields of a `Run` of these ranks."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        words = [f"{n}={v}" for n, v in changed.items() if v != getattr(PrefillRanks, n)]
        return ",".join(words) or "tp=1"


@dataclass(frozen=True, kw_only=True)
class InferenceSection:
    """Settings of a step of prefill or decode."""

    batch_size: Count | None = of_inference(
        None, "Requests of a step, over all ranks.", unset="dp * pp, or the number of requests"
    )
    prompt_length: Count | None = of_inference(
        None,
        "Prefill: new tokens of a request. Decode: tokens of a prompt chunk on each "
        "rank of dp (chunked prefill).",
        unset="prefill: the model's longest, at most 8192 or max-model-len; decode: no chunk",
    )
    """Of a decoder with an encoder, whose prompt is its source, None: the one token that it starts
    with."""
    context_length: Number | None = of_inference(
        None,
        "Tokens of a request in the KV cache before the step.",
        unset="prefill: 0; decode: one less than the model's longest, 8192 or max-model-len",
    )
    output_length: Count | None = of_inference(
        None, "Decode: output tokens of a request, which give requests per second.", unset="unknown"
    )
    source_length: Count | None = of_inference(
        None,
        "Encoder-decoder: encoder tokens of a request.",
        unset="the model's longest, at most 8192",
    )
    requests: Text | tuple[Group, ...] | None = of_inference(
        None, "A .csv of requests with columns count, context_length, new_tokens.", metavar="FILE"
    )
    num_speculative_tokens: Annotated[int, whole(0, 1024)] = of_inference(
        0, "Decode: draft tokens of a request that the step verifies."
    )
    weight_precision: Literal["bf16", "fp8", "int4", "fp4", "nvfp4", "mxfp4"] | None = of_inference(
        None,
        "Storage of the layers' matrices, with scales; fp8 and nvfp4 also multiply in that format.",
        unset="the checkpoint's quantization_config, else precision",
        of_requests=True,
    )
    kv_cache_dtype: Literal["bf16", "fp8", "fp32"] | None = of_inference(
        None,
        "Data type of the KV cache.",
        unset="the checkpoint's quantization_config, else precision",
        of_requests=True,
    )
    kv_cache: Literal["paged", "contiguous"] = of_inference(
        "paged",
        "Layout of the KV cache: blocks, or one area of fixed length per request.",
        of_requests=True,
    )
    kv_block_size: Count = of_inference(
        16,
        "Tokens per block of the paged cache; a request's last block counts as full.",
        of_requests=True,
    )
    max_model_len: Count | None = of_inference(
        None,
        "Maximum tokens of a request, context and new ones; size of the area in a "
        "contiguous cache.",
        unset="the longest request",
    )
    prefill: Text | PrefillRanks | None = of_inference(
        None,
        "Decode: layout of the prefill ranks that send the cache (disaggregated "
        "serving), such as tp=4,pp=2.",
        metavar="SETTINGS",
    )
    num_redundant_experts: Number = of_inference(
        0, "Replicas of experts (EPLB), which share the load or make ep divide the experts."
    )
    mla: Literal["naive", "absorb"] | None = of_inference(
        None,
        "Latent attention: expand keys and values from latents, or attend to latents.",
        unset="prefill: naive, decode: absorb",
    )
