"""Multi-token prediction: one more layer for each token after the next (arXiv 2412.19437, 2.2).

As in Megatron-LM (`multi_token_prediction.py`) these layers are on the last pipeline stage, with a
copy of the embedding, and use the model's output projection again. Tokens and labels are those of
the model, shifted by one position per layer. A rank of cp is given its part of them; Megatron-LM
fetches the token at the border of its part from the neighbour.
"""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.ends import mtp_name
from stagewright.blocks.layers import body
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import apply, identity, join, leaf
from stagewright.graph.node import Node
from stagewright.graph.roles import Binding
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def final_norm(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The model's last norm, as a block: the output and multi-token prediction both read it."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype, scope="head")
    y = b.norm(x, "final_norm", scope="head") if config.final_norm else x
    return finish("final_norm", b, x, identity(y, "y"))


def mtp(config: ModelConfig, recipe: Recipe, kind: Layer) -> Block:
    """The layer that predicts one more token, from the hidden state that predicted the token before
    and from that token's embedding."""
    b = Builder(config, recipe)
    x: Node | None = None
    if kind.ahead > 1:
        h = b.take(mtp_name(kind.ahead - 1), "B", "S", "M")
    else:
        h = x = stream(("B", "S", "M"), b.dtype, scope="mtp")
    bound = Binding(like="tokens")
    tokens = leaf("input", ("B", "S"), "int64", f"tokens{kind.ahead}", scope="mtp", binding=bound)
    table = b.param("wte", "V/tp", "M", scope="mtp", tied="wte", rows=0)
    e = apply("embedding", "bs,vm->bsm", tokens, table, dtype=b.dtype, name="word", scope="mtp")
    e = b.norm(identity(e, "embedded"), "enorm", scope="mtp")
    h = b.norm(h, "hnorm", scope="mtp")
    both = join(e, h, "bsM,bsN->bsK", 2 * size("M"), name="eh", scope="mtp")
    w = b.weight("w_eh", 2 * size("M"), "M/tp", scope="mtp")
    h = identity(b.linear("bsk,km->bsm", both, w, "eh_proj", scope="mtp"), "eh_gathered")
    y = b.norm(body(b, identity(h, "embedded"), kind), "mtp_norm", scope="mtp")
    b.make(mtp_name(kind.ahead), y)
    return finish("mtp", b, x, None, passes=True)
