"""Rules of inference runs."""

from __future__ import annotations

import math

from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.run import lengths
from stagewright.run.requests import LENGTHS, groups, loads, prefixed
from stagewright.run.rule import MOST_FLOPS, Refuse, apply
from stagewright.run.settings import Run

MOST_CACHE = 2**60
"""Numbers of a rank's cache."""

MODELS = (
    Refuse(
        lambda run, model: model.tower,
        "{model.name}: images before the text are there in training only; use mode=train, or serve "
        "a preset of its language model",
    ),
    Refuse(
        lambda run, model: model.encoder,
        "{model.name} is an encoder, it generates nothing; use mode=train",
    ),
)
"""Models that are not served."""

NO_SOURCE = (
    Refuse(
        lambda run, model: run.source_length is not None,
        "source_length={run.source_length} is of an encoder and a decoder, but {model.name} has no "
        "encoder; use prompt_length or context_length",
    ),
)

SOURCE = (
    Refuse(
        lambda run, model: run.prefill is not None,
        "prefill sends what a decoder caches of its own, but that of {model.name} caches what its "
        "encoder makes, too; drop it",
    ),
    Refuse(
        lambda run, model: run.mode == "prefill" and prefixed(run),
        "a prefill step of {model.name} begins with its encoder: nothing is in the cache before; "
        "use no context_length, or mode=decode",
    ),
    Refuse(
        lambda run, model: run.mode == "decode" and run.prompt_length is not None,
        "a decode step of {model.name} runs no encoder, which a new request's prompt needs; drop "
        "prompt_length, or use mode=prefill",
    ),
    Refuse(
        lambda run, model: run.mode == "decode" and run.pp > 1,
        "pp={run.pp}: stages of {model.name} with layers of its encoder have nothing to do in a "
        "decode step; use pp=1",
    ),
    Refuse(
        lambda run, model: max(run.cp, run.dcp or 1) > 1,
        "cp={run.cp} and dcp={run.dcp}: sources of {model.name}, and caches of them, are not split "
        "by tokens; use 1",
    ),
)
"""The encoder sees the source of each request in a step of its own."""

STATES = (
    Refuse(
        lambda run, model: run.prefill is not None,
        "prefill sends keys and values, but layers of {model.name} keep states; drop it",
    ),
    Refuse(
        lambda run, model: (
            run.mode == "decode" and any(group.new_tokens != 1 for group in groups(run))
        ),
        "a decode step of {model.name}, whose layers carry a state, has one new token of each "
        "request; use no prompt_length, num_speculative_tokens or new_tokens, or mode=prefill",
    ),
)
"""States go on token by token: a decode step has one of each request."""

COMPRESSED_KEYS = (
    Refuse(
        lambda run, model: run.prefill is not None,
        "prefill sends keys and values of single tokens, but {model.name} keeps compressed keys "
        "and states of unfinished ones; drop it",
    ),
    Refuse(
        lambda run, model: run.cp > 1,
        "cp={run.cp} splits prompts, but a compressed key of {model.name} is made of neighbouring "
        "tokens; use cp=1",
    ),
)
"""Attention to a window and to keys of several tokens."""

STORAGE = (
    Refuse(
        lambda run, model: run.num_redundant_experts and run.expert_load is not None,
        "num_redundant_experts={run.num_redundant_experts} evens out what expert_load says; drop "
        "either",
    ),
    Refuse(
        lambda run, model: run.num_redundant_experts and not model.num_experts,
        "{model.name} is a dense model; drop num_redundant_experts={run.num_redundant_experts}",
    ),
    Refuse(
        lambda run, model: run.num_redundant_experts > model.num_experts,
        "num_redundant_experts={run.num_redundant_experts} is more than the {model.num_experts} "
        "experts of {model.name}; use at most as many",
    ),
    Refuse(
        lambda run, model: run.precision not in ("bf16", "fp32"),
        "precision={run.precision} is a recipe of training; use bf16 or fp32, and a "
        "weight_precision such as fp8",
    ),
    Refuse(
        lambda run, model: run.precision == "fp32" and run.weight_precision is not None,
        "weight_precision={run.weight_precision} needs precision=bf16, got fp32; drop either",
    ),
)

CONTEXT = (
    Refuse(
        lambda run, model: (run.dcp or 1) > run.cp and model.index_topk,
        "dcp={run.dcp} spreads the tokens of a request over ranks, but the indexer of {model.name} "
        "chooses among all of them; drop it",
    ),
    Refuse(
        lambda run, model: run.cp > 1 and not model.attends,
        "cp={run.cp} splits keys and values by tokens, layers of {model.name} keep none; use tp or "
        "dp",
    ),
    Refuse(
        lambda run, model: (run.dcp or 1) > run.cp and not model.sees_all,
        "dcp={run.dcp} splits what layers keep of all tokens, but those of {model.name} keep only "
        "windows, chunks or states, and each rank all of these; drop it",
    ),
    Refuse(
        lambda run, model: (run.dcp or 1) > 1 and (run.dcp or 1) % run.cp,
        "dcp={run.dcp} is no multiple of cp={run.cp}: ranks of cp share the cache of a request "
        "before those of tp do; use dcp=1, or a multiple",
    ),
)
"""Ranks that share the tokens of a request, and the cache of them."""

SPLIT_PROMPTS = (
    Refuse(
        lambda run, model: run.mode == "decode" and run.prompt_length is not None,
        "ranks of cp={run.cp} decode the same tokens, and would share those of a prompt; drop "
        "prompt_length, or use cp=1 and dcp",
    ),
    Refuse(
        lambda run, model: run.mode == "prefill" and model.state_space,
        "cp={run.cp} splits prompts, but layers of {model.name} carry a state along them; use cp=1",
    ),
    Refuse(
        lambda run, model: run.mode == "prefill" and _shortest(run) < 2 * run.cp,
        "cp={run.cp} splits a prompt into {parts} parts, but a request has {shortest} new tokens; "
        "use longer ones, or cp=1",
        lambda run, model: {"parts": 2 * run.cp, "shortest": _shortest(run)},
    ),
)
"""With cp above 1."""

EXCLUSIONS = (
    Refuse(
        lambda run, model: (
            run.prefill is not None and (run.mode != "decode" or run.prompt_length is not None)
        ),
        "prefill names the ranks that compute what decode has in its cache, got {got}; drop either",
        lambda run, model: {
            "got": "a prompt_length" if run.mode == "decode" else f"mode={run.mode}"
        },
    ),
    Refuse(
        lambda run, model: run.mode == "prefill" and run.num_speculative_tokens,
        "num_speculative_tokens={run.num_speculative_tokens} is about decode, got mode=prefill; "
        "drop it",
    ),
    Refuse(
        lambda run, model: run.kv_cache == "contiguous" and run.kv_block_size != 16,
        "kv_block_size={run.kv_block_size} is of a paged cache, got kv_cache=contiguous; drop "
        "either",
    ),
    Refuse(
        lambda run, model: run.context_length is not None and _all_give(run, "context_length"),
        "context_length={run.context_length}, but all requests have theirs; drop either",
    ),
    Refuse(
        lambda run, model: (
            run.mode == "prefill" and run.prompt_length is not None and _all_give(run, "new_tokens")
        ),
        "prompt_length={run.prompt_length}, but all requests have new_tokens; drop either",
    ),
)
"""Settings of inference that exclude each other."""


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError if a resolved run cannot be served."""
    apply(SOURCE if model.encoder_num_layers else NO_SOURCE, run, model)
    if model.modules:
        names = ", ".join(m.name for m in model.modules)
        raise UserError(
            f"modules ({names}) are there in training only: they compute all tokens of a sequence, "
            "and nothing says what they keep of them in a cache; use mode=train, or a preset or "
            "config.json of the model"
        )
    if run.mla is not None and not model.kv_lora_rank:
        raise UserError(
            f"mla={run.mla} is a form of latent attention, {model.name} has none; drop it"
        )
    if run.mla == "naive" and model.index_topk:
        raise UserError(
            f"mla=naive expands the latents of all tokens, but {model.name} attends to those that "
            "an indexer chooses; use absorb, or drop it"
        )
    if model.state_space:
        apply(STATES, run, model)
    if model.o_groups:
        apply(COMPRESSED_KEYS, run, model)
    apply(STORAGE, run, model)
    _check_context(run, model)
    apply(EXCLUSIONS, run, model)
    _check_requests(run, model)


def _shortest(run: Run) -> int:
    return min(group.new_tokens or 0 for group in groups(run))


def _all_give(run: Run, length: str) -> bool:
    """True if every row of the requests has this length."""
    assert length in LENGTHS
    rows = run.requests
    if not rows or isinstance(rows, str):
        return False
    return all(getattr(group, length) is not None for group in rows)


def _check_context(run: Run, model: ModelConfig) -> None:
    apply(CONTEXT, run, model)
    shared = run.dcp or 1
    heads = 1 if model.kv_lora_rank else model.num_query_groups
    copies = run.tp // math.gcd(run.tp, heads)
    within = shared // run.cp
    if shared > 1 and copies % within:
        what = "latents" if model.kv_lora_rank else f"each of {heads} key-value heads"
        fit = ", ".join(str(run.cp * n) for n in range(1, copies + 1) if copies % n == 0)
        raise UserError(
            f"dcp={run.dcp} wants {within} ranks of tp to share a cache, but with tp={run.tp} "
            f"there are {copies} copies of {what} of {model.name}; use {fit}"
        )
    if max(run.cp, shared) > 1 and run.prefill is not None:
        raise UserError(
            f"prefill sends a cache that no ranks share, got cp={run.cp} and dcp={run.dcp}; drop "
            "either"
        )
    if run.cp > 1:
        apply(SPLIT_PROMPTS, run, model)


def _check_requests(run: Run, model: ModelConfig) -> None:
    requests = groups(run)
    decoding = lengths.count_requests(requests)
    if run.mode == "decode" and run.prompt_length is not None:
        decoding -= run.dp * run.microbatches
    if decoding < run.dp:
        raise UserError(
            f"{decoding} requests leave some of the dp={run.dp} ranks without one; "
            "use more requests, or a smaller dp"
        )
    longest = max(lengths.length(group) for group in requests)
    if model.position == "learned" and longest > model.max_position_embeddings:
        raise UserError(
            f"a request has {longest} tokens, context and new ones, more than the "
            f"{model.max_position_embeddings} learned positions of {model.name}; use fewer"
        )
    if run.max_model_len is not None and longest > run.max_model_len:
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
    if most["L"] * wide > MOST_CACHE:
        raise UserError(f"a cache of {most['L']} tokens is beyond any memory; use fewer requests")
