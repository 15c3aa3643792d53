"""Diffusion transformers: the diffusion step and the image's class modulate every layer.

DiT (arXiv 2212.09748) with adaLN-Zero. The condition, one vector per image, is the first position
of the sequence, so that it passes through pipeline stages and gets its gradient.
"""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.attention import attention
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.mlp import mlp
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import add, apply, cast, einsum, elementwise, identity, join, leaf, part
from stagewright.graph.node import Node
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def noisy_patches(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The condition, which is the sum of the step's and the class's embedding, and the patches."""
    b = Builder(config, recipe)
    pixels = leaf("input", ("B", "Patches", "Pixels"), b.dtype, "pixels", scope="embedding")
    x = einsum("bpk,km->bpm", pixels, b.param("w_patch", "Pixels", "M", scope="embedding"))
    grid = leaf("input", ("Patches", "M"), b.dtype, "grid", scope="embedding")  # sines, not learned
    x = apply("bias", "bpm,pm->bpm", b.bias(x, "b_patch", "M"), grid, name="placed")
    step = leaf("input", ("B", "Waves"), b.dtype, "steps", scope="embedding")
    w = b.param("w_step_in", "Waves", "M", scope="embedding")
    h = b.bias(einsum("bq,qm->bm", step, w, name="step_in"), "b_step_in", "M")
    w = b.param("w_step_out", "M", "M", scope="embedding")
    h = b.bias(einsum("bn,nm->bm", b.act(h, "silu"), w, name="step_out"), "b_step_out", "M")
    kind = leaf("input", ("B",), "int64", "classes", scope="embedding")
    table = b.param("w_classes", "Classes", "M", scope="embedding")
    c = add(h, apply("embedding", "b,vm->bm", kind, table, dtype=b.dtype), name="condition")
    return finish("noisy_patches", b, None, _behind(c, x, "y"))


def conditioned_layer(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Attention and MLP, with shifts, scales and gates that are projections of the condition."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype)
    c, y = _apart(x)
    w = b.param("w_modulation", "M", "6", "M", scope="modulation")
    by = einsum("bn,nkm->bkm", b.act(c, "silu"), w, name="modulation", scope="modulation")
    by = b.bias(by, "b_modulation", "6", "M")
    for first, scope, function in ((0, "attention", attention), (3, "mlp", mlp)):
        h = _modulated(_norm(y, scope), by, shift=first, scale=first + 1)
        out = identity(function(b, h), "branch", scope=scope)
        out = _modulated(out, by, shift=-1, scale=first + 2, base=0.0)
        y = add(y, out, name=f"{scope}_residual", scope=scope)
    return finish("layer", b, x, _behind(c, y, "y"))


def denoiser(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The mean squared error of the predicted noise and variance."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype, scope="head")
    c, y = _apart(x)
    w = b.param("w_final_modulation", "M", "2", "M", scope="head")
    by = einsum("bn,nkm->bkm", b.act(c, "silu"), w, name="modulation", scope="head")
    by = b.bias(by, "b_final_modulation", "2", "M")
    h = _modulated(_norm(y, "head"), by, shift=0, scale=1)
    out = einsum("bpm,mo->bpo", h, b.param("w_final", "M", "Out", scope="head"), name="noise")
    out = cast(b.bias(out, "b_final", "Out"), "fp32", name="noise32")
    wanted = leaf("input", out.shape, "fp32", "wanted", scope="head")
    error = add(out, elementwise("scale", wanted, by=-1.0), name="error")
    squared = einsum("bpo,bpo->bpo", error, error, name="squared", dtype="fp32")
    loss = apply("mean", "bpo->", squared, name="loss")
    return finish("denoiser", b, x, loss, is_loss=True)


def _apart(x: Node) -> tuple[Node, Node]:
    """The condition [B, M] and the patches [B, Patches, M] of a sequence."""
    c = part(x, "bSm->bm", size(1), first=True, dim=1, name="condition")
    return c, part(x, "bSm->bPm", size("Patches"), first=False, dim=1, name="patches")


def _behind(c: Node, y: Node, name: str) -> Node:
    """The sequence [B, S, M] of the condition and the patches."""
    return identity(join(c, y, "bm,bPm->bSm", size("S"), dim=1, name="sequence"), name)


def _norm(x: Node, scope: str) -> Node:
    """LayerNorm without weights, whose place the modulation takes."""
    return apply("norm", "bpM->bpM", x, fn="layernorm", name=f"{scope}_norm_out", scope=scope)


def _modulated(x: Node, by: Node, *, shift: int, scale: int, base: float = 1.0) -> Node:
    """x * (base + row `scale` of `by`) + row `shift` of `by`; a shift of -1 adds nothing."""
    return apply("modulate", "bpm,bKm->bpm", x, by, shift=shift, scale=scale, base=base)
