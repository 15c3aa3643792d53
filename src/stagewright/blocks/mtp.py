"""Multi-token prediction: a layer more for each token after the next one (arXiv 2412.19437, 2.2).

As Megatron-LM has it (`multi_token_prediction.py`): on the last pipeline stage, where it has a copy
of the embedding; the output projection is that of the model, once more. Of the tokens and labels,
which are those of the model shifted by one more, a rank of cp has its part already: Megatron-LM
fetches the one at the border from its neighbour.
"""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.ends import mtp_name
from stagewright.blocks.finish import finish
from stagewright.blocks.layers import body
from stagewright.blocks.recipe import Recipe
from stagewright.graph.make import apply, identity, join, leaf
from stagewright.graph.node import Node
from stagewright.graph.roles import Binding
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def final_norm(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The norm before the output, where more than the output reads what it yields."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype, scope="head")
    y = b.norm(x, "final_norm", scope="head") if config.final_norm else x
    return finish("final_norm", b, x, identity(y, "y"))


def mtp(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
    """One more token: what was known of the one before and this one's embedding, to a layer."""
    b = Builder(config, recipe)
    x: Node | None = None
    if what.ahead > 1:
        h = b.take(mtp_name(what.ahead - 1), "B", "S", "M")
    else:
        h = x = stream(("B", "S", "M"), b.dtype, scope="mtp")
    bound = Binding(like="tokens")
    tokens = leaf("input", ("B", "S"), "int64", f"tokens{what.ahead}", scope="mtp", binding=bound)
    table = b.param("wte", "V/tp", "M", scope="mtp", tied="wte", rows=0)
    e = apply("embedding", "bs,vm->bsm", tokens, table, dtype=b.dtype, name="word", scope="mtp")
    e = b.norm(identity(e, "embedded"), "enorm", scope="mtp")
    h = b.norm(h, "hnorm", scope="mtp")
    both = join(e, h, "bsM,bsN->bsK", 2 * size("M"), name="eh", scope="mtp")
    w = b.weight("w_eh", 2 * size("M"), "M/tp", scope="mtp")
    h = identity(b.linear("bsk,km->bsm", both, w, "eh_proj", scope="mtp"), "eh_gathered")
    y = b.norm(body(b, identity(h, "embedded"), what), "mtp_norm", scope="mtp")
    b.make(mtp_name(what.ahead), y)
    return finish("mtp", b, x, None, passes=True)
