"""A model as a chain of blocks, and the values and tables that its blocks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from stagewright.blocks.builder import Block
from stagewright.blocks.ends import (
    GROUP_LSE,
    GROUP_PICKED,
    ORIGINAL,
    embedding,
    head,
    loss,
    output,
    positions,
    tied,
)
from stagewright.blocks.families.drafts import EMBEDDED, draft_input
from stagewright.blocks.families.encoder_decoder import (
    decoder_layer,
    encoder_end,
    encoder_layer,
    source_embedding,
)
from stagewright.blocks.families.mtp import final_norm, mtp, mtp_name
from stagewright.blocks.families.shared import shared_tables
from stagewright.blocks.families.vision import classifier, patches, projector, tower
from stagewright.blocks.layers import layer
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.text.modules import chained, module_named
from stagewright.graph.roles import CHOSEN
from stagewright.model.config import ModelConfig
from stagewright.model.layers import ChainLink, Layer

Make = Callable[[ModelConfig, Recipe, Layer], Block]


def _in_tower(make: Make) -> Make:
    def made(config: ModelConfig, recipe: Recipe, kind: Layer) -> Block:
        assert config.tower is not None
        return tower(make(config.tower, recipe, kind))

    return made


BLOCKS: dict[str, Make] = {
    "embedding": lambda config, recipe, kind: (
        chained(config, recipe, kind) if kind.module else embedding(config, recipe)
    ),
    "positions": lambda config, recipe, _: positions(config, recipe),
    "layer": layer,
    "source_embedding": source_embedding,
    "encoder_layer": encoder_layer,
    "encoder_end": encoder_end,
    "decoder_layer": decoder_layer,
    "final_norm": final_norm,
    "mtp": mtp,
    "draft_input": lambda config, recipe, _: draft_input(config, recipe),
    "head": lambda config, recipe, kind: (
        chained(config, recipe, kind) if kind.module else head(config, recipe)
    ),
    "output": lambda config, recipe, _: output(config, recipe),
    "output_with_gradient": lambda config, recipe, _: output(
        config, recipe, gradient_in_forward=True
    ),
    "loss": lambda config, recipe, _: loss(config, recipe),
    "patches": patches,
    "classifier": classifier,
    "tower.patches": _in_tower(patches),
    "tower.layer": _in_tower(layer),
    "projector": projector,
    "module": chained,
}
"""The kinds of blocks that a model is a chain of, by name."""


class PlacedBlock(NamedTuple):
    """A block in its place in a model."""

    block: str
    """The block's kind, a key of `BLOCKS`."""
    number: int = -1
    """The index of a layer, counted through the model; -1: the block is no layer."""
    layer: Layer = Layer()
    behind: bool = False
    """A block that is no layer shares the stage of the layer before it, not of the next."""


@lru_cache(maxsize=16)  # every run of a search asks for the chain of its model
def chain(config: ModelConfig) -> tuple[PlacedBlock, ...]:
    """The blocks of a model in order."""
    return (*_of_kind(config),)


def _of_kind(config: ModelConfig) -> list[PlacedBlock]:
    if config.chain:
        return _of_modules(config)
    tower = config.tower
    first = tower.num_layers if tower else 0
    if config.encoder_num_layers:
        return _encoder_decoder(config)
    layers = [PlacedBlock("layer", first + i, config.layer(i)) for i in range(config.num_layers)]
    if config.bare:
        return layers
    if config.vision:
        return [
            PlacedBlock("patches"),
            *layers,
            *([PlacedBlock("classifier")] if config.vision.classes else []),
        ]
    begin, end = [PlacedBlock("embedding")], [PlacedBlock("head")]
    if config.draft_head != "none":
        begin.append(PlacedBlock("draft_input"))
    if config.mtp_num_layers:
        kind = config.layer(config.num_layers - 1)
        if kind.mixer == "index_shared":  # these layers have an indexer of their own
            kind = kind._replace(mixer="indexed")
        ahead = [kind._replace(ahead=k + 1) for k in range(config.mtp_num_layers)]
        end = [
            PlacedBlock("final_norm", behind=True),
            *(PlacedBlock("mtp", layer=layer) for layer in ahead),
            *end,
        ]
    if tower:
        towers = [part._replace(block=f"tower.{part.block}") for part in chain(tower)]
        begin = [*towers, PlacedBlock("projector")]
    return [*begin, *layers, *end]


def _of_modules(config: ModelConfig) -> list[PlacedBlock]:
    """The blocks of a chain of modules; the first and the last one are the model's ends, unless
    they are its layers."""
    links = [ChainLink.read(text) for text in config.chain]
    if not any(link.layers for link in links):
        alone, *behind = links
        links = [alone._replace(layers=1), *behind]
    placed: list[PlacedBlock] = []
    number = 0
    for i, link in enumerate(links):
        name = "embedding" if i == 0 else "head" if i == len(links) - 1 else "module"
        if not link.layers:
            placed.append(PlacedBlock(name, layer=Layer(module=link.module)))
        for _ in range(link.layers):
            kind = config.layer(number)._replace(module=link.module)
            placed.append(PlacedBlock("layer", number, kind))
            number += 1
    return placed


def _encoder_decoder(config: ModelConfig) -> list[PlacedBlock]:
    """The blocks of the encoder and then of the decoder."""
    first = config.encoder_num_layers
    encoder = [PlacedBlock("encoder_layer", i, Layer()) for i in range(first)]
    decoder = [
        PlacedBlock("decoder_layer", first + i, config.layer(i)) for i in range(config.num_layers)
    ]
    begin, between = [PlacedBlock("source_embedding")], [PlacedBlock("encoder_end", behind=True)]
    return [*begin, *encoder, *between, PlacedBlock("embedding"), *decoder, PlacedBlock("head")]


MADE_ON_EACH_STAGE = frozenset({"encoder_bias", "decoder_bias"})
"""Live values that each pipeline stage makes again for its own blocks."""


def live_ins(config: ModelConfig, block: str, layer: Layer) -> tuple[str, ...]:
    """The values that a block takes from blocks before it, besides the stream."""
    if layer.module:
        handed = {name for module in config.modules for name in module.hands}
        module = module_named(config, layer.module)
        return tuple(name for name, _, _ in module.inputs if name in handed)
    if block == "mtp":
        return (mtp_name(layer.ahead - 1),) if layer.ahead > 1 else ()
    if block in ("encoder_layer", "decoder_layer"):
        bias = (block.replace("layer", "bias"),) if config.position == "relative" else ()
        return bias if block == "encoder_layer" else ("memory", *bias)
    if block == "head":
        return tuple(mtp_name(k + 1) for k in range(config.mtp_num_layers))
    if block == "loss":
        return GROUP_LSE, GROUP_PICKED
    if config.draft_head.startswith("eagle3") and block == "layer":
        return (EMBEDDED,)
    if layer.mixer == "index_shared":
        return (CHOSEN,)
    return (ORIGINAL,) if layer.block else ()


def tied_tables(config: ModelConfig, block: str, layer: Layer, begins: frozenset[str]) -> list[str]:
    """The tables of which a block and other blocks have copies; `begins` as in `Recipe`."""
    if layer.module:
        return [*module_named(config, layer.module).shared]
    copies = {
        **dict.fromkeys(("embedding", "projector", "source_embedding"), tied(config)),
        "mtp": "wte",
        "head": config.tied_embeddings,
    }
    if layer.block:
        return shared_tables(config, layer)
    biases = [f"{name.removesuffix('_bias')}.relative_bias" for name in sorted(begins)]
    return ["wte"] if copies.get(block) else biases
