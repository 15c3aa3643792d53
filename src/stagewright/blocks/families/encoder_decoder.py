"""An encoder, and a decoder with cross attention to its output: T5 (arXiv 1910.10683).

The encoder's sequence has `Source` positions, the decoder's S. The encoder's output is a live value
that every layer of the decoder reads; pipeline stages send it on with the decoder's hidden states,
as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.blocks.attention import cross_attention
from stagewright.blocks.builder import Block, Builder, renamed, stream
from stagewright.blocks.ends import embedding
from stagewright.blocks.inference import idle
from stagewright.blocks.layers import body, layer
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def source_embedding(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Tokens of the encoder, looked up in the one table of both."""
    return _of_source(embedding(config, recipe, tokens="source_tokens"), recipe)


def encoder_layer(config: ModelConfig, recipe: Recipe, kind: Layer) -> Block:
    """A layer in which every position sees all positions."""
    return _of_source(layer(replace(config, causal=False, encoder=True), recipe, kind), recipe)


def encoder_end(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The encoder's last norm, which makes the live value `memory`; the encoder's stream ends."""
    b = Builder(config, recipe)
    x = stream(("B", "Source", "M"), b.dtype, scope="encoder")
    h = b.norm(x, "encoder_norm", scope="encoder") if config.final_norm else x
    b.make("memory", b.dropout(h, config.hidden_dropout))
    end = finish("encoder_end", b, x, None)
    return idle(end) if recipe.inference and recipe.inference.decode else end


def decoder_layer(config: ModelConfig, recipe: Recipe, kind: Layer) -> Block:
    """Causal attention, cross attention to the encoder's output, and an MLP."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype)
    return finish("decoder_layer", b, x, body(b, x, kind, cross=cross_attention))


def _of_source(block: Block, recipe: Recipe) -> Block:
    """A block over the source's positions; in decoding it is idle, as all sources are cached."""
    block = renamed(block, block.name, lambda symbol: symbol.subs({"S": "Source"}))
    return idle(block) if recipe.inference and recipe.inference.decode else block
