"""What an inference run asks for: the requests of its step, what holds them, what cannot be."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.run import lengths as batch
from stagewright.run.lengths import Group, Groups

if TYPE_CHECKING:
    from stagewright.run.settings import Run

MOST_MEMORY = 2**60
MOST_FLOPS = 2**56
"""Of one kernel, as in training: sums over a step then stay within 64 bits."""

TRAINING = {
    "framework": "its habits are those of training",
    "params_dtype": "use weight_precision",
    "grad_reduce_dtype": "there are no gradients",
    "operators": "there is no autograd",
    "repeat_kv": "keys are cached as they are",
    "set_grads_to_none": "there are no gradients",
    "pipeline_caches": "there is no backward pass",
    "optimizer_step_tensors": "there is no optimizer",
    "recompute_early_stop": "there is no backward pass",
    "fsdp_root_unit": "weights are not sharded over dp",
    "fsdp_reduce": "there are no gradients",
    "fsdp_shard_dim": "weights are not sharded over dp",
    "ddp_bucket_cap_mb": "there are no gradients",
    "loss_parallel": "there is no loss",
    "input_grad_reduce": "there are no gradients",
    "whole_embedding_grad": "there are no gradients",
    "sequence_parallel_grads": "there are no gradients",
    "clip_grad_norm": "there are no gradients",
    "cp_grad_comm_type": "there are no gradients",
    "cp_comm_type": "keys and values of new tokens are gathered",
    "zero": "weights are not sharded over dp",
    "dp_shard": "weights are not sharded over dp",
    "reshard_after_forward": "weights are not sharded over dp",
    "seq_length": "use prompt_length and context_length",
    "decoder_seq_length": "use prompt_length and context_length",
    "micro_batch_size": "use batch_size",
    "global_batch_size": "use batch_size",
    "schedule": "a pipeline runs its microbatches in turn",
    "vpp": "a pipeline rank holds one stage",
    "recompute": "there is no backward pass",
    "moe_token_dispatcher_type": "copies go to their experts",
    "moe_apply_probs": "gates weigh results where the tokens are",
    "moe_expert_capacity_factor": "no token is dropped",
    "moe_aux_loss_coeff": "there is no loss",
    "moe_z_loss_coeff": "there is no loss",
    "moe_router_enable_expert_bias": "it is part of the model",
    "expert_load": "all experts get as many tokens",
    "mtp_num_layers": "drafts are num_speculative_tokens",
    "mtp_loss_scaling_factor": "there is no loss",
    "recompute_modules": "there is no backward pass",
    "recompute_num_layers": "there is no backward pass",
    "optimizer": "there is no optimizer",
    "flash_attention": "attention over a cache is one kernel",
    "dropout": "there is none",
    "clip_grad": "there are no gradients",
    "grad_reduce": "there are no gradients",
    "activation_gather": "there is no backward pass",
    "bucket": "there are no gradients",
}
"""Settings that mean nothing in inference, and why."""

INFERENCE = (
    *("batch_size", "prompt_length", "context_length", "requests", "num_speculative_tokens"),
    *("kv_cache_dtype", "kv_cache", "kv_block_size", "max_model_len", "device_memory"),
    *("prefill", "weight_precision", "mla", "num_redundant_experts", "dcp", "source_length"),
)
"""Settings that mean nothing in training."""

_BYTES = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?(?:e\+?[0-9]{1,2})?) ?([kMGTP]i?B|B)?")


STORED = {
    "bf16": "",
    "fp8": "fp8_b128",
    "int4": "int4_g128",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
}
"""What weights are stored as, by `weight_precision`; `ir.BYTES` has their groups and scales."""


def read_requests(value: Any) -> Any:
    """The setting `requests`: a path as it is, rows as groups."""
    return batch.given(value) if isinstance(value, list | tuple) else value  # pyright: ignore


def read_bytes(value: str | int, setting: str = "device_memory") -> int:
    """Bytes from a number or from text such as `80e9`, `80GB` or `80 GiB`.

    >>> read_bytes("80e9"), read_bytes("80 GiB")
    (80000000000, 85899345920)
    """
    found = _BYTES.fullmatch(str(value))
    if found is None:
        raise UserError(f"{setting} is {value!r}, wanted bytes such as 80e9, 80GB or 80GiB")
    number, unit = found.groups()
    power = "_kMGTP".index(unit[0]) if unit and unit != "B" else 0
    size = float(number) * (1024 if unit and "i" in unit else 1000) ** power
    if not 1 <= size <= MOST_MEMORY:
        raise UserError(f"{setting} is {value!r}, wanted from 1 byte to {MOST_MEMORY}")
    return int(size)


def defaults(
    run: Run, longest: int, *, latent: bool = False, sources: bool = False
) -> dict[str, Any]:
    """What settings that are not given become, where the longest sequence is `longest`.

    `latent`: the model's attention is. `sources`: requests have tokens of an encoder.
    The rows of a file of requests take the place of its path.
    """
    found: dict[str, Any] = {}
    rows = _rows(run)
    if rows is None or any(g.context_length is None for g in rows):
        new = 1 + run.num_speculative_tokens
        found["context_length"] = 0 if run.mode == "prefill" else max(0, longest - new)
    if run.mode == "prefill" and (rows is None or any(g.new_tokens is None for g in rows)):
        found["prompt_length"] = 1 if sources else longest
    if sources:
        found["source_length"] = longest
    if latent:  # as vLLM's backends do (vllm/v1/attention/backends/mla/common.py)
        found["mla"] = "naive" if run.mode == "prefill" else "absorb"
    if run.kv_cache == "contiguous":
        update = {k: v for k, v in found.items() if getattr(run, k) is None}
        whole = run.model_copy(update=update)
        found["max_model_len"] = max(batch.length(g) for g in groups(whole))
    return found


def _rows(run: Run) -> Groups | None:
    return batch.read(run.requests) if isinstance(run.requests, str) else run.requests


def groups(run: Run) -> Groups:
    """The requests of a step of a resolved run."""
    new = run.prompt_length if run.mode == "prefill" else 1 + run.num_speculative_tokens
    every = Group(run.batch_size or run.dp * run.pp, run.context_length, new)
    rows = _rows(run)
    if rows is None:
        rows = (every,)
    elif run.batch_size is not None:
        rows = batch.apportioned(rows, run.batch_size)
    found = [
        replace(g, **{k: getattr(every, k) for k in _LENGTHS if getattr(g, k) is None})
        for g in rows
    ]
    if run.mode == "decode" and run.prompt_length is not None:
        found.append(Group(run.dp * microbatches(run), 0, run.prompt_length))
    return batch.merged(found, "requests")


_LENGTHS = ("context_length", "new_tokens")


def microbatches(run: Run) -> int:
    """A pipeline works on as many batches at once as it has ranks, if there are so many requests.

    As vLLM's engine does, whose batch queue is as long as the pipeline.
    """
    if run.batch_size is None and run.requests is not None:
        requests = batch.total(_rows(run) or ())
    else:
        requests = run.batch_size or run.dp * run.pp
    return max(1, min(run.pp, requests // run.dp))


class Loads(NamedTuple):
    """What ranks compute in each microbatch: distinct sizes, and who has which."""

    sizes: tuple[dict[str, int], ...]
    of: Int  # [rank of dp and place among those that share a cache, microbatch]


def loads(run: Run, model: ModelConfig) -> Loads:
    """The sizes of a step of a resolved run that differ between ranks of dp and microbatches.

    S new tokens, O logits, L places in the cache and I blocks of these, and what attention depends
    on besides; `_local` those of layers with a window, `_chunked` with chunks, `_striped` those of
    one rank where several share the tokens of a request. Requests are dealt in turn to the ranks of
    dp, and there to the microbatches. `routed` tokens of all ranks go to their experts together.
    """
    requests = groups(run)
    places = run.dp * microbatches(run)

    def sums(cache: batch.Cache, reach: batch.Reach = batch.ALL, stripe: int = 0) -> batch.Int:
        each = batch.each(
            requests, cache, reach, _verified(run), stripe=stripe, multiple=padding(run)
        )
        return batch.dealt(requests, each, places)

    whole = cache_of(run)
    tables = [sums(whole, reach) for reach in model.reaches]
    names = [SIZES[c] + reach.kind for reach in model.reaches for c in batch.COLUMNS]
    if run.source_length is not None:
        of_source = batch.sources(requests, run.source_length, whole)
        tables.append(batch.dealt(requests, of_source, places))
        names += SOURCES
    if model.num_experts:
        tokens = tables[0][:, batch.COLUMNS.index("tokens")].reshape(-1, run.dp)
        together = tokens.sum(axis=1, keepdims=True) + np.zeros_like(tokens)
        tables.append(together.reshape(-1, 1))
        names.append("routed")
    each = np.concatenate(tables, axis=1)[None]
    shared = stripes(run, model)
    if shared > 1:
        cache = whole._replace(stripes=shared)
        asked = striped_columns(run)
        at = [batch.COLUMNS.index(c) for c in asked]
        striped = np.stack([sums(cache, stripe=n)[:, at] for n in range(shared)])
        if "prefix" in asked:  # one row where only others have some: the program is the same
            striped[..., asked.index("prefix")] |= striped[..., asked.index("prefix")] == 0
        each = np.concatenate([np.broadcast_to(each, (shared, *each.shape[1:])), striped], axis=2)
        names += [f"{SIZES[c]}_striped" for c in asked]
    rows, of = np.unique(each.reshape(-1, each.shape[2]), axis=0, return_inverse=True)
    sizes = tuple(dict(zip(names, map(int, row), strict=True)) for row in rows)
    # [stripe, microbatch, rank of dp]
    of = of.reshape(shared, -1, run.dp).transpose(2, 0, 1)
    return Loads(sizes, of.reshape(run.dp * shared, -1))


def stripes(run: Run, model: ModelConfig) -> int:
    """Ranks that share the cache of a request; those of windows, chunks and states none share."""
    return run.dcp or 1 if model.sees_all and run.mode != "train" else 1


def striped_columns(run: Run) -> tuple[str, ...]:
    """What attention over shared caches depends on: new tokens alone are not read from there."""
    of_all = ("slots", "blocks", "stored")
    if not prefixed(run):
        return of_all
    return (*of_all, "prefix") if run.mla == "naive" else (*of_all, "pairs", "keys")


def _verified(run: Run) -> int:
    """Tokens of a request that are all predicted from, where it has no more."""
    return 1 + run.num_speculative_tokens if run.mode == "decode" else 1


def padding(run: Run) -> int:
    """What new tokens of a request are padded to a multiple of.

    A prompt is in twice as many parts as ranks of cp, of which a rank has an early and a late one,
    so that all see as many keys (vLLM's DualChunkSwap, as in Llama 3's training, arXiv 2407.21783).
    """
    return 2 * run.cp if run.mode == "prefill" and run.cp > 1 else 1


def prefixed(run: Run) -> bool:
    """Whether requests may have tokens in the cache before the step, however many there are."""
    rows = _rows(run) or (Group(),)
    known = [run.context_length if g.context_length is None else g.context_length for g in rows]
    return run.mode == "decode" or any(known)


SIZES = dict(
    zip(
        batch.COLUMNS,
        ("requests", "S", "pairs", "keys", "L", "I", "O", "stored", "prefix"),
        strict=True,
    )
)
"""The dims and numbers of a graph that a batch decides; `requests`, `S` and `O` know no window."""


SOURCES = ("Source", "pairs_source", "pairs_cross", "L_source", "I_source")
"""The same of `batch.SOURCE`."""


def cache_of(run: Run) -> batch.Cache:
    """How a resolved run keeps tokens."""
    paged = run.kv_cache == "paged"
    return batch.Cache(run.kv_block_size if paged else 0, run.max_model_len or 0)


# ---- what cannot be done -------------------------------------------------------------------------


def check_mode(run: Run) -> None:
    """Refuse settings of training in inference, and those of inference in training."""
    for name, why in TRAINING.items() if run.mode != "train" else ():
        if getattr(run, name) != type(run).model_fields[name].default:
            raise UserError(f"{name} is a setting of training, got mode={run.mode}: {why}; drop it")
    for name in INFERENCE if run.mode == "train" else ():
        if getattr(run, name) != type(run).model_fields[name].default:
            raise UserError(
                f"{name} is a setting of inference, got mode=train; "
                "set mode to prefill or decode, or drop it"
            )


def check_model(model: ModelConfig) -> None:
    """Raise a UserError if a model is none that is served."""
    if model.tower:
        raise UserError(
            f"{model.name}: images before the text are there in training only; use mode=train, or "
            "serve a preset of its language model"
        )
    if model.encoder or model.recommendation:
        what = "an encoder" if model.encoder else "no language model"
        raise UserError(f"{model.name} is {what}, it generates nothing; use mode=train")


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError if a resolved run cannot be served."""
    _check_source(run, model)
    if model.modules:
        names = ", ".join(m.name for m in model.modules)
        raise UserError(f"modules ({names}) are there in training only; drop them, or mode")
    if run.mla is not None and not model.kv_lora_rank:
        raise UserError(
            f"mla={run.mla} is a form of latent attention, {model.name} has none; drop it"
        )
    if model.state_space:
        _check_states(run, model)
    _check_redundant(run, model)
    if run.precision == "fp8":
        raise UserError(
            "precision=fp8 is a recipe of training; use bf16 or fp32, and weight_precision=fp8"
        )
    if run.precision == "fp32" and run.weight_precision is not None:
        raise UserError(
            f"weight_precision={run.weight_precision} needs precision=bf16, got fp32; drop either"
        )
    _check_context(run, model)
    if run.sequence_parallel and run.tp == 1:
        raise UserError("sequence_parallel splits over tp, got tp=1; raise tp, or turn it off")
    if run.device_memory is not None:
        read_bytes(run.device_memory)
    _check_settings(run)
    _check_requests(run, model)


def _check_states(run: Run, model: ModelConfig) -> None:
    """States go on token by token: a decode step has one of each request."""
    if run.prefill is not None:
        raise UserError(
            f"prefill sends keys and values, but layers of {model.name} keep states; drop it"
        )
    if run.mode == "decode" and any(g.new_tokens != 1 for g in groups(run)):
        raise UserError(
            f"a decode step of {model.name}, whose layers carry a state, has one new token of each "
            "request; use no prompt_length, num_speculative_tokens or new_tokens, or mode=prefill"
        )


def _check_context(run: Run, model: ModelConfig) -> None:
    """Who shares the tokens of a request, and the cache of them."""
    shared, asked = run.dcp or 1, f"dcp={run.dcp}"
    if run.cp > 1 and not model.attends:
        raise UserError(
            f"cp={run.cp} splits keys and values by tokens, layers of {model.name} keep none; use "
            "tp or dp"
        )
    if shared > run.cp and not model.sees_all:
        raise UserError(
            f"{asked} splits what layers keep of all tokens, but those of {model.name} keep only "
            "windows, chunks or states, and each rank all of these; drop it"
        )
    if shared > 1 and shared % run.cp:
        raise UserError(
            f"{asked} is no multiple of cp={run.cp}: ranks of cp share the cache of a request "
            "before those of tp do; use dcp=1, or a multiple"
        )
    kept = 1 if model.kv_lora_rank else model.num_query_groups
    copies = run.tp // math.gcd(run.tp, kept)
    within = shared // run.cp
    if shared > 1 and copies % within:
        what = "latents" if model.kv_lora_rank else f"each of {kept} key-value heads"
        fit = ", ".join(str(run.cp * n) for n in range(1, copies + 1) if copies % n == 0)
        raise UserError(
            f"{asked} wants {within} ranks of tp to share a cache, but with tp={run.tp} there are "
            f"{copies} copies of {what} of {model.name}; use {fit}"
        )
    if max(run.cp, shared) > 1 and run.prefill is not None:
        raise UserError(
            f"prefill sends a cache that no ranks share, got cp={run.cp} and {asked}; drop either"
        )
    if run.cp == 1:
        return
    if run.mode == "decode" and run.prompt_length is not None:
        raise UserError(
            f"ranks of cp={run.cp} decode the same tokens, and would share those of a prompt; drop "
            "prompt_length, or use cp=1 and dcp"
        )
    if run.mode == "prefill" and model.state_space:
        raise UserError(
            f"cp={run.cp} splits prompts, but layers of {model.name} carry a state along them; use "
            "cp=1"
        )
    shortest = min(g.new_tokens or 0 for g in groups(run))
    if run.mode == "prefill" and shortest < 2 * run.cp:
        raise UserError(
            f"cp={run.cp} splits a prompt into {2 * run.cp} parts, but a request has {shortest} "
            "new tokens; use longer ones, or cp=1"
        )


def _check_source(run: Run, model: ModelConfig) -> None:
    """What the encoder sees of each request, in a step of its own."""
    if not model.encoder_num_layers:
        if run.source_length is not None:
            raise UserError(
                f"source_length={run.source_length} is of an encoder and a decoder, but "
                f"{model.name} has no encoder; use prompt_length or context_length"
            )
        return
    if run.prefill is not None:
        raise UserError(
            f"prefill sends what a decoder caches of its own, but that of {model.name} caches what "
            "its encoder makes, too; drop it"
        )
    if run.mode == "prefill" and prefixed(run):
        raise UserError(
            f"a prefill step of {model.name} begins with its encoder: nothing is in the cache "
            "before; use no context_length, or mode=decode"
        )
    if run.mode == "decode" and run.prompt_length is not None:
        raise UserError(
            f"a decode step of {model.name} runs no encoder, which a new request's prompt needs; "
            "drop prompt_length, or use mode=prefill"
        )
    if run.mode == "decode" and run.pp > 1:
        raise UserError(
            f"pp={run.pp}: stages of {model.name} with layers of its encoder have nothing to do in "
            "a decode step; use pp=1"
        )
    if max(run.cp, run.dcp or 1) > 1:
        raise UserError(
            f"cp={run.cp} and dcp={run.dcp}: sources of {model.name}, and caches of them, are not "
            "split by tokens; use 1"
        )


def _check_redundant(run: Run, model: ModelConfig) -> None:
    count = run.num_redundant_experts
    if count and not model.num_experts:
        raise UserError(f"{model.name} is a dense model; drop num_redundant_experts={count}")
    if count > model.num_experts:
        raise UserError(
            f"num_redundant_experts={count} is more than the {model.num_experts} experts of "
            f"{model.name}; use at most as many"
        )


def _check_settings(run: Run) -> None:
    """Settings of inference that exclude each other."""
    if run.prefill is not None and (run.mode != "decode" or run.prompt_length is not None):
        raise UserError(
            "prefill names the ranks that compute what decode has in its cache, got "
            + ("a prompt_length" if run.mode == "decode" else f"mode={run.mode}")
            + "; drop either"
        )
    if run.mode == "prefill" and run.num_speculative_tokens:
        raise UserError(
            f"num_speculative_tokens={run.num_speculative_tokens} is about decode, got "
            "mode=prefill; drop it"
        )
    if run.kv_cache == "contiguous" and run.kv_block_size != 16:
        raise UserError(
            f"kv_block_size={run.kv_block_size} is of a paged cache, got kv_cache=contiguous; "
            "drop either"
        )
    if run.kv_cache == "paged" and run.max_model_len is not None:
        raise UserError(
            f"max_model_len={run.max_model_len} is the room of a request in a contiguous cache, "
            "got kv_cache=paged, where a request takes blocks as it needs them; drop either"
        )
    rows = run.requests or ()
    own = {name: bool(rows) and all(getattr(g, name) is not None for g in rows)
           for name in _LENGTHS}  # fmt: skip
    if own["context_length"] and run.context_length is not None:
        raise UserError(
            f"context_length={run.context_length}, but all requests have theirs; drop either"
        )
    if own["new_tokens"] and run.mode == "prefill" and run.prompt_length is not None:
        raise UserError(
            f"prompt_length={run.prompt_length}, but all requests have new_tokens; drop either"
        )


def _check_requests(run: Run, model: ModelConfig) -> None:
    asked = groups(run)
    decoding = batch.total(asked)
    if run.mode == "decode" and run.prompt_length is not None:
        decoding -= run.dp * run.microbatches
    if decoding < run.dp:
        raise UserError(
            f"{decoding} requests leave some of the dp={run.dp} ranks without one; "
            "use more requests, or a smaller dp"
        )
    longest = max(batch.length(g) for g in asked)
    if model.position == "learned" and longest > model.max_position_embeddings:
        raise UserError(
            f"a request has {longest} tokens, context and new ones, more than the "
            f"{model.max_position_embeddings} learned positions of {model.name}; use fewer"
        )
    if run.kv_cache == "contiguous" and longest > (run.max_model_len or 0):
        raise UserError(
            f"max_model_len={run.max_model_len}, but a request has {longest} tokens, context and "
            "new ones; raise it"
        )
    most = {name: max(s[name] for s in loads(run, model).sizes) for name in ("S", "pairs", "L")}
    widest = max(
        model.hidden_size * max(model.vocab_size, model.ffn_hidden_size),
        model.num_attention_heads * model.kv_channels * model.hidden_size,
    )
    wide = model.num_attention_heads * max(model.kv_channels, model.kv_lora_rank)
    if max(2 * most["S"] * widest, 4 * most["pairs"] * wide) // run.tp > MOST_FLOPS:
        raise UserError(
            f"{most['S']} new tokens, of which each sees {most['pairs'] // most['S']} keys, make a "
            f"kernel of more than {MOST_FLOPS} FLOPs on one rank; use fewer or shorter requests, "
            "or raise dp or tp"
        )
    if most["L"] * wide > 2**60:
        raise UserError(f"a cache of {most['L']} tokens is beyond any memory; use fewer requests")
