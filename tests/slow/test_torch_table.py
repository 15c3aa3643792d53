"""Rows of the table of PyTorch's operations, by numbers: what a row makes of a call computes what
PyTorch computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd import single
from stagewright.algebra.size import size
from stagewright.graph.make import apply, leaf
from stagewright.graph.node import Graph, toposort
from stagewright.graph.table import attributes_of
from stagewright.imports.ops import FUNCTIONS, ROWS, OpCall, Translation
from stagewright.imports.recording import Ref, TracedNode
from stagewright.imports.rewrite import TracedGraph

torch: Any = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
pytestmark = [pytest.mark.slow, pytest.mark.extra]

Given = tuple[Any, ...]
A, B3, X4 = (4, 6), (3, 4, 6), (2, 4, 8, 6)
CASES: list[tuple[str, Given, dict[str, Any]]] = [
    ("linear.default", (B3, (5, 6), (5,)), {}),
    ("linear.default", (A, (5, 6)), {}),
    ("addmm.default", ((5,), A, (6, 5)), {}),
    ("mm.default", (A, (6, 5)), {}),
    ("bmm.default", (B3, (3, 6, 5)), {}),
    ("matmul.default", (X4, (6, 5)), {}),
    ("matmul.default", (X4, (2, 4, 6, 5)), {}),
    ("matmul.default", (A, (6,)), {}),
    ("mv.default", (A, (6,)), {}),
    ("dot.default", ((6,), (6,)), {}),
    ("baddbmm.default", ((3, 4, 5), B3, (3, 6, 5)), {}),
    ("einsum.default", ("bij,jk->bik", [B3, (6, 5)]), {}),
    ("einsum.default", ("...i,ij->...j", [X4, (6, 5)]), {}),
    ("einsum.default", ("bij,jk,k->bi", [B3, (6, 5), (5,)]), {}),
    ("conv1d.default", ((2, 4, 9), (6, 4, 3), (6,), [2], [1]), {}),
    ("conv2d.default", ((2, 4, 7, 9), (6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 2), {}),
    ("conv_transpose2d.input", ((2, 4, 5, 6), (4, 3, 2, 2), (3,), [2, 2]), {}),
    ("scaled_dot_product_attention.default", (X4, X4, X4), {"is_causal": True}),
    ("scaled_dot_product_attention.default", (X4, (2, 2, 8, 6), (2, 2, 8, 6)),
     {"enable_gqa": True}),
    ("layer_norm.default", (B3, [6], (6,), (6,)), {}),
    ("rms_norm.default", (B3, [6], (6,)), {}),
    ("embedding.default", ((9, 6), "ids"), {}),
    ("softmax.int", (B3, -1), {}),
    ("_softmax.default", (B3, 2, False), {}),
    ("add.Tensor", (B3, A), {}), ("add.Tensor", (B3, A), {"alpha": 2}), ("add.Tensor", (A, 3), {}),
    ("sub.Tensor", (B3, A), {}), ("sub.Tensor", (A, 2), {}), ("rsub.Scalar", (A, 2), {}),
    ("mul.Tensor", (B3, (4, 1)), {}), ("mul.Tensor", (A, 3), {}), ("div.Tensor", (A, A), {}),
    ("div.Tensor", (A, 4), {}), ("pow.Tensor_Scalar", (A, 2), {}), ("neg.default", (A,), {}),
    ("gelu.default", (A,), {"approximate": "tanh"}), ("gelu.default", (A,), {}),
    ("mean.dim", (B3, [1]), {}), ("mean.dim", (B3, [-1], True), {}), ("sum.default", (B3,), {}),
    ("sum.dim_IntList", (B3, [0, 2]), {}), ("sum.dim_IntList", (B3, [1], True), {}),
    ("view.default", (B3, [12, 6]), {}), ("reshape.default", (X4, [2, 4, 48]), {}),
    ("flatten.using_ints", (X4, 1, 2), {}), ("unsqueeze.default", (A, 1), {}),
    ("squeeze.dim", ((4, 1, 6), 1), {}), ("transpose.int", (X4, 1, 2), {}), ("t.default", (A,), {}),
    ("permute.default", (X4, [0, 2, 3, 1]), {}), ("expand.default", ((4, 1, 6), [2, 4, 3, 6]), {}),
    ("slice.Tensor", (B3, 1, 1, 3), {}), ("slice.Tensor", (B3, 2, -2, 9), {}),
    ("narrow.default", (B3, 2, 2, 3), {}), ("select.int", (B3, 1, -1), {}),
    ("cat.default", ([A, (2, 6), (1, 6)],), {}), ("cat.default", ([B3, B3], -1), {}),
    ("stack.default", ([A, A], 1), {}), ("contiguous.default", (A,), {}),
    *((f"{name}.default", (A,), {}) for name in FUNCTIONS if name != "gelu"),
]  # fmt: skip


def drawn(given: Any, rng: np.random.Generator) -> Any:
    """Shapes as positive random tensors; all else as it is."""
    if given == "ids":
        return torch.tensor(rng.integers(0, 9, (2, 5)))
    if isinstance(given, tuple):
        return torch.tensor(rng.uniform(0.2, 1.2, given))
    many = isinstance(given, list) and given and isinstance(given[0], tuple)
    return [drawn(each, rng) for each in given] if many else given


def computed(call: OpCall, xs: list[Any]) -> Any:
    """What a call makes of arrays."""
    if call.op == "reshape":
        return xs[0].reshape(call.shape)
    labels = [
        [x for x, n in zip(of, v.shape, strict=True) if n > 1]
        for of, v in zip(call.ins, xs, strict=True)
    ]
    plain = [v.squeeze() for v in xs]
    out = [x for x, n in zip(call.out, call.shape, strict=True) if n != 1]
    shape = [int(n) for n in call.shape if n != 1]
    if call.op == "view":
        known = [x for x in out if x in labels[0]]
        turned = plain[0].transpose([labels[0].index(x) for x in known])
        grown = turned.reshape([n if x in known else 1 for x, n in zip(out, shape, strict=True)])
        return np.broadcast_to(grown, shape).reshape(call.shape)
    if call.op == "slice":
        dim, start = int(call.attrs["dim"]), int(call.attrs["start"])
        return np.take(xs[0], range(start, start + int(call.shape[dim])), dim)
    if call.op == "join":
        return np.concatenate(xs, int(call.attrs["dim"]))
    names: dict[Any, str] = {}
    for x in [x for of in (*labels, out) for x in of]:
        names.setdefault(x, "abcdefghijklmnopqrstuvwxyz"[len(names)])
    if call.op == "attention":  # the op's own meaning has positions before heads
        q, k, v = (np.moveaxis(x, -3, -2) for x in xs)
        given = {f"x{i}": x for i, x in enumerate((q, k, v))}
        nodes = [leaf("input", x.shape, "fp32", name) for name, x in given.items()]
        how = implied("attention") | {"causal": call.attrs["causal"]}
        node = apply("attention", "bqaD,bkaD,bkaD->bqaD", *nodes, name="y", **how)
        made = single(Graph.of(toposort([node]), {"y": node}), {}, given)["y"]
        return np.moveaxis(made, -2, -3)
    text = {x: c.upper() if x in call.unsplit else c for x, c in names.items()}
    spec = ",".join("".join(text[x] for x in of) for of in labels)
    spec += "->" + "".join(text[x] for x in out)
    leaves = [
        leaf("input", v.shape, "int64" if v.dtype == np.int64 else "fp32", f"x{i}")
        for i, v in enumerate(plain)
    ]
    if call.op == "add":  # a text says `bias` where the second lacks dims of the first
        places = [np.argsort([out.index(x) for x in of]) for of in labels]
        wide = [
            v.transpose(at).reshape([n if x in of else 1 for x, n in zip(out, shape, strict=True)])
            for v, at, of in zip(plain, places, labels, strict=True)
        ]
        return (wide[0] + wide[1]).reshape(call.shape)
    attrs = {k: v for k, v in call.attrs.items() if v is not None and k != "window"}
    own = implied("softmax") if call.op == "softmax" else {}
    node = apply(call.op, spec, *leaves, out=tuple(map(size, shape)), name="y", **own | attrs)
    graph = Graph.of(toposort([node]), {"y": node})
    return single(graph, {}, {f"x{i}": v for i, v in enumerate(plain)})["y"].reshape(call.shape)


def implied(op: str) -> dict[str, Any]:
    """The attributes that a text need not write."""
    return {k: a.implied for k, a in attributes_of(op).items() if a.implied is not None}


def translated(op: str, given: list[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The call by the row of the table, and the calls of the row on the same numbers."""
    values: dict[str, Any] = {}

    def argument(of: Any) -> Any:
        if isinstance(of, torch.Tensor):
            values[f"x{len(values)}"] = of.numpy()
            return Ref(f"x{len(values) - 1}")
        return tuple(map(argument, of)) if isinstance(of, list) else of

    args = tuple(map(argument, given))
    leaves = [
        TracedNode(n, "input", v.shape, "int64" if v.dtype == np.int64 else "fp32")
        for n, v in values.items()
    ]
    node = TracedNode("y", f"aten.{op}", tuple(result.shape), "fp32", args, kwargs)
    calls = Translation(TracedGraph([*leaves, node], ["y"]), approximate=False).calls
    for name, call in calls.items():
        if name not in values:
            values[name] = computed(call, [values[n] for n in call.operands])
    return values["y"]


@pytest.mark.parametrize(("op", "given", "kwargs"), CASES, ids=lambda v: str(v)[:40])
def test_a_row_computes_what_pytorch_computes(op: str, given: Given, kwargs: dict[str, Any]):
    packet, _, overload = op.partition(".")
    tensors = [drawn(each, np.random.default_rng(7)) for each in given]
    known = {k: v for k, v in kwargs.items() if op != "layer_norm.default"}
    theirs = getattr(getattr(torch.ops.aten, packet), overload)(*tensors, **known)
    ours = translated(op, tensors, kwargs, theirs)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("length", [1, 3])
def test_rows_of_a_table_are_summed_over_bags(length: int, mode: int):
    """`embedding_bag` with its offsets, as `nn.EmbeddingBag` calls it for indices [4, length]."""
    rng = np.random.default_rng(3)
    table, ids = rng.uniform(0.2, 1.2, (9, 6)), rng.integers(0, 9, 4 * length)
    offsets = torch.arange(0, 4 * length, length)
    call = torch.ops.aten.embedding_bag.padding_idx
    first, *_ = call(
        torch.tensor(table), torch.tensor(ids), offsets, False, mode, False, None, False, None
    )
    op = "aten.embedding_bag.padding_idx"
    args = (Ref("table"), Ref("ids"), None, False, mode, False, None, False, None)
    nodes = [
        TracedNode("table", "input", table.shape, "fp32"),
        TracedNode("ids", "input", ids.shape, "int64"),
        TracedNode("bag", op, args=args),
        TracedNode("y", "getitem", tuple(first.shape), "fp32", (Ref("bag"), 0)),
    ]
    values: dict[str, Any] = {"table": table, "ids": ids}
    for name, made in Translation(TracedGraph(nodes, ["y"]), approximate=False).calls.items():
        if name not in values:
            values[name] = computed(made, [values[n] for n in made.operands])
    np.testing.assert_allclose(values["y"], first.numpy(), rtol=2e-5)


def test_rows_without_a_case_are_known():
    tried = {f"aten.{op.partition('.')[0]}" for op, *_ in CASES}
    same = {"aten.conv3d", "aten.convolution", "aten.conv_transpose1d", "aten.true_divide",
            "aten.unflatten", "aten._unsafe_view", "aten.numpy_T", "aten.expand_as", "aten.clone",
            "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.concat"}  # fmt: skip
    """The functions of rows that are tried under another name."""
    rest = {"aten.group_norm", "aten.cross_entropy_loss", "aten.to", "aten._to_copy",
            "aten.type_as", "aten.dropout"}  # fmt: skip
    parts = {name for name in ROWS if ROWS[name] is ROWS["aten.split"]} | {
        "getitem"
    }  # and embedding_bag
    own = {name for name in ROWS if name.startswith("our.")}
    assert {*ROWS} - tried == same | rest | parts | own
