"""Recommendation: embedding tables of features between two MLPs (DLRM, arXiv 1906.00091)."""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.builder import Block, Builder
from stagewright.blocks.ends import cross_entropy
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import apply, einsum, identity, join, leaf
from stagewright.graph.node import Node
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def ranking(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The probability of a click: rows of tables, dot products of all pairs of them, an MLP.

    Tables are one tensor [tables, rows, width], as if all had their mean number of rows.
    """
    r = config.recommendation
    assert r is not None
    b = Builder(config, recipe)
    indices = leaf("input", ("B", "Tables"), "int64", "indices", scope="tables")
    width = f"Bottom{len(r.bottom) - 1}"
    tables = b.param("tables", "Tables", "Rows", f"{width}/dp", scope="tables", rows=0)
    found = apply("embedding", "bt,tvd->btd", indices, tables, dtype=b.dtype, name="found")
    found = identity(found, "rows_found")
    x = leaf("input", ("B", "Dense"), b.dtype, "features", scope="bottom")
    x = _mlp(b, x, "bottom", len(r.bottom), last=True)
    every = join(x, found, "bd,bTd->bFd", size("Tables") + 1, dim=1, name="every")
    pairs = einsum("bfd,bgd->bfg", every, every, name="pairs", scope="interaction")
    below = apply("triangle", "bFG->bP", pairs, out=(pairs.shape[0], size("Pairs")), name="below")
    x = join(x, below, "bD,bP->bT", size(width) + size("Pairs"), name="joined")
    logits = _mlp(b, x, "top", len(r.top), last=False)
    # Binary cross-entropy is cross-entropy of two classes, one of which has the logit 0.
    two = apply("pad", "bV->bW", logits, out=(logits.shape[0], size(2)), first=True, dim=-1)
    return finish("ranking", b, None, cross_entropy(two), is_loss=True)


def _mlp(b: Builder, x: Node, name: str, layers: int, *, last: bool) -> Node:
    """Layers with a bias and a ReLU each; the last has a ReLU where `last` says so."""
    for i in range(layers):
        out = f"{name.title()}{i}"
        w = b.param(f"{name}.{i}.weight", x.shape[-1], out, scope=name)
        x = b.linear("bi,io->bo", x, w, f"{name}{i}", scope=name)
        x = b.bias(x, f"{name}.{i}.bias", out)
        if last or i < layers - 1:
            x = b.act(x, "relu")
    return x
