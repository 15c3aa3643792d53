"""Time of a kernel from its shape: a roofline with corrections.

- Matrix products (`gemm_seconds`) run as tiles over the compute units of a GPU: the last wave of
  tiles is rarely full, a small tile reuses less of what it reads, and every tile starts and ends.
- Fused attention (`attention_seconds`) runs as tiles of 128 queries, each of which passes through
  all keys that its mask leaves.
- Attention over a cache (`cached_attention_seconds`) does the same while it reads keys and values.
- Chunked recurrences (`_chunked`) run at a measured rate, or as one product per chunk and head.
- Rows that are copied by index (`copies_seconds`), to experts and back, move their bytes more
  slowly than streams.
- All other kernels (`memory_seconds`) move their bytes at the speed of streams.

Every kernel takes at least its launch. `kernels_seconds` selects the model by the name of a kernel.
The constants are those of the hardware (`hardware`).

>>> from stagewright.time.hardware import resolve
>>> h100 = resolve("h100-sxm")
>>> sizes = [np.array([x]) for x in (1.0, 8192, 8192, 8192)]
>>> moved = np.array([3 * 2 * 8192**2])
>>> seconds = gemm_seconds(*sizes, traffic=moved, dtype="bf16", hardware=h100)[0]
>>> bool(1300e-6 < seconds < 1500e-6)  # 1405 us measured
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.graph.table import OPS, Timing, served_heads
from stagewright.program.shapes import GEMM
from stagewright.time.hardware import PEAKS, GemmFit, Hardware, SparseAttentionFit


class Kernels(NamedTuple):
    """Kernels of one name and data type: an array element per kernel."""

    extents: Mapping[str, Float]
    """By name, such as `q` or `heads`; 0 where a kernel lacks the extent."""
    flops: Float
    traffic: Float
    """Bytes."""
    dtype: str
    backward: Bool


def timing_of(kernel: str) -> Timing:
    """Model of a kernel, by its name: `gemm`, or the name of an op."""
    if kernel == GEMM:
        return Timing.PRODUCT
    return OPS[kernel].timing if kernel in OPS else Timing.MEMORY


def kernels_seconds(kernel: str, kernels: Kernels, hardware: Hardware) -> Float:
    """Seconds of kernels of one name, by the model of this name.

    `hardware` at the clocks that kernels run at; of a step, `Hardware.sustained`.
    """
    timing = timing_of(kernel)
    match timing:
        case Timing.PRODUCT:
            return np.maximum(
                _products_seconds(kernels, hardware), _unaligned_seconds(kernels, hardware)
            )
        case Timing.TO_EXPERTS | Timing.FROM_EXPERTS:
            return _expert_copies(kernels, timing, hardware)
        case Timing.CACHED_ATTENTION if hardware.inference and hardware.inference.cached_attention:
            return _cached_attention(kernels, hardware)
        case Timing.SERVED_ATTENTION | Timing.CACHED_ATTENTION:
            return _served_attention(kernels, hardware, causal=timing is Timing.CACHED_ATTENTION)
        case Timing.ATTENTION | Timing.ATTENTION_BACKWARD:
            backward = timing is Timing.ATTENTION_BACKWARD
            return training_attention_seconds(kernels, hardware, backward=backward)
        case Timing.CHUNKED:
            return _chunked(kernels, hardware)
        case Timing.MEMORY:
            return memory_seconds(kernels.traffic, kernels.flops, hardware)


# ---- matrix products -----------------------------------------------------------------------------

# Rows and columns of the tiles that libraries choose from, and into how many parts they may split
# the sum (cuBLAS and CUTLASS kernels; the fastest is taken, as their heuristics try to).
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (64, 256), (256, 64),
         (32, 64), (64, 32))  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
DEPTH = 64  # elements of the sum that a tile takes at a time

ALIGNED_BYTES = 16
"""Alignment of the rows of operands that tensor cores use most efficiently.

Source: cuBLAS's manual, "Tensor Core Usage": pointers and leading dimensions of 16 bytes."""

_CHUNK = 1024
"""Products that are timed at once, with all tiles and splits: as many as a cache holds."""


def peak_flops(hardware: Hardware, dtype: str) -> float:
    """Dense peak of matrix products in FLOP/s; for fp32 that of the vector units.

    Raises UserError where the hardware has no matrix products in this data type.
    """
    peak = hardware.rate_of(dtype)
    if peak is None:
        supported = [name for name in PEAKS if hardware.rate_of(name)]
        raise UserError(
            f"{hardware.name} has no matrix products in {dtype}; use one of {', '.join(supported)}"
        )
    return peak * 1e12


def gemm_seconds(
    batch: Float, m: Float, n: Float, k: Float, *, traffic: Float, dtype: str, hardware: Hardware
) -> Float:
    """Seconds of matrix products that move `traffic` bytes.

    Each product has `batch` results of m x n, whose elements are sums over k. Several results are
    a grouped product: one kernel, whose constants are fitted to those of experts, or as many
    products one after the other (`ExpertFit.takes_turns`).
    """
    if hardware.experts is not None and hardware.experts.takes_turns:
        count = np.maximum(batch, 1.0)
        batch, traffic = np.minimum(batch, 1.0), traffic / count
        grouped = hardware.with_grouped_experts()
        return count * gemm_seconds(batch, m, n, k, traffic=traffic, dtype=dtype, hardware=grouped)
    is_grouped = batch > 1
    sizes, seconds = np.stack([batch, m, n, k, traffic]), np.zeros(len(m))
    for grouped in (False, True):
        selected = np.flatnonzero(is_grouped == grouped)
        if not len(selected):
            continue
        fit = hardware.products(dtype, grouped=grouped)
        for chunk in np.split(selected, range(_CHUNK, len(selected), _CHUNK)):
            seconds[chunk] = _fastest_tile(
                sizes[:, chunk], fit, peak_flops(hardware, fit.product or dtype), hardware
            )
    return seconds


def _fastest_tile(sizes: Float, fit: GemmFit, peak: float, hardware: Hardware) -> Float:
    """Seconds of products, each with its fastest tile and split of the sum.

    `sizes` has the shape [5, products]: batch, m, n, k and traffic.
    """
    batch, m, n, k, traffic = sizes
    bandwidth = hardware.memory_bandwidth_gb_s * 1e9 * fit.memory_fraction
    unit_peak = peak / hardware.compute_units
    # [tiles, 1, 1] and [splits, 1], beside [products].
    tiles_of_fit = TILES if fit.least_rows >= 32 else (*TILES, (fit.least_rows, 128))
    rows, columns = (np.array(side)[:, None, None] for side in zip(*tiles_of_fit, strict=True))
    reuse = np.array([_reuse(fit, *tile) for tile in tiles_of_fit])[:, None, None]
    splits = np.array(SPLITS)[:, None]
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
    rate = unit_peak * fit.fraction * reuse
    waves = _waves(tiles * splits / hardware.compute_units, fit.quantization)
    depth = np.ceil(k / splits / DEPTH) * DEPTH
    compute = waves * (2 * rows * columns * depth / rate + fit.tile_us * 1e-6)
    # Where the sum is split: partial sums in fp32, written and read.
    compute = compute + np.where(splits > 1, fit.split_us * 1e-6, 0.0)
    partial_sums = np.where(splits > 1, 8 * splits * batch * m * n / bandwidth, 0.0)
    memory = traffic / bandwidth + partial_sums
    best = _overlapped(compute, memory, fit.sharpness).min(axis=(0, 1))
    return fit.launch_us * 1e-6 + best


def _reuse(fit: GemmFit, rows: int, columns: int) -> float:
    """Speed of a tile relative to that of 128 x 256, which reads least per multiply-add."""
    return (1 + fit.tile_factor * 0.75) / (1 + fit.tile_factor * (64 / rows + 64 / columns))


def _waves(ratio: Float, quantization: float) -> Float:
    """Waves of tiles: the last one counts in full, or by its share if tiles overlap."""
    return np.where(ratio <= 1, 1.0, quantization * np.ceil(ratio) + (1 - quantization) * ratio)


def _overlapped(compute: Float, memory: Float, sharpness: float) -> Float:
    """Seconds of two overlapping parts: the longer one, plus a term if both are similar."""
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness)


def _products_seconds(kernels: Kernels, hardware: Hardware) -> Float:
    """Seconds of products; heads of an attention that no kernel fuses never take turns."""
    size, together = kernels.extents, hardware.with_grouped_experts()

    def seconds(on: Hardware) -> Float:
        return gemm_seconds(
            size["batch"], size["m"], size["n"], size["k"],
            traffic=kernels.traffic, dtype=kernels.dtype, hardware=on,
        )  # fmt: skip

    if together is hardware or "head" not in size:
        return seconds(hardware)
    return np.where(size["head"] > 0, seconds(together), seconds(hardware))


def _unaligned_seconds(kernels: Kernels, hardware: Hardware) -> Float:
    """Lower bound of products of heads whose rows are not aligned; 0 for others.

    A head is a row of each operand of an attention that no kernel fuses: of 108 or 150 values in
    bf16, it does not begin at a multiple of `ALIGNED_BYTES`.
    """
    width = kernels.extents.get("head")
    if width is None or hardware.unaligned_heads_tflops is None:
        return np.zeros_like(kernels.flops)
    unaligned = (width * float(BYTES[kernels.dtype])) % ALIGNED_BYTES > 0
    return np.where(unaligned, kernels.flops / (hardware.unaligned_heads_tflops * 1e12), 0.0)


# ---- attention -----------------------------------------------------------------------------------

QUERIES = 128
"""Queries of a tile of attention."""
ROWS = 64
"""Rows of a tile of queries that share a key: the least that tensor cores multiply."""


def attention_seconds(
    tiles: Float, longest: Float, points: Float, flops_per_point: Float, traffic: Float,
    *, dtype: str, hardware: Hardware, backward: bool = False,
) -> Float:  # fmt: skip
    """Seconds of fused attention kernels: an array element per kernel.

    `tiles`: blocks of `QUERIES` queries, in backward of keys; `longest`: keys (in backward queries)
    that the longest of them passes through;
    `points`: pairs of a query and a key in all tiles, each with an exponential; `traffic`: bytes of
    operands and results.
    """
    fit = (hardware.attention.fp8 if dtype == "fp8" else None) or hardware.attention
    rate = _attention_peak(hardware, dtype) * fit.fraction / hardware.compute_units
    if backward:
        rate *= fit.bwd_ratio
    point = flops_per_point / rate + fit.softmax_ps * 1e-12
    even = points * point / hardware.compute_units
    waves = np.ceil(tiles / hardware.compute_units)
    computed = np.maximum(even, QUERIES * longest * point) + waves * fit.tile_us * 1e-6
    moved = fit.traffic_factor * traffic / (hardware.memory_bandwidth_gb_s * 1e9)
    return fit.launch_us * 1e-6 + computed + moved


def masked_points(queries: Float, points: Float, window: Float) -> Float:
    """Pairs of a query and a key that causal attention computes though its mask hides them.

    Masks act on whole tiles: those on the diagonal are computed in full, and so are those at the
    lower edge of a window, which queries have that see as many keys as the window is long.
    """
    sees_window = np.clip(2 * points / (queries * np.maximum(window, 1)) - 1, 0, 1) * (window > 0)
    return queries * QUERIES / 2 * (1 + sees_window)


def _attention_peak(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of fused attention; of bf16 if the hardware does not support `dtype`.

    Only narrower data types fall back to bf16: fp32 has the rate of the vector units, as in
    matrix products.
    """
    supported = dtype in ("fp32", "bf16") or (
        dtype == "fp8" and hardware.peak_fp8_tflops is not None
    )
    return peak_flops(hardware, dtype if supported else "bf16")


def training_attention_seconds(kernels: Kernels, hardware: Hardware, *, backward: bool) -> Float:
    """Seconds of fused attention of sequences of one length.

    Forward computes two products per pair of query and key, backward five.
    """
    size = kernels.extents
    d, v = size["d"], size["v"]
    # Backward goes through the keys in tiles, each of which meets all queries.
    rows, columns = (size["k"], size["q"]) if backward else (size["q"], size["k"])
    span = np.maximum(size["window"], size.get("chunk", 0))
    visible = np.where(span > 0, np.minimum(span, columns), columns)
    tiles = np.ceil(rows / QUERIES) * (size["batch"] * size["heads"])
    flops_per_point = 2 * (3 * d + 2 * v) if backward else 2 * (d + v)
    points = kernels.flops / flops_per_point
    masked = masked_points(tiles * QUERIES, points, size["window"])
    points = points + size["causal"] * masked
    if backward and kernels.dtype == "fp8" and hardware.vendor == "NVIDIA":
        # cuDNN's kernel computes keys outside the window, too.
        all_keys = tiles * QUERIES * (columns + QUERIES) / 2
        points = np.where(size["window"] > 0, all_keys, points)
    return attention_seconds(
        tiles, visible, points, flops_per_point, kernels.traffic,
        dtype=kernels.dtype, hardware=hardware, backward=backward,
    )  # fmt: skip


def _served_attention(kernels: Kernels, hardware: Hardware, *, causal: bool) -> Float:
    """Attention over requests of different lengths, in tiles of queries as in training.

    Several units share the keys of one tile (flash decoding), so that the load is even. Reading the
    keys may take longer than computing: a single token has few queries for each key read.
    """
    size = kernels.extents
    flops_per_point = 2 * (size["d"] + size.get("v", size["d"]))
    heads = math.prod(served_heads(size))
    tiles = np.ceil(size["q"] / QUERIES) * heads
    zero = np.zeros_like(kernels.flops)
    points = kernels.flops / flops_per_point
    if causal:
        points = points + masked_points(size["q"] * heads, points, size.get("window", zero))
    computed = attention_seconds(
        tiles, zero, points, flops_per_point, zero, dtype=kernels.dtype, hardware=hardware
    )
    return np.maximum(computed, memory_seconds(kernels.traffic, zero, hardware))


def cached_attention_seconds(
    queries: Float, sharing: Float, points: Float, keys: Float, flops_per_point: Float,
    traffic: Float, *, dtype: str, hardware: Hardware, window: Float | float = 0.0,
    latent: bool = False,
) -> Float:  # fmt: skip
    """Seconds of attention over a cache, in decode, prefill or both at once.

    `window`: keys that a query sees at most, 0 for all; `latent`: all heads read one row of a
    token, as key and as value.

    `queries`: of all heads, one for each head of a token; `sharing`: heads that share the keys of
    one key-value head; `points`: pairs of a query and a key; `keys`: keys of all key-value heads
    that are read; `traffic`: bytes of keys, values, queries and results. An array element each.

    Several units share the keys of one request (flash decoding), so that all are busy. A tile has
    at least `ROWS` rows, however few queries meet a key: a decode step fills it with empty rows,
    which are computed while it waits for memory.
    """
    assert hardware.inference is not None
    fit = hardware.inference.cached_attention
    fit = (hardware.inference.latent_attention.get(dtype) if latent else None) or fit
    assert fit is not None
    rate = _attention_peak(hardware, dtype) * fit.fraction
    point = flops_per_point / rate + fit.softmax_ps * 1e-12 / hardware.compute_units
    # Tokens of a tile have all heads of latents, and so no keys that only some of them see.
    masked = 0.0 if latent else masked_points(queries, points, np.asarray(window))
    computed = np.maximum(points + masked, ROWS * keys) * point
    bandwidth = hardware.memory_bandwidth_gb_s * 1e9
    both = _overlapped(computed, traffic / (bandwidth * fit.memory_fraction), fit.sharpness)
    # Queries and results of all heads, and the keys and values of their tokens, in 16 bits.
    exposed = fit.traffic_factor * queries * (1 + 1 / sharing) * flops_per_point / bandwidth
    rows = np.clip(points / np.maximum(keys, 1), np.minimum(sharing, QUERIES), QUERIES)
    tiles = queries / rows / hardware.compute_units
    return (fit.launch_us + tiles * fit.tile_us) * 1e-6 + both + exposed


def _cached_attention(kernels: Kernels, hardware: Hardware) -> Float:
    """Attention over a cache, by constants that were fitted to decode kernels."""
    size = kernels.extents
    flops_per_point = 2 * (size["d"] + size.get("v", size["d"]))
    heads = math.prod(served_heads(size))
    # Latents are read once for all heads, keys and values once for the heads of a group.
    sharing = size.get("r", size.get("a", np.ones_like(size["d"])))
    # No more are read than there are pairs: an indexer chooses some of a cache's keys.
    points = kernels.flops / flops_per_point
    slots = size["k"] + size.get("j", np.zeros_like(size["d"]))
    keys = np.minimum(slots * heads, points) / sharing
    work = (size["q"] * heads, sharing, points, keys, flops_per_point, kernels.traffic)
    assert hardware.inference is not None
    cache = hardware.inference.cache  # latents are multiplied as they are stored
    window = size.get("window", np.zeros_like(points))
    of_heads, of_latents = (
        cached_attention_seconds(
            *work, dtype=dtype, hardware=hardware, window=window, latent=latent
        )
        for latent, dtype in ((False, kernels.dtype), (True, cache))
    )
    is_latent = size.get("latent", np.zeros_like(points)) > 0
    seconds = np.where(is_latent, of_latents, of_heads)
    chosen = size.get("t")
    fit = hardware.inference.sparse_attention.get(cache)
    if chosen is None or "j" in size or fit is None:
        return seconds
    # Prompts beyond the keys that may be chosen; a decode step splits the keys of its requests.
    prompts = (slots < ROWS * size["q"]) & (points > size["q"] * heads * chosen / 2)
    sparse = sparse_attention_seconds(size["q"], sharing, chosen, flops_per_point, fit, hardware)
    return np.where(is_latent & prompts, sparse, seconds)


def sparse_attention_seconds(
    tokens: Float, heads: Float, chosen: Float, flops_per_point: Float,
    fit: SparseAttentionFit, hardware: Hardware,
) -> Float:  # fmt: skip
    """Seconds of attention to latents that are chosen for each token.

    No two tokens share their keys, so that each has a tile of its own (`flash_mla_sparse_fwd` of
    FlashMLA): all heads, which pass through all `chosen` places, whether a key is there or not.
    """
    rows = np.ceil(heads / fit.rows) * fit.rows
    products = tokens * chosen * rows * flops_per_point / peak_flops(hardware, "bf16")
    waves = np.ceil(tokens / hardware.compute_units)
    return (fit.launch_us + waves * fit.tile_us) * 1e-6 + products


class DecodeInPromptKernel(NamedTuple):
    """Time that decoding requests add to attention of prompts in one kernel.

    FlashAttention 2 has one call for all requests of a step (vLLM's `FLASH_ATTN` on GPUs of compute
    capability 8 and 12). Heads share the tile of a key-value head, and units the keys of a request,
    only where all requests have one query (`seqlenq_ngroups_swapped` of
    csrc/flash_attn/flash_api.cpp in github.com/vllm-project/flash-attention, where `max_seqlen_q`
    is 1). In a mixed batch, and where requests have drafts, each head has tiles of `ROWS` rows of
    its own, which pass through all keys of their request; heads that share keys read them again
    where the second-level cache no longer has them; and each request has as many tiles as the
    longest prompt, of which all but one are empty.
    """

    key_seconds: float
    """Of a head's tile for each key."""
    tile_seconds: float
    empty_tile_seconds: float
    tiles: float
    """Tiles of one request, over the compute units: one for each head."""
    read_seconds: float
    """Of reading a key and a value of all key-value heads."""
    rereads: float
    """Further readings of a key that the cache does not hold: one for each further head."""
    cached_keys: float
    """Keys that the second-level cache holds."""

    @classmethod
    def of(cls, hardware: Hardware, heads: float, sharing: float, width: float) -> Self | None:
        """Model of `heads` heads, of which `sharing` share keys, or None without such a kernel.

        `width` is that of key and value.
        """
        fit = hardware.inference.mixed_attention if hardware.inference else None
        cached = hardware.inference.cached_attention if hardware.inference else None
        if fit is None or cached is None:
            return None
        rate = _attention_peak(hardware, "bf16") * cached.fraction / hardware.compute_units
        point = (2 * width / rate + cached.softmax_ps * 1e-12) / fit.fraction
        memory = hardware.memory_bandwidth_gb_s * 1e9 * cached.memory_fraction
        return cls(
            ROWS * point, fit.tile_us * 1e-6, fit.empty_us * 1e-6, heads / hardware.compute_units,
            2 * width * heads / sharing / memory, sharing - 1, fit.cache_mb * 1e6 / (2 * width),
        )  # fmt: skip

    def __call__(self, requests: float, keys: float, queries: float) -> float:
        """Seconds of `requests` with `keys` in total; the longest prompt has `queries`."""
        tiles = self.tiles * requests
        even = tiles * self.tile_seconds + self.tiles * keys * self.key_seconds
        computed = max(even, self.tile_seconds + keys / requests * self.key_seconds)
        read = keys * self.read_seconds * (1 + self.rereads * max(0.0, 1 - self.cached_keys / keys))
        empty = tiles * max(-(-queries // ROWS) - 1, 0) * self.empty_tile_seconds
        shorter, longer = sorted((computed, read))
        return longer * (1 + (shorter / longer) ** 6) ** (1 / 6) + empty


# ---- kernels that move bytes ---------------------------------------------------------------------


def bytes_per_second(hardware: Hardware) -> float:
    """Bandwidth in bytes per second that kernels reach which stream through device memory."""
    return hardware.memory_bandwidth_gb_s * 1e9 * hardware.memory_bandwidth_fraction


def memory_seconds(traffic: Float, flops: Float, hardware: Hardware) -> Float:
    """Seconds of kernels that move `traffic` bytes and compute little."""
    moved = traffic / bytes_per_second(hardware)
    return hardware.kernel_launch_us * 1e-6 + np.maximum(
        moved, flops / (hardware.peak_fp32_tflops * 1e12)
    )


def copies_seconds(traffic: Float, flops: Float, hardware: Hardware) -> Float:
    """Seconds of kernels that copy rows by index, to experts and back.

    `traffic` in bytes counts the row that is read for each copy that is written.
    """
    if hardware.experts is None:
        return memory_seconds(traffic, flops, hardware)
    moved = traffic / (hardware.memory_bandwidth_gb_s * 1e9 * hardware.experts.copy_fraction)
    return hardware.kernel_launch_us * 1e-6 + moved


def routing_seconds(choices: Float, hardware: Hardware) -> Float:
    """Seconds of kernels that sort tokens by expert; `choices`: tokens times top-k."""
    if hardware.experts is None:
        return np.zeros_like(choices)
    return hardware.experts.routing_us * 1e-6 + hardware.experts.routing_ns * 1e-9 * choices


def _expert_copies(kernels: Kernels, timing: Timing, hardware: Hardware) -> Float:
    """Copies of tokens to experts and back; forward copies include the sorting by expert."""
    size = kernels.extents
    copies = size["e"] * size["r"]
    if timing is Timing.FROM_EXPERTS:
        return copies_seconds(kernels.traffic, copies, hardware)
    moved = np.maximum(kernels.traffic, 2 * copies * size["m"] * float(BYTES[kernels.dtype]))
    sorting = np.where(kernels.backward, 0, routing_seconds(copies, hardware))
    return copies_seconds(moved, copies, hardware) + sorting


FORWARD_RECURRENCE, BACKWARD_RECURRENCE = 1.53, 0.885
"""Speed of the kernels of a recurrence in either pass, over that of both (`recurrence_tflops`).

Mamba-2's forward scan reaches 65.5 TFLOP/s on B200, where whole steps give 42.8
(`benchmarks/fit_recurrence.py`); the ratio of one GPU stands for all."""


def _chunked(kernels: Kernels, hardware: Hardware) -> Float:
    """A chunked recurrence at the speed that the hardware reaches in such kernels.

    Where none has been measured: as one product of equal FLOPs per chunk and head. A step of decode
    has no chunks: it moves states.
    """
    size, flops, traffic = kernels.extents, kernels.flops, kernels.traffic
    states = memory_seconds(traffic, flops, hardware)
    chunk = size.get("chunk")
    if chunk is None or not chunk.any():
        return states
    if hardware.recurrence_tflops is not None:
        moved = memory_seconds(traffic, np.zeros_like(flops), hardware)
        of_pass = np.where(kernels.backward, BACKWARD_RECURRENCE, FORWARD_RECURRENCE)
        rate = hardware.recurrence_tflops * 1e12 * of_pass
        seconds = np.maximum(moved, flops / rate)
    else:
        rows = np.maximum(chunk, 1)
        batch = np.ceil(size["s"] / rows) * size["b"] * size["g"] * size["h"]
        k = flops / (2 * rows * size["p"] * batch)
        hardware = hardware.model_copy(update={"experts": None})  # these are not grouped products
        seconds = gemm_seconds(
            batch, rows, size["p"], k, traffic=traffic, dtype=kernels.dtype, hardware=hardware
        )
    return np.where(chunk > 0, seconds, states)
