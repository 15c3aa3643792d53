"""Heads that draft tokens for a model: they read its hidden states beside embedded tokens.

* Multi-token prediction (arXiv 2412.19437, 2.2): both normalized, side by side, and projected to
  the model's width (vllm-project/vllm `vllm/model_executor/models/deepseek_mtp.py`).
* EAGLE (arXiv 2401.15077): the same without norms (`llama_eagle.py` there).
* EAGLE-3 (arXiv 2503.01840): hidden states of three layers are projected to one in the pass over
  the model's tokens (`combine_hidden_states` of `llama_eagle3.py`); later passes (`eagle3_own`)
  read the head's own state. Attention of each layer reads the normalized embedding beside it.

`blocks.families.mtp` has the same layers as a part of a model that is trained.
"""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.graph.make import identity, join, leaf
from stagewright.graph.node import Node
from stagewright.graph.roles import Binding
from stagewright.model.config import ModelConfig

EMBEDDED = "draft_embedded"
"""The normalized embedding of the tokens, which attention of EAGLE-3's layers reads."""
COMBINED = 3
"""Layers of the model whose hidden states EAGLE-3 combines."""


def draft_input(config: ModelConfig, recipe: Recipe) -> Block:
    """Embedded tokens [B, S, M] to what the head's layers read."""
    b = Builder(config, recipe)
    scope, kind = "mtp", config.draft_head
    e = stream(("B", "S", "M"), b.dtype, scope=scope)
    width = COMBINED * size("M") if kind == "eagle3" else size("M")
    bound = Binding(like="tokens")
    h = leaf("input", ("B", "S", width), b.dtype, "hidden_states", scope=scope, binding=bound)
    if kind.startswith("eagle3"):
        if kind == "eagle3":
            w = b.weight("w_fc", COMBINED * size("M"), "M", scope=scope)
            h = b.linear("bsk,km->bsm", h, w, "fc", scope=scope)
        b.make(EMBEDDED, identity(b.norm(e, "enorm", scope=scope), "embedded"))
        return finish("draft_input", b, e, identity(h, "y"))
    if kind == "mtp":
        e, h = b.norm(e, "enorm", scope=scope), b.norm(h, "hnorm", scope=scope)
    both = join(e, h, "bsM,bsN->bsK", 2 * size("M"), name="eh", scope=scope)
    w = b.weight("w_eh", 2 * size("M"), "M", scope=scope)
    y = b.linear("bsk,km->bsm", both, w, "eh_proj", scope=scope)
    return finish("draft_input", b, e, identity(y, "y"))


def beside_embedded(b: Builder, h: Node) -> Node:
    """Input of attention of an EAGLE-3 layer: the embedding and the state, [B, S, 2 M]."""
    e = b.take(EMBEDDED, "B", "S", "M")
    return join(e, h, "bsM,bsN->bsK", 2 * size("M"), name="beside_embedded", scope="attention")
