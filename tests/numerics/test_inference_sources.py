"""An encoder and a decoder, served: as the whole sequences without a cache, and as sharded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from spmd import Spmd, check, random_values
from stagewright.blocks import Inference, Recipe
from stagewright.graph.node import Graph, toposort
from stagewright.graph.ops.attention import FAR
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower.blocks import build_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant, place_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.placement import strategy
from stagewright.parallel.plan import Plan
from stagewright.run.settings import Run
from toys import WITH_LIVE_VALUES as MODELS

Values = dict[str, Any]
BLOCK = 4  # tokens of a block of a cache
# Two ranks of dp with two requests each: tokens of their sources, and new ones of each step.
SOURCES = ((5, 3), (4, 4))
STEPS = (((2, 1), (1, 2)), ((1, 1), (1, 1)), ((1, 2), (2, 1)))
LENGTHS = [[sum(of[r][i] for of in STEPS) for i in range(2)] for r in range(2)]


def forward(graph: Graph) -> Graph:
    """What a block for training makes for others, or the logits."""
    ends = {k: n for k, n in graph.outputs.items() if n.phase == "forward" and k != "loss"}
    logits = [n.srcs[0] for n in graph if n.name == "logits32"]
    ends |= {"y": logits[0]} if logits else {}
    return Graph.of(toposort(ends.values()), ends)


def kinds(config: ModelConfig, run: Run) -> list[BlockVariant]:
    """The blocks of a model on one rank, in order."""
    (stage,) = place_blocks(run.resolved(config), config)
    return [kind for kind, _ in stage]


@cache
def weights(model: str) -> list[Values]:
    """By block; tables that blocks share are one."""
    config = MODELS[model]
    run = Run(model=model, mode="prefill")
    sizes = sizes_of(run, config)
    shared: Values = {}
    found: list[Values] = []
    for seed, kind in enumerate(kinds(config, run)):
        params = [n for n in build_block(kind, config, recipe_of(run, config)).graph
                  if n.op == "param"]  # fmt: skip
        own = random_values(Graph.of(params, {n.name: n for n in params}), sizes, seed)
        tied = {n.name for n in params if n.binding.tied}
        found.append({k: shared.setdefault(k, v) if k in tied else v for k, v in own.items()})
    return found


@cache
def prompts() -> tuple[Any, Any]:
    """Tokens of the source and of the decoder, by rank and request."""
    rng = random.Random(5)

    def draw(lengths: Sequence[Sequence[int]]) -> Any:
        return [[[rng.randrange(24) for _ in range(n)] for n in of] for of in lengths]

    return draw(SOURCES), draw(LENGTHS)


def truth(model: str, source: list[int], tokens: list[int]) -> Any:
    """Logits of one request, [positions, vocabulary], from the graphs for training."""
    config = MODELS[model]
    run = Run(model=model, dropout=False, seq_length=len(source), decoder_seq_length=len(tokens))
    sizes = sizes_of(run.resolved(config), config)
    handed: Values = {"source_tokens": np.array([source]), "tokens": np.array([tokens])}
    for kind, own in zip(kinds(config, run), weights(model), strict=True):
        recipe = recipe_of(run.resolved(config), config)
        graph = forward(build_block(kind, config, recipe).graph)
        env = Spmd({}, sizes).run(graph, own | handed)
        made = {name: env[n][()] for name, n in graph.outputs.items()}
        handed |= made | ({"x": made["y"]} if "y" in made else {})
    return handed["y"][0]


def slots_of(lengths: Sequence[Sequence[int]]) -> tuple[Any, list[dict[tuple[int, int], int]]]:
    """A block table of each rank, and the slot of every (request, position)."""
    rng = random.Random(6)
    table: list[list[int]] = []
    slots: list[dict[tuple[int, int], int]] = []
    for ends in lengths:
        blocks = [(r, at) for r, end in enumerate(ends) for at in range(0, end, BLOCK)]
        blocks += [(len(ends), 0)] * (5 - len(blocks))  # of nobody
        rng.shuffle(blocks)
        table.append([r * FAR + at for r, at in blocks])
        slots.append({(r, at + i): n * BLOCK + i for n, (r, at) in enumerate(blocks)
                      for i in range(BLOCK)})  # fmt: skip
    return np.array(table), slots


class Step(NamedTuple):
    """A block of the model in one step, with its inputs."""

    number: int
    block: str
    graph: Graph
    sizes: dict[str, int]
    values: Values
    truth: Values


def played(model: str) -> Iterator[Step]:
    """Every block of every step on one device: prefill, then decode."""
    config = MODELS[model]
    (own_table, own), (source_table, of_source) = slots_of(LENGTHS), slots_of(SOURCES)
    source, decoded = prompts()
    done = [[0, 0], [0, 0]]
    caches: dict[int, Values] = {}
    for number, step in enumerate(STEPS):
        inputs: Values = {"block_table": own_table, "block_table_source": source_table}
        places = [[(r, done[d][r] + i) for r, n in enumerate(new) for i in range(n)]
                  for d, new in enumerate(step)]  # fmt: skip
        firsts = [[(r, i) for r, n in enumerate(ends) for i in range(n)] for ends in SOURCES]
        inputs |= {
            "tokens": [[decoded[d][r][i] for r, i in of] for d, of in enumerate(places)],
            "token_slots": [[own[d][at] for at in of] for d, of in enumerate(places)],
            "source_ends": [
                [of_source[d][r, SOURCES[d][r] - 1] for r, _ in of] for d, of in enumerate(places)
            ],
            "token_positions": [[i for _, i in of] for of in places],
            "logit_rows": [list(range(len(of))) for of in places],
            "source_tokens": [[source[d][r][i] for r, i in of] for d, of in enumerate(firsts)],
            "source_slots": [[of_source[d][at] for at in of] for d, of in enumerate(firsts)],
        }
        handed: Values = {name: np.array(value) for name, value in inputs.items()}
        new = len(places[0])
        run = Run(model=model, mode="decode" if number else "prefill").resolved(config)
        sizes = sizes_of(run, config) | {"B": 2, "S": new, "O": new, "Source": len(firsts[0])}
        sizes |= dict.fromkeys(("L", "L_source"), 5 * BLOCK) | dict.fromkeys(("I", "I_source"), 5)
        recipe = Recipe(dropout=False, inference=Inference(decode=number > 0))
        for at, (kind, params) in enumerate(zip(kinds(config, run), weights(model), strict=True)):
            graph = build_block(kind, config, recipe).graph
            empty = {n.name: np.zeros([d.value(sizes) for d in n.shape])
                     for n in graph if n.op == "state"}  # fmt: skip
            values = params | handed | empty | caches.get(at, {})
            env = Spmd({}, sizes).run(graph, values)
            made = {name: env[n][()] for name, n in graph.outputs.items()}
            yield Step(number, kind.block, graph, sizes, values, made)
            caches[at] = caches.get(at, {}) | {
                n.srcs[0].name: env[n][()] for n in graph if n.op == "cache"
            }
            handed |= {k: v for k, v in made.items() if k == "memory"}
            handed |= {"x": made["y"]} if "y" in made else {}
        for d, of in enumerate(step):
            for r, n in enumerate(of):
                done[d][r] += n


@pytest.mark.parametrize("model", ["t5", "t5, 1.1"])
def test_every_logit_is_that_of_the_whole_sequence(model: str) -> None:
    source, decoded = prompts()
    whole = [[truth(model, source[d][r], decoded[d][r]) for r in range(2)] for d in range(2)]
    done = [[0, 0], [0, 0]]
    heads = [s for s in played(model) if s.block == "head"]
    for step, head in zip(STEPS, heads, strict=True):
        for d, of in enumerate(step):
            row = 0
            for r, n in enumerate(of):
                at = done[d][r]
                np.testing.assert_allclose(
                    head.truth["y"][d, row : row + n], whole[d][r][at : at + n], rtol=1e-6
                )
                done[d][r], row = at + n, row + n
    assert done == LENGTHS


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"tp": 3, "dp": 2}], ids=str)
@pytest.mark.parametrize("model", ["t5", "t5, 1.1"])
def test_sharded(model: str, mesh: dict[str, int]) -> None:
    tensor = tuple(a for a in mesh if a == "tp")
    here = Plan(data=tuple(a for a in mesh if a == "dp"), tensor=tensor, key_value=tensor)
    for step in played(model):
        sharded = shard(step.graph, strategy(here))
        verify(sharded)
        check(step.graph, sharded, mesh, step.sizes, step.values, step.truth)


def test_a_decode_step_leaves_the_encoder_alone() -> None:
    """Its weights are there, and so are those that made the keys of the source."""
    for step in played("t5"):
        ops = {n.op for n in step.graph}
        if step.number and step.block in ("source_embedding", "encoder_layer", "encoder_end"):
            assert ops == {"param"}
        if step.block == "decoder_layer":
            held = {n.name for n in step.graph if n.op == "param"}
            assert {"cross.wk", "cross.wv", "decoder.relative_bias"} <= held
            caches = {n.name for n in step.graph if n.op == "state"}
            assert caches == {f"{x}_cache{of}" for x in "kv" for of in ("", "_source")}
            written = [n.name for n in step.graph if n.op == "cache"]
            assert len(written) == (2 if step.number else 4)
