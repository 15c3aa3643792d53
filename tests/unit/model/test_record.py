"""Every model goes into a manifest and comes back the same; what is none is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import EXAMPLES
from stagewright.errors import UserError
from stagewright.model.catalog import resolve
from stagewright.model.json import from_json, to_json
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
