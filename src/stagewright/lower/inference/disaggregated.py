"""Disaggregated prefill and decode: two joined programs, and the KV cache sent between them.

A second group of ranks, with separate degrees, computes the prompts of a decode step's requests.
After a prompt, every decode rank receives the keys and values of its requests, layers and heads
from the prefill ranks that have them (as with vLLM's NixlConnector, where decode ranks read
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
    """Join concurrent steps of two instances, and caches that one sends the other meanwhile.

    The caches are of requests that decode in later steps, so the decode step does not wait for
    them. If `computed`, their prompts were computed in earlier steps and they wait for nothing;
    otherwise the prefill step computes them and sends each layer's after it. All else is that of
    the decode step.
    """
    sides = prefill, decode
    dtype = str(decode.run.kv_cache_dtype)
    waiting = "nobody" if computed else "sender"
    program = joined([side.program for side in sides], sent, dtype, waiting=waiting)
    blocks = {f"{name} {k}": g for name, s in zip(SIDES, sides, strict=True)
              for k, g in s.blocks.items()}  # fmt: skip
    return replace(decode, blocks=blocks, program=program)


def in_replica(alone: Run, whole: Run, model: ModelConfig, replica: int) -> dict[int, int]:
    """Map each rank of a single replica to its rank in a layout with data parallelism.

    Both runs are resolved; they differ in `dp` and what lies along it.
    """
    ranks = _Side.of(whole, model).rank
    own = _Side.of(alone, model).rank
    return {rank: ranks[replica, tp, pp] for (_, tp, pp), rank in own.items()}


def prefill_run(run: Run) -> Run:
    """Prefill run that computes the prompts of a resolved decode run's requests."""
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
    """Degrees of the prefill ranks; with ep on both sides, etp is that of the decode ranks."""
    inherited = {"etp": run.etp} if run.ep > 1 and ranks.ep > 1 else {}
    return inherited | ranks.settings()


# ---- messages ------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """Ranks of one group by their coordinates along dp, tp and pp."""

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
    """List all messages, ordered by layer, target and source.

    Both groups assign requests round-robin to their dp ranks. tp splits the key-value heads, or has
    copies of them (or of latents); decode ranks take copies round-robin.
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
    """[prefill dp, decode dp] tokens of the requests of both dp ranks.

    Counted in full blocks of a paged cache; layers with a window or chunks count attended tokens.
    """
    requests = [Group(g.count, g.context_length, 0) for g in groups(run)]
    period = math.lcm(ranks, run.dp)
    column = lengths.COLUMNS.index("slots" if run.kv_cache == "paged" else "keys")
    sums = lengths.attention_sums(requests, cache_of(run), reach)
    tokens = lengths.deal(requests, sums, period)[:, column]
    by_pair: dict[tuple[int, int], int] = {}
    for i, count in enumerate(tokens.tolist()):
        pair = i % ranks, i % run.dp
        by_pair[pair] = by_pair.get(pair, 0) + count
    return by_pair


def heads_held_by(heads: int, ranks: int, target: int, targets: int) -> list[tuple[int, int]]:
    """(sending tp rank, number of key-value heads) for tp rank `target` of `targets`.

    Where ranks have copies of a head, neighbouring targets take copies round-robin, so the numbers
    of targets per copy differ by at most one: below, ranks 4 to 7 have head 1; of the targets that
    need it, 2 takes rank 6 and 3 takes rank 7.

    >>> heads_held_by(8, 4, 0, 2), heads_held_by(8, 2, 3, 4), heads_held_by(2, 8, 3, 4)
    ([(0, 2), (1, 2)], [(1, 2)], [(7, 1)])
    """
    copies = max(1, ranks // heads)
    first = target * heads // targets
    count: dict[int, int] = {}
    for head in range(first, max((target + 1) * heads // targets, first + 1)):
        sender = head * ranks // heads + target % copies
        count[sender] = count.get(sender, 0) + 1
    return list(count.items())
