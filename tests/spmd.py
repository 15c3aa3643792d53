"""The truth: every rank an array, collectives move them. Runs any graph on a simulated mesh, in
numpy.

Ranks whose operands are the same arrays share one result: what is duplicated is computed once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from helpers import read_yaml
from stagewright import blocks as model_blocks
from stagewright.algebra.index import Spec, parse
from stagewright.algebra.layout import Layout
from stagewright.algebra.size import Size, size
from stagewright.blocks import Block, Recipe
from stagewright.graph.cost import indices
from stagewright.graph.node import Graph, Node
from stagewright.graph.table import LEAVES, MOVES, OPS
from stagewright.lower.blocks import build_block, shard_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant, place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.model.layers import OwnSizes, SharedBlocks, StateSpace
from stagewright.parallel.degrees import parallelization
from stagewright.run.rules import check as check_run
from stagewright.run.settings import Run
from stagewright.schedule.schedules import make as make_order

Coords = tuple[int, ...]
Env = dict[Node, dict[Coords, Any]]

BELOW = (
    {
        "classes": "Classes",
        "indices": "Rows",
        "tokens": "V",
        "labels": "V",
        "positions": "P",
        "token_types": "T",
    }
    | {
        "token_slots": "K",
        "cached_rows": "L",
        "block_table": "K",
        "logit_rows": "S",
        "token_positions": "S",
    }
    | dict.fromkeys(("source_tokens", "tokens1", "tokens2", "labels1", "labels2"), "V")
)
"""The dim whose size the integers of an input stay below."""


def group_index(
    axis_sizes: Mapping[str, int], axes: tuple[str, ...], coords: Mapping[str, int]
) -> int:
    """Index of a rank inside the joint group of `axes`, outermost axis first."""
    index = 0
    for axis in axes:
        index = index * axis_sizes[axis] + coords[axis]
    return index


class Spmd:
    """A mesh of simulated ranks and the sizes of the dims."""

    def __init__(self, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self.mesh = dict(mesh)
        self.sizes = {**sizes, **mesh}
        self.ranks: list[Coords] = list(itertools.product(*(range(n) for n in mesh.values())))
        self.at = {r: dict(zip(mesh, r, strict=True)) for r in self.ranks}
        self.groups: dict[tuple[Coords, tuple[str, ...]], list[Coords]] = {}
        self.known: dict[Size, int] = {}

    def group(self, rank: Coords, axes: tuple[str, ...]) -> list[Coords]:
        """The ranks of the joint group of `axes`, outermost axis first."""
        key = tuple(0 if a in axes else i for a, i in self.at[rank].items()), axes
        if key not in self.groups:
            at = self.at[rank]
            places = itertools.product(*(range(self.mesh[a]) for a in axes))
            joint = [{**at, **dict(zip(axes, place, strict=True))} for place in places]
            self.groups[key] = [tuple(where.values()) for where in joint]
        return self.groups[key]

    def points(self, dim: Size) -> int:
        """Points of a dim on one device."""
        if dim not in self.known:
            self.known[dim] = dim.value(self.sizes)
        return self.known[dim]

    def size(self, axes: Iterable[str]) -> int:
        return math.prod([self.mesh[a] for a in axes])

    def cut(self, array: Any, layout: Layout, rank: Coords) -> Any:
        """The part of a global array that a rank holds."""
        for i, axes in enumerate(layout.dims):
            if axes:
                array = part(array, i, self.size(axes), group_index(self.mesh, axes, self.at[rank]))
        return array

    def local_shape(self, n: Node) -> tuple[int, ...]:
        dims = zip(n.shape, n.layout.dims, strict=True)
        return tuple([self.points(d) // self.size(axes) for d, axes in dims])

    def run(self, graph: Graph, values: Mapping[str, Any]) -> Env:
        """Every node's value on every rank, from the leaves' global values by name."""
        env: Env = {}
        for n in graph:
            if n.op in LEAVES:
                env[n] = self.leaf(n, values[n.name])
            elif n.op in MOVES:
                env[n] = self.move(n, env[n.srcs[0]])
            else:
                env[n] = self.compute(n, [env[s] for s in n.srcs])
            shapes = {np.shape(x) for x in env[n].values()}
            assert shapes == {self.local_shape(n)}, (
                f"{n} should be {self.local_shape(n)}, is {shapes}"
            )
        return env

    def leaf(self, n: Node, array: Any) -> dict[Coords, Any]:
        axes = sorted(n.layout.axes())
        made = Once()

        def held(r: Coords) -> Any:
            # Of a sum over ranks, the first one holds all.
            first = all(self.at[r][a] == 0 for a in n.layout.partial)
            return self.cut(array, n.layout, r) * (1 if first else 0)

        return {
            r: made(tuple([self.at[r][a] for a in axes]), lambda r=r: held(r)) for r in self.ranks
        }

    def move(self, n: Node, have: dict[Coords, Any]) -> dict[Coords, Any]:
        """A collective, or a slice."""
        axes: Any = n["axes"]
        src, dst = n["src"], n["dst"]
        had = n.srcs[0].layout
        if isinstance(src, int):
            assert had.dims[src][-len(axes) :] == axes, (
                f"{n}: only the innermost splits leave a dim"
            )
        if isinstance(dst, int):
            assert n.layout.dims[dst][-len(axes) :] == axes, f"{n}: splits enter as the innermost"

        def result(parts: list[Any], here: int) -> Any:
            match n.op:
                case "all_gather":
                    return np.concatenate(parts, axis=src)
                case "all_reduce":
                    return combined(parts, had)
                case "reduce_scatter":
                    return part(combined(parts, had), dst, len(parts), here)
                case "all_to_all":
                    return np.concatenate([part(p, dst, len(parts), here) for p in parts], axis=src)
                case _:
                    return part(parts[here], dst, len(parts), here)

        made = Once()
        out: dict[Coords, Any] = {}
        for r in self.ranks:
            parts = [have[other] for other in self.group(r, axes)]
            here = group_index(self.mesh, axes, self.at[r])
            key = (None if dst is None else here, *map(id, parts))
            out[r] = made(key, lambda parts=parts, here=here: result(parts, here))
        return out

    def compute(self, n: Node, have: list[dict[Coords, Any]]) -> dict[Coords, Any]:
        """What the op means, on every rank's part of its index space."""
        spec = parse(str(n["spec"]))
        symbolic, split_by = indices(n)
        extent = {x: self.points(d) for x, d in symbolic.items()}
        ring = OPS[n.op].ring or ()
        around = frozenset[str]()  # the axes of ring attention
        if ring:
            around = frozenset(split_by.get(ring[0], ())) & frozenset(split_by.get(ring[1], ()))
        shape = self.local_shape(n)
        counted = spec.contracted or {x for d in spec.out for x in d}
        count = math.prod([extent[x] for x in counted])
        attrs = dict(n.attrs)

        def start(rank: Coords, letter: str) -> int:
            axes = split_by.get(letter, ())
            if not axes or (around and letter in ring):
                return 0
            return group_index(self.mesh, axes, self.at[rank]) * (extent[letter] // self.size(axes))

        def result(rank: Coords, arrays: list[Any]) -> Any:
            at = self.at[rank]
            if around:
                arrays = self.gone_round(n, spec, have, rank, around)
            ctx = Context(
                attrs,
                start=partial(start, rank),
                shape=shape,
                leads=lambda axes: all(at[a] == 0 for a in axes),
                count=count,
                size=extent.__getitem__,
                shape_of=lambda x: extent[x] // self.size(split_by.get(x, ())),
                value=lambda attr: size(attrs[attr]).value(self.sizes),
            )
            out = OPS[n.op].run(ctx, *arrays)
            for i, dim in enumerate(spec.out):
                if around and dim[0] in ring:
                    axes = split_by[dim[0]]
                    out = part(out, i, self.size(axes), group_index(self.mesh, axes, at))
            return out

        own = {a for axes in split_by.values() for a in axes} | set(attrs.get("alone", ()))
        made = Once()
        out: dict[Coords, Any] = {}
        for r in self.ranks:
            arrays = [x[r] for x in have]
            key = (*[self.at[r][a] for a in sorted(own)], *map(id, arrays))
            out[r] = made(key, lambda r=r, arrays=arrays: result(r, arrays))
        return out

    def gone_round(
        self, n: Node, spec: Spec, have: list[dict[Coords, Any]], rank: Coords, axes: frozenset[str]
    ) -> list[Any]:
        """The operands with whole sequences: what a rank has seen once all blocks went round."""
        result: list[Any] = []
        ring = OPS[n.op].ring
        assert ring is not None
        # What every rank has a part of the sum of, it has of its own queries.
        own = not any(d[0] in ring for d in spec.out)
        for dims, s, x in zip(spec.ins, n.srcs, have, strict=True):
            if not any(d[0] in ring for d in dims):
                result.append(x[rank])
                continue
            i = dims.index(("q",)) if ("q",) in dims else dims.index(("k",))
            assert axes == set(s.layout.dims[i])
            parts = [x[r] for r in self.group(rank, s.layout.dims[i])]
            if own and not result:  # the gradient comes first
                here = group_index(self.mesh, s.layout.dims[i], self.at[rank])
                parts = [p * (at == here) for at, p in enumerate(parts)]
            result.append(np.concatenate(parts, axis=i))
        return result

    def total(self, n: Node, env: Env, rank: Coords) -> Any:
        """The value with a partial sum that was left standing added up."""
        return combined(
            [env[n][r] for r in self.group(rank, tuple(sorted(n.layout.partial)))], n.layout
        )


def part(array: Any, dim: int, parts: int, here: int) -> Any:
    """One of so many equal parts."""
    assert array.shape[dim] % parts == 0, f"{array.shape} does not split in {parts} along dim {dim}"
    width = array.shape[dim] // parts
    return array[(slice(None),) * dim + (slice(here * width, (here + 1) * width),)]


def combined(parts: list[Any], layout: Layout) -> Any:
    """What the parts of a partial value make together."""
    return np.maximum.reduce(parts) if layout.reduction == "max" else sum(parts[1:], start=parts[0])


class Once(dict[Hashable, Any]):
    """Results by what they depend on."""

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make()
        return self[key]


class Context(SimpleNamespace):
    """What a rank knows of itself while it computes."""

    def __init__(self, attrs: dict[str, Any], **more: Any) -> None:
        super().__init__(**more)
        self._attrs = attrs

    def __getitem__(self, key: str) -> Any:
        return self._attrs[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._attrs.get(key, default)


def random_values(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """A value for every leaf, by name; small weights, so that no softmax or tanh saturates."""
    rng = np.random.default_rng(seed)
    result: dict[str, Any] = {}
    for n in graph:
        if n.op in LEAVES and n.name not in result:
            shape = [d.value(sizes) for d in n.shape]
            if n.name == "chosen":  # of S keys, the first among them: every query sees that one
                keys = np.broadcast_to(np.arange(shape[-1]) * 2, shape)
                result[n.name] = rng.permuted(keys, axis=-1)
            elif n.dtype == "int64":
                result[n.name] = rng.integers(sizes[BELOW[n.name]], size=shape)
            else:
                result[n.name] = rng.normal(scale=0.5 if n.op == "param" else 1.0, size=shape)
    return result


def single(graph: Graph, sizes: Mapping[str, int], values: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs by name, as one device computes them."""
    env = Spmd({}, sizes).run(graph, values)
    return {name: env[n][()] for name, n in graph.outputs.items()}


def check(
    graph: Graph,
    sharded: Graph,
    mesh: Mapping[str, int],
    sizes: Mapping[str, int],
    values: Mapping[str, Any],
    truth: Mapping[str, Any] | None = None,
) -> None:
    """Every output of the sharded graph is the single-device one, on every rank.

    `truth` has those of the single device, where they are known.
    """
    truth = single(graph, sizes, values) if truth is None else truth
    spmd = Spmd(mesh, sizes)
    env = spmd.run(sharded, values)
    for name, whole in truth.items():
        n = sharded.outputs[name]
        for r in spmd.ranks:
            want, got = spmd.cut(whole, Layout(n.layout.dims), r), spmd.total(n, env, r)
            if not np.allclose(got, want, rtol=1e-6, atol=1e-7):
                np.testing.assert_allclose(
                    got, want, rtol=1e-6, atol=1e-7, err_msg=f"{name} {n} {r}"
                )


def check_blocks(config: ModelConfig, run: Run) -> None:
    """Every block of a model, sharded as a run says, computes what one device does."""
    run = run.resolved(config)
    check_run(run, config)
    mesh, plan = parallelization(run, config)
    sizes, recipe = sizes_of(run, config), recipe_of(run, config)
    axes = {a: n for a, n in reversed(mesh.axes) if n > 1}
    one_rank = run.model_copy(update={"pp": 1, "vpp": 1})
    stages = tie_tables(place_blocks(one_rank, config), make_order("1f1b", 1, 1, 1), config)
    for variant in dict.fromkeys(variant for variant, _ in stages[0]):
        block, values, truth = _one_device(config, variant, recipe, tuple(sizes.items()))
        graph = shard_block(variant, run, config, mesh, plan, sizes, recipe)
        check(block.graph, graph, axes, sizes, values, truth)


@cache
def _one_device(
    config: ModelConfig, variant: BlockVariant, recipe: Recipe, sizes: tuple[tuple[str, int], ...]
) -> tuple[Block, dict[str, Any], dict[str, Any]]:
    block = build_block(variant, config, recipe)
    values = random_values(block.graph, dict(sizes))
    return block, values, single(block.graph, dict(sizes), values)


# ---- random layouts ------------------------------------------------------------------------------

MESHES = [
    {"a": 2},
    {"a": 3},
    {"a": 2, "b": 2},
    {"a": 3, "b": 2},
    {"a": 2, "b": 3},
    {"a": 2, "b": 2, "c": 2},
    {"a": 2, "b": 3, "c": 2},
]


class RandomLayouts:
    """Random layouts for what a strategy may speak about: every leaf, and some of the names."""

    def __init__(self, rng: random.Random, sizes: Mapping[str, int]) -> None:
        self.rng = rng
        self.sizes = sizes
        self.mesh = dict(rng.choice(MESHES))
        self.inner = self.split_of_groups()
        self.named = rng.choice([0.0, 0.3, 0.8])
        self.table: dict[object, tuple[Layout, float] | None] = {}

    def want(self, n: Node, have: Layout | None) -> Layout | None:
        key = n.name, len(n.shape), n.role, n.op in LEAVES  # two cores may be in a layer
        if key not in self.table:
            asked = n.op in LEAVES or (n.name and self.rng.random() < self.named)
            self.table[key] = (self.layout(n), self.rng.random()) if asked else None
        found = self.table[key]
        if found is None:
            return None
        to, left = found
        if have is None or left < 0.7 or not have.partial - to.axes():
            return to
        return Layout(to.dims, have.partial - to.axes(), have.reduction)  # the sum may stay one

    def split_of_groups(self) -> frozenset[str]:
        """The axes that split the heads of a key-value group: the others must split all groups."""
        groups = self.sizes.get("G")
        for count in range(len(self.mesh)):
            for outer in itertools.combinations(self.mesh, count):
                inner = frozenset(self.mesh) - {*outer}
                if (
                    self.ranks(outer) == groups
                    and self.sizes["A"] // groups % self.ranks(inner) == 0
                ):
                    return inner
        return frozenset()

    def ranks(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh[a] for a in axes)

    def layout(self, n: Node) -> Layout:
        dims: list[tuple[str, ...]] = [()] * len(n.shape)
        for axis in self.rng.sample(sorted(self.mesh), len(self.mesh)):
            if dims and self.rng.random() < 0.6:
                i = self.rng.randrange(len(dims))
                dims[i] = (*dims[i], axis)
        return Layout(
            tuple(self.fitting(str(d), axes) for d, axes in zip(n.shape, dims, strict=True))
        )

    def fitting(self, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """As many of the axes as divide the dim; heads of a group only where groups are split."""
        outer = tuple(a for a in axes if a not in self.inner)
        if dim == "A" and (self.ranks(outer) != self.sizes["G"] or not self.inner):
            dim, axes = "G", outer
        if dim == "G":
            axes = outer
        while size(dim).value(self.sizes) % self.ranks(axes):
            axes = axes[:-1]
        return axes


# ---- tiny models ---------------------------------------------------------------------------------

_SMALL = {
    **{"num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 24, "num_attention_heads": 12},
    **{"num_query_groups": 6, "kv_channels": 6, "vocab_size": 24, "max_position_embeddings": 12},
}


def _tiny(name: str, fields: dict[str, Any]) -> ModelConfig:
    built: dict[str, Any] = {}
    if "state_space" in fields:
        built["state_space"] = StateSpace(**fields["state_space"])
    if "own_sizes" in fields:
        built["own_sizes"] = tuple(OwnSizes(**sizes) for sizes in fields["own_sizes"])
    return ModelConfig(**{"name": name, **_SMALL, **fields, **built})


TINY = {name: _tiny(name, fields) for name, fields in read_yaml("tiny_models.yaml").items()}
"""Every kind of block there is, with sizes that 2, 3, 4 and 6 ranks divide."""
ZAMBA2 = replace(
    TINY["llama"],
    **{"name": "zamba2", "num_layers": 5, "mixers": ("mamba2",), "mlps": ("none",)},
    **{"state_space": TINY["mamba2"].state_space, "tied_embeddings": True},
    shared_blocks=SharedBlocks(layers=(0, 1, 2, 1, 1), adapter_rank=12, attention_adapter=True),
)
"""Layers that share their weights, and are handed more than the stream."""


def dims(config: ModelConfig) -> dict[str, int]:
    """The numbers behind the dims of a model's blocks, for 6 sequences of 12 tokens."""
    return sizes_of(Run(model=config.name, micro_batch_size=6, seq_length=12), config)


PLAIN = Recipe()


class Case(NamedTuple):
    """A block of a tiny model, and what one device computes with it."""

    block: Block
    sizes: dict[str, int]
    values: dict[str, Any]
    truth: dict[str, Any]


@cache
def case(model: str, block: str, recipe: Recipe = PLAIN, layer: int = 0) -> Case:
    """The block called "embedding", "layer" or "head" of a tiny model."""
    config = TINY[model]
    built = model_blocks.BLOCKS[block](config, recipe, config.layer(layer))
    sizes = dims(config)
    values = random_values(built.graph, sizes)
    return Case(built, sizes, values, single(built.graph, sizes, values))
