"""Models of images, and a tower before text: parameters as published, sharded as on one device,
whole programs that are sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS
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
