"""Constants of kernels that only inference runs, or runs otherwise than training.

They belong to the hardware, whose files have them as `inference`; `benchmarks/fit_inference.py`
fits them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from stagewright.time.constants import FigureBlock

BLOCKS = "fp8_block"
"""The key of constants of products in fp8 whose weights are scaled by blocks of rows and columns,
with the kernel that finds the scales of their inputs."""


class InferenceGemmFit(FigureBlock):
    """Constants of products of few rows, in place of those that training's products have.

    Training's rows in fp8 are of products with the kernels that find scales and quantize; engines
    quantize within the kernel before, or by one kernel that is timed by itself.
    """

    tile_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    memory_fraction: float = Field(gt=0, le=1.2)
    sharpness: float = Field(ge=1)
    fraction: float | None = Field(gt=0, le=1.2, default=None)
    """Share of the peak; None: training's."""


class CachedAttentionFit(FigureBlock):
    """Constants of attention over a cache; see `roofline.cached_attention_seconds`."""

    launch_us: float = Field(ge=0)
    """Time of the shortest call: writing keys and values, attention, and joining of its parts."""
    tile_us: float = Field(ge=0)
    """Time that a tile of queries of one key-value head takes on one compute unit, beyond reading
    and computing."""
    memory_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth at which keys and values are read."""
    sharpness: float = Field(ge=1)


class MixedAttentionFit(FigureBlock):
    """Constants of FlashAttention 2 where prompts are beside requests that decode.

    See `roofline.DecodingBesidePrompts`.
    """

    fraction: float = Field(gt=0, le=3)
    """Speed of tiles, over that of attention over a cache."""
    tile_us: float = Field(ge=0)
    """Time of a request's tile of one head, beyond its keys."""
    empty_us: float = Field(ge=0)
    """Time of a tile without queries, of which requests have as many as the longest prompt."""
    cache_mb: float = Field(gt=0)
    """Keys and values of one head of all requests that the second-level cache holds."""


class DirectAllReduce(FigureBlock):
    """An all-reduce by one kernel that reads its peers' memory, as engines use in decode.

    See `collectives.direct_all_reduce`.
    """

    latency_us: float = Field(ge=0)
    gpu_us: float = Field(ge=0)
    """Time per GPU of the group."""
    bandwidth_fraction: float = Field(gt=0, le=1)
    """Share of the links' bandwidth."""
    second_us: float = Field(ge=0)
    """Time to start the second of two passes: each GPU adds up a part, then all read the parts."""


class EngineFit(FigureBlock):
    """Constants of one engine's own kernels, in place of those that stand for all engines."""

    gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """By precision, or `BLOCKS`."""
    cached_attention: Mapping[str, CachedAttentionFit] = Field(default_factory=dict)
    """By the precision in which the cache is kept."""
    mixed_attention: MixedAttentionFit | None = None
    """None: attention is the same kernel whether prompts are beside requests that decode or not."""


class InferenceFit(FigureBlock):
    """Constants of kernels that only inference runs, or runs otherwise than training."""

    gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """By precision, or `BLOCKS`; a precision without constants has training's."""
    experts_gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """Of grouped products, beside the constants of single ones, in place of `ExpertFit.gemm`."""
    cached_attention: CachedAttentionFit
    all_reduce: DirectAllReduce | None = None
    routing_us: float | None = Field(ge=0, default=None)
    """Time of the kernels that sort tokens by expert; None: training's (`ExpertFit`)."""
    engines: Mapping[str, EngineFit] = Field(default_factory=dict)
    """By engine, in the words of `Execution.serving_engine`."""
    mixed_attention: MixedAttentionFit | None = None
    """That of the engine which these constants are of (`EngineFit`)."""

    def of_engine(self, engine: str | None, cache: str) -> InferenceFit:
        """These constants with those of an engine, whose cache is kept in the precision `cache`."""
        fit = self.engines.get(engine or "")
        if fit is None:
            return self
        attention = fit.cached_attention.get(cache, self.cached_attention)
        products = {**self.gemm, **fit.gemm}
        # FlashAttention 2 reads no cache in fp8: engines have another kernel then.
        mixed = fit.mixed_attention if cache == "bf16" else None
        return self.model_copy(
            update={"cached_attention": attention, "gemm": products, "mixed_attention": mixed}
        )
