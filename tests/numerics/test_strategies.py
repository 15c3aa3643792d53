"""Real strategies compute what one device computes, with the collectives that papers count."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import cases, pairs, rows_of, some, times
from spmd import PLAIN, TINY, case, check, dims
from stagewright.algebra.layout import Mesh
from stagewright.blocks import PRECISIONS, Recipe, Tie
from stagewright.errors import UserError
from stagewright.graph.node import BYTES, Graph, Node, text
from stagewright.graph.recompute import remat
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.graph.verify import verify
from stagewright.lower.blocks import shard_block
from stagewright.lower.compile import compile
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.placement import strategy, zero_layouts
from stagewright.parallel.plan import Plan
from stagewright.run.rules import check as check_run
from stagewright.run.settings import Run


class Setup(NamedTuple):
    """A mesh and what its axes are for."""

    mesh: dict[str, int]
    fields: dict[str, Any]

    def plan(self, groups: int, state: int = 0) -> Plan:
        """The plan for a model with so many key-value heads, which tp splits as far as it can.

        `state` are groups of heads that carry a state.
        """
        fields = self.fields
        splitting = (*fields.get("tensor", ()), *self.over_heads)
        key_value: tuple[str, ...] = ()
        for axis in splitting:
            if groups % self.mesh[axis] == 0:
                key_value = (*key_value, axis)
                groups //= self.mesh[axis]
        inner = frozenset(splitting) - {*key_value}
        assert not inner or groups == 1, (
            "more than one key-value head of which ranks share the queries"
        )
        state_groups: tuple[str, ...] = ()
        for axis in (*fields.get("tensor", ()), *fields.get("context", ())):
            if state % self.mesh[axis] == 0:
                state_groups = (*state_groups, axis)
                state //= self.mesh[axis]
        return Plan(
            key_value=key_value,
            inner=inner,
            state_groups=state_groups,
            **fields,
        )

    @property
    def over_heads(self) -> tuple[str, ...]:
        ulysses = self.fields.get("cp_comm_type") == "a2a"
        return self.fields["context"] if ulysses else ()


def setup(mesh: Mapping[str, int], **fields: Any) -> Setup:
    """Axes are used as they are called, unless said otherwise."""
    use = {"dp": "data", "cp": "context", "tp": "tensor"}
    own = {use[a]: (a,) for a in mesh if a in use}
    return Setup(dict(mesh), own | fields)


SETUPS: dict[str, Setup] = {
    row["name"]: setup(row["mesh"], **row["fields"]) for row in rows_of("test_strategies", "setups")
}


def again_when_sharded(n: Node) -> str | None:
    """ZeRO-3 gathers parameters again in backward."""
    return "backward" if n.role is Role.USED else None


def sharded(
    model: str,
    block: str,
    setup: Setup,
    recipe: Recipe = PLAIN,
    again: Callable[[Node], str | None] | None = None,
    *,
    layer: int = 0,
    keep_gathered: bool = False,
) -> Graph:
    """A block of a tiny model, parallelized, after a check of what it computes."""
    c = case(model, block, recipe, layer)
    plan = setup.plan(c.sizes["G"], c.sizes.get("Group", 0))
    graph, primal = c.block.graph, c.block.primal
    if again or (plan.zero == 3 and not recipe.gather_once):
        graph, primal = remat(graph, again or again_when_sharded, primal)
    result = shard(
        graph,
        strategy(plan, zero_layouts(graph, plan, Mesh(tuple(setup.mesh.items())), c.sizes)),
        primal,
        keep_gathered=keep_gathered,
        inner=plan.inner,
        model_axes=plan.model_axes,
    )
    verify(result)
    check(graph, result, setup.mesh, c.sizes, c.values, c.truth)
    return result


# ---- the same numbers ----------------------------------------------------------------------------

BLOCKS = ("embedding", "layer", "head")
EVERYTHING = ("tp + sp", "tp + cp + zero 1", "tp + cp all_gather + zero 3", "tp + cp a2a + zero 1")


def fits(model: str, setup: Setup) -> bool:
    """Ranks share the queries of a key-value head only where each has but one such head."""
    try:
        setup.plan(TINY[model].num_query_groups)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(("model", "name"), pairs(["llama", "gpt2", "falcon-mqa"], SETUPS, 4))
def test_every_strategy(model: str, name: str) -> None:
    if not fits(model, SETUPS[name]):
        model = "qwen2"  # two key-value heads
    for block in BLOCKS:
        sharded(model, block, SETUPS[name])


@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
@pytest.mark.parametrize("name", [name for name, s in SETUPS.items() if "expert" in s.fields])
def test_experts(model: str, name: str) -> None:
    sharded(model, "layer", SETUPS[name])


@pytest.mark.parametrize(
    ("model", "name"), pairs(sorted({*TINY} - {"llama", "gpt2", "falcon-mqa"}), EVERYTHING, 8)
)
def test_every_model(model: str, name: str) -> None:
    if not fits(model, SETUPS[name]):
        name = "tp with copied heads + cp"
    if TINY[model].residual_streams > 1 and "zero" in name:
        name = "tp + cp + dp"  # nobody splits the three scales of a mix evenly
    for block in BLOCKS:
        sharded(model, block, SETUPS[name])
    kinds = [TINY[model].layer(i) for i in range(TINY[model].num_layers)]
    for kind in {*kinds[1:]} - {kinds[0]}:
        sharded(model, "layer", SETUPS[name], layer=kinds.index(kind))


@pytest.mark.parametrize("model", ["llama", "qwen2", "falcon-mqa", "gemma2", "bert"])
@pytest.mark.parametrize(
    "name", ["tp", "cp ring", "cp a2a", "tp + cp + dp", "tp with copied heads"]
)
def test_unfused_attention(model: str, name: str) -> None:
    if not fits(model, SETUPS[name]):
        pytest.skip("ranks would share key-value heads unevenly")
    sharded(model, "layer", SETUPS[name], Recipe(flash_attention=False))


@pytest.mark.parametrize("name", ["cp ring", "tp + cp + dp", "tp + cp all_gather + zero 3"])
def test_sliding_window(name: str) -> None:
    sharded("gemma2", "layer", SETUPS[name], layer=1)


RECIPES = {
    "sgd": Recipe(optimizer="sgd"),
    "no clipping": Recipe(clip_grad=False),
    "gathered once": Recipe(gather_once=True),
    "one table": Recipe(ties=(Tie("wte", first=False, owner=False, away=False),)),
    "fp8": Recipe(precision=PRECISIONS["fp8"]),
    "fp32, no master copy": Recipe(precision=PRECISIONS["fp32"]),
}


@pytest.mark.parametrize(
    ("recipe", "name"),
    pairs(RECIPES, ["dp", "tp + cp + zero 1", "tp + cp all_gather + zero 3"]),
)
def test_recipes(recipe: str, name: str) -> None:
    for block in BLOCKS:
        sharded("gpt2", block, SETUPS[name], RECIPES[recipe])


# ---- any run -------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    row["name"]: row["values"] for row in rows_of("test_strategies", "settings")
}


def random_run(rng: random.Random, model: str) -> Run | None:
    """A run of a tiny model with 6 sequences of 12 tokens, or None where it cannot be done."""
    chosen = {name: rng.choice(values) for name, values in SETTINGS.items()}
    if not TINY[model].num_experts:
        chosen |= {"ep": 1, "etp": None}
    if not chosen["zero"]:
        chosen["dp_shard"] = None
    if chosen["zero"] != 3:
        chosen |= {"reshard_after_forward": True, "fsdp_reduce": "microbatch"}
        chosen |= {"fsdp_shard_dim": "best"}
    if chosen["sequence_parallel"]:
        chosen["input_grad_reduce"] = "shared"
    else:
        chosen["sequence_parallel_grads"] = "step"
    if chosen["recompute"] != "selective":
        chosen["recompute_modules"] = ("core_attn",)
    chosen |= {"micro_batch_size": 6 // chosen["dp"], "seq_length": 12}
    run = Run(model=model, **chosen).resolved(TINY[model])
    try:
        check_run(run, TINY[model])
        mesh, plan = parallelization(run, TINY[model])
    except UserError:
        return None
    tokens = 12 // run.cp // (run.tp if run.sequence_parallel else 1)
    sizes = sizes_of(run, TINY[model])
    fits = (
        run.world_size <= 24,
        sizes == dims(TINY[model]),  # nothing was padded
        not TINY[model].num_experts or tokens % 2 == 0,  # every two tokens go to all experts
        # Ranks that share key-value heads unevenly have other heads than the first ones.
        not plan.inner or sizes["G"] == mesh.size(*plan.key_value),
        not plan.zero or mesh.size(*plan.zero_axes) in (1, 2, 3, 6),  # shards are even
    )
    return run if all(fits) else None


def even(graph: Graph, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether splits divide: the interpreter pads nothing."""
    return all(
        d.value(sizes) % math.prod(mesh[a] for a in axes) == 0
        for n in graph
        for d, axes in zip(n.shape, n.layout.dims, strict=True)
    )


@pytest.mark.parametrize("model", some([*TINY]))
def test_any_run(model: str) -> None:
    rng, done = random.Random(model), 0
    while done < times(1):
        run = random_run(rng, model)
        if run is None:
            continue
        block = rng.choice(["embedding", "layer", "layer", "layer", "head"])
        index = rng.randrange(TINY[model].num_layers)
        kind = BlockVariant(block)
        if block == "layer":
            kind = BlockVariant(block, TINY[model].layer(index), run.recompute == "full")
        mesh, plan = parallelization(run, TINY[model])
        c = case(model, block, recipe_of(run, TINY[model]), index)
        recipe = recipe_of(run, TINY[model])
        graph = shard_block(kind, run, TINY[model], mesh, plan, c.sizes, recipe)
        if not even(graph, dict(mesh.axes), c.sizes):
            continue
        done += 1
        try:
            check(c.block.graph, graph, dict(mesh.axes), c.sizes, c.values, c.truth)
        except Exception as error:
            error.add_note(f"{block} of {run.describe()}")
            raise


# ---- the same collectives ------------------------------------------------------------------------


def collectives(graph: Graph) -> dict[str, int]:
    """How many there are, by phase, kind and axes; `/step` marks those that run once per step."""
    found: Counter[str] = Counter()
    for n in graph:
        if n.op in COLLECTIVE_OPS:
            axes: Any = n["axes"]
            found[f"{n.phase}{'/step' * n.once} {n.op}[{'+'.join(axes)}]"] += 1
    return dict(found)


@cases
def test_textbook(
    what: str,
    source: str,
    model: str,
    block: str,
    mesh: dict[str, int],
    plan: dict[str, Any],
    expect: dict[str, int],
    options: dict[str, Any],
) -> None:
    """What a paper, or the code of a framework, says of one block."""
    if "recipe" in options:
        options = options | {"recipe": Recipe(**options["recipe"])}
    if "again" in options:
        role = Role[options["again"]]
        options = options | {"again": lambda n: "backward" if n.role is role else None}
    graph = sharded(model, block, setup(mesh, **plan), **options)
    assert collectives(graph) == expect, f"{what}: {source}"


# ---- golden text ---------------------------------------------------------------------------------


def test_golden(golden: Callable[[str, str], None]) -> None:
    setup = SETUPS["tp + cp + zero 1"]
    parts = [f"# {b}\n{text(sharded('qwen2', b, setup))}" for b in BLOCKS]
    golden("qwen2-tp-sp-cp-zero1.txt", "\n\n".join(parts))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_low_precision_moves_what_full_precision_moves(zero: int) -> None:
    """Tensor and sequence parallelism gather activations, in whatever precision; never weights."""
    moved = {}
    for precision in ("bf16", "fp8"):
        run = Run(
            model="llama3-8b", layers=1, tp=4, dp=2, zero=zero, sequence_parallel=True,
            seq_length=64, precision=precision,
        )  # fmt: skip
        program = compile(run).program
        tasks = program.classes[0].tasks
        over_tp = [program.label_of(int(s)) == "tp" for s in tasks.slot[tasks.kind == 1]]
        which = np.flatnonzero(tasks.kind == 1)[over_tp]
        layer = which[tasks.layer[which] == 0]
        size = [BYTES[tasks.dtypes[int(d)]] for d in tasks.dtype[layer]]
        count = tasks.comm_bytes[layer] // size
        moved[precision] = sorted(zip(tasks.collective[layer], count, strict=True))
    assert moved["fp8"] == moved["bf16"]
