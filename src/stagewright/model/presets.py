"""The models known by name: a row each in a YAML file per family, as `data/models/llama.yaml`.

A row is `name: [sizes..., repository, {field: value}]`. The sizes are layers, hidden size, MLP
width, heads, key/value heads, width of a head, vocabulary and longest sequence (the keys of
`architecture.LIMITS`); a model without attention or dense MLPs has zeros there. The repository on
huggingface.co, whose config.json has the figures, and the fields in which the model differs from
its family may be left out. All other keys of a file are fields of `Architecture` that its models
share; a field with fields of its own (`state_space`) may be written partly there and partly in a
row. `quantization_config` is that of the published config.json. `pattern` stands for mixers and
MLPs in Nemotron-H's letters; `tower` is the name of a preset.

>>> PRESETS["llama3.1-70b"].num_layers
80
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from stagewright.files import own_yaml
from stagewright.model.architecture import LIMITS, NESTED
from stagewright.model.config import ModelConfig
from stagewright.model.hf.quantization import read_quantization
from stagewright.model.layers import OwnSizes, from_letters

Fields = dict[str, Any]


class Presets(Mapping[str, ModelConfig]):
    """Models by name. A file is parsed when one of its models is asked for, a model made then.

    The order is that of `index.yaml`, and within a family that of its file.
    """

    def __getitem__(self, name: str) -> ModelConfig:
        """The model of this name; the same object each time."""
        return _model(name)

    def __iter__(self) -> Iterator[str]:
        return (name for family in _texts() for name in _family(family)[1])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _family_of(name) is not None


PRESETS: Mapping[str, ModelConfig] = Presets()
"""The models known by name, each as its paper or its published config.json has it."""


@cache
def _texts() -> dict[str, str]:
    """The file of each family."""
    folder = files("stagewright").joinpath("data", "models")
    texts = {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name[-5:] == ".yaml"}
    listed: list[str] = own_yaml(texts.pop("index").read_text("utf-8"))
    order = (*listed, *sorted(texts.keys() - {*listed}))
    return {family: texts[family].read_text("utf-8") for family in order}


@cache
def _family(family: str) -> tuple[Fields, dict[str, list[Any]]]:
    """The fields that models of a family share, and the row of each."""
    fields: Fields = own_yaml(_texts()[family])
    return fields, fields.pop("models")


@lru_cache(maxsize=256)
def _family_of(name: str) -> str | None:
    """The family of a model; None: there is no such model."""
    mentioned = (family for family, text in _texts().items() if name in text)
    return next((family for family in mentioned if name in _family(family)[1]), None)


def family(name: str) -> str:
    """Family of a model: the file that it is in, or its own name if it is no preset.

    >>> family("llama3.1-8b"), family("mine")
    ('llama', 'mine')
    """
    return _family_of(name) or name


@cache
def _model(name: str) -> ModelConfig:
    family = _family_of(name)
    if family is None:
        raise KeyError(name)
    shared, rows = _family(family)
    row = rows[name]
    sizes = dict(zip(LIMITS, row, strict=False))
    fields: Fields = {**shared, **sizes}
    for more in row[len(LIMITS) :]:
        address = f"https://huggingface.co/{more}/blob/main/config.json"
        given: Fields = {"source": address} if isinstance(more, str) else more
        for field, value in given.items():
            partly = field in NESTED and field in shared
            fields[field] = {**shared[field], **value} if partly else value
    if "pattern" in fields:
        fields |= from_letters(fields.pop("pattern"))
    if "tower" in fields:
        fields["tower"] = PRESETS[fields["tower"]]
    for field in NESTED.keys() & fields.keys():
        fields[field] = NESTED[field](**_tuples(fields[field]))
    if "own_sizes" in fields:
        fields["own_sizes"] = [OwnSizes(**sizes) for sizes in fields["own_sizes"]]
    published = fields.pop("quantization_config", None)
    model = ModelConfig(name=name, **_tuples(fields))
    if published is None:
        return model
    return replace(model, quantization=read_quantization(name, published, model)[0])


def _tuples(fields: Fields) -> Fields:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}  # pyright: ignore
