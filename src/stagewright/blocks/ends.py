"""The two ends of a language model: embedding, and output projection with its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.families.streams import collapsed, copied, stream_dims
from stagewright.blocks.inference import gathered, last_tokens
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import (
    add,
    apply,
    cast,
    einsum,
    elementwise,
    elementwise_whole,
    identity,
    leaf,
)
from stagewright.graph.node import Node
from stagewright.graph.roles import SUMS, Binding, Role
from stagewright.model.config import ModelConfig


def embedding(config: ModelConfig, recipe: Recipe, *, tokens: str = "tokens") -> Block:
    """Token ids to the residual stream; positions, token types and norm as the family has them."""
    b = Builder(config, recipe)
    width = "W" if config.embedding_size else "M"
    bound = Binding(like="tokens")
    ids = leaf("input", ("B", "S"), "int64", tokens, scope="embedding", binding=bound)
    table = b.param("wte", "V/tp", width, scope="embedding", tied=tied(config), rows=0)
    x = apply("embedding", "bs,vm->bsm", ids, table, dtype=b.dtype, name="word")
    if config.embedding_size:
        x = einsum("bsw,wm->bsm", x, b.param("w_in", "W", "M", scope="embedding"), name="word_in")
    if recipe.shared_vocabulary:
        return finish("embedding", b, None, identity(x, "y"))
    y = _embedded(b, x)
    if config.shares:
        b.make(ORIGINAL, y)
    return finish("embedding", b, None, y)


def positions(config: ModelConfig, recipe: Recipe) -> Block:
    """Words to the residual stream, where the ranks of a pipeline share the embedding's table."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype, scope="embedding")
    return finish("positions", b, x, _embedded(b, x))


def _embedded(b: Builder, x: Node) -> Node:
    """Words [B, S, M] to the residual stream: positions, token types and norm as the family has."""
    config, recipe = b.config, b.recipe
    if config.position == "learned":
        at = leaf("input", ("S",), "int64", "positions", scope="embedding")
        at, each = (b.positions(), "bs") if recipe.inference else (at, "s")
        rows = b.param("wpe", "P", "M", scope="embedding", rows=0)
        rows = apply("embedding", f"{each},vm->{each}m", at, rows, dtype=b.dtype)
        x = apply("bias", f"bsm,{each}m->bsm", x, rows, name="summed")
    if config.token_types:
        kind = leaf("input", ("B", "S"), "int64", "token_types", scope="embedding")
        types = b.param("wtt", "T", "M", scope="embedding", rows=0)
        x = add(x, apply("embedding", "bs,vm->bsm", kind, types, dtype=b.dtype), name="summed")
    if config.position == "learned" or config.token_types:
        x = identity(x, "scatter")
    x = identity(x, "embedded")
    if config.embedding_norm:
        x = b.norm(x, "embedding_norm")
    return identity(copied(b, b.dropout(x, config.embedding_dropout)), "y")


ORIGINAL = "original"
"""The stream as the embedding made it, which shared blocks read beside the stream as it is."""


def head(config: ModelConfig, recipe: Recipe) -> Block:
    """Residual stream to loss: vocabulary-parallel cross-entropy (arXiv 1909.08053, section 3).

    In inference the block ends with the logits of the tokens whose next one is predicted.
    """
    b = Builder(config, recipe)
    scope = "head"
    x = stream(stream_dims(config.residual_streams), b.dtype, scope=scope)
    predicted = [b.take(mtp_name(k + 1), "B", "S", "M") for k in range(config.mtp_num_layers)]
    # Multi-token prediction reads the normed stream, so that the norm is a block of its own there.
    h = collapsed(b, x)
    elsewhere = predicted or recipe.shared_vocabulary
    h = b.norm(h, "final_norm", scope=scope) if config.final_norm and not elsewhere else h
    if recipe.inference:
        return finish("head", b, x, gathered(_logits(b, last_tokens(h))))
    pooled = _pooler(b, h) if config.pooler else None
    loss = _nll(b, h)
    if predicted:
        each = [_nll(b, p, f"labels{k + 1}") for k, p in enumerate(predicted)]
        weight = recipe.mtp_loss / len(each)
        further = elementwise("scale", add(*each, name="mtp_losses"), by=weight, name="mtp_loss")
        loss = add(loss, further, name="loss")
    if pooled is not None:
        loss = add(loss, cast(pooled, "fp32"), name="loss")
    return finish("head", b, x, loss, is_loss=True)


GROUP_LSE, GROUP_PICKED = "group_lse", "group_picked"
"""Per token, of each rank's group of the vocabulary: the logarithm of the sum of the exponentials
of its logits, and the logit of the label, 0 where the label is in another group."""
GROUPS = "VocabularyGroups"
"""Number of ranks that share the vocabulary."""


def output(config: ModelConfig, recipe: Recipe, *, gradient_in_forward: bool = False) -> Block:
    """Hidden states to what the loss needs of each rank's group of the vocabulary.

    The output layer between its two sums over ranks (arXiv 2411.05288, algorithm 1): the forward is
    pass S, the backward is pass T. `gradient_in_forward` (algorithm 2): forward multiplies the
    softmax of each group with the table, too, so that the gradient of the hidden states follows
    from the sums over ranks alone; what is left to pass T is the gradient of the table.
    """
    b = Builder(config, recipe)
    # The gradient of hidden states is made where the scope of these says.
    x = stream(("B", "S", "M"), b.dtype, scope=SUMS if gradient_in_forward else "head")
    labels = labels_of(("B", "S"))
    h = identity(x, "hidden", detached=True) if gradient_in_forward else x
    groups = (*x.shape[:2], size(GROUPS))
    logits = cast(_logits(b, h), "fp32", name="logits32")
    top = apply("max", "bs(gv)->bsg", logits, out=groups, name="group_max")
    summed = apply("exp_sum", "bs(gv),bsg->bsg", logits, top, name="group_sum")
    lse = elementwise("log_sum_exp", top, summed, name=GROUP_LSE)
    picked = apply("pick", "bs(gv),bs->bsg", logits, labels, out=groups, name=GROUP_PICKED)
    if gradient_in_forward:
        w = b.used["lm_head"]
        shares = apply("softmax_of_group", "bs(gv),bsg->bs(gv)", logits, lse, name="softmax")
        shares = cast(shares, b.dtype, name="softmax")
        whole = (*groups, size("M"))
        of_lse = einsum("bs(gv),(gv)m->bsgm", shares, w, out=whole, name="mean_row")
        of_picked = apply(
            "embedding", "bs,(gv)m->bsgm", labels, w, out=whole, dtype=b.dtype, name="label_row"
        )
        attrs: dict[str, Any] = {"scope": SUMS, "out": groups}
        lse = apply("with_gradient", "bsg,bsM,bsgM->bsg", lse, x, of_lse, **attrs)
        picked = apply("with_gradient", "bsg,bsM,bsgM->bsg", picked, x, of_picked, **attrs)
    b.make(GROUP_LSE, lse)
    b.make(GROUP_PICKED, picked)
    return finish("output", b, x, None)


def loss(config: ModelConfig, recipe: Recipe) -> Block:
    """The sums over the groups of the vocabulary, and cross-entropy of them."""
    b = Builder(config, recipe)
    lse, picked = (
        b.take(name, "B", "S", GROUPS, dtype="fp32") for name in (GROUP_LSE, GROUP_PICKED)
    )
    attrs: dict[str, Any] = {"scope": SUMS}
    top = identity(apply("max", "bsg->bs", lse, name="max", **attrs), "max")
    summed = apply("exp_sum", "bsg,bs->bs", lse, top, name="exp_sum", **attrs)
    summed = identity(summed, "exp_sum")
    label = identity(apply("sum", "bsg->bs", picked, name="picked", **attrs), "picked")
    each = elementwise("nll", top, summed, label, name="nll")
    return finish("loss", b, None, apply("mean", "bs->", each, name="loss"), is_loss=True)


def _nll(b: Builder, h: Node, labels: str = "labels") -> Node:
    """Cross-entropy of the logits of hidden states [B, S, M]."""
    logits = _logits(b, h)
    return token_loss(b, logits, labels_of(logits.shape[:-1], labels))


def token_loss(b: Builder, logits: Node, labels: Node) -> Node:
    """Cross-entropy as the recipe has it: of logits that are whole, gathered or split."""
    if b.recipe.logits == "gathered":
        logits = identity(logits, "logits_whole", role=Role.LOGITS)
    chain = "split" if b.recipe.logits == "split" else "whole"
    eager = chain if b.recipe.operators.eager else ""
    return cross_entropy(logits, labels, eager)


def tied(config: ModelConfig) -> str:
    """The name of the embedding's table, if other blocks have copies of it."""
    copies = config.tied_embeddings or config.mtp_num_layers > 0 or config.encoder_num_layers > 0
    return "wte" if copies else ""


def mtp_name(ahead: int) -> str:
    """The live value from which the token `ahead` after the next one is predicted."""
    return f"mtp{ahead}"


def _logits(b: Builder, h: Node) -> Node:
    """Logits [B, S, V]: a family's transform, the output projection, and its bias or softcap."""
    config, scope = b.config, "head"
    if config.mlm_transform:
        h = einsum(
            "bsm,mn->bsn",
            h,
            b.param("w_transform", "M", "M", scope=scope),
            name="transform",
            scope=scope,
        )
        h = b.act(b.bias(h, "b_transform", "M"), config.activation)
        h = b.norm(h, "transform_norm", "M")
    width = "W" if config.embedding_size else "M"
    if config.embedding_size:
        h = einsum(
            "bsm,mw->bsw", h, b.param("w_out", "M", "W", scope=scope), name="out_proj", scope=scope
        )
    table = "wte" if config.tied_embeddings else "lm_head"
    copied = "wte" if config.tied_embeddings else ""
    declare = b.param if copied else b.weight
    w = declare(table, "V/tp", width, scope=scope, tied=copied, rows=0)
    if b.recipe.gradients.of_each_linear:
        h = identity(h, "logits_in")
    h = h if copied else b.lowered(h, b.recipe.stored(table, scope))
    own_type: dict[str, str] = {"dtype": b.dtype} if h.dtype != b.dtype else {}
    logits = einsum("bsm,vm->bsv", h, w, name="logits", scope=scope, role=Role.LOGITS, **own_type)
    if config.lm_head_bias:
        logits = b.bias(logits, "b_head", "V/tp")
    if config.logit_softcap:
        logits = b.act(logits, "softcap", cap=config.logit_softcap)
    return logits


def _pooler(b: Builder, h: Node) -> Node:
    """BERT's pooled first token; its mean stands for the loss of the two-way classifier."""
    first = apply("first_token", "bsm->bm", h, name="first", scope="head")
    w = b.param("w_pool", "M", "M", scope="head")
    pooled = b.act(b.bias(einsum("bm,mn->bn", first, w, name="pooled"), "b_pool", "M"), "tanh")
    return apply("mean", "bn->", pooled, name="pooled_mean")


def labels_of(shape: Sequence[Size | str], name: str = "labels") -> Node:
    """The numbers of the tokens to predict."""
    bound = Binding(like="labels")
    return leaf("input", tuple(shape), "int64", name, scope="head", binding=bound)


def _picked(log_probs: Node, labels: Node, t: str) -> Node:
    """The mean of the negative log-probabilities of the labels."""
    log_prob = apply("pick", f"{t}v,{t}->{t}", log_probs, labels, name="picked")
    log_prob = elementwise("scale", identity(log_prob, "picked"), by=-1.0)
    return apply("mean", f"{t}->", log_prob, name="loss")


def cross_entropy(logits: Node, labels: Node, eager: str = "") -> Node:
    """Mean over tokens of log(sum(exp(logits))) - logit of the label, in fp32 always.

    `eager`: as PyTorch's log_softmax and nll_loss compute it, on "whole" logits, or on logits that
    may be "split" over the vocabulary.
    """
    t = "bstuw"[: len(labels.shape)]
    x = cast(logits, "fp32", name="logits32")
    if eager == "whole":
        x = elementwise_whole("log_softmax", x, name="log_probs")
        return _picked(x, labels, t)
    top = identity(apply("max", f"{t}v->{t}", x, name="max"), "max")
    summed = identity(apply("exp_sum", f"{t}v,{t}->{t}", x, top, name="exp_sum"), "exp_sum")
    if eager:
        x = apply("log_probs", f"{t}v,{t},{t}->{t}v", x, top, summed, name="log_probs")
        return _picked(x, labels, t)
    picked = identity(apply("pick", f"{t}v,{t}->{t}", x, labels, name="picked"), "picked")
    each = elementwise("nll", top, summed, picked, name="nll")
    return apply("mean", f"{t}->", each, name="loss")
