"""Nodes are interned, passes rebuild the graph, and the text is the same every time."""

from __future__ import annotations

import gc
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from stagewright.algebra.layout import Move, replicated, split
from stagewright.algebra.size import size
from stagewright.graph.make import add, apply, einsum, elementwise, identity, leaf, move
from stagewright.graph.node import Graph, Node, replace, text, toposort
from stagewright.graph.roles import Role
from stagewright.graph.verify import verify


def x(name: str = "x", **fields: Any) -> Node:
    return leaf("input", ("B", "S", "M"), "bf16", name, **fields)


def w(name: str = "w") -> Node:
    return leaf("param", ("M", "F"), "bf16", name)


# ---- nodes ---------------------------------------------------------------------------------------


def test_equal_nodes_are_one() -> None:
    assert x() is x()
    assert einsum("bsm,mf->bsf", x(), w()) is einsum("bsm,mf->bsf", x(), w())
    assert elementwise("act", x(), fn="silu") is elementwise("act", x(), fn="silu")


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


def test_replacing_nothing_is_the_node_itself() -> None:
    assert replace(x()) is x()
    assert replace(replace(x(), name="y"), name="x") is x()


def test_the_order_of_attributes_is_of_no_account() -> None:
    one = elementwise("act", x(), fn="softcap", cap=2.0)
    assert one is elementwise("act", x(), cap=2.0, fn="softcap")
    assert (one["fn"], one["cap"], one.get("by"), one.get("by", 1)) == ("softcap", 2.0, None, 1)


def test_nodes_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        x().name = "y"  # pyright: ignore


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


def test_toposort_runs_inputs_first_and_as_asked() -> None:
    a, b = elementwise("act", x(), fn="relu"), elementwise("act", x(), fn="silu")
    total = add(b, a)
    assert toposort([total]) == [x(), b, a, total]
    assert toposort([a, total]) == [x(), a, b, total]
    assert toposort([]) == []


def test_long_graphs_do_not_recurse() -> None:
    graph = chain(5_000, "deep")
    new, table = graph.rebuild(lambda old, srcs: replace(old, srcs=srcs))
    assert len(new.nodes) == 5_001
    assert all(table[n] is n for n in graph)


def test_a_graph_is_what_the_outputs_need() -> None:
    used, unused = elementwise("act", x(), fn="relu"), elementwise("act", x(), fn="silu")
    graph = Graph.of([unused, used], {"y": used})
    assert list(graph) == [x(), used]
    assert list(Graph.of([], {"y": used})) == [x(), used]


def test_a_graph_runs_in_the_order_given() -> None:
    a, b = elementwise("act", x(), fn="relu"), elementwise("act", x(), fn="silu")
    total = add(a, b)
    assert list(Graph.of([b, a, total], {"y": total})) == [x(), b, a, total]
    assert list(Graph.of([total, b, a], {"y": total})) == [x(), a, b, total]


def test_rebuilding_with_the_same_nodes_changes_nothing() -> None:
    graph = graph_of({"y": einsum("bsm,mf->bsf", x(), w())})
    new, table = graph.rebuild(lambda old, srcs: replace(old, srcs=srcs))
    assert new == graph
    assert table == {n: n for n in graph}


def test_rebuild_sees_each_node_once_with_new_inputs() -> None:
    h = einsum("bsm,mf->bsf", x(), w(), name="h")
    graph = graph_of({"y": add(h, h, name="y")})
    seen: list[str] = []

    def doubled(old: Node, srcs: tuple[Node, ...]) -> Node:
        seen.append(old.name)
        new = replace(old, srcs=srcs)
        return elementwise("scale", new, by=2.0, name="twice") if old is h else new

    new, table = graph.rebuild(doubled)
    assert seen == ["x", "w", "h", "y"]
    assert [n.name for n in new] == ["x", "w", "h", "twice", "y"]
    assert table[h].op == "scale"
    assert new.outputs["y"] is table[graph.outputs["y"]]
    verify(new)


def test_rebuild_drops_what_is_no_longer_needed() -> None:
    h = identity(x(), "h")
    y = elementwise("act", h, fn="relu", name="y")
    new, _ = graph_of({"y": y}).rebuild(
        lambda old, srcs: srcs[0] if old.op == "identity" else replace(old, srcs=srcs)
    )
    assert [n.name for n in new] == ["x", "y"]


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


def test_text() -> None:
    h = einsum("bsm,mf->bsf", replace(x(), layout=split("dp", "", "")), w(), name="h")
    y = elementwise("act", h, fn="relu", name="h", dtype="fp32")
    g = apply("sum", "bsf->f", y, phase="backward", once=True, name="g")
    assert text(graph_of({"g": g})).splitlines() == [
        "x: [B/dp, S, M] = input()",
        "w: [M, F] = param()",
        "h: [B/dp, S, F] = einsum[bsm,mf->bsf](x, w)",
        "h.2: [B/dp, S, F] fp32 = act[bsf->bsf](h)",
        "g: [F @ 1/dp] fp32 = sum[bsf->f](h.2)  ; backward once",
    ]
