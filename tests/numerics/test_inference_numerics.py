"""A step with a cache computes what the whole sequence computes without one, however it is cut.

Requests of several lengths go through prefill, chunked prefill mixed with decode, decode and
speculative decode; every logit is that of the model's training graph on the request alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import pairs, some, table_of
from spmd import TINY, ZAMBA2, Spmd, check, random_values
from stagewright import blocks as model_blocks
from stagewright.algebra.layout import Layout
from stagewright.blocks import Block, Inference, Recipe
from stagewright.graph.node import Graph, Node, toposort
from stagewright.graph.ops.attention import FAR
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.graph.verify import verify
from stagewright.lower.recipe import sizes_of
from stagewright.parallel.placement import strategy
from stagewright.parallel.plan import Plan
from stagewright.run.settings import Run

SERVED = Recipe(dropout=False, inference=Inference())
TRAINED = Recipe(dropout=False)
ABSORBED = replace(SERVED, absorb=True)
# Here experts are chosen by a token's place in a step (`meaning._chosen`): requests fare alike
# however they are cut only if their tokens go to all experts.
ALL = {m: replace(c, top_k=c.num_experts) for m, c in TINY.items() if c.causal}
ALL["zamba2"] = replace(
    ZAMBA2, num_layers=2, shared_blocks=replace(ZAMBA2.shared_blocks, layers=(1,))
)
ALL["deepseek-v4"] = replace(
    ALL["deepseek-v4"], num_layers=2, mixers=("compressed", "compressed_indexed")
)
# Sequences of any length are whole chunks.
ALL |= {
    m: replace(c, state_space=replace(c.state_space, chunk=1))
    for m, c in ALL.items()
    if c.state_space
}
MODELS = list(ALL)
FORMS = [(m, SERVED) for m in MODELS] + [(m, ABSORBED) for m in MODELS if ALL[m].kv_lora_rank]
BLOCK = 4  # tokens of a block of the cache
WHERE = ("token_slots", "block_table", "token_positions", "logit_rows", "key_slots")
WHERE = (*WHERE, "token_requests")
STRIPED = replace(SERVED, inference=Inference(striped=True, prefix=True))
FRESH = replace(SERVED, inference=Inference(striped=True))

Values = dict[str, Any]


class Piece(NamedTuple):
    """New tokens of one request in a step."""

    request: int
    new: int


# Two ranks of dp with two requests each; steps have equally many new tokens on both ranks.
ENDS = ((8, 5), (3, 10))  # lengths at the end
STEPS: tuple[tuple[tuple[Piece, ...], ...], ...] = (
    ((Piece(0, 4), Piece(1, 2)), (Piece(1, 5), Piece(0, 1))),  # prefill
    ((Piece(0, 1), Piece(1, 2)), (Piece(0, 1), Piece(1, 2))),  # a decode and a chunk of a prompt
    ((Piece(1, 1), Piece(0, 1)), (Piece(0, 1), Piece(1, 1))),  # decode, in another order
    ((Piece(0, 2),), (Piece(1, 2),)),  # two tokens of one request: a draft is verified
)


def built(model: str, part: str, recipe: Recipe, layer: int = 0) -> Block:
    config = ALL[model]
    return model_blocks.BLOCKS[part](config, recipe, config.layer(layer))


@cache
def weights(model: str) -> Values:
    """By block: those of the two layers differ, a table with copies is one."""
    result: Values = {}
    tables: Values = {}
    sizes = sizes_of(Run(model=model, seq_length=1), ALL[model])
    for seed, (part, layer) in enumerate(parts()):
        graph = built(model, part, SERVED, layer).graph
        params = Graph.of([n for n in graph if n.op == "param"],
                          {n.name: n for n in graph if n.op == "param"})  # fmt: skip
        result[part, layer] = values = random_values(params, sizes, seed)
        copies = {n.name: n.binding.tied for n in params if n.binding.tied}
        values |= {name: tables.setdefault(of, values[name]) for name, of in copies.items()}
    return result


def parts() -> list[tuple[str, int]]:
    return [("embedding", 0), ("layer", 0), ("layer", 1), ("head", 0)]


# ---- the truth: each request alone, without a cache ----------------------------------------------


def all_logits(model: str, tokens: Sequence[int]) -> Any:
    """[positions, vocabulary] of one sequence, from the graphs for training."""
    config = ALL[model]
    x: Any = None
    original: Any = None
    chosen: Any = None
    # Whole compressed keys: no position sees those that are added behind it.
    real = len(tokens)
    tokens = [*tokens, *[0] * (-real % config.positions_of_a_key)]
    for part, layer in parts():
        graph = built(model, part, TRAINED, layer).graph
        name = "logits32" if part == "head" else "y"
        found = {n.name: n for n in graph if n.phase == "forward"}
        end = found["logits32"].srcs[0] if part == "head" else graph.outputs["y"]
        forward = Graph.of(toposort([end]), {name: end})
        sizes = sizes_of(Run(model=model), config) | {"B": 1, "S": len(tokens), "R": len(tokens)}
        keys = len(tokens) // (config.compress_rate_csa or 1)
        sizes["Top"] = -(-min(config.index_topk, keys) // config.index_block_size)
        values = weights(model)[part, layer] | {
            "tokens": np.array([tokens]), "positions": np.arange(len(tokens)), "x": x,
            "original": original, "chosen": chosen,
        }  # fmt: skip
        env = Spmd({}, sizes).run(forward, values)
        x = env[end][()]
        chosen = next((env[n][()] for n in forward if n.op == "index_topk"), chosen)
        original = x if part == "embedding" else original
    return x[0, :real]


@cache
def prompts() -> tuple[tuple[tuple[int, ...], ...], ...]:
    rng = random.Random(7)
    return tuple(tuple(tuple(rng.randrange(24) for _ in range(n)) for n in ends) for ends in ENDS)


# ---- a cache in blocks, in any order -------------------------------------------------------------


def tables() -> tuple[Any, list[dict[tuple[int, int], int]]]:
    """The block table of each rank of dp, and the slot of every (request, position)."""
    rng = random.Random(3)
    table: list[list[int]] = []
    slots: list[dict[tuple[int, int], int]] = []
    for ends in ENDS:
        blocks = [(r, at) for r, end in enumerate(ends) for at in range(0, end, BLOCK)]
        blocks += [(len(ends), 0)] * (6 - len(blocks))  # of nobody in this step
        rng.shuffle(blocks)
        table.append([r * FAR + at for r, at in blocks])
        slots.append({
            (r, at + i): n * BLOCK + i for n, (r, at) in enumerate(blocks) for i in range(BLOCK)
        })  # fmt: skip
    return np.array(table), slots


def compressed(
    each: int, step: Sequence[Sequence[Piece]], done: Sequence[Sequence[int]]
) -> tuple[Values, dict[str, int]]:
    """Inputs and sizes of a cache of keys of `each` positions; each rank's last block is of nobody,
    where rows go that no tokens complete."""
    rng = random.Random(each)
    kind, most = f"_by{each}", max(sum(-(-(end // each) // BLOCK) for end in ends) for ends in ENDS)
    new: list[list[tuple[int, int]]] = []
    for rank, pieces in enumerate(step):
        tokens = ((p.request, done[rank][p.request] + i) for p in pieces for i in range(p.new))
        new.append([(r, at // each) for r, at in tokens if (at + 1) % each == 0])
    many = max(1, *map(len, new))
    table: list[list[int]] = []
    slots: list[list[int]] = []
    for ends, keys in zip(ENDS, new, strict=True):
        blocks = [(r, at) for r, end in enumerate(ends) for at in range(0, end // each, BLOCK)]
        blocks += [(len(ends), 0)] * (most - len(blocks))
        rng.shuffle(blocks)
        blocks.append((len(ends), 0))
        table.append([r * FAR + at for r, at in blocks])
        where = {
            (r, at + i): n * BLOCK + i for n, (r, at) in enumerate(blocks) for i in range(BLOCK)
        }
        slots.append([where[key] for key in keys] + [(most + 1) * BLOCK - 1] * (many - len(keys)))
    numbers = [[at for _, at in keys] + [0] * (many - len(keys)) for keys in new]
    values = {"token_slots": slots, "block_table": table, "key_positions": numbers}
    held = (most + 1) * BLOCK
    sizes = {"L": held, "I": most + 1, "keys": held, "stored": many}
    return (
        {f"{name}{kind}": np.array(value) for name, value in values.items()},
        {f"{name}{kind}": size for name, size in sizes.items()},
    )


def striped(stripes: int) -> tuple[Any, list[dict[tuple[int, int], int]]]:
    """The same where stripes share a request's tokens; each rank's last block is of nobody."""
    rng = random.Random(4)
    table: list[list[int]] = []
    slots: list[dict[tuple[int, int], int]] = []
    wide = BLOCK * stripes
    most = max(sum(-(-end // wide) for end in ends) for ends in ENDS)
    for ends in ENDS:
        blocks = [(r, at) for r, end in enumerate(ends) for at in range(0, end, wide)]
        blocks += [(len(ends), 0)] * (most - len(blocks))
        rng.shuffle(blocks)
        blocks.append((len(ends), 0))
        table.append([r * FAR + at for r, at in blocks])
        slots.append({
            (r, at + i): (i % stripes * (most + 1) + n) * BLOCK + i // stripes
            for n, (r, at) in enumerate(blocks) for i in range(wide)
        })  # fmt: skip
    return np.array(table), slots


def in_stripes(stripes: int, step: Sequence[Sequence[Piece]], done: Sequence[Sequence[int]]) -> Any:
    """Inputs and sizes of a step whose requests have done so many tokens before."""
    table, slots = striped(stripes)
    many = table.shape[1] * BLOCK  # slots of a stripe
    rows: list[list[list[int]]] = []
    for rank, pieces in enumerate(step):
        of: list[list[int]] = [[] for _ in range(stripes)]
        for p in pieces:
            for at in range(done[rank][p.request]):
                of[at % stripes].append(slots[rank][p.request, at] % many)
        rows.append(of)
    most = max(1, *(len(some) for of in rows for some in of))
    prefix = np.array([[some + [many - 1] * (most - len(some)) for some in of] for of in rows])
    new = [
        [slots[rank][p.request, done[rank][p.request] + i] for p in pieces for i in range(p.new)]
        for rank, pieces in enumerate(step)
    ]
    folded = (prefix + np.arange(stripes)[:, None] * many).reshape(len(step), -1)
    values = {
        "token_slots_striped": np.array(new), "block_table_striped": table,
        "prefix_slots": prefix, "row_slots": np.concatenate([folded, new], axis=1),
    }  # fmt: skip
    sizes = {"Stripes": stripes, "L_striped": many, "I_striped": table.shape[1]}
    return values, sizes | {"prefix_striped": most}


class Step(NamedTuple):
    """A block of the model in one step, with its inputs."""

    number: int
    part: str
    layer: int
    graph: Graph
    sizes: dict[str, int]
    values: Values
    truth: Values


def played(model: str, recipe: Recipe, stripes: int) -> Iterator[Step]:
    """Every block of every step on one device, each with the caches that the step before left."""
    table, slots = tables()
    rng = np.random.default_rng(5)
    done = [[0] * len(ends) for ends in ENDS]
    caches: dict[tuple[str, int], Values] = {}
    for number, step in enumerate(STEPS):
        where: Values = {name: [] for name in WHERE}
        tokens: list[list[int]] = []
        of_stripes, more = in_stripes(stripes, step, done)
        for each in {ALL[model].reach(mixer).compress for mixer in ALL[model].mixers} - {1}:
            own, own_sizes = compressed(each, step, done)
            of_stripes, more = of_stripes | own, more | own_sizes
        for rank, pieces in enumerate(step):
            news = [(p.request, done[rank][p.request] + i) for p in pieces for i in range(p.new)]
            tokens.append([prompts()[rank][r][at] for r, at in news])
            where["token_slots"].append([slots[rank][new] for new in news])
            where["token_positions"].append([at for _, at in news])
            where["token_requests"].append([r for r, _ in news])
            where["logit_rows"].append(list(range(len(news))))
            for p in pieces:
                done[rank][p.request] += p.new
            where["key_slots"].append(rng.permutation(table.shape[1] * BLOCK))
        where = {k: np.array(v) for k, v in where.items()} | {"block_table": table}
        local = {
            f"{name}{kind}": where[name]
            for name in ("token_slots", "block_table", "key_slots")
            for kind in ("_local", "_chunked", "_top")
        }
        local |= of_stripes
        new, held, blocks = len(tokens[0]), table.shape[1] * BLOCK, table.shape[1]
        sizes = sizes_of(Run(model=model), ALL[model]) | {
            "B": len(ENDS), "S": new, "O": new, "R": len(ENDS) * new, "requests": len(ENDS[0]),
            **{f"{name}{kind}": many for kind in ("", "_local", "_chunked", "_top")
               for name, many in (("L", held), ("I", blocks), ("keys", held))},
            "Top": ALL[model].index_topk // ALL[model].index_block_size, **more,
        }  # fmt: skip
        x: Any = None
        original: Any = None
        chosen: Any = None
        for part, layer in parts():
            graph = built(model, part, recipe, layer).graph
            empty = {n.name: np.zeros([d.value(sizes) for d in n.shape])
                     for n in graph if n.op == "state"}  # fmt: skip
            old = caches.get((part, layer), empty)
            values = weights(model)[part, layer] | where | local | old
            values |= {"tokens": np.array(tokens), "x": x, "original": original, "chosen": chosen}
            env = Spmd({}, sizes).run(graph, values)
            truth = {name: env[n][()] for name, n in graph.outputs.items()}
            yield Step(number, part, layer, graph, sizes, values, truth)
            caches[part, layer] = {
                next(s for s in n.srcs if s.op == "state").name: env[n][()]
                for n in graph
                if n.op == "cache" or (n.role is Role.CACHE and n.srcs)
            }
            x, original = truth["y"], truth.get("original", original)
            chosen = truth.get("chosen", chosen)


@cache
def steps(model: str, recipe: Recipe = SERVED, stripes: int = 2) -> tuple[Step, ...]:
    return tuple(played(model, recipe, stripes))


@pytest.mark.parametrize(("model", "recipe"), some(FORMS), ids=lambda x: getattr(x, "absorb", x))
def test_every_logit_is_that_of_the_whole_sequence(model: str, recipe: Recipe) -> None:
    served(model, recipe, 2)


SHARED = ("llama", "plain", "gemma2", "gpt-oss", "qwen3-next", "deepseek-lite")


@pytest.mark.parametrize(
    ("model", "absorb", "stripes"),
    [
        ("llama", False, 1),
        *((m, False, 2 + (m == "gpt-oss")) for m in SHARED),
        ("deepseek-lite", True, 3),
    ],
)
def test_stripes_of_a_cache_are_one(model: str, absorb: bool, stripes: int) -> None:
    served(model, replace(STRIPED, absorb=absorb), stripes)


@pytest.mark.parametrize(
    ("model", "absorb"),
    [(m, False) for m in SHARED]
    + [("deepseek-lite", True), ("deepseek-biased", False), ("deepseek-biased", True)],
)
def test_new_tokens_need_no_cache(model: str, absorb: bool) -> None:
    """Where none is there yet, attention is to what the step makes, and the cache is the same."""
    fresh, through = (
        [s for s in played_from(model, replace(of, absorb=absorb)) if s.number == 0]
        for of in (FRESH, STRIPED)
    )
    for a, b in zip(fresh, through, strict=True):
        assert a.truth.keys() == b.truth.keys()
        for name, value in a.truth.items():
            np.testing.assert_allclose(value, b.truth[name], rtol=1e-6, atol=1e-9)


def played_from(model: str, recipe: Recipe) -> tuple[Step, ...]:
    """The first step's blocks."""
    found: list[Step] = []
    for step in played(model, recipe, 2):
        if step.number:
            break
        found.append(step)
    return tuple(found)


def served(model: str, recipe: Recipe, stripes: int) -> None:
    whole = [[all_logits(model, tokens) for tokens in ranks] for ranks in prompts()]
    done = [[0] * len(ends) for ends in ENDS]
    heads = [s for s in steps(model, recipe, stripes) if s.part == "head"]
    for step, head in zip(STEPS, heads, strict=True):
        for rank, pieces in enumerate(step):
            row = 0
            for r, new in pieces:
                at = done[rank][r]
                got = head.truth["y"][rank, row : row + new]
                np.testing.assert_allclose(got, whole[rank][r][at : at + new], rtol=1e-6, atol=1e-9)
                done[rank][r] += new
                row += new
    assert done == [list(ends) for ends in ENDS]


# ---- sharded as unsharded ------------------------------------------------------------------------


def plan(mesh: Mapping[str, int], groups: int, state: int = 0, **fields: Any) -> Plan:
    """dp splits requests, tp heads: key-value heads too as far as there are so many, and likewise
    groups of heads that carry a state."""
    tensor = tuple(a for a in mesh if a.startswith("tp"))
    key_value: tuple[str, ...] = ()
    for axis in tensor:
        if groups % mesh[axis] == 0:
            key_value, groups = (*key_value, axis), groups // mesh[axis]
    state_groups: tuple[str, ...] = ()
    for axis in tensor:
        if state and state % mesh[axis] == 0:
            state_groups, state = (*state_groups, axis), state // mesh[axis]
    return Plan(
        data=tuple(a for a in mesh if a == "dp"),
        tensor=tensor,
        key_value=key_value,
        inner=frozenset(tensor) - {*key_value},
        state_groups=state_groups,
        **fields,
    )


MESHES: dict[str, Any] = table_of("test_inference_numerics", "meshes")


FAMILIES = [
    *("llama", "gpt2", "gemma2", "plain", "qwen3", "olmoe", "falcon-mqa", "deepseek-lite"),
    *("gpt-oss", "llama4", "mamba2", "mamba", "jamba", "qwen3-next", "kimi-linear"),
    *("falcon-h1", "falcon-h1-small", "zamba2", "glm-5.2", "minimax-m3", "mimo"),
    "deepseek-v4",
]


@pytest.mark.parametrize(
    ("of", "name"),
    pairs([*((model, SERVED) for model in FAMILIES), ("deepseek-lite", ABSORBED)], MESHES),
    ids=lambda x: x if isinstance(x, str) else f"{x[0]} {x[1].absorb}",
)
def test_sharded(of: tuple[str, Recipe], name: str) -> None:
    model, recipe = of
    mesh, fields = MESHES[name]
    groups = ALL[model].num_query_groups
    if ALL[model].o_groups % math.prod(n for axis, n in mesh.items() if axis != "dp"):
        pytest.skip("groups of heads are not split")
    for step in steps(model, recipe):
        if step.number not in (0, 1):
            continue
        state = ALL[model].state_space
        here = plan(mesh, groups, state.groups if state else 0, **fields)
        if here.inner and groups % 6 == 0 and "tp_rep" not in mesh:
            pytest.skip("ranks would share key-value heads unevenly")
        sharded = shard(step.graph, strategy(here), inner=here.inner)
        verify(sharded)
        check(step.graph, sharded, mesh, step.sizes, step.values, step.truth)
        found = {n.name: n for n in sharded}
        kept = [n for n in sharded if n.op == "state" and n.binding.split_as]
        assert all(n.layout.dims[0] == here.data for n in kept)
        if ALL[model].o_groups:  # rows and states that all heads share
            caches = [n for n in sharded if n.op == "state"]
            assert all(n.layout.dims[:1] == (here.data,) for n in caches)
            assert not any(axes for n in caches for axes in n.layout.dims[1:])
        elif kept:
            # Every rank keeps the states of its own heads or channels.
            each = math.prod(mesh[a] for axes in kept[-1].layout.dims[2:] for a in axes)
            assert each == math.prod(mesh[a] for a in here.tensor)
        elif step.part == "layer" and ALL[model].kv_lora_rank:
            kinds = ("", "_top")
            kept = [n for k in kinds for name in ("latent", "index")
                    if (n := found.get(f"{name}_cache{k}"))]  # fmt: skip
            assert kept
            assert all(n.layout == Layout((here.data, (), ())) for n in kept)  # copies over tp
        elif step.part == "layer":
            kinds = ("", "_local", "_chunked", "_top")
            kept = next(name for k in kinds if (name := f"k_cache{k}") in found)
            assert found[kept].layout == Layout((here.data, (), here.key_value, ()))
        if step.part == "head":
            assert found["logits_gathered" if here.tensor else "logits"].layout.dims[2] == ()


@pytest.mark.parametrize("redundant", [0, 6])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
def test_experts_on_ranks(model: str, mesh: dict[str, int], redundant: int) -> None:
    """Attention of dp ranks, experts on all: copies go there and results come back.

    Without dp, ranks have the same tokens: each does what its experts get, and sums are reduced.
    """
    (step,) = [s for s in steps(model) if s.number == 2 and (s.part, s.layer) == ("layer", 0)]
    config = replace(ALL[model], top_k=6 if redundant else 3)
    recipe = replace(SERVED, inference=Inference(redundant_experts=redundant))
    graph = model_blocks.BLOCKS["layer"](config, recipe, config.layer(0)).graph
    held = config.num_experts + redundant
    sizes = step.sizes | {"H": held, "R": 4 * config.top_k // held}
    values = step.values | {"x": np.random.default_rng(9).normal(size=(2, 2, 12))}
    for name in ("we_up", "we_gate", "we_down"):
        values[name] = np.concatenate([values[name]] * (held // config.num_experts))
    here = plan(mesh, config.num_query_groups)
    here = replace(here, expert=tuple(reversed(mesh)) if redundant else (list(mesh)[-1],))
    sharded = shard(graph, strategy(here), inner=here.inner)
    verify(sharded)
    check(graph, sharded, mesh, sizes, values)
    found = Counter(n.op for n in sharded if n.scope.startswith("mlp"))
    assert found["all_to_all"] == (2 if "dp" in here.expert else 0)
    assert found["all_reduce"] == (1 if "tp" in mesh else 0)
    assert not found["all_gather"]


DCP = {"tp_kv": 6, "tp_dcp": 2}
SPLIT_EXPERTS: dict[str, tuple[dict[str, int], dict[str, Any], Counter[str]]] = {
    "etp": ({"tp": 2}, {"expert_tensor": ("tp",)}, Counter(all_reduce=1)),
    "etp, dp": ({"tp": 2, "dp": 2}, {"expert_tensor": ("tp",)}, Counter(all_reduce=1)),
    "etp, ep": (
        {"tp_kv": 6, "tp_rep": 2}, {"expert": ("tp_kv",), "expert_tensor": ("tp_rep",)},
        Counter(all_reduce=1),
    ),
    "etp, ep over dp": (
        {"tp": 2, "dp": 2}, {"expert": ("dp",), "expert_tensor": ("tp",)},
        Counter(all_reduce=1, all_to_all=2),
    ),
    "sequence parallel": (
        {"tp": 2}, {"expert_tensor": ("tp",), "sequence_parallel": True},
        Counter(reduce_scatter=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT_EXPERTS)
@pytest.mark.parametrize("model", ["mixtral", "deepseek", "gpt-oss"])
def test_split_experts(model: str, name: str) -> None:
    """Copies of a token are combined, what shared experts make is added, and tokens are summed."""
    mesh, fields, moves = SPLIT_EXPERTS[name]
    (step,) = [s for s in steps(model) if s.number == 2 and (s.part, s.layer) == ("layer", 0)]
    config = replace(ALL[model], top_k=3)
    graph = model_blocks.BLOCKS["layer"](config, SERVED, config.layer(0)).graph
    sizes = step.sizes | {"H": config.num_experts, "R": 4 * config.top_k // config.num_experts}
    values = step.values | {"x": np.random.default_rng(9).normal(size=(2, 2, 12))}
    here = plan(mesh, config.num_query_groups, **fields)
    here = replace(here, combined=here.expert_tensor)
    sharded = shard(graph, strategy(here), inner=here.inner)
    verify(sharded)
    check(graph, sharded, mesh, sizes, values)
    found = Counter(n.op for n in sharded if n.scope.startswith("mlp"))
    summing = ("all_reduce", "reduce_scatter", "all_to_all")
    assert {op: found[op] for op in summing if found[op]} == moves


LATENT_DCP = {"tp_rep": 3, "tp_dcp": 2, "dp": 2}
BOTH = {"tp_dcp": 2, "cp": 2}


@pytest.mark.parametrize(
    ("model", "absorb", "mesh", "context", "moves"),
    [
        # Of a layer: queries and sums are gathered, results scattered; then the two sums of tp.
        ("llama", False, DCP, (), ["all_gather"] * 2 + ["reduce_scatter"] + ["all_reduce"] * 2),
        ("gpt-oss", False, DCP, (), None),
        ("deepseek-lite", True, LATENT_DCP, (),
         ["all_gather"] * 2 + ["reduce_scatter"] + ["all_reduce"] * 2),
        # Rows of the prefix are gathered instead, each rank's heads see them all.
        ("deepseek-lite", False, LATENT_DCP, (), ["all_gather"] + ["all_reduce"] * 2),
        # Ranks of cp have the same queries, and all want the result.
        ("llama", False, {"cp": 2}, (), ["all_gather", "all_reduce"]),
        ("llama", False, {"cp": 2, "tp": 3, "dp": 2}, (), None),
        ("plain", False, BOTH, (), None),
        ("qwen3-next", False, {"cp": 2}, (), None),
        # A prompt's parts: keys and values are gathered, and what needs the prefix.
        ("llama", False, {"cp": 2}, ("cp",), ["all_gather"] * 4 + ["reduce_scatter"]),
        ("gemma2", False, {"cp": 2, "tp": 2}, ("cp",), None),
        ("deepseek-lite", False, {"cp": 2, "tp": 2}, ("cp",), None),
        ("plain", False, BOTH, ("cp",), None),
    ],
)  # fmt: skip
def test_sharded_stripes(
    model: str, absorb: bool, mesh: dict[str, int], context: tuple[str, ...],
    moves: list[str] | None,
) -> None:  # fmt: skip
    stripes = tuple(a for a in mesh if a in ("cp", "tp_dcp"))[::-1]
    many = math.prod(mesh[a] for a in stripes)
    state = ALL[model].state_space
    here = plan(mesh, 6 if model == "llama" else ALL[model].num_query_groups,
                state.groups if state else 0, context=context, stripes=stripes,
                cp_comm_type="all_gather")  # fmt: skip
    for step in steps(model, replace(STRIPED, absorb=absorb), many):
        if step.number != (2 if context else 1) or step.layer:
            continue
        sharded = shard(step.graph, strategy(here), inner=here.inner)
        verify(sharded)
        check(step.graph, sharded, mesh, step.sizes, step.values, step.truth)
        kept = [n for n in sharded if n.op == "state" and "Stripes" in map(str, n.shape)]
        assert all(n.layout.dims[1] == stripes for n in kept)
        if step.part == "layer" and moves:
            assert sorted(n.op for n in sharded if n.op in COLLECTIVE_OPS) == sorted(moves)


@pytest.mark.parametrize("model", ["llama", "deepseek-lite", "gpt-oss"])
def test_a_prompt_over_ranks(model: str) -> None:
    """Without a prefix, only keys and values are gathered, or latents; each rank keeps some."""
    mesh = {"cp": 2, "tp": 3}
    here = plan(mesh, ALL[model].num_query_groups, context=("cp",), stripes=("cp",),
                cp_comm_type="all_gather")  # fmt: skip
    for step in played_from(model, FRESH):
        sharded = shard(step.graph, strategy(here), inner=here.inner)
        verify(sharded)
        check(step.graph, sharded, mesh, step.sizes, step.values, step.truth)
        found = Counter(n.op for n in sharded if n.op in COLLECTIVE_OPS)
        if step.part == "layer":
            gathered = 1 if ALL[model].kv_lora_rank else 2
            assert found["all_gather"] == gathered
            assert not found["reduce_scatter"]


def test_sequence_parallel() -> None:
    """Norms on a part of the tokens: gathered before products, reduce-scattered after."""
    mesh = {"tp": 3}
    here = plan(mesh, 6, sequence_parallel=True)
    ops: list[list[str]] = []
    for step in steps("llama"):
        if step.number == 1:  # three tokens
            sharded = shard(step.graph, strategy(here), inner=here.inner)
            check(step.graph, sharded, mesh, step.sizes, step.values, step.truth)
            ops.append([n.op for n in sharded if n.op in ("all_gather", "reduce_scatter")])
    layer = ["all_gather", "reduce_scatter"] * 2
    assert ops == [["reduce_scatter"], layer, layer, ["all_gather"] * 2]


def test_no_gradients() -> None:
    for part, layer in parts():
        graph = built("llama", part, SERVED, layer).graph
        assert {n.phase for n in graph} == {"forward"}
        assert not any(n.once for n in graph)


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph if n.name == name)
