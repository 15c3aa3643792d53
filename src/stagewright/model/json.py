"""A model as a value of JSON, for a manifest, and back.

>>> from stagewright.model.presets import PRESETS
>>> fields = to_json(PRESETS["mamba2-1.3b"])
>>> fields["state_space"]["heads"], from_json(fields, {}) == PRESETS["mamba2-1.3b"]
(64, True)
"""

from __future__ import annotations

import dataclasses
from reprlib import repr as shown
from typing import Any, cast

from stagewright.blocks.text.stg import parse
from stagewright.model.architecture import NESTED
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Module, OwnSizes


def to_json(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model; modules by name only, since a manifest holds their texts itself."""
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    for name in NESTED:
        if fields[name] is not None:
            fields[name] = dataclasses.asdict(fields[name])
    fields["own_sizes"] = [dataclasses.asdict(sizes) for sizes in model.own_sizes]
    for name in ("own_sizes", "layers_with_own_sizes"):
        if not model.own_sizes:
            del fields[name]
    if not model.notes:
        del fields["notes"]
    if model.tower is not None:
        fields["tower"] = to_json(model.tower)
    return fields | {"modules": [m.name for m in model.modules]}


def from_json(value: object, texts: object) -> ModelConfig:
    """The model with these fields; `texts` are the texts of its modules, by name.

    Raises TypeError for a value that is no record of a model, UserError for an impossible model.
    """
    fields = _fields(value, "model")
    for name, kind in NESTED.items():
        if fields.get(name) is not None:
            fields[name] = kind(**_fields(fields[name], name))
    if fields.get("tower") is not None:
        tower = _fields(fields["tower"], "tower")
        if tower.get("tower") is not None:
            raise TypeError("the tower has a tower")
        fields["tower"] = from_json(tower, {})
    if fields.get("own_sizes"):
        listed = cast("tuple[object, ...]", fields["own_sizes"])
        fields["own_sizes"] = tuple(OwnSizes(**_fields(x, "own_sizes")) for x in listed)
    if fields.get("modules"):
        fields["modules"] = _modules(fields["modules"], texts)
    return ModelConfig(**fields)


def _fields(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {shown(value)}")
    pairs = cast("dict[object, object]", value).items()
    return {str(k): tuple(v) if isinstance(v, list) else v for k, v in pairs}  # pyright: ignore


def _modules(names: object, texts: object) -> tuple[Module, ...]:
    known = cast("dict[object, object]", texts) if isinstance(texts, dict) else {}
    listed = cast("tuple[object, ...]", names) if isinstance(names, tuple) else (names,)
    modules: dict[str, Module] = {}
    for name in listed:
        text = known.get(name) if isinstance(name, str) else None
        if not isinstance(text, str) or not text:
            raise TypeError(f"module {shown(name)} is Python code; compile it from Python")
        modules |= parse(text, f"{name}.stg", resolve).modules
        if name not in modules:
            raise TypeError(f"the text of module {shown(name)} defines no module of that name")
    return tuple(modules[str(name)] for name in listed)
