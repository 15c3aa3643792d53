"""Every model goes into a manifest and comes back the same; what is none is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import EXAMPLES
from stagewright.errors import UserError
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.model.json import from_json, to_json
from stagewright.model.layers import OwnSizes
from stagewright.model.presets import PRESETS
from stagewright.run.settings import Run
from stagewright.trace.run_manifest import load_model


@pytest.mark.parametrize("name", PRESETS)
def test_there_and_back(name: str):
    fields = json.loads(json.dumps(to_json(PRESETS[name])))
    assert from_json(fields, {}) == PRESETS[name]


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["mamba2-130m", "zamba2-2.7b", "llava-1.5-7b", "vit-b-16"])
def test_a_manifest_repeats_its_run(name: str, tmp_path: Path):
    compiled = sw.compile(Run(model=name, layers=2))
    sw.generate(compiled, tmp_path / "one")
    manifest = tmp_path / "one" / "manifest.json"
    assert load_model(manifest) == compiled.model
    sw.generate(sw.compile(Run.load(manifest), load_model(manifest)), tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_modules_by_their_texts():
    model = resolve(str(EXAMPLES / "gated-mixer.stg"))
    texts = {m.name: m.text for m in model.modules}
    again = from_json(json.loads(json.dumps(to_json(model))), texts)
    assert [m.text for m in again.modules] == [m.text for m in model.modules]
    for hostile in ({}, {"other": "x"}, [1], None, {next(iter(texts)): 3}):
        with pytest.raises(TypeError, match="is Python code; compile it from Python"):
            from_json(to_json(model), hostile)
    with pytest.raises((TypeError, UserError)):
        from_json(to_json(model), dict.fromkeys(texts, "param w[M]"))


DAMAGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("mamba2-130m", lambda m: m.update(state_space=3)),
    ("mamba2-130m", lambda m: m["state_space"].update(heads="many")),
    ("mamba2-130m", lambda m: m["state_space"].update(heads=-1)),
    ("mamba2-130m", lambda m: m["state_space"].update(heads=True)),
    ("mamba2-130m", lambda m: m["state_space"].update(more=1)),
    ("mamba2-130m", lambda m: m["state_space"].pop("heads")),
    ("zamba2-1.2b", lambda m: m.update(shared_blocks=[1])),
    ("zamba2-1.2b", lambda m: m["shared_blocks"].update(layers="many")),
    ("zamba2-1.2b", lambda m: m["shared_blocks"].update(layers=[1, -1])),
    ("zamba2-1.2b", lambda m: m["shared_blocks"].update(layers=[2])),
    ("zamba2-1.2b", lambda m: m["shared_blocks"].update(attention_adapter=1)),
    ("zamba2-1.2b", lambda m: m["shared_blocks"].pop("layers")),
    ("vit-b-16", lambda m: m["vision"].update(patch_size=0)),
    ("vit-b-16", lambda m: m["vision"].update(image_size=10**12)),
    ("vit-b-16", lambda m: m["vision"].update(patch_bias=1)),
    ("llava-1.5-7b", lambda m: m.update(tower="clip")),
    ("llava-1.5-7b", lambda m: m["tower"].update(tower=copy.deepcopy(m["tower"]))),
    ("llava-1.5-7b", lambda m: m["tower"].update(hidden_size="wide")),
    ("gpt2", lambda m: m.update(modules=["a"])),
    ("gpt2", lambda m: m.update(modules="a")),
    ("gpt2", lambda m: m.clear()),
]


@pytest.mark.parametrize("nth", range(len(DAMAGES)))
def test_damaged(nth: int):
    name, change = DAMAGES[nth]
    fields = json.loads(json.dumps(to_json(PRESETS[name])))
    change(fields)
    with pytest.raises((TypeError, UserError)):
        from_json(fields, {})


# ---- layers with sizes of their own --------------------------------------------------------------


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
