"""Nodes are interned, passes rebuild the graph, and the text is the same every time."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest

from stagewright.algebra.layout import Move, replicated, split
from stagewright.algebra.size import size
from stagewright.graph.make import einsum, elementwise, leaf, move
from stagewright.graph.node import Graph, Node, replace
from stagewright.graph.roles import Role
from stagewright.graph.verify import verify


def x(name: str = "x", **fields: Any) -> Node:
    return leaf("input", ("B", "S", "M"), "bf16", name, **fields)


def w(name: str = "w") -> Node:
    return leaf("param", ("M", "F"), "bf16", name)


# ---- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "backward"},
        {"once": True},
        {"scope": "mlp"},
        {"name": "other"},
        {"dtype": "fp32"},
        {"layout": split("dp", "", "")},
        {"shape": (size("B"), size("S"), size("F"))},
        {"attrs": (("role", "input"),)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_field_is_identity(changes: dict[str, Any]) -> None:
    other = replace(x(), **changes)
    assert other is not x()
    assert other != x()
    assert other is replace(x(), **changes)


def test_nodes_that_nobody_holds_go_away() -> None:
    from stagewright.graph import node as ir

    def made() -> int:
        gc.collect()
        return len(ir._interned)  # pyright: ignore

    gc.freeze()  # what other tests hold is not looked through again
    before = made()
    graph = chain(50, "short-lived")
    assert made() >= before + 50
    del graph
    assert made() == before


ALL_GATHER = Move("all_gather", ("tp",), 2, None)


def graph_of(outputs: dict[str, Node]) -> Graph:
    return Graph.of(outputs.values(), outputs)


def chain(length: int, name: str) -> Graph:
    n = x(name)
    for i in range(length):
        n = elementwise("act", n, fn="relu", name=f"{name}.{i}")
    return Graph.of([n], {"y": n})


def test_repr() -> None:
    n = replace(x(), layout=split("dp", "cp tp", ""))
    assert repr(n) == "x: [B/dp, S/cp/tp, M]"


# ---- graphs --------------------------------------------------------------------------------------


def test_long_graphs_do_not_recurse() -> None:
    graph = chain(5_000, "deep")
    new, table = graph.rebuild(lambda old, srcs: replace(old, srcs=srcs))
    assert len(new.nodes) == 5_001
    assert all(table[n] is n for n in graph)


def test_verify() -> None:
    h = einsum("bsm,mf->bsf", x(), w())
    assert verify(graph_of({"y": h})).outputs == {"y": h}
    with pytest.raises(AssertionError, match="before one of its inputs"):
        verify(Graph((h, x(), w()), {"y": h}))
    with pytest.raises(AssertionError, match="is output 'y' and no node"):
        verify(Graph((x(),), {"y": h}))


def ill_formed() -> list[tuple[Node, str]]:
    h = einsum("bsm,mf->bsf", x(), w(), name="h")
    parts = replace(x(), layout=split("", "", "tp"))
    gathered = move(parts, ALL_GATHER, phase="forward", once=False)
    return [
        (replace(x(), layout=replicated(2)), "has 3 dims and a layout of 2"),
        (replace(h, op="einsumm"), "no such op"),
        (replace(h, phase="forwards"), "phase 'forwards', wanted one of forward"),
        (replace(h, dtype="fp9"), "dtype 'fp9', wanted one of fp32"),
        (replace(h, attrs=(*h.attrs, ("fn", "relu"))), "einsum: no attribute 'fn'"),
        (replace(h, attrs=(("spec", "bsm,mf,f->bsf"),)), "its expression [3, 2, 1, 3]"),
        (replace(h, role=Role.USED), "role 'used' of no parameter"),
        (replace(gathered, layout=split("tp", "", "")), "does not lead here"),
        (replace(gathered, op="all_reduce"), "is no way from 2 to None"),
    ]


@pytest.mark.parametrize(("n", "message"), ill_formed(), ids=lambda x: x if type(x) is str else "")
def test_what_is_ill_formed_is_told_with_its_pass(n: Node, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message) + r".* \(after sharding\)"):
        verify(graph_of({"y": n}), "sharding")


# ---- text ----------------------------------------------------------------------------------------
