"""A weight says where it lives where its block creates it; nothing else knows its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stagewright.algebra.notation import NotationError
from stagewright.blocks import Recipe
from stagewright.blocks.builder import Builder, stream
from stagewright.blocks.training import finish
from stagewright.errors import UserError
from stagewright.graph.make import apply, identity, leaf
from stagewright.graph.node import Graph, Node, text
from stagewright.graph.parameter import Parameter
from stagewright.graph.shard import shard
from stagewright.lower.blocks import shard_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.strategy_table import table_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.catalog import resolve
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.placement import strategy
from stagewright.parallel.plan import Plan
from stagewright.run.settings import Run

SIZES = {"B": 2, "S": 4, "M": 8, "A": 4, "G": 2, "D": 2}
TP = Plan(tensor=("tp",), key_value=("tp",), zero=0)


def built(build: str) -> dict[str, Node]:
    """The nodes of a small block that makes one named weight, sharded over two ranks of tp."""
    b = Builder(resolve("llama3-8b"), Recipe())
    x = stream(("B", "S", "M"), b.dtype)
    if build == "columns":
        y = b.linear("bsm,mn->bsn", x, b.weight("w", "M", "M/tp"), "wide")
    elif build == "rows":
        y = b.linear("bsm,mn->bsn", x, b.weight("w", "M/tp", "M"), "narrow")
    else:  # OLMoE's norm of queries: over the channels of all heads
        q = b.linear("bsm,mad->bsad", x, b.weight("wq", "M", "A/tp", "D"), "q")
        w = b.weight("w", "A/tp", "D")
        square = apply("mean_square", "bsad->bs", q, dtype="fp32", name="square")
        q = apply("rms_scale", "bsad,bs,ad->bsad", q, square, w, name="normed")
        y = b.linear("bsad,adm->bsm", q, b.weight("wo", "A/tp", "D", "M"), "out")
    block = finish("layer", b, x, identity(y, "y"))
    graph = shard(block.graph, strategy(TP), block.primal)
    assert {n.op for n in graph if n.phase == "forward"} & {"all_reduce", "all_gather"}
    return {n.name: n for n in graph if n.op == "param"}


def test_one_name_is_placed_as_each_block_says() -> None:
    assert built("columns")["w"].layout.dims == ((), ("tp",))
    assert built("rows")["w"].layout.dims == (("tp",), ())
    assert built("heads")["w"].layout.dims == (("tp",), ())


def layer(settings: Mapping[str, Any], table: Mapping[str, str] = {}) -> Graph:
    """A sharded layer of Llama 3, perhaps with a user's table."""
    model = resolve("llama3-8b")
    run = Run(model=model.name, layers=1, seq_length=8, **settings).resolved(model)
    mesh, plan = parallelization(run, model)
    plan = replace(plan, table=table_of(run, model, table))
    return shard_block(
        BlockVariant("layer", model.layer(0)),
        run,
        model,
        mesh,
        plan,
        sizes_of(run, model),
        recipe_of(run, model),
    )


def test_what_belongs_to_a_parameter_has_its_declaration() -> None:
    graph = layer({"tp": 2, "dp": 2, "zero": 1})
    belonging = [n for n in graph if n.binding.name == "wk"]
    assert {n.phase for n in belonging} == {"forward", "backward", "optimizer"}
    assert {n.binding.param for n in belonging} == {Parameter.declare("wk", "M", "G/tp.kv", "D")}
    states = [n for n in belonging if n.op == "state"]
    assert len(states) == 3
    assert {axes for n in states for axes in n.layout.dims[1:2]} == {("tp",)}


@pytest.mark.parametrize("row", ["[M, G/tp.kv, D]", "[M, G, D]"])
def test_a_table_speaks_of_parts_of_a_degree(row: str) -> None:
    """Of 8 key-value heads over 16 ranks, each rank has one; the declaration says the same."""
    same = text(layer({"tp": 16})) == text(layer({"tp": 16}, {"wk": row}))
    assert same == ("tp.kv" in row)


def test_a_declaration_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(NotationError, match="tp comes twice"):
        Parameter.declare("w", "M/tp", "F/tp")
    with pytest.raises(NotationError, match=r"tp\.heads and tp\.kv name the same ranks"):
        Parameter.declare("w", "Head/tp.heads", "G/tp.kv")
    groups = Parameter.declare("w", "M", "Group/tp.groups", "Head/tp.heads")
    assert str(groups.placement) == "[M, Group/tp.groups, Head/tp.heads]"


def test_a_stream_whose_width_stands_before_its_positions_is_not_split_along_them() -> None:
    turned = leaf("input", ("B", "M", "S"), "bf16", "x")
    whole = strategy(Plan(tensor=("tp",)))
    assert whole(turned, None) is not None
    split = strategy(Plan(tensor=("tp",), sequence_parallel=True))
    with pytest.raises(UserError, match=r"\[B, M, S\].*leave them out"):
        split(turned, None)
