"""A model as a value of JSON, for a manifest, and back.

>>> from stagewright.model.config import PRESETS
>>> fields = to_json(PRESETS["mamba2-1.3b"])
>>> fields["state_space"]["heads"], from_json(fields, {}) == PRESETS["mamba2-1.3b"]
(64, True)
"""

from __future__ import annotations

import dataclasses
from reprlib import repr as shown
from typing import Any, cast

from stagewright.model.config import Diffusion, ModelConfig, Module, Recommendation, Vision
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace

NESTED: dict[str, type] = {
    "state_space": StateSpace,
    "shared_blocks": SharedBlocks,
    "vision": Vision,
    "diffusion": Diffusion,
    "recommendation": Recommendation,
}
"""Fields of a model with fields of their own; another is `tower`, a model."""
LARGEST = 2**31


def to_json(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model; of its modules the names, since their texts stand by themselves."""
    found = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    for name in NESTED:
        if found[name] is not None:
            found[name] = dataclasses.asdict(found[name])
    if model.tower is not None:
        found["tower"] = to_json(model.tower)
    return found | {"modules": [m.name for m in model.modules]}


def from_json(fields: object, texts: object) -> ModelConfig:
    """The model of such fields; `texts` are its modules', by name. TypeError for what is none."""
    found = _fields(fields, "model")
    for name, kind in NESTED.items():
        if found.get(name) is not None:
            found[name] = _nested(kind, found[name], name)
    if found.get("tower") is not None:
        tower = _fields(found["tower"], "tower")
        if tower.get("tower") is not None:
            raise TypeError("the tower has a tower")
        found["tower"] = from_json(tower, {})
    if found.get("modules"):
        found["modules"] = _modules(found["modules"], texts)
    return ModelConfig(**found)


def _fields(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {shown(value)}")
    pairs = cast("dict[object, object]", value).items()
    return {str(k): tuple(v) if isinstance(v, list) else v for k, v in pairs}  # pyright: ignore


def _nested(kind: type, value: object, name: str) -> Any:
    """A value with fields of its own, each of the type that it is declared with."""
    given = _fields(value, name)
    for field in dataclasses.fields(kind):
        if field.name not in given:  # has a default, or the call below tells
            continue
        got = given[field.name]
        # The model looks at the numbers of some itself.
        looks = kind in (StateSpace, SharedBlocks)
        least = int(field.default != 0 and not looks)
        if (
            (field.type == "int" and not _whole(got, least))
            or (field.type == "bool" and type(got) is not bool)
            or (field.type == "tuple[int, ...]" and not _wholes(got, 0 if looks else 1))
        ):
            raise TypeError(f"{name}.{field.name} is {shown(got)}")
    return kind(**given)


def _whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


def _wholes(value: object, least: int) -> bool:
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,)
    return all(_whole(item, least) for item in items)


def _modules(names: object, texts: object) -> tuple[Module, ...]:
    from stagewright.blocks.stg import parse  # it reads files in terms of the models of a run

    known = cast("dict[object, object]", texts) if isinstance(texts, dict) else {}
    listed = cast("tuple[object, ...]", names) if isinstance(names, tuple) else (names,)
    found: dict[str, Module] = {}
    for name in listed:
        text = known.get(name) if isinstance(name, str) else None
        if not isinstance(text, str) or not text:
            raise TypeError(f"module {shown(name)} is Python code; compile it from Python")
        found |= parse(text, f"{name}.stg").modules
        if name not in found:
            raise TypeError(f"the text of module {shown(name)} defines no such one")
    return tuple(found[str(name)] for name in listed)
