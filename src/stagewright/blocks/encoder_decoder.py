"""An encoder, and a decoder that looks at what it made of its sequence: T5 (arXiv 1910.10683).

The encoder's sequence has `Source` positions, the decoder's S. What the encoder yields is handed on
to every layer of the decoder, and through pipeline stages, as Megatron-LM sends it along with the
decoder's hidden states.
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.blocks.attention import cross_attention
from stagewright.blocks.builder import Block, Builder, renamed, stream
from stagewright.blocks.ends import embedding
from stagewright.blocks.finish import finish
from stagewright.blocks.inference import idle
from stagewright.blocks.layers import body, layer
from stagewright.blocks.recipe import Recipe
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer


def source_embedding(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """Tokens of the encoder, looked up in the one table of both."""
    return _of_source(embedding(config, recipe, tokens="source_tokens"), recipe)


def encoder_layer(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
    """A layer in which every position sees all."""
    return _of_source(layer(replace(config, causal=False, encoder=True), recipe, what), recipe)


def encoder_end(config: ModelConfig, recipe: Recipe, _: Layer) -> Block:
    """The encoder's last norm; what it yields is not the stream, which ends."""
    b = Builder(config, recipe)
    x = stream(("B", "Source", "M"), b.dtype, scope="encoder")
    h = b.norm(x, "encoder_norm", scope="encoder") if config.final_norm else x
    b.make("memory", b.dropout(h, config.hidden_dropout))
    end = finish("encoder_end", b, x, None)
    return idle(end) if recipe.inference and recipe.inference.decode else end


def decoder_layer(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
    """Attention to what is before, attention to the encoder's output, MLP."""
    b = Builder(config, recipe)
    x = stream(("B", "S", "M"), b.dtype)
    return finish("decoder_layer", b, x, body(b, x, what, cross=cross_attention))


def _of_source(block: Block, recipe: Recipe) -> Block:
    """A block of the encoder, which has nothing to do where all sources are in the cache."""
    of = renamed(block, block.name, lambda of: of.subs({"S": "Source"}))
    return idle(of) if recipe.inference and recipe.inference.decode else of
