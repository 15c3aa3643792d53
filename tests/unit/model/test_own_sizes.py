"""Layers with sizes of their own: which models may have them, and what tp may split."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.model.json import from_json, to_json
from stagewright.model.layers import OwnSizes
from stagewright.model.presets import PRESETS

WIDE = OwnSizes(num_query_groups=2, kv_channels=256, ffn_hidden_size=1024)


def _model(**changes: object) -> ModelConfig:
    small = replace(PRESETS["llama3-8b"], name="small", num_layers=4, hidden_size=512)
    small = replace(small, num_attention_heads=16, num_query_groups=8, ffn_hidden_size=2048)
    own = {"own_sizes": (WIDE,), "layers_with_own_sizes": (0, 1)}
    return replace(small, **{**own, **changes})  # pyright: ignore[reportArgumentType]


def test_fields_and_their_json_agree() -> None:
    model = _model()
    assert from_json(to_json(model), {}) == model
    assert [model.layer(i).sizes for i in range(4)] == [0, 1, 0, 1]
    assert model.with_own_sizes(1).kv_channels == 256
    assert model.shared_query_groups == 2


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"layers_with_own_sizes": (2,)}, "numbers from 0 to 1"),
        ({"own_sizes": (3,)}, "a tuple of OwnSizes"),
        ({"own_sizes": (OwnSizes(num_query_groups=3),)}, "that divide the 16 heads"),
        ({"own_sizes": (OwnSizes(kv_channels=0),)}, "a whole number from 1"),
        ({"mtp_num_layers": 1}, "where some layers have sizes of their own"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        _model(**changes)


def test_tp_splits_what_all_layers_have() -> None:
    """8 heads of 2 queries and 2 of 8: copies of the 2 would split the queries of the 8 in 4."""
    assert sw.compile(sw.Run(model="x", tp=4, seq_length=64), _model()).program.classes
    with pytest.raises(UserError, match="the query heads of the others; use 1, 2 or 4"):
        sw.compile(sw.Run(model="x", tp=8, seq_length=64), _model())
    odd = _model(own_sizes=(OwnSizes(ffn_hidden_size=1025),))
    with pytest.raises(UserError, match="whose layers have sizes of their own; use 1"):
        sw.compile(sw.Run(model="x", tp=4, seq_length=64), odd)


def test_a_cache_has_the_sizes_of_its_layer() -> None:
    """Of 1024 tokens in two layers each: 2 x 8 x 32 and 2 x 2 x 256 numbers of two bytes."""
    run = sw.Run(model="x", mode="decode", batch_size=1, context_length=1023, kv_block_size=1)
    model = _model(kv_channels=32)
    (of,) = sw.compile(run, model).program.classes
    assert of.memory["kv_cache"] == 1024 * 2 * 2 * (2 * 8 * 32 + 2 * 2 * 256)
