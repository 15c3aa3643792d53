"""Accelerators and their systems as data: one YAML file each, a source per number.

>>> h100 = resolve("h100-sxm")
>>> h100.peak_bf16_tflops, h100.scale_up.gpus
(989.4, 8)

A file may build upon another (`base: h100-sxm`) and name only what differs. A number is written
`[value, source]`, where the source is a key of the file's `sources`; a plain number has none. The
constants of kernels were fitted to measured kernels by `benchmarks/fit_kernels.py`,
`benchmarks/fit_inference.py` and, of AMD, `benchmarks/fit_aiter.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from reprlib import repr as shown  # short whatever the value
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from stagewright.errors import UserError, did_you_mean, either
from stagewright.files import from_yaml, own_yaml, read_text

Topology = Literal["switch", "fully_connected", "ring", "torus"]
Fabric = Literal["rail_optimized", "fat_tree", "dragonfly"]

MAX_FIGURE = 1e12
"""Limit of a figure of a device, whatever its unit: products of larger ones are infinite."""

_NUMBERS: tuple[Any, ...] = (float, int, float | None, int | None)
"""Types of fields that are numbers."""


class FigureBlock(BaseModel):
    """Block of figures in a file: finite numbers and known keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject texts and booleans in place of numbers, which pydantic would convert.

        YAML 1.1 reads 1e3 as text.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value):
            return value
        if isinstance(value, str | bool) and annotation in _NUMBERS:
            raise PydanticCustomError("float_type", "wanted a number")
        return value

    @field_validator("*")
    @classmethod
    def _is_plausible(cls, value: Any) -> Any:
        if isinstance(value, int | float) and abs(value) > MAX_FIGURE:
            text = f"wanted at most {MAX_FIGURE:g}; check the unit"
            raise PydanticCustomError("implausible", "{text}", {"text": text})
        return value


def wanted_of(message: str) -> str:
    """Message of pydantic on a figure, in the terms of our errors.

    >>> wanted_of("Input should be greater than 0"), wanted_of("Input should be a finite number")
    ('wanted a number greater than 0', 'wanted a finite number')
    """
    text = message.removeprefix("Value error, ")
    return text.replace("Input should be a ", "wanted a ").replace(
        "Input should be", "wanted a number"
    )


def figure_error(error: ValidationError, fields: Iterable[str], missing: str = "") -> str:
    """First error of a block whose keys are `fields`; `missing` ends the error of a lacking key."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key {name!r}{did_you_mean(path[-1], fields)}"
        case "missing":
            return f"{name} is missing{missing if len(path) == 1 else ''}"
        case "literal_error":
            choices = Topology if path[-1] == "topology" else Fabric
            return f"{name} is {shown(first['input'])}, wanted {either(get_args(choices))}"
        case "float_parsing" | "float_type":
            return f"{name} is {shown(first['input'])}, wanted a number"
        case _:
            return f"{name} is {shown(first['input'])}: {wanted_of(first['msg'])}"


# ---- constants of kernels ------------------------------------------------------------------------


class GemmFit(FigureBlock):
    """Constants of matrix products in one precision; see `roofline.gemm_seconds`."""

    fraction: float = Field(gt=0, le=1.2)
    """Share of the peak that tiles of 128 x 256 reach, apart from all other terms."""
    tile_factor: float = Field(ge=0)
    """Slowdown of smaller tiles, which read more bytes per multiply-add."""
    tile_us: float = Field(ge=0)
    """Time to start and end a tile."""
    quantization: float = Field(ge=0, le=1)
    """1: the last wave of tiles counts in full; 0: by the share of it that is filled."""
    split_us: float = Field(ge=0)
    """Time that a product takes longer if its sum is split over several units (split-K)."""
    launch_us: float = Field(ge=0)
    memory_fraction: float = Field(gt=0, le=1.2)
    sharpness: float = Field(ge=1)
    """Exponent of the overlap of computing and reading: infinite if the longer one decides."""
    least_rows: int = Field(ge=8, default=32)
    """Rows of the smallest tiles."""
    product: Literal["", "mxfp8"] = ""
    """Data type in which the kernel multiplies; empty: that of the inputs."""

    def slowed(self, clock: float) -> GemmFit:
        """Constants at a share `clock` of the clock of compute units.

        >>> tiles = GemmFit(fraction=0.8, tile_factor=0, tile_us=0.6, quantization=0, split_us=0,
        ...     launch_us=2, memory_fraction=0.8, sharpness=3)
        >>> tiles.slowed(0.5).fraction
        0.4
        """
        if self.fraction <= FULL_POWER:  # it never slows the clock
            return self
        tile = {"tile_us": self.tile_us / clock, "fraction": self.fraction * clock}
        return self.model_copy(update=tile)


class AttentionFit(FigureBlock):
    """Constants of fused attention; see `roofline.attention_seconds`."""

    fraction: float = Field(gt=0, le=3)
    """Share of the peak that products reach, apart from the exponential."""
    softmax_ps: float = Field(ge=0)
    """Time of one exponential on one compute unit."""
    tile_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    traffic_factor: float = Field(ge=0)
    """Exposed traffic of device memory, over the bytes of operands and results."""
    bwd_ratio: float = Field(gt=0, le=1.5)
    """FLOP/s of backward over those of forward."""
    fp8: AttentionFit | None = None
    """Constants for operands in fp8; None: these, with the peak of fp8."""

    def slowed(self, clock: float) -> AttentionFit:
        """Constants at a share `clock` of the clock of compute units."""
        tile = {"tile_us": self.tile_us / clock, "softmax_ps": self.softmax_ps / clock}
        fp8 = self.fp8 and self.fp8.slowed(clock)
        return self.model_copy(update={**tile, "fraction": self.fraction * clock, "fp8": fp8})


class ExpertFit(FigureBlock):
    """Constants of the kernels around the products of experts; see `roofline.copies_seconds`."""

    routing_us: float = Field(ge=0)
    """Time of the small kernels that choose experts and sort tokens by expert."""
    routing_ns: float = Field(ge=0)
    """Time that these kernels take per choice of an expert by a token."""
    copy_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that kernels reach which copy rows by index."""
    gemm: Mapping[str, GemmFit] = Field(default_factory=dict)
    """Grouped products, by precision; a precision without constants takes those of products."""
    takes_turns: bool = False
    """True if products of experts that are launched one by one run one by one, whatever their
    streams (`GroupedLinear` of Transformer Engine has four)."""


# ---- constants of kernels of inference -----------------------------------------------------------

BLOCKS = "fp8_block"
"""Key in `gemm` of fp8 products whose weights have a scale per block of rows and columns.

Their constants include the kernel that finds the scales of the inputs."""


class InferenceGemmFit(FigureBlock):
    """Constants of products of few rows, which replace those of `GemmFit`.

    Training's rows in fp8 are of products with the kernels that find scales and quantize; engines
    quantize within the kernel before, or by one kernel that is timed by itself.
    """

    tile_us: float = Field(ge=0)
    launch_us: float = Field(ge=0)
    memory_fraction: float = Field(gt=0, le=1.2)
    sharpness: float = Field(ge=1)
    fraction: float | None = Field(gt=0, le=1.2, default=None)
    """Share of the peak; None: that of `GemmFit`."""
    least_rows: int | None = Field(ge=8, default=None)
    """Rows of the smallest tiles; None: those of `GemmFit`."""
    product: Literal["", "mxfp8"] | None = None
    """Data type in which the kernel multiplies; None: that of the inputs."""


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
    fraction: float = Field(gt=0, le=3)
    """Share of the peak that products reach, apart from the exponential."""
    softmax_ps: float = Field(ge=0, default=0)
    """Time of one exponential on one compute unit."""
    traffic_factor: float = Field(ge=0, default=0)
    """Exposed traffic of device memory, over the bytes of the queries, keys, values and results of
    new tokens."""

    def slowed(self, clock: float) -> CachedAttentionFit:
        """Constants at a share `clock` of the clock of compute units."""
        update = {"fraction": self.fraction * clock, "softmax_ps": self.softmax_ps / clock}
        return self.model_copy(update=update)


class SparseAttentionFit(FigureBlock):
    """Constants of attention of prompts to latents that an indexer chooses for each token.

    See `roofline.sparse_attention_seconds`.
    """

    launch_us: float = Field(ge=0)
    tile_us: float = Field(ge=0)
    """Time of a token's tile on one compute unit to gather its keys, beyond its products."""
    rows: int = Field(ge=1)
    """Least rows of a tile: heads of a token, whose products the tensor cores make at once."""


class MixedAttentionFit(FigureBlock):
    """Constants of FlashAttention 2 for batches of prompts and decoding requests.

    See `roofline.DecodeInPromptKernel`.
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
    """Constants of an all-reduce by one kernel that reads its peers' memory.

    Engines run it in decode; see `collectives.direct_all_reduce`.
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
    experts_gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """Of grouped products; keys as in `InferenceFit`."""
    cached_attention: Mapping[str, CachedAttentionFit] = Field(default_factory=dict)
    """By the precision of the cache."""
    mixed_attention: MixedAttentionFit | None = None
    """None: prompts and decoding requests have separate kernels of attention."""


class InferenceFit(FigureBlock):
    """Constants of kernels that only inference runs, or runs otherwise than training."""

    gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """By precision, or `BLOCKS`; a precision without constants has training's."""
    experts_gemm: Mapping[str, InferenceGemmFit] = Field(default_factory=dict)
    """Of grouped products, with the rest of the constants of single ones.

    By precision, or by the storage of weights whose inputs are in bf16, such as `mxfp4`: kernels of
    their own unpack these weights (Marlin, Triton), or cast the inputs (TensorRT-LLM's)."""
    cached_attention: CachedAttentionFit | None = None
    """None: attention over a cache is as fast as that of prompts, or as its keys are read."""
    latent_attention: Mapping[str, CachedAttentionFit] = Field(default_factory=dict)
    """Attention to latents, which all heads read as keys and values, by the precision of the
    cache; a precision without constants has those of `cached_attention`."""
    sparse_attention: Mapping[str, SparseAttentionFit] = Field(default_factory=dict)
    """By the precision of the cache; without constants, attention to chosen latents is as fast as
    to all: so are the kernels of TensorRT-LLM for a cache in fp8 on Blackwell."""
    all_reduce: DirectAllReduce | None = None
    routing_us: float | None = Field(ge=0, default=None)
    """Time of the kernels that sort tokens by expert; None: training's (`ExpertFit`)."""
    engines: Mapping[str, EngineFit] = Field(default_factory=dict)
    """By engine, in the words of `Execution.serving_engine`."""
    mixed_attention: MixedAttentionFit | None = None
    """That of the selected engine (`EngineFit`)."""
    cache: str = "bf16"
    """Precision of the selected cache."""

    def of_engine(self, engine: str | None, cache: str) -> InferenceFit:
        """Constants of an engine with a cache in the precision `cache`."""
        fit = self.engines.get(engine or "")
        if fit is None:
            return self.model_copy(update={"cache": cache})
        update = {
            "cache": cache,
            "cached_attention": fit.cached_attention.get(cache, self.cached_attention),
            "gemm": {**self.gemm, **fit.gemm},
            "experts_gemm": {**self.experts_gemm, **fit.experts_gemm},
            # FlashAttention 2 reads no cache in fp8: engines have another kernel then.
            "mixed_attention": fit.mixed_attention if cache == "bf16" else None,
        }
        return self.model_copy(update=update)


# ---- links and devices ---------------------------------------------------------------------------


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that are not printable; wanted one line of text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
"""A name or a description: one printable line, which goes to terminals and into scripts."""


class _Link(FigureBlock):
    """Figures of a link, per GPU.

    A message starts within `latency_us` and passes slowly, or, where that takes longer, somewhat
    later and faster: as NCCL's protocols LL, LL128 and Simple do.
    """

    bandwidth_gb_s: float = Field(gt=0)
    """One direction, all links of a GPU together."""
    bandwidth_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that large messages reach."""
    medium_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that medium messages reach."""
    low_latency_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that small messages reach."""
    latency_us: float = Field(ge=0)
    medium_us: float = Field(ge=0)
    """Time to start a medium message, beyond `latency_us`."""
    hop_us: float = Field(ge=0)
    """Time of each further step of a collective."""
    bulk_us: float = Field(ge=0)
    """Time to start a large message, beyond `latency_us`."""
    in_network_reduction: bool = False
    """True if switches reduce (NVLink SHARP, SHARP)."""
    in_network_fraction: float = Field(gt=0, le=1, default=1)
    """Share of the bandwidth that all_reduce reaches where switches reduce."""
    in_network_us: float = Field(ge=0, default=0)
    """Time per GPU to start a reduction in switches."""


class ScaleUp(_Link):
    """The fast links between the GPUs of a node, rack or pod."""

    topology: Topology
    gpus: int = Field(ge=1)
    """GPUs that these links join."""
    shape: tuple[int, ...] = ()
    """Torus: GPUs along each dimension; their product is `gpus`."""
    cube: int = Field(ge=0, default=0)
    """Torus: a slice whose sides are multiples of this is closed along all of them, by switches;
    0: only a side as long as the torus is."""


class ScaleOut(_Link):
    """The network between nodes."""

    fabric: Fabric
    oversubscription: float = Field(ge=1, default=1.0)
    """Bandwidth below the top of the tree, or within a dragonfly group, over that above it."""
    gpus_per_leaf: int | None = Field(ge=1, default=None)
    """GPUs below one switch of the oversubscribed level."""
    all_reduce_adapters: int | None = Field(ge=1, default=None)
    """Adapters of a scale-up domain that an all_reduce over several domains uses at most."""


ROWWISE_RATE = 0.7
"""Rate of products in fp8 with a scale per row, over that with a scale per tensor.

Llama 3 8B on eight H100 gains 25.0% over bf16 with a scale per tensor and 10.05% with one per row
(docs/source/workflows/training.md of github.com/pytorch/ao, 36027d82). Predicted are 23.6% and, at
this rate, 10.1% (benchmarks/fit_sustained.py rowwise); at the same rate it would be 23.6%."""


class Hardware(FigureBlock):
    """An accelerator and its system. TFLOP/s are dense, GB are 1e9 bytes, bandwidths are GB/s."""

    name: Line
    vendor: Line
    description: Line = ""

    peak_bf16_tflops: float = Field(gt=0)
    peak_fp8_tflops: float | None = Field(gt=0, default=None)
    peak_fp4_tflops: float | None = Field(gt=0, default=None)
    peak_int8_tflops: float | None = Field(gt=0, default=None)
    peak_fp32_tflops: float = Field(gt=0)
    """Peak of the vector units."""

    compute_units: int = Field(ge=1)
    """Units over which the tiles of a kernel spread: streaming multiprocessors, compute units."""
    memory_gb: float = Field(gt=0)
    memory_bandwidth_gb_s: float = Field(gt=0)
    host_bandwidth_gb_s: float = Field(gt=0)
    """Bandwidth to the memory of the host, one direction."""
    host_factor: float = Field(gt=0, default=1.0)
    """Time of the host to launch a kernel, over that of an x86 CPU."""

    gemm: Mapping[Line, GemmFit]
    """By precision; a precision without constants takes those of bf16."""
    attention: AttentionFit
    attention_kernels: Mapping[Line, AttentionFit] = Field(default_factory=dict)
    """Other attention kernels that frameworks run, by name, such as `fa2`."""
    experts: ExpertFit | None = None
    """None: not measured; copies run at the speed of streams, and routing takes its launches."""
    inference: InferenceFit | None = None
    """None: not measured; inference takes the constants of training."""
    memory_bandwidth_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that a large element-wise kernel reaches."""
    kernel_launch_us: float = Field(ge=0)
    """Time of the shortest kernel within a stream of kernels."""
    recurrence_tflops: float | None = Field(gt=0, default=None)
    """Speed of the kernels of a chunked recurrence, such as Mamba-2, written in Triton, which
    wait for exponentials and masks; None: as products in bf16."""
    unaligned_heads_tflops: float | None = Field(gt=0, default=None)
    """Speed of the products of an attention that no kernel fuses, where the width of a head is no
    multiple of 16 bytes, in a long run; None: as products of aligned operands."""
    sustained_fraction: Mapping[Line, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=lambda: {"bf16": 1.0}
    )
    """By precision the clock of the compute units in a long run, whose power is limited, over that
    in a benchmark that runs for a moment; a plain number is that of all precisions, and a precision
    without one takes that of bf16. Memory and launches are as fast as in a benchmark."""

    gpus_per_node: int = Field(ge=1)
    scale_up: ScaleUp
    scale_out: ScaleOut

    tdp_w: float = Field(gt=0)
    """Thermal design power of one GPU."""
    idle_w: float | None = Field(ge=0, default=None)
    """Power of one GPU that waits; None: a fifth of the TDP (`power.IDLE_FRACTION`)."""
    node_overhead_w: float = Field(ge=0, default=0)
    """Power of host, network and cooling inside the node, per GPU."""
    price_usd_per_gpu_hour: float | None = Field(ge=0, default=None)
    vllm_small_batches: bool = False
    """vLLM's default limits of a step are those of a small device, whatever the memory: so of the
    A100 (vllm-project/vllm@00024d31 `vllm/engine/arg_utils.py`, `get_batch_defaults`)."""

    sources: Mapping[Line, Line] = Field(default_factory=dict)
    """The source of each number, by key, with dots for nesting."""

    @field_validator("sustained_fraction", mode="before")
    @classmethod
    def _of_all_precisions(cls, value: Any) -> Any:
        return {"bf16": value} if isinstance(value, int | float) else value

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return round(self.memory_gb * 1e9)

    def rate_of(self, dtype: str) -> float | None:
        """Dense peak of matrix products in TFLOP/s; vector units for fp32; None: unsupported."""
        return getattr(self, PEAKS[dtype]) if dtype in PEAKS else None

    @property
    def is_before_blackwell(self) -> bool:
        """True for NVIDIA's without matrix products in fp4."""
        return self.vendor == "NVIDIA" and self.rate_of("fp4") is None

    def clock_of(self, dtype: str) -> float:
        """Clock of compute units in a step, over that of a benchmark."""
        like = _LIKE.get(dtype, dtype)
        known = [d for d in (dtype, like, "bf16") if d in self.sustained_fraction]
        return self.sustained_fraction[known[0]] if known else 1.0

    def sustained(self) -> Hardware:
        """Hardware at the clocks of a step: compute is slower, memory is not.

        The constants of kernels are those of a benchmark (`benchmarks/fit_kernels.py`). Attention
        runs at the clock of bf16 in every precision; attention to latents keeps its constants, of
        which memory decides.
        """
        products, grouped = (
            {
                d: fit.slowed(self.clock_of(fit.product or d))
                for d in PEAKS
                for fit in (self.products(d, grouped=g),)
            }
            for g in (False, True)
        )
        attention, inference = self.attention, self.inference
        if attention.fraction > FULL_POWER:
            attention = attention.slowed(self.clock_of("bf16"))
            if inference and inference.cached_attention:
                cached = inference.cached_attention.slowed(self.clock_of("bf16"))
                inference = inference.model_copy(update={"cached_attention": cached})
        update = {
            "gemm": products,
            "experts": self.experts and self.experts.model_copy(update={"gemm": grouped}),
            "attention": attention,
            "inference": inference,
            "sustained_fraction": {"bf16": 1.0},
        }
        return self.model_copy(update=update)

    def products(self, dtype: str, *, grouped: bool = False) -> GemmFit:
        """Constants of matrix products in one precision; `grouped`: several in one kernel."""
        like = _LIKE.get(dtype, dtype)
        grouped_fit = self.experts.gemm.get(like) if grouped and self.experts else None
        return grouped_fit or self.gemm.get(dtype) or self.gemm.get(like) or self.gemm["bf16"]

    def with_grouped_experts(self) -> Hardware:
        """This hardware where one kernel computes the products of all experts."""
        if self.experts is None or not self.experts.takes_turns:
            return self
        experts = self.experts.model_copy(update={"takes_turns": False})
        return self.model_copy(update={"experts": experts})

    def with_rowwise_scales(self) -> Hardware:
        """This hardware where products in fp8 have a scale per row and column of the operands.

        On NVIDIA's GPUs these are PyTorch's CUTLASS kernels (`torch._scaled_mm`), not cuBLAS's.
        """
        if self.vendor != "NVIDIA" or self.peak_fp8_tflops is None:
            return self
        gemm = {**self.gemm, "fp8": self.products("fp8").slowed(ROWWISE_RATE)}
        return self.model_copy(update={"gemm": gemm})

    def with_rates_of_bf16(self, dtypes: Iterable[str]) -> Hardware:
        """Hardware with bf16's rate for data types without matrix products.

        Such kernels read weights in few bits and multiply in bf16, as vLLM's Marlin kernels do
        where a GPU lacks fp8 or fp4.
        """
        known = [dtype for dtype in dtypes if dtype in PEAKS]
        rates = {PEAKS[dtype]: self.rate_of(dtype) or self.peak_bf16_tflops for dtype in known}
        return self.model_copy(update=rates)

    def with_attention(self, kernel: str) -> Hardware:
        """This hardware with another default attention kernel, by name; UserError if unknown."""
        if kernel not in self.attention_kernels:
            known = either(self.attention_kernels) if self.attention_kernels else "none"
            raise UserError(
                f"{self.name} has no attention kernel {kernel!r}"
                f"{did_you_mean(kernel, self.attention_kernels)}; known: {known}"
            )
        return self.model_copy(update={"attention": self.attention_kernels[kernel]})

    def for_inference(
        self,
        *,
        blocks: bool = False,
        weights: str = "",
        engine: str | None = None,
        cache: str = "bf16",
    ) -> Hardware:
        """This hardware with the constants of inference, if it has any.

        `blocks`: products in fp8 are of weights that are scaled by blocks. `weights`: storage of
        experts whose inputs are in bf16. `engine`: with the constants of this engine's kernels.
        `cache`: precision of the engine's cache.
        """
        if self.inference is None:
            return self
        fit = self.inference.of_engine(engine, cache)

        def updated(fits: Mapping[str, InferenceGemmFit]) -> dict[str, GemmFit]:
            selected = {dtype: fit for dtype, fit in fits.items() if dtype in PEAKS}
            if blocks and BLOCKS in fits:
                selected["fp8"] = fits[BLOCKS]
            if weights in fits:
                selected["bf16"] = fits[weights]
            return {
                dtype: self.products(dtype).model_copy(update=fit.model_dump(exclude_none=True))
                for dtype, fit in selected.items()
            }

        experts = self.experts
        if experts is not None:
            routing = experts.routing_us if fit.routing_us is None else fit.routing_us
            grouped = {**experts.gemm, **updated(fit.experts_gemm)}
            update = {"routing_us": routing, "gemm": grouped, "takes_turns": False}
            experts = experts.model_copy(update=update)
        products = {**self.gemm, **updated(fit.gemm)}
        return self.model_copy(update={"gemm": products, "experts": experts, "inference": fit})


FULL_POWER = 0.28
"""Share of the peak of products at which a GPU draws all of its TDP: (1 - 0.498) / 1.792, of
`benchmarks/fit_power.py`. Kernels that never reach it leave the clock as it is."""

PEAKS: Mapping[str, str] = {
    "bf16": "peak_bf16_tflops",
    "fp8": "peak_fp8_tflops",
    "mxfp8": "peak_fp8_tflops",
    "int8": "peak_int8_tflops",
    "fp4": "peak_fp4_tflops",
    "fp32": "peak_fp32_tflops",
}
"""Data types of matrix products, and the field of `Hardware` with the peak of each."""

_LIKE = {"mxfp8": "fp8"}
"""Data types that take the constants of others by default."""


# ---- files ---------------------------------------------------------------------------------------


def names() -> list[str]:
    """Names of the hardware in the package."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir())


def resolve(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Hardware of a name in `names()`, or of a YAML file: its path or lines.

    Raises UserError.
    """
    name = str(name_or_path)
    if "\n" in name:
        return _load(from_yaml(name, "hardware"), "hardware")
    if is_path(name):
        return _load(from_yaml(read_text(name, "hardware in YAML"), name), name)
    return _packaged(full_name(name))


def full_name(name: str) -> str:
    """The name of hardware, also by its part before a hyphen: `gb200` is `gb200-nvl72`.

    Raises UserError that lists all that begin so, or all.
    """
    if name in names():
        return name
    longer = [known for known in names() if known.startswith(f"{name.lower()}-")]
    if len(longer) == 1:
        return longer[0]
    if longer:
        raise UserError(f"hardware {name!r} may be {either(longer)}; name one of them")
    raise UserError(
        f"unknown hardware {name!r}{did_you_mean(name.lower(), names())}; "
        f"known: {', '.join(names())}; or the path of a .yaml file"
    )


@cache
def _packaged(name: str) -> Hardware:
    return _load(_packaged_yaml(name), name)


def _packaged_yaml(name: str) -> Any:
    return own_yaml((_folder() / f"{name}.yaml").read_text("utf-8"))


def _folder() -> Any:
    return files("stagewright") / "data" / "hardware"


def is_path(name: str) -> bool:
    """True for the path of a YAML file."""
    return name.endswith((".yaml", ".yml")) or os.sep in name


def _load(raw: Any, where: str) -> Hardware:
    values, sources = _with_base(raw, where, (os.path.normpath(where),))
    try:
        hardware = Hardware(**values, sources=sources)
    except ValidationError as error:
        path = error.errors()[0]["loc"]
        link = {"scale_up": ScaleUp, "scale_out": ScaleOut}.get(str(path[0]))
        fields = (link if link and len(path) > 1 else Hardware).model_fields
        missing = "; give it, or a base to start from: base: h100-sxm"
        raise UserError(f"{where}: {figure_error(error, fields, missing)}") from None
    by_precision = {"gemm": hardware.gemm, "sustained_fraction": hardware.sustained_fraction}
    if hardware.experts:
        by_precision["experts.gemm"] = hardware.experts.gemm
    for key, constants in by_precision.items():
        for name in sorted(constants.keys() - PEAKS.keys()):
            raise UserError(
                f"{where}: unknown key '{key}.{name}'{did_you_mean(name, PEAKS)}; wanted "
                f"{either(PEAKS)}"
            )
    if "bf16" not in hardware.gemm:
        raise UserError(
            f"{where}: gemm.bf16 is missing, whose constants all data types take that have none"
        )
    return hardware


def _with_base(
    raw: Any, where: str, files_read: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a file and their sources, merged with those of its base."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: got {shown(raw)}, wanted keys such as peak_bf16_tflops: 989.4")
    block = {str(key): value for key, value in cast("dict[object, Any]", raw).items()}
    base = block.pop("base", None)
    texts: Any = block.pop("sources", {})
    if not isinstance(texts, dict):
        raise UserError(f"{where}: sources is {shown(texts)}, wanted names and where they lead")
    texts = {str(name): text for name, text in cast("dict[object, Any]", texts).items()}
    values, sources = _split_sources(block, texts, where)
    if base is None:
        return values, sources
    is_file = isinstance(base, str) and is_path(base)
    name = os.path.normpath(Path(where).parent / base) if is_file else str(base)
    if name in files_read or not (is_file or name in names()):
        raise UserError(
            f"{where}: base is {base!r}{did_you_mean(str(base), names())}; wanted "
            f"{either(n for n in names() if n not in files_read)}, or the path of another .yaml "
            "file"
        )
    if is_file:
        text = read_text(name, f"hardware in YAML, the base of {where}")
        base_raw = from_yaml(text, name)
    else:
        base_raw = _packaged_yaml(name)
    base_values, base_sources = _with_base(base_raw, name, (*files_read, name))
    # A number that replaces that of the base has no source of the base.
    for key in [k for k in base_sources if k in values]:
        del base_sources[key]
    return _overlay(base_values, values), base_sources | sources


def smaller_shares(link: Mapping[str, Any], bandwidth_fraction: float) -> dict[str, float]:
    """Shares of the bandwidth that smaller messages reach, in proportion to another large share.

    A measurement of large messages alone would else leave medium ones as fast as before.
    """
    ratio = bandwidth_fraction / link["bandwidth_fraction"]
    names = ("medium_fraction", "low_latency_fraction")
    return {name: min(1.0, link[name] * ratio) for name in names if name in link}


def _overlay(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in values.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _overlay(base[key], cast("dict[str, Any]", value)) if nested else value
    large = values.get("bandwidth_fraction")
    if isinstance(large, int | float) and base.get("bandwidth_fraction"):
        result |= {n: x for n, x in smaller_shares(base, large).items() if n not in values}
    return result


def _split_sources(
    block: Mapping[str, Any], texts: Mapping[str, str], where: str, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a block, and the source of each path; `source: x` holds for its block."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    common = block.get("source") if prefix else None
    for key, value in block.items():
        path, source = f"{prefix}{key}", common
        if prefix and key == "source":
            continue
        if isinstance(value, dict):
            nested = cast("dict[str, Any]", value)
            values[key], nested_sources = _split_sources(nested, texts, where, f"{path}.")
            sources |= nested_sources
            continue
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):  # pyright: ignore
            value, source = cast("list[Any]", value)
        values[key] = value
        if source is not None:
            if str(source) not in texts:
                raise UserError(
                    f"{where}: the source {str(source)!r} of {path} is not under sources"
                    f"{did_you_mean(str(source), texts)}"
                )
            sources[path] = texts[str(source)]
    return values, sources
