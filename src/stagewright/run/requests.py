"""Requests of an inference step, and the cache that holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.numbers import plural
from stagewright.run import lengths
from stagewright.run.lengths import Group, Groups
from stagewright.run.sections import Settings
from stagewright.run.sections.inference import PrefillRanks
from stagewright.run.validation import describe_error
from stagewright.stored import Stored

LEAST_MEMORY = 10**6
"""Bytes; a smaller size is a number whose unit was left out."""
MOST_MEMORY = 2**60

_BYTES = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?(?:e\+?[0-9]{1,2})?) ?([kMGTP]i?B|B)?")


STORED: Mapping[str, Stored | None] = {
    "bf16": None,
    "fp8": Stored("fp8", 32, 128, 128, "fp8"),  # DeepSeek-V3 (arXiv 2412.19437, section 3.3)
    "int4": Stored("int4", 16, 1, 128),  # GPTQ, AWQ: symmetric, scales in fp16
    "fp4": Stored("fp4", 8, 1, 16),  # NVFP4 for weights only (NVIDIA), scales in fp8
    "nvfp4": Stored("fp4", 8, 1, 16, "fp4"),  # inputs, too
    "mxfp4": Stored("fp4", 8, 1, 32),  # OCP MX 1.0: an exponent of 8 bits
}
"""Storage of the matrices of layers by `weight_precision`; None: in 16 bits."""

FROZEN: Mapping[str, Stored] = {
    "fp8": Stored("fp8", 32),
    "nf4": Stored("fp4", 32, 1, 64),
    "nf4-double": Stored("fp4", Fraction(65, 8), 1, 64),
}
"""Storage of frozen matrices by `quantize_base`: in fp8 with a scale for each matrix. NF4 of
bitsandbytes has an fp32 maximum for 64 values, which double quantization holds in 8 bits, with an
fp32 scale for 256 of these maxima (QLoRA, arXiv 2305.14314, section 3)."""


def read_bytes(value: str | int, setting: str = "device_memory") -> int:
    """Bytes from a number or from text such as `80e9`, `80GB` or `80 GiB`.

    >>> read_bytes("80e9"), read_bytes("80 GiB")
    (80000000000, 85899345920)
    >>> read_bytes("80")
    Traceback (most recent call last):
    stagewright.errors.UserError: device_memory is '80', which is 80 bytes; wanted a size with \
its unit, such as 80GB or 80GiB
    """
    match = _BYTES.fullmatch(str(value))
    if match is None:
        raise UserError(f"{setting} is {value!r}, wanted bytes such as 80e9, 80GB or 80GiB")
    number, unit = match.groups()
    power = "_kMGTP".index(unit[0]) if unit and unit != "B" else 0
    size = float(number) * (1024 if unit and "i" in unit else 1000) ** power
    if size < LEAST_MEMORY:
        unit, count = f"{float(number) or 80:g}GB", plural(round(size), "byte", "bytes")
        raise UserError(
            f"{setting} is {value!r}, which is {count}; wanted a size with its unit, such as "
            f"{unit} or {unit[:-1]}iB"
        )
    if size > MOST_MEMORY:
        raise UserError(f"{setting} is {value!r}, wanted at most {MOST_MEMORY} bytes")
    return int(size)


def allowance_of(run: Settings) -> int:
    """Bytes of `memory_allowance`, which every rank holds besides tensors; 0 where not set."""
    if run.memory_allowance is None:
        return 0
    return read_bytes(run.memory_allowance, "memory_allowance")


def defaults(run: Settings, model: ModelConfig, longest: int) -> dict[str, Any]:
    """Defaults of settings that are None; `longest` is the model's longest sequence, capped.

    No request that follows from a default is longer than `run.max_model_len`.
    """
    values: dict[str, Any] = {}
    rows = _rows(run)
    most = min(longest, run.max_model_len or longest)
    if rows is None or any(g.context_length is None for g in rows):
        new = 1 + run.num_speculative_tokens
        values["context_length"] = 0 if run.mode == "prefill" else max(0, most - new)
    if run.mode == "prefill" and (rows is None or any(g.new_tokens is None for g in rows)):
        cached = (run.context_length or 0) if run.max_model_len else 0
        values["prompt_length"] = 1 if model.encoder_num_layers else max(1, most - cached)
    if model.encoder_num_layers:
        values["source_length"] = longest
    if model.kv_lora_rank:  # as vLLM's backends do (vllm/v1/attention/backends/mla/common.py)
        # Tokens that an indexer chooses are not expanded (mla/flashmla_sparse.py).
        expands = run.mode == "prefill" and not model.index_topk
        values["mla"] = "naive" if expands else "absorb"
    if run.kv_cache == "contiguous":
        given = {"context_length": run.context_length, "prompt_length": run.prompt_length}
        given = values | {name: value for name, value in given.items() if value is not None}
        filled = _groups(run, given.get("context_length"), given.get("prompt_length"))
        values["max_model_len"] = max(lengths.length(g) for g in filled)
    return values


def _rows(run: Settings) -> Groups | None:
    return lengths.read(run.requests) if isinstance(run.requests, str) else run.requests


def groups(run: Settings) -> Groups:
    """The requests of a step of a resolved run."""
    return _groups(run, run.context_length, run.prompt_length)


def _groups(run: Settings, context_length: int | None, prompt_length: int | None) -> Groups:
    new = prompt_length if run.mode == "prefill" else 1 + run.num_speculative_tokens
    default = Group(run.batch_size or run.dp * run.pp, context_length, new)
    rows = _rows(run)
    if rows is None:
        rows = (default,)
    elif run.batch_size is not None:
        rows = lengths.apportion(rows, run.batch_size)
    filled = [
        replace(g, **{k: getattr(default, k) for k in LENGTHS if getattr(g, k) is None})
        for g in rows
    ]
    if run.mode == "decode" and prompt_length is not None:
        filled.append(Group(run.dp * microbatches(run), 0, prompt_length))
    return lengths.merge_groups(filled, "requests")


LENGTHS = ("context_length", "new_tokens")
"""Lengths of a group that the run gives where the group does not."""


def microbatches(run: Settings) -> int:
    """Batches in the pipeline at once: one per pipeline rank, if there are enough requests.

    As in vLLM's engine, whose batch queue is as long as the pipeline.
    """
    if run.batch_size is None and run.requests is not None:
        requests = lengths.count_requests(_rows(run) or ())
    else:
        requests = run.batch_size or run.dp * run.pp
    return max(1, min(run.pp, requests // run.dp))


class Loads(NamedTuple):
    """Sizes of the ranks' work in each microbatch: the distinct ones, and which each rank has."""

    sizes: tuple[dict[str, int], ...]
    of: Int
    """Index into `sizes` by [rank of dp and stripe of the cache, microbatch]."""


def loads(run: Settings, model: ModelConfig) -> Loads:
    """The sizes of a step of a resolved run that differ between ranks of dp and microbatches.

    S new tokens, O logits, L places in the cache and I blocks of these, and what attention depends
    on besides; `_local` those of layers with a window, `_chunked` with chunks, `_striped` those of
    one rank where several share the tokens of a request. Requests are dealt in turn to the ranks of
    dp, and there to the microbatches. `routed` tokens of all ranks go to their experts together.
    """
    requests = groups(run)
    places = run.dp * microbatches(run)

    def sums(cache: lengths.Cache, reach: Reach = lengths.ALL, stripe: int = 0) -> Int:
        values = lengths.attention_sums(
            requests, cache, reach, _verified(run), stripe=stripe, multiple=padding(run)
        )
        return lengths.deal(requests, values, places)

    whole = cache_of(run)
    tables = [sums(whole, reach) for reach in model.reaches]
    names = [SIZES[c] + reach.kind for reach in model.reaches for c in lengths.COLUMNS]
    if run.source_length is not None:
        of_source = lengths.sources(requests, run.source_length, whole)
        tables.append(lengths.deal(requests, of_source, places))
        names += SOURCES
    if model.num_experts:
        tokens = tables[0][:, lengths.COLUMNS.index("tokens")].reshape(-1, run.dp)
        together = tokens.sum(axis=1, keepdims=True) + np.zeros_like(tokens)
        tables.append(together.reshape(-1, 1))
        names.append("routed")
    table = np.concatenate(tables, axis=1)[None]
    shared = stripes(run, model)
    if shared > 1:
        cache = whole._replace(stripes=shared)
        chosen = striped_columns(run)
        at = [lengths.COLUMNS.index(c) for c in chosen]
        striped = np.stack([sums(cache, stripe=n)[:, at] for n in range(shared)])
        if "prefix" in chosen:  # one row where only others have some: the program is the same
            striped[..., chosen.index("prefix")] |= striped[..., chosen.index("prefix")] == 0
        repeated = np.broadcast_to(table, (shared, *table.shape[1:]))
        table = np.concatenate([repeated, striped], axis=2)
        names += [f"{SIZES[c]}_striped" for c in chosen]
    # A step that completes no compressed key has one that nobody reads: the program is the same.
    completed = [i for i, name in enumerate(names) if name.startswith("stored_by")]
    table = table.copy()
    table[..., completed] = np.maximum(table[..., completed], 1)
    rows, of = np.unique(table.reshape(-1, table.shape[2]), axis=0, return_inverse=True)
    sizes = tuple(dict(zip(names, map(int, row), strict=True)) for row in rows)
    # [stripe, microbatch, rank of dp]
    of = of.reshape(shared, -1, run.dp).transpose(2, 0, 1)
    return Loads(sizes, of.reshape(run.dp * shared, -1))


def stripes(run: Settings, model: ModelConfig) -> int:
    """Ranks that share a request's cache; caches of windows, chunks and states are unshared."""
    return run.dcp or 1 if model.sees_all and run.mode != "train" else 1


def striped_columns(run: Settings) -> tuple[str, ...]:
    """Columns of `lengths.COLUMNS` that attention over a striped cache depends on.

    New tokens alone are not read from the cache.
    """
    of_all = ("slots", "blocks", "stored")
    if not prefixed(run):
        return of_all
    return (*of_all, "prefix") if run.mla == "naive" else (*of_all, "pairs", "keys")


def _verified(run: Settings) -> int:
    """New tokens of a request that all have logits, if the request has no more of them."""
    return 1 + run.num_speculative_tokens if run.mode == "decode" else 1


def padding(run: Settings) -> int:
    """New tokens of a request are padded to a multiple of this.

    A prompt is cut into 2 x cp parts, and each rank of cp has an early and a late part, so that all
    ranks attend to equally many keys (vLLM's DualChunkSwap, as in Llama 3's training, arXiv
    2407.21783).
    """
    return 2 * run.cp if run.mode == "prefill" and run.cp > 1 else 1


def prefixed(run: Settings) -> bool:
    """True if requests may have tokens in the cache before the step."""
    rows = _rows(run) or (Group(),)
    known = [run.context_length if g.context_length is None else g.context_length for g in rows]
    return run.mode == "decode" or any(known)


SIZES = dict(
    zip(
        lengths.COLUMNS,
        ("requests", "S", "pairs", "keys", "L", "I", "O", "stored", "prefix"),
        strict=True,
    )
)
"""Dims of a graph by the column that gives their size; `requests`, `S` and `O` know no window."""


SOURCES = ("Source", "pairs_source", "pairs_cross", "L_source", "I_source")
"""Dims of a graph by the columns of `lengths.SOURCE`."""


def cache_of(run: Settings) -> lengths.Cache:
    """The KV cache of a resolved run."""
    paged = run.kv_cache == "paged"
    return lengths.Cache(run.kv_block_size if paged else 0, 0 if paged else run.max_model_len or 0)


# ---- the setting `prefill`: a second group of ranks, as text or as settings by name --------------


def read_prefill(value: object) -> object:
    """A mapping as ranks; text, ranks and None as they are."""
    if not isinstance(value, Mapping):
        return value
    try:
        return TypeAdapter(PrefillRanks).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [of.name for of in fields(PrefillRanks)]
        raise UserError(f"prefill: {describe_error(first, names)}") from None


def ranks_of_text(text: str) -> PrefillRanks:
    """Ranks from text.

    >>> ranks_of_text("tp=4,pp=2").world_size
    8
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, number in pairs:
        number = number.strip()
        if not (equals and number.isdecimal() and number.isascii() and len(number) < 12):
            raise UserError(
                f"prefill: {shown(name + equals + number)} is no setting with a number; wanted "
                "such as tp=4,pp=2"
            )
    settings: dict[str, Any] = {name.strip(): int(number) for name, _, number in pairs}
    ranks = read_prefill(settings)
    assert isinstance(ranks, PrefillRanks)
    return ranks
