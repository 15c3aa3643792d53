"""Images: patches as a sequence, a classifier, and a tower whose output precedes the text."""

from __future__ import annotations

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Block, Builder, renamed, stream
from stagewright.blocks.ends import cross_entropy, labels_of, tied
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import apply, einsum, identity, join, leaf, part
from stagewright.graph.roles import Role
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def patches(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Embedded square patches of images, behind a learned vector that stands for the whole image.

    The product equals a convolution whose stride is its width (arXiv 2010.11929, section 3.1).
    """
    assert config.vision is not None
    b = Builder(config, recipe)
    pixels = leaf("input", ("B", "Patches", "Pixels"), b.dtype, "pixels", scope="embedding")
    w = b.param("w_patch", "Pixels", "M", scope="embedding")
    x = einsum("bpk,km->bpm", pixels, w, name="patches")
    if config.vision.patch_bias:
        x = b.bias(x, "b_patch", "M")
    whole = b.param("cls", "1", "M", scope="embedding")
    x = join(whole, x, "Cm,bPm->bSm", size("S"), dim=1, name="sequence", scope="embedding")
    positions = b.param("wpe", "S", "M", scope="embedding", rows=0)
    x = apply("bias", "bsm,sm->bsm", x, positions, name="summed")
    x = identity(x, "embedded")
    if config.embedding_norm:
        x = b.norm(x, "embedding_norm")
    return finish("patches", b, None, identity(b.dropout(x, config.embedding_dropout), "y"))


def classifier(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Cross-entropy of the class that is predicted from the first position."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype, scope="head")
    h = b.norm(x, "final_norm", scope="head") if config.final_norm else x
    first = apply("first_token", "bsm->bm", h, name="first", scope="head")
    w = b.param("w_class", "M", "Classes", scope="head")
    logits = b.bias(
        einsum("bm,mv->bv", first, w, name="logits", role=Role.LOGITS), "b_class", "Classes"
    )
    return finish(
        "classifier", b, x, cross_entropy(logits, labels_of(logits.shape[:-1])), is_loss=True
    )


def projector(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Patches, which two layers project to the text's width (arXiv 2310.03744, section 3.3), and
    the embedded text behind them."""
    b = Builder(config, recipe)
    x = stream(("B", "tower_S", "tower_M"), b.dtype, scope="embedding")
    seen = part(x, "bSm->bPm", size("tower_Patches"), first=False, dim=1, name="seen")
    h = einsum("bpm,mn->bpn", seen, b.param("w_in", "tower_M", "M", scope="embedding"), name="in")
    h = b.act(b.bias(h, "b_in", "M"), "gelu")
    h = einsum("bpm,mn->bpn", h, b.param("w_out", "M", "M", scope="embedding"), name="out")
    h = b.bias(h, "b_out", "M")
    tokens = leaf("input", ("B", "Text"), "int64", "tokens", scope="embedding")
    table = b.param("wte", "V/tp", "M", scope="embedding", tied=tied(config), rows=0)
    words = identity(apply("embedding", "bs,vm->bsm", tokens, table, dtype=b.dtype), "words")
    y = join(h, words, "bPm,bTm->bSm", size("S"), dim=1, name="joined")
    return finish("projector", b, x, identity(y, "y"))


def tower(block: Block) -> Block:
    """A block of the vision model, with sizes of its own: `M` becomes `tower_M`."""

    def rename(of: Size) -> Size:
        return of.subs({s: f"tower_{s}" for s in of.symbols if s != "B"})

    return renamed(block, f"tower.{block.name}", rename)
