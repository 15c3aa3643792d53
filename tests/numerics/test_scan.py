"""Recurrences in chunks: the algorithms of the papers compute what the ops mean, with as many
products as the ops say they cost; and what the kernels hand on through device memory."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stagewright.algebra.size import Size, size
from stagewright.graph.cost import flops, traffic
from stagewright.graph.make import apply, leaf
from stagewright.graph.node import Node
from stagewright.graph.ops import state as scan
from stagewright.graph.table import OPS

B, S, G, H, N, P, L = 2, 96, 2, 3, 8, 4, 32
SIZES = {"B": B, "S": S, "G": G, "H": H, "N": N, "P": P, "L": L}


def extent(d: Size, axes: tuple[str, ...]) -> int:
    return d.value(SIZES)


class Counted:
    """Matrix products by the sides of one: `lower` counts blocks of 16 up to the diagonal."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()

    def __call__(self, what: str, spec: str, x: Any, y: Any, *, part: float = 1) -> Any:
        sizes = dict(zip(spec.split("->")[0].replace(",", ""), (*x.shape, *y.shape), strict=True))
        self.flops[what] += round(2 * math.prod(sizes.values()) * part)
        return np.einsum(spec, x, y)


def operands(op: str, kernel: str, decays: str = "bSgh") -> tuple[Node, dict[str, Any]]:
    n = "N" if op == "delta_rule" else "n"
    terms = [f"bSg{n}", f"bSg{n}", "bSghp", "bSgh", decays]
    srcs = [leaf("input", tuple(x.upper()), "bf16", f"x{i}") for i, x in enumerate(terms)]
    attrs = {"kernel": kernel, "chunk": L, "scale": 1.0}
    return apply(op, f"{','.join(terms)}->bSghp", *srcs, **attrs), attrs


def values(vector: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, B, S, G, N)) / math.sqrt(N)
    v, beta = rng.normal(size=(B, S, G, H, P)), rng.uniform(size=(B, S, G, H))
    decay = -rng.uniform(size=(B, S, G, H, N) if vector else (B, S, G, H)) / 8
    return q, k, v, beta, decay


def chunked(x: Any) -> Any:
    return x.reshape(B, S // L, L, *x.shape[2:])


SEEN = np.tri(L)
HALF = (L + 16) / (2 * L)  # of the blocks of 16 x 16, those up to the diagonal


def test_ssd_in_chunks() -> None:
    """Section 6 of arXiv 2405.21060: the four steps of its listing 1."""
    q, k, v, beta, decay = values(vector=False)
    mul = Counted()
    qs, ks, us, at = map(chunked, (q, k, v * beta[..., None], decay))
    at = at.cumsum(2)
    since = np.exp(np.minimum(at[:, :, :, None] - at[:, :, None], 0)) * SEEN[:, :, None, None]
    scores = mul("keys", "bcign,bcjgn->bcijg", qs, ks)
    within = mul("values", "bcijgh,bcjghp->bcighp", scores[..., None] * since, us, part=1 / 2)
    fed = us * np.exp(at[:, :, -1:] - at)[..., None]
    made = mul("states", "bcjgn,bcjghp->bcghnp", ks, fed)
    state, before = np.zeros_like(made[:, 0]), []
    for c in range(S // L):
        before.append(state)
        state = np.exp(at[:, c, -1])[..., None, None] * state + made[:, c]
    read = mul("states", "bcign,bcghnp->bcighp", qs, np.stack(before, 1))
    out = (within + read * np.exp(at)[..., None]).reshape(v.shape)

    n, attrs = operands("linear_attention", "ssd")
    want = scan.linear_attention(attrs, q, k, v, beta, decay)
    np.testing.assert_allclose(out, want, atol=1e-10)
    assert flops(n, extent) == sum(mul.flops.values())


@pytest.mark.parametrize("kernel", ["delta", "kimi"])
def test_delta_rule_in_chunks(kernel: str) -> None:
    """Arxiv 2412.06464, section 3.3, and 2510.26692, section 3: with the products that the kernels
    keep for backward as `delta_inverse` and `delta_scores` make them."""
    vector = kernel == "kimi"
    q, k, v, beta, decay = values(vector)
    mul = Counted()
    made = SimpleNamespace(shape=(B, S, G, H, L))
    inverse, scores = (
        chunked(x)
        for x in (scan.delta_inverse(made, k, beta, decay), scan.delta_scores(made, q, k, decay))
    )
    qs, ks, vs, betas, at = map(chunked, (q, k, v, beta, decay))
    at = (at if vector else at[..., None]).cumsum(2)  # [b, c, i, g, h, n or 1]
    keys = ks[:, :, :, :, None] * betas[..., None]
    w = mul("keys", "bcighj,bcjghn->bcighn", inverse, keys * np.exp(at))
    u = mul("values", "bcighj,bcjghp->bcighp", inverse, vs * betas[..., None])
    if not vector:  # kept by Kimi's kernels, made in the last one by those of gated delta nets
        heads = np.broadcast_to(ks[:, :, :, :, None], keys.shape)
        asked = np.broadcast_to(qs[:, :, :, :, None], keys.shape)
        mul("keys", "bcighn,bcjghn->bcijgh", asked, heads)
    state, out = np.zeros((B, G, H, N, P)), []
    for c in range(S // L):
        new = u[:, c] - mul("states", "bighn,bghnp->bighp", w[:, c], state)
        within = mul("values", "bighj,bjghp->bighp", scores[:, c], new)
        asked = qs[:, c, :, :, None] * np.exp(at[:, c])
        out.append(within + mul("states", "bighn,bghnp->bighp", asked, state))
        fed = ks[:, c, :, :, None] * np.exp(at[:, c, -1:] - at[:, c])
        last = np.exp(at[:, c, -1])[..., None]
        state = last * state + mul("states", "bjghn,bjghp->bghnp", fed, new)
    found = np.concatenate(out, 1)

    n, attrs = operands("delta_rule", kernel, "bSghN" if vector else "bSgh")
    np.testing.assert_allclose(found, scan.delta_rule(attrs, q, k, v, beta, decay), atol=1e-10)
    assert flops(n, extent) == sum(mul.flops.values())
    for op, spec in (
        ("delta_scores", "bSgN,bSgN,bSgh->bSghL"),
        ("delta_inverse", "bSgN,bSgh,bSgh->bSghL"),
    ):
        srcs = [
            leaf("input", tuple(x.upper()), "bf16", "x") for x in spec.split("->")[0].split(",")
        ]
        within = apply(
            op, spec, *srcs, chunk=L, out=(*srcs[0].shape[:3], srcs[2].shape[3], size("L"))
        )
        solve = L * L // 2 if op == "delta_inverse" else 0  # L / 4 multiply-adds per element
        assert flops(within, extent) == B * S * G * H * (round(2 * L * N * HALF) + solve)


# Backward against forward, in products of a chunk: (L x L x n, L x L x p, L x n x p, L x L x L).
# Counted by hand in the sources that `graph/ops/state.py` names.
BACKWARD = {
    ("linear_attention", "ssd"): (3, 3, 5, 0),
    ("linear_attention", "linear"): (3, 2, 5, 0),
    ("delta_rule", "delta"): (9, 5, 8, 2),
    ("delta_rule", "kimi"): (3 + 4 * HALF, 5, 8, 2),
}


@pytest.mark.parametrize(("op", "kernel"), BACKWARD)
def test_backward_makes_again_what_its_kernels_do(op: str, kernel: str) -> None:
    n, _ = operands(op, kernel, "bSghN" if kernel == "kimi" else "bSgh")
    seed = leaf("input", tuple("BSGHP"), "bf16", "g", phase="backward")
    vjp = OPS[op].vjp
    assert vjp is not None
    got = sum(flops(g, extent) for g in vjp(n, seed) if g is not None)
    keys, vals, states, square = BACKWARD[op, kernel]
    ssd = kernel == "ssd"  # C B' once per group; masked blocks are skipped
    per_head = 2 * L * P * vals / (2 if ssd else 1) + 2 * N * P * states + 2 * L * L * square
    per_head += 2 * L * N * keys / (H if ssd else 1)
    assert got == B * S * G * H * per_head


def test_ssd_is_about_what_megatron_counts() -> None:
    """Megatron-LM's estimate of the scan, 7 x d_inner x state per token (its training.py), is one
    of Mamba-1; the products of SSD at its chunks of 128 are fewer, within a third."""
    sizes = {"B": 1, "S": 4096, "G": 8, "H": 16, "N": 128, "P": 64}
    terms = ["bSgn", "bSgn", "bSghp", "bSgh", "bSgh"]
    srcs = [leaf("input", tuple(x.upper()), "bf16", f"x{i}") for i, x in enumerate(terms)]
    attrs = {"kernel": "ssd", "chunk": 128, "scale": 1.0}
    n = apply("linear_attention", f"{','.join(terms)}->bSghp", *srcs, **attrs)
    ours = flops(n, lambda d, axes: d.value(sizes))
    assert 0.67 < ours / (7 * 4096 * 8192 * 128) < 1


def test_selective_scan() -> None:
    """9 per element of the state (state-spaces/mamba issue 110); backward about three times."""
    dims = ["bsi", "bsi", "in", "bsn", "bsn"]
    sizes = {"B": 2, "S": 64, "I": 12, "N": 4}
    srcs = [leaf("input", tuple(x.upper()), "bf16", f"x{i}") for i, x in enumerate(dims)]
    n = apply("scan", "bSi,bSi,in,bSn,bSn->bSi", *srcs)
    points = 2 * 64 * 12 * 4
    assert flops(n, lambda d, axes: d.value(sizes)) == 9 * points
    vjp = OPS["scan"].vjp
    assert vjp is not None
    found = [g for g in vjp(n, leaf("input", tuple("BSI"), "bf16", "g")) if g is not None]
    assert sum(flops(g, lambda d, axes: d.value(sizes)) for g in found) == 28 * points
    work = traffic(n, lambda d, axes: d.value(sizes))  # states stay on chip
    assert work.written == 2 * (2 * 64 * 12)
    assert sum(work.reads) == 2 * (2 * 2 * 64 * 12 + 12 * 4 + 2 * 2 * 64 * 4)


def test_convolution() -> None:
    sizes = {"B": 2, "S": 64, "I": 12, "T": 4}
    srcs = [leaf("input", tuple(x), "bf16", "x") for x in ("BSI", "IT", "I")]
    n = apply("conv1d", "bSi,iT,i->bSi", *srcs, fn="silu")
    outputs = 2 * 64 * 12
    assert flops(n, lambda d, axes: d.value(sizes)) == outputs * (2 * 4 + 8)
    plain = apply("conv1d", "bSi,iT,i->bSi", *srcs, fn="")
    assert flops(plain, lambda d, axes: d.value(sizes)) == outputs * 2 * 4


@pytest.mark.parametrize(
    ("op", "kernel", "written"),
    [
        # states in fp32 twice written and read, C B' per group in fp32: once forward
        ("linear_attention", "ssd", 12 * H * N * P / L + 8 * L),
        ("linear_attention", "linear", 4 * H * N * P / L),
        ("delta_rule", "delta", 4 * H * (N * P / L + N + 2 * P)),
    ],
)
def test_states_go_through_memory(op: str, kernel: str, written: float) -> None:
    n, _ = operands(op, kernel)
    work = traffic(n, extent)
    assert work.written == 2 * B * S * G * H * P + B * S * G * written
