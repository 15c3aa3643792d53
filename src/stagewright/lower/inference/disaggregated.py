"""Prefill and decode on ranks of their own: two programs side by side, and the cache sent across.

A second group of ranks, with degrees of its own, computes the prompts of a decode step's requests.
When a prompt is done, every decode rank receives the keys and values of its requests, layers and
heads from the prefill ranks that hold them (as with vLLM's NixlConnector, where decode ranks read
from prefill ranks): one message per layer and sender. A layer's attention waits for its messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.inference.joined import SIDES, Message, joined
from stagewright.lower.inference.serving import compile_serving
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.parallel.degrees import parallelization
from stagewright.program.communicators import place_along
from stagewright.run import lengths
from stagewright.run.lengths import Group
from stagewright.run.requests import cache_of, groups
from stagewright.run.rules import check
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.inference import PrefillRanks
from stagewright.run.settings import Run


def compile_disaggregated(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a decode step with the prefill step that fills its cache (`run.prefill` is set)."""
    first = prefill_run(run).resolved(model)
    try:
        check(first, model)
    except UserError as error:
        raise UserError(f"{error} (ranks of prefill: {run.prefill})") from None
    sides = compile_serving(first, model, table), compile_serving(run, model, table)
    found = messages(first, run, model)
    program = joined([side.program for side in sides], found, str(run.kv_cache_dtype))
    blocks = {f"{name} {k}": g for name, s in zip(SIDES, sides, strict=True)
              for k, g in s.blocks.items()}  # fmt: skip
    return replace(sides[1], blocks=blocks, program=program)


def beside(
    prefill: CompiledRun, decode: CompiledRun, sent: Sequence[Message], *, computed: bool = True
) -> CompiledRun:
    """Steps of two instances at one moment, and caches that one sends the other meanwhile.

    The caches are of requests that decode in steps to come: the decode step does not wait for them.
    They are of prompts that were `computed` in steps before, and wait for nothing; or the step of
    prompts computes them, and each layer's leave when it is done. Otherwise the run is that of the
    decode step.
    """
    sides = prefill, decode
    dtype = str(decode.run.kv_cache_dtype)
    waiting = "nobody" if computed else "sender"
    program = joined([side.program for side in sides], sent, dtype, waiting=waiting)
    blocks = {f"{name} {k}": g for name, s in zip(SIDES, sides, strict=True)
              for k, g in s.blocks.items()}  # fmt: skip
    return replace(decode, blocks=blocks, program=program)


def in_replica(alone: Run, whole: Run, model: ModelConfig, replica: int) -> dict[int, int]:
    """The rank in a layout with data parallelism of each rank of one replica by itself.

    Both runs are resolved; they differ in `dp` and what lies along it.
    """
    ranks = _Side.of(whole, model).rank
    own = _Side.of(alone, model).rank
    return {rank: ranks[replica, tp, pp] for (_, tp, pp), rank in own.items()}


def prefill_run(run: Run) -> Run:
    """The prefill run that computes the prompts of a resolved decode run's requests."""
    others = run.prefill_ranks
    assert others is not None
    asked = groups(run)
    if any(not g.context_length for g in asked):
        raise UserError(
            "prefill computes the context of each request, but some have context_length=0; give "
            "all at least one token"
        )
    prompts = [Group(group.count, 0, group.context_length) for group in asked]
    shared = [name for name, setting in SETTINGS.items() if setting.of_requests]
    return Run(
        model=run.model,
        mode="prefill",
        requests=lengths.merge_groups(prompts, "requests"),
        **{name: getattr(run, name) for name in shared},
        **_degrees(others, run),
    )


def _degrees(ranks: PrefillRanks, run: Run) -> dict[str, Any]:
    """The degrees of the prefill ranks; with ep on both sides, etp is that of the decode ranks."""
    inherited = {"etp": run.etp} if run.ep > 1 and ranks.ep > 1 else {}
    return inherited | ranks.settings()


# ---- who sends what to whom ----------------------------------------------------------------------


class _Side(NamedTuple):
    """The ranks of one group by their coordinates along dp, tp and pp."""

    run: Run
    dp: list[int]
    tp: list[int]
    pp: list[int]
    rank: Mapping[tuple[int, int, int], int]

    @classmethod
    def of(cls, run: Run, model: ModelConfig) -> _Side:
        mesh, plan = parallelization(run, model)
        stage = place_along(mesh, ["pp"])
        places = [place_along(mesh, plan.data), place_along(mesh, plan.tensor), stage]
        dp, tp, pp = (place.tolist() for place in places)
        return cls(run, dp, tp, pp, {at: r for r, at in enumerate(zip(dp, tp, pp, strict=True))})

    def stage_of(self, layers: int) -> list[int]:
        ends = list(accumulate(self.run.layers_per_stage or (layers,)))
        return [next(s for s, end in enumerate(ends) if layer < end) for layer in range(layers)]


def messages(first: Run, second: Run, model: ModelConfig) -> list[Message]:
    """All messages, ordered by layer, target and source.

    Both groups assign requests round-robin to their dp ranks. tp splits the key-value heads, or
    holds copies of them (or of latents); among copies the decode ranks ask different ones in turn.
    """
    one, two = _Side.of(first, model), _Side.of(second, model)
    latents = model.kv_lora_rank and model.kv_lora_rank + model.qk_rope_head_dim
    dtype = str(second.kv_cache_dtype)
    of_index = model.index_head_dim * BYTES["fp8_r128" if model.kv_lora_rank else dtype]
    tokens = {reach: _tokens(first.dp, second, reach) for reach in model.reaches}
    from_stage, to_stage = one.stage_of(model.num_layers), two.stage_of(model.num_layers)
    found: list[Message] = []
    for layer in range(model.num_layers):
        own = model.with_own_sizes(model.layer(layer).sizes)
        heads = 1 if model.kv_lora_rank else own.num_query_groups
        of_head = (latents or own.kv_channels + (own.v_head_dim or own.kv_channels)) * BYTES[dtype]
        overlaps = [heads_held_by(heads, first.tp, t, second.tp) for t in range(second.tp)]
        kept = tokens[model.reach(model.layer(layer).mixer)]
        beside = of_index * (model.layer(layer).mixer == "indexed")
        for target, (dp, tp, pp) in enumerate(zip(two.dp, two.tp, two.pp, strict=True)):
            if pp != to_stage[layer]:
                continue
            for (sender, receiver), held in kept.items():
                if receiver == dp and held:
                    found += [
                        Message(
                            layer,
                            one.rank[sender, at, from_stage[layer]],
                            target,
                            math.ceil(held * (many * of_head + beside * (not nth))),
                        )
                        for nth, (at, many) in enumerate(overlaps[tp])
                    ]
    return found


def _tokens(ranks: int, run: Run, reach: Reach) -> dict[tuple[int, int], int]:
    """[prefill dp, decode dp] tokens of the requests that both dp ranks hold.

    Counted in whole blocks of a paged cache; layers with a window or chunks count what they reach.
    """
    asked = [Group(g.count, g.context_length, 0) for g in groups(run)]
    turns = math.lcm(ranks, run.dp)
    column = lengths.COLUMNS.index("slots" if run.kv_cache == "paged" else "keys")
    sums = lengths.attention_sums(asked, cache_of(run), reach)
    tokens = lengths.deal(asked, sums, turns)[:, column]
    found: dict[tuple[int, int], int] = {}
    for turn, held in enumerate(tokens.tolist()):
        pair = turn % ranks, turn % run.dp
        found[pair] = found.get(pair, 0) + held
    return found


def heads_held_by(heads: int, ranks: int, place: int, places: int) -> list[tuple[int, int]]:
    """(sending tp rank, key-value heads) for the target tp rank `place` of `places`.

    Where ranks hold copies of a head, neighbouring targets ask different copies in turn, so that
    the copies' numbers of targets differ by at most one: below, ranks 4 to 7 have head 1, and of
    the targets that want it, 2 asks rank 6 and 3 asks rank 7.

    >>> heads_held_by(8, 4, 0, 2), heads_held_by(8, 2, 3, 4), heads_held_by(2, 8, 3, 4)
    ([(0, 2), (1, 2)], [(1, 2)], [(7, 1)])
    """
    copies = max(1, ranks // heads)
    mine = range(place * heads // places, max((place + 1) * heads // places,
                                              place * heads // places + 1))  # fmt: skip
    count: dict[int, int] = {}
    for head in mine:
        holder = head * ranks // heads + place % copies
        count[holder] = count.get(holder, 0) + 1
    return list(count.items())
