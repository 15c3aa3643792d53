"""Rules of inference runs."""

from __future__ import annotations

import math

from stagewright.model.config import ModelConfig
from stagewright.run import lengths
from stagewright.run.requests import groups, loads, prefixed
from stagewright.run.rule import ALL, MOST_FLOPS, Errors, rule
from stagewright.run.settings import Run
from stagewright.run.training_rules import layers

MOST_CACHE = 2**60
"""Numbers of a rank's cache."""


@rule("the model is served")
def served_models(run: Run, model: ModelConfig) -> Errors:
    """Images and encoders are in training only."""
    if model.tower:
        yield (
            f"{model.name}: images before the text are there in training only; use mode=train, or "
            "serve a preset of its language model"
        )
    if model.encoder:
        yield f"{model.name} is an encoder, it generates nothing; use mode=train"


@rule("the step can be served", *ALL)
def served_steps(run: Run, model: ModelConfig) -> Errors:
    """All that concerns the requests, the cache and the layers of a step."""
    yield from layers.errors(run, model)
    run = run.resolved(model)
    yield from (_source if model.encoder_num_layers else _no_source)(run, model)
    yield from _layers(run, model)
    yield from _storage(run, model)
    yield from _context(run, model)
    yield from _exclusions(run, model)
    yield from _requests(run, model)


# ---- the model -----------------------------------------------------------------------------------


def _no_source(run: Run, model: ModelConfig) -> Errors:
    if run.source_length is not None:
        yield (
            f"source_length={run.source_length} is of an encoder and a decoder, but {model.name} "
            "has no encoder; use prompt_length or context_length"
        )


def _source(run: Run, model: ModelConfig) -> Errors:
    """The encoder sees the source of each request in a step of its own."""
    if run.prefill is not None:
        yield (
            f"prefill sends what a decoder caches of its own, but that of {model.name} caches what "
            "its encoder makes, too; drop it"
        )
    if run.mode == "prefill" and prefixed(run):
        yield (
            f"a prefill step of {model.name} begins with its encoder: nothing is in the cache "
            "before; use no context_length, or mode=decode"
        )
    if run.mode == "decode" and run.prompt_length is not None:
        yield (
            f"a decode step of {model.name} runs no encoder, which a new request's prompt needs; "
            "drop prompt_length, or use mode=prefill"
        )
    if run.mode == "decode" and run.pp > 1:
        yield (
            f"pp={run.pp}: stages of {model.name} with layers of its encoder have nothing to do in "
            "a decode step; use pp=1"
        )
    if max(run.cp, run.dcp or 1) > 1:
        yield (
            f"cp={run.cp} and dcp={run.dcp}: sources of {model.name}, and caches of them, are not "
            "split by tokens; use 1"
        )


def _layers(run: Run, model: ModelConfig) -> Errors:
    """Modules, latents, states and compressed keys."""
    if model.modules:
        names = ", ".join(m.name for m in model.modules)
        yield (
            f"modules ({names}) are there in training only: they compute all tokens of a sequence, "
            "and nothing says what they keep of them in a cache; use mode=train, or a preset or "
            "config.json of the model"
        )
    if run.mla is not None and not model.kv_lora_rank:
        yield f"mla={run.mla} is a form of latent attention, {model.name} has none; drop it"
    if run.mla == "naive" and model.index_topk:
        yield (
            f"mla=naive expands the latents of all tokens, but {model.name} attends to those that "
            "an indexer chooses; use absorb, or drop it"
        )
    if model.state_space and run.prefill is not None:
        yield f"prefill sends keys and values, but layers of {model.name} keep states; drop it"
    # States go on token by token: a decode step has one of each request.
    decodes_states = model.state_space and run.mode == "decode"
    if decodes_states and any(group.new_tokens != 1 for group in groups(run)):
        several = ("num_speculative_tokens", "prompt_length")
        given = next((name for name in several if getattr(run, name)), "new_tokens")
        yield (
            f"{given}: a decode step of {model.name}, whose layers carry a state, has one new "
            "token of each request; leave it out"
        )
    if model.o_groups and run.prefill is not None:
        yield (
            f"prefill sends keys and values of single tokens, but {model.name} keeps compressed "
            "keys and states of unfinished ones; drop it"
        )
    if model.o_groups and run.cp > 1:
        yield (
            f"cp={run.cp} splits prompts, but a compressed key of {model.name} is made of "
            "neighbouring tokens; use cp=1"
        )


# ---- storage, and the ranks that share a cache ---------------------------------------------------


def _storage(run: Run, model: ModelConfig) -> Errors:
    if redundant := run.num_redundant_experts:
        if run.expert_load is not None:
            yield (
                f"num_redundant_experts={redundant} evens out what expert_load says; drop either"
            )
        if not model.num_experts:
            yield f"{model.name} is a dense model; drop num_redundant_experts={redundant}"
        if redundant > model.num_experts:
            yield (
                f"num_redundant_experts={redundant} is more than the {model.num_experts} experts "
                f"of {model.name}; use at most as many"
            )
    if run.precision not in ("bf16", "fp32"):
        yield (
            f"precision={run.precision} is a recipe of training; use bf16 or fp32, and a "
            "weight_precision such as fp8"
        )
    if run.precision == "fp32" and run.weight_precision is not None:
        yield f"weight_precision={run.weight_precision} needs precision=bf16, got fp32; drop either"


def _context(run: Run, model: ModelConfig) -> Errors:
    """Ranks that share the tokens of a request, and the cache of them."""
    shared = run.dcp or 1
    if shared > run.cp and model.index_topk:
        yield (
            f"dcp={run.dcp} spreads the tokens of a request over ranks, but the indexer of "
            f"{model.name} chooses among all of them; drop it"
        )
    if run.cp > 1 and not model.attends:
        yield (
            f"cp={run.cp} splits keys and values by tokens, layers of {model.name} keep none; use "
            "tp or dp"
        )
    if shared > run.cp and not model.sees_all:
        yield (
            f"dcp={run.dcp} splits what layers keep of all tokens, but those of {model.name} keep "
            "only windows, chunks or states, and each rank all of these; drop it"
        )
    if shared > 1 and shared % run.cp:
        yield (
            f"dcp={run.dcp} is no multiple of cp={run.cp}: ranks of cp share the cache of a "
            "request before those of tp do; use dcp=1, or a multiple"
        )
    heads = 1 if model.kv_lora_rank else model.num_query_groups
    copies = run.tp // math.gcd(run.tp, heads)
    within = shared // run.cp
    if shared > 1 and copies % within:
        what = "latents" if model.kv_lora_rank else f"each of {heads} key-value heads"
        fit = ", ".join(str(run.cp * n) for n in range(1, copies + 1) if copies % n == 0)
        yield (
            f"dcp={run.dcp} wants {within} ranks of tp to share a cache, but with tp={run.tp} "
            f"there are {copies} copies of {what} of {model.name}; use {fit}"
        )
    if max(run.cp, shared) > 1 and run.prefill is not None:
        yield (
            f"prefill sends a cache that no ranks share, got cp={run.cp} and dcp={run.dcp}; drop "
            "either"
        )
    if run.cp > 1:
        yield from _split_prompts(run, model)


def _split_prompts(run: Run, model: ModelConfig) -> Errors:
    if run.mode == "decode":
        if run.prompt_length is not None:
            yield (
                f"ranks of cp={run.cp} decode the same tokens, and would share those of a prompt; "
                "drop prompt_length, or use cp=1 and dcp"
            )
        return
    if model.state_space:
        yield (
            f"cp={run.cp} splits prompts, but layers of {model.name} carry a state along them; use "
            "cp=1"
        )
    shortest = min(group.new_tokens or 0 for group in groups(run))
    if shortest < 2 * run.cp:
        yield (
            f"cp={run.cp} splits a prompt into {2 * run.cp} parts, but a request has {shortest} "
            "new tokens; use longer ones, or cp=1"
        )


# ---- requests ------------------------------------------------------------------------------------


def _exclusions(run: Run, model: ModelConfig) -> Errors:
    """Settings of inference that exclude each other."""
    rows = run.requests if isinstance(run.requests, tuple) else ()
    prefills, prompt = run.mode == "prefill", run.prompt_length
    if run.prefill is not None and (prefills or prompt is not None):
        got = "mode=prefill" if prefills else "a prompt_length"
        yield (
            f"prefill names the ranks that compute what decode has in its cache, got {got}; drop "
            "either"
        )
    if prefills and run.num_speculative_tokens:
        yield (
            f"num_speculative_tokens={run.num_speculative_tokens} is about decode, got "
            "mode=prefill; drop it"
        )
    if run.kv_cache == "contiguous" and run.kv_block_size != 16:
        yield (
            f"kv_block_size={run.kv_block_size} is of a paged cache, got kv_cache=contiguous; drop "
            "either"
        )
    all_have = rows and all(group.context_length is not None for group in rows)
    if run.context_length is not None and all_have:
        yield f"context_length={run.context_length}, but all requests have theirs; drop either"
    all_have = rows and all(group.new_tokens is not None for group in rows)
    if prefills and prompt is not None and all_have:
        yield f"prompt_length={prompt}, but all requests have new_tokens; drop either"


def _requests(run: Run, model: ModelConfig) -> Errors:
    requests = groups(run)
    decoding = lengths.count_requests(requests)
    if run.mode == "decode" and run.prompt_length is not None:
        decoding -= run.dp * run.microbatches
    if decoding < run.dp:
        yield (
            f"{decoding} requests leave some of the dp={run.dp} ranks without one; "
            "use more requests, or a smaller dp"
        )
    longest = max(lengths.length(group) for group in requests)
    if model.position == "learned" and longest > model.max_position_embeddings:
        yield (
            f"a request has {longest} tokens, context and new ones, more than the "
            f"{model.max_position_embeddings} learned positions of {model.name}; use fewer"
        )
    if run.max_model_len is not None and longest > run.max_model_len:
        yield (
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
        yield (
            f"{most['S']} new tokens, of which each sees {most['pairs'] // most['S']} keys, make a "
            f"kernel of more than {MOST_FLOPS} FLOPs on one rank; use fewer or shorter requests, "
            "or raise dp or tp"
        )
    if most["L"] * wide > MOST_CACHE:
        yield f"a cache of {most['L']} tokens is beyond any memory; use fewer requests"
