"""Models of images, and a tower before text: parameters as published, sharded as on one device,
whole programs that are sound."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases, some
from invariants import check as check_program
from spmd import check as same_as_one_device
from spmd import random_values, single
from stagewright import blocks as model_blocks
from stagewright.errors import UserError
from stagewright.lower.blocks import shard_block
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Vision
from stagewright.model.presets import PRESETS
from stagewright.parallel.degrees import parallelization
from stagewright.run.rules import check as check_run
from stagewright.run.settings import Run

PUBLISHED = {
    # huggingface.co/google/vit-base-patch16-224 and -large-: parameters of the classifiers of 1000
    # classes, as torchvision and timm count them too; vit_huge_patch14_224 of timm.
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    # CLIP's vision model without the norm (2 x 1024) after its last layer
    "clip-vit-l-336": 303_507_456 - 2048,
    # llava-hf/llava-1.5-7b-hf, model.safetensors.index.json, without that norm
    "llava-1.5-7b": 7_063_427_072 - 2048,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert parameters(PRESETS[name]) == (PUBLISHED[name], PUBLISHED[name])


# ---- sharded as on one device --------------------------------------------------------------------

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16}
SMALL |= {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 2, "vocab_size": 16}
ENCODER = {"max_position_embeddings": 5, "causal": False, "encoder": True, "position": "none"}
ENCODER |= {"norm": "layernorm", "norm_bias": True, "qkv_bias": True, "gated": False}
ENCODER |= dict.fromkeys(("attention_output_bias", "mlp_bias"), True) | {"activation": "gelu"}
VIT = ModelConfig(name="vit", **SMALL, **ENCODER, vision=Vision(4, 2, classes=8))
TOWER = replace(VIT, name="tower", hidden_size=12, vision=Vision(4, 2, patch_bias=False))
TOWER = replace(TOWER, num_layers=1, embedding_norm=True, kv_channels=3)
MODELS = {
    "vit": VIT,
    "llava": ModelConfig(name="llava", **SMALL, max_position_embeddings=12, tower=TOWER),
}
LAYERED: list[dict[str, Any]] = [{"tp": 2}, {"dp": 4}, {"tp": 4, "dp": 2}]
LAYERED += [{"dp": 2, "zero": 1}, {"dp": 2, "tp": 2, "zero": 3}]
SETTINGS = {"vit": LAYERED, "llava": [*LAYERED, {"tp": 2, "dp": 2, "recompute": "full"}]}


@cache
def one_device(model: str, kind: BlockVariant, run: Run) -> Any:
    config = MODELS[model]
    block = model_blocks.BLOCKS[kind.block](config, recipe_of(run, config), kind.layer)
    sizes = sizes_of(run, config)
    values = random_values(block.graph, sizes)
    return block, sizes, values, single(block.graph, sizes, values)


@pytest.mark.parametrize(
    ("model", "settings"), some([(m, s) for m in MODELS for s in SETTINGS[m]]), ids=str
)
def test_blocks_compute_what_one_device_does(model: str, settings: dict[str, Any]) -> None:
    config = MODELS[model]
    batch = 8 // settings.get("dp", 1)
    run = Run(model=model, micro_batch_size=batch, **settings).resolved(config)
    check_run(run, config)
    mesh, plan = parallelization(run, config)
    axes = {a: n for a, n in reversed(mesh.axes) if n > 1}
    for part in dict.fromkeys(p._replace(number=0) for p in model_blocks.chain(config)):
        layered = "layer" in part.block
        kind = BlockVariant(part.block, part.layer, layered and run.recompute == "full")
        block, sizes, values, truth = one_device(model, kind, run)
        graph = shard_block(kind, run, config, mesh, plan, sizes, recipe_of(run, config))
        same_as_one_device(block.graph, graph, axes, sizes, values, truth)


# ---- whole programs ------------------------------------------------------------------------------

WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("vit", {"tp": 2, "dp": 2, "pp": 2, "global_batch_size": 8}),
    ("llava", {"tp": 2, "pp": 3, "global_batch_size": 6}),
    ("llava", {"dp": 2, "zero": 3, "recompute": "selective"}),
]


@pytest.mark.parametrize(("model", "settings"), WHOLE, ids=str)
def test_programs_are_sound(model: str, settings: dict[str, Any]) -> None:
    compiled = sw.compile(Run(model=model, **settings), MODELS[model])
    check_program(compiled.program)


def test_flops_of_a_vision_transformer() -> None:
    """17.6 GFLOP forward, of 197 positions (ViT-B/16 in torchvision: 17.56 GFLOPs as
    multiply-adds, so twice that); element-wise work comes on top."""
    compiled = sw.compile(Run(model="vit-b-16"))
    t = compiled.program.classes[0].tasks
    forward = int(t.flops[t.phase == 0].sum())
    assert np.isclose(forward, 2 * 17.56e9, rtol=0.01)


@cases
def test_refuses(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        sw.compile(Run(**settings))
