"""One harness over the rows of the op table: gradients against finite differences, the result's
shape, execution under random layouts, and work against direct counts."""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import cases, rows_of, some, times
from spmd import RandomLayouts, Spmd, check, random_values, single
from stagewright.algebra.index import parse
from stagewright.algebra.layout import Layout, split
from stagewright.algebra.size import Size, size
from stagewright.graph.cost import flops, local, traffic
from stagewright.graph.gradient import backward
from stagewright.graph.make import apply, einsum, elementwise, leaf
from stagewright.graph.node import Graph, Node, replace, toposort
from stagewright.graph.ops.attention import FAR
from stagewright.graph.shard import shard
from stagewright.graph.table import LEAVES, OPS
from stagewright.graph.verify import verify

SIZES = (
    dict.fromkeys("BSQKMFAVPXJ", 12)
    | {"G": 6, "D": 6, "E": 6, "R": 72, "N": 4, "Z": 2}
    | {"I": 4, "O": 12, "L": 4, "H": 6, "W": 24}
)
SIZES["T"] = 3


class Example(NamedTuple):
    """How a row is used: an index expression, attributes, and which operands have no gradient."""

    op: str
    spec: str
    attrs: dict[str, Any] = {}  # noqa: RUF012
    fixed: tuple[int, ...] = ()
    integers: tuple[str, ...] = ()  # the names of operands that are ids, positions or places
    out: str = ""  # the result's dims, where operands do not tell
    positive: tuple[int, ...] = ()
    negative: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.op, self.spec, *(f"{k}={v}" for k, v in self.attrs.items())])


GQA = "bq(gr)D,bkgD,bkgD->bq(gr)D"
MHA = "bqaD,bkaD,bkaD->bqaD"
MLA = "bqaD,bkaD,bkaV->bqaV"
LATENTS = "bqaD,bkD->bqaV"  # keys, and their beginning values
BOTH = {"products": (1, 1), "width": 6}  # with keys, and with values
# Dims of one or two indices. Groups of a vocabulary are as many as all ranks can share.
NAMES = {("g", "r"): "A"}
NAMES_OF_GROUPS = {("g", "v"): "W", ("g",): "J"}
LATENTS_CHOSEN, MHA_CHOSEN = "bqaD,bKD,bqT->bqaV", "bqaD,bKaD,bKaD,bqT->bqaD"
CHOSEN = BOTH | {"chosen": True, "causal": True, "top": 3}
TARGET = {"causal": True, "top": 3, "width": 6, "products": (1, 0)}
SCORES = TARGET | {"weighed": True}
INDEX = {name: value for name, value in SCORES.items() if name != "top"}

EXAMPLES = [Example(**row) for row in rows_of("test_ops", "examples")]


class Built(NamedTuple):
    """An example as a graph: outputs `out` and the gradients `d0`, `d1`, ... of its operands."""

    graph: Graph
    primal: dict[Node, Node]
    values: dict[str, Any]


def built(example: Example) -> Built:
    spec = parse(example.spec)
    srcs: list[Node] = []
    for i, dims in enumerate(spec.ins):
        named = example.integers[i] if example.integers else ""
        known = NAMES_OF_GROUPS if ("g", "v") in (*itertools.chain(*spec.ins), *spec.out) else NAMES
        names = tuple(known.get(d, d[0].upper()) for d in dims)
        dtype = "int64" if named else "fp32"
        srcs.append(leaf("input", names, dtype, named or f"x{i}"))
    shape = tuple(size(d) for d in example.out) or None
    out = apply(example.op, example.spec, *srcs, out=shape, name="out", **example.attrs)
    seed = replace(leaf("input", (), "fp32", "g", phase="backward"), shape=out.shape)
    seed = replace(seed, layout=Layout(((),) * len(out.shape)))
    vjp = OPS[example.op].vjp  # what inference has needs none
    found = vjp(out, seed) if vjp else (None,) * len(srcs)
    assert tuple(i for i, g in enumerate(found) if g is None) == example.fixed
    gradients = {f"d{i}": g for i, g in enumerate(found) if g is not None}
    outputs = {"out": out, **gradients}
    graph = Graph.of(toposort(outputs.values()), outputs)
    values = random_values(graph, SIZES) | {
        "g": np.random.default_rng(1).normal(size=shape_of(out))
    }
    if "block_table" in example.integers:  # three places each of two requests, in any order
        values["block_table"] = (values["block_table"] % 4 // 2) * FAR + values[
            "block_table"
        ] % 2 * 3
    if {"token_slots", "chosen"} <= {*example.integers}:  # a query sees itself
        table, slots = values["block_table"], values["token_slots"]
        own = np.take_along_axis(table, slots // 3, axis=1) % FAR + slots % 3
        own = own // example.attrs.get("top_block", 1)
        chosen = values["chosen"]
        chosen[..., 0] = own if chosen.ndim == 3 else own[:, :, None]
    for i in example.positive:
        values[f"x{i}"] = np.exp(values[f"x{i}"])
    for i in example.negative:
        values[f"x{i}"] = -np.exp(values[f"x{i}"])
    if example.op == "dropout":
        values["x1"] = (values["x1"] > 0) * 1.0
    primal = {seed: out} | {g: srcs[int(k[1:])] for k, g in gradients.items()}
    return Built(graph, primal, values)


def shape_of(n: Node) -> list[int]:
    return [d.value(SIZES) for d in n.shape]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_gradients_against_finite_differences(example: Example) -> None:
    graph, _, values = built(example)
    forward = Graph.of(graph.nodes, {"out": graph.outputs["out"]})
    truth = single(graph, SIZES, values)
    rng = np.random.default_rng(2)
    for i in range(len(parse(example.spec).ins)):
        if i in example.fixed:
            continue
        name, h = f"x{i}", 1e-5
        way = rng.normal(size=values[name].shape)
        ends = [
            single(forward, SIZES, values | {name: values[name] + sign * h * way})["out"]
            for sign in (1, -1)
        ]
        slope = (values["g"] * (ends[0] - ends[1])).sum() / (2 * h)
        assert (truth[f"d{i}"] * way).sum() == pytest.approx(slope, rel=1e-5, abs=1e-6), name
        assert truth[f"d{i}"].shape == values[name].shape


# Rows of tokens stand in any order, which depends on the layout: test_strategies tries these whole.
@pytest.mark.numerics
@pytest.mark.parametrize("example", some([e for e in EXAMPLES if not OPS[e.op].rows]), ids=str)
def test_any_layouts(example: Example) -> None:
    graph, primal, values = built(example)
    truth = single(graph, SIZES, values)
    for seed in range(times(4)):
        draw = RandomLayouts(random.Random(seed), SIZES)
        inner = draw.inner if "(gr)" in example.spec else frozenset[str]()
        sharded = shard(graph, draw.want, primal, inner=inner)
        verify(sharded)
        check(graph, sharded, draw.mesh, SIZES, values, truth)


def test_every_row_is_tried() -> None:
    tried = {n.op for example in EXAMPLES for n in built(example).graph}
    # A loss's `nll` and the optimizer are tried in test_grad, and losses that stand beside a value
    # in test_moe, as part of their blocks.
    of_blocks = {"accumulate", "tie", "norm2", "adamw", "sgd", "spread", "divide"}
    # Likewise what is made of operands that are differentiated in its stead.
    of_blocks |= {"delta_inverse", "delta_scores", "inverse_norm", "unit", "unit_bwd"}
    of_blocks |= {"index_loss", "index_loss_bwd", "with_gradient"}
    of_blocks |= {"aux_loss", "aux_loss_bwd", "z_loss", "z_loss_bwd"}
    of_blocks |= {"count", "splits", "bias_update", "log_probs_bwd"}
    of_blocks |= {"conv1d_served", "scan_served", "linear_attention_served", "delta_rule_served"}
    of_blocks |= {"compress_served"}
    assert set(OPS) - tried <= of_blocks
    assert tried <= set(OPS) | LEAVES


def test_log_probs_of_the_own_maximum_and_sum_have_the_gradient_of_log_softmax() -> None:
    x = leaf("input", ("B", "S", "V"), "fp32", "x")
    labels = leaf("input", ("B", "S"), "int64", "labels")
    g = leaf("input", (), "fp32", "g", phase="backward")
    top = apply("max", "bsv->bs", x)
    total = apply("exp_sum", "bsv,bs->bs", x, top)
    gradients: list[Any] = []
    for y in (
        apply("log_probs", "bsv,bs,bs->bsv", x, top, total),
        apply("log_softmax", "bsV->bsV", x),
    ):
        loss = apply("mean", "bs->", apply("pick", "bsv,bs->bs", y, labels))
        (dx,) = backward(loss, g, [x]).gradients
        graph = Graph.of(toposort([dx]), {"dx": dx})
        gradients.append(single(graph, SIZES, random_values(graph, SIZES))["dx"])
    np.testing.assert_allclose(*gradients, atol=1e-12)


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if row.linear])
def test_linear_rows_are_linear(op: str) -> None:
    examples = [e for e in EXAMPLES if e.op == op and not e.integers]
    alone = ("expand", "tie", "accumulate", "pad", "own_experts_bwd", "repeat_bwd")
    assert examples or op in alone
    for example in examples:
        graph, _, values = built(example)
        forward = Graph.of(graph.nodes, {"out": graph.outputs["out"]})
        other = {k: np.random.default_rng(3).normal(size=np.shape(v)) for k, v in values.items()}
        one, two, both = (
            single(forward, SIZES, v)["out"]
            for v in (values, other, {k: values[k] + other[k] for k in values})
        )
        np.testing.assert_allclose(both, one + two)


# ---- layouts of results --------------------------------------------------------------------------


def read(text: str) -> Layout:
    dims, _, partial = text.partition("@")
    return Layout(split(*dims.strip().split(",")).dims, frozenset(partial.split()))


def operands(spec: str, layouts: list[str]) -> list[Node]:
    srcs: list[Node] = []
    for i, (dims, layout) in enumerate(zip(parse(spec).ins, layouts, strict=True)):
        names = tuple("A" if len(d) > 1 else d[0].upper() for d in dims)
        srcs.append(replace(leaf("input", names, "fp32", f"x{i}"), layout=read(layout)))
    return srcs


@cases
def test_layouts_that_disagree(op: str, spec: str, layouts: list[str], message: str) -> None:
    own = {"norm": {"fn": "rmsnorm"}, "act": {"fn": "relu"}}.get(op, {})
    with pytest.raises(ValueError, match=message):
        apply(op, spec, *operands(spec, layouts), **own)


@cases
def test_attributes_are_declared(op: str, attrs: dict[str, Any], message: str) -> None:
    """Every op's row says what its nodes are told; a typo is an error where the node is made."""
    with pytest.raises(ValueError, match=re.escape(message)):
        elementwise(op, *operands("bsm->bsm", [",,"]), **attrs)


def test_a_norm_counts_copies_once() -> None:
    (w,) = operands("mf->", [",tp"])
    n = apply("norm2", "mf->", w, alone=("dp",))
    assert n.layout == Layout((), frozenset({"tp", "dp"}))
    spmd = Spmd({"tp": 2, "dp": 3}, SIZES)
    value = np.random.default_rng(0).normal(size=(12, 12))
    env = spmd.run(Graph.of([n], {"n": n}), {"x0": value})
    for r in spmd.ranks:
        np.testing.assert_allclose(spmd.total(n, env, r), (value**2).sum())


# ---- ways to make nodes --------------------------------------------------------------------------


# ---- work ----------------------------------------------------------------------------------------

SMALL = dict(zip("BSQKMFAGDVERX", (2, 3, 4, 4, 5, 6, 6, 3, 2, 7, 3, 5, 4), strict=True))
MESH = {"dp": 2, "tp": 3, "cp": 2}


def number(d: Size, axes: tuple[str, ...]) -> int:
    return -(-d.value(SMALL) // math.prod(MESH[a] for a in axes))


def counted(spec: str) -> int:
    """Multiplications and additions of the loops that an einsum stands for."""
    parsed = parse(spec)
    sizes = SMALL | ({"R": SMALL["A"] // SMALL["G"]} if "(gr)" in spec else {})
    used = sorted({x for dims in parsed.ins for d in dims for x in d})
    loops = itertools.product(*(range(sizes[x.upper()]) for x in used))
    return sum(2 for _ in loops)


@pytest.mark.parametrize("spec", [e.spec for e in EXAMPLES if e.op == "einsum"])
def test_flops_of_einsum(spec: str) -> None:
    n = einsum(spec, *operands(spec, ["," * (len(d) - 1) for d in parse(spec).ins]))
    assert flops(n, number) == counted(spec)


def seen(queries: int, causal: bool, window: int) -> list[tuple[int, int]]:
    pairs = itertools.product(range(queries), repeat=2)
    return [(q, k) for q, k in pairs if not causal or (k <= q and (not window or k > q - window))]


@pytest.mark.parametrize("spec", [GQA, MHA])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 2), (True, 4)])
def test_flops_of_attention(spec: str, causal: bool, window: int) -> None:
    n = apply("attention", spec, *operands(spec, [",,,"] * 3), causal=causal, window=window, **BOTH)
    # Kernels, and everybody who counts FLOPs, halve the square: half the diagonal is left out.
    diagonal = SMALL["Q"] / 2 if causal and window in (0, SMALL["Q"]) else window / 2 * causal
    pairs = len(seen(SMALL["Q"], causal, window)) - diagonal
    heads = SMALL["B"] * SMALL["A"]
    assert flops(n, number) == pytest.approx(heads * pairs * SMALL["D"] * 2 * 2, rel=0.13)
    if not window:
        assert flops(n, number) == heads * pairs * SMALL["D"] * 2 * 2


@pytest.mark.parametrize("window", [0, 256])
def test_windows_and_masks_of_long_sequences(window: int) -> None:
    long = {"B": 1, "A": 1, "Q": 4096, "K": 4096, "D": 1}
    n = apply("attention", MHA, *operands(MHA, [",,,"] * 3), causal=True, window=window, **BOTH)
    last = window or 4096
    pairs = sum(min(q + 1, last) for q in range(4096))
    assert flops(n, lambda d, axes: d.value(long)) == pytest.approx(4 * pairs, rel=2e-3)


@pytest.mark.parametrize("chunk", [256, 1000])
def test_chunks_of_long_sequences(chunk: int) -> None:
    long = {"B": 1, "A": 1, "Q": 4096, "K": 4096, "D": 1}
    n = apply("attention", MHA, *operands(MHA, [",,,"] * 3), causal=True, chunk=chunk, **BOTH)
    pairs = sum(q % chunk + 1 for q in range(4096))
    assert flops(n, lambda d, axes: d.value(long)) == pytest.approx(4 * pairs, rel=4e-3)


def test_flops_of_attention_to_chosen_keys() -> None:
    """A query sees 3 keys, or those before it: a band of the triangle, as with a window."""
    sizes = {"B": 2, "Q": 12, "K": 12, "A": 4, "D": 5, "V": 3, "T": 3}
    seen = 2 * (12 * (2 * 3 * 12 - 3 * 3) // (2 * 12))

    def own(d: Size, axes: tuple[str, ...]) -> int:
        return d.value(sizes)

    def shape(dims: str) -> tuple[Size, ...]:
        return tuple(size(d) for d in dims)

    q, k, w, t = operands("bqaD,bKD,bqA,bqT->", [",,,", ",,", ",,", ",,"])
    core = apply("attention", LATENTS_CHOSEN, q, k, t, out=shape("BQAV"), **CHOSEN)
    assert flops(core, own) == 2 * (5 + 3) * 4 * seen
    target = apply("index_target", "bqaD,bKD,bqT->bqT", q, k, t, **TARGET)
    assert flops(target, own) == 2 * 5 * 4 * seen
    chosen = apply("index_topk", "bqAD,bKD,bqA->bqT", q, k, w, out=shape("BQT"), **INDEX)
    assert flops(chosen, own) == 2 * (5 + 1) * 4 * 2 * 12 * 12 // 2


def test_flops_of_attention_with_values_of_another_width() -> None:
    n = apply("attention", MLA, *operands(MLA, [",,,"] * 3), causal=False, window=0, **BOTH)
    pairs = SMALL["B"] * SMALL["A"] * SMALL["Q"] * SMALL["K"]
    assert flops(n, number) == 2 * pairs * (SMALL["D"] + SMALL["V"])
    latents = operands(LATENTS, [",,,", ",,"])
    out = (*latents[0].shape[:-1], size("V"))
    n = apply("attention", LATENTS, *latents, out=out, causal=False, window=0, **BOTH)
    assert flops(n, number) == 2 * pairs * (SMALL["D"] + SMALL["V"])
    assert traffic(n, number).reads == tuple(4 * local(s, number) for s in latents)  # fp32, once


def test_flash_attention_does_five_products_in_backward() -> None:
    n = apply("attention", MHA, *operands(MHA, [",,,"] * 3), causal=True, window=0, **BOTH)
    seed = replace(n, op="input", srcs=(), attrs=(), name="g")
    vjp = OPS["attention"].vjp
    assert vjp is not None
    work = [flops(g, number) for g in vjp(n, seed) if g is not None]
    assert sum(work) == flops(n, number) * 5 / 2  # arXiv 2205.14135, section 3.2


def test_bytes() -> None:
    x, w = leaf("input", ("B", "S", "M"), "bf16", "x"), leaf("param", ("M", "F"), "bf16", "w")
    w = replace(w, layout=split("", "tp"))
    work = traffic(einsum("bsm,mf->bsf", x, w), number)
    assert work.reads == (2 * 2 * 3 * 5, 2 * 5 * 2)
    assert work.written == 2 * 2 * 3 * 2
    assert work.flops == 2 * 2 * 3 * 5 * 2

    tokens, table = (
        leaf("input", ("B", "S"), "int64", "tokens"),
        leaf("param", ("V", "M"), "bf16", "t"),
    )
    rows = traffic(apply("embedding", "bs,vm->bsm", tokens, table, dtype="bf16"), number)
    assert rows.reads == (8 * 2 * 3, 2 * 2 * 3 * 5)  # the rows of the tokens, not the table
    assert rows.written == 2 * 2 * 3 * 5

    assert traffic(x, number) == (0, (), 0)
    assert traffic(apply("identity", "bsm->bsm", x), number).written == 0


def test_bytes_of_a_step() -> None:
    g, p = leaf("input", ("M", "F"), "fp32", "g"), leaf("state", ("M", "F"), "fp32", "master")
    m, v = leaf("state", ("M", "F"), "fp32", "m"), leaf("state", ("M", "F"), "fp32", "v")
    new = apply("adamw", "mf,mf,mf,mf->mf", g, p, m, v, dtype="bf16", updates=3)
    work = traffic(new, number)
    assert work.reads == (4 * 30,) * 4
    assert work.written == 2 * 30 + 3 * 4 * 30
