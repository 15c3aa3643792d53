"""Find the model that a name or a path stands for: a preset, a config.json or a `.stg` file, or an
id of the Hugging Face hub whose config.json is in the hub's local cache.

>>> resolve("llama3.1-70b").num_query_groups
8
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown  # short and shallow whatever the file holds
from typing import cast

from stagewright.blocks.text import stg
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_bytes, refuse_half_characters
from stagewright.launch import files as launch
from stagewright.model import hub
from stagewright.model.config import ModelConfig
from stagewright.model.hf import quantization
from stagewright.model.hf import read as hf
from stagewright.model.hf.keys import Json
from stagewright.model.presets import PRESETS
from stagewright.printable import printable

MOST_BYTES = 10_000_000
"""No larger file is read: a config.json has a few kilobytes."""


def resolve(name_or_path: str, as_family: str = "") -> ModelConfig:
    """The model of a preset's name, of a config.json or its directory, or of a `.stg` file.

    An id of the Hugging Face hub, such as `Qwen/Qwen3-8B`, is looked up in the hub's local cache;
    nothing is fetched. A preset wins over a file of the same name; write `./gpt2` for the file.
    `as_family` is the model type, or the class, as which a config.json is read whatever the file
    says. Raises `UserError` if there is neither, or if the file describes a model that cannot be
    built.

    >>> import stagewright as sw
    >>> model = sw.resolve("llama3-8b")
    >>> model.num_layers, model.hidden_size, model.num_query_groups
    (32, 4096, 8)
    """
    if not isinstance(cast("object", name_or_path), str):
        raise UserError(f"got {shown(name_or_path)}, wanted the name of a model, or a path")
    if as_family and (name_or_path in PRESETS or name_or_path.endswith(".stg")):
        raise UserError(
            f"--as {shown(as_family)} is for config.json files, and {shown(name_or_path)} is "
            "none; leave --as out"
        )
    return _resolve(name_or_path, (), as_family)


def _resolve(name_or_path: str, texts: tuple[str, ...], as_family: str = "") -> ModelConfig:
    """The model; `texts` are the `.stg` files whose models are like the one that is asked for."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path.endswith(".stg"):
        path = os.path.abspath(name_or_path)
        if path in texts:
            raise UserError(f"{name_or_path} is like itself; name a preset or another file")
        return stg.load(name_or_path, partial(_resolve, texts=(*texts, path)))
    if launch.find(name_or_path):
        return launch.model_of(name_or_path)
    if name_or_path and os.path.exists(name_or_path):
        return from_config(name_or_path, as_family)
    if cached := hub.config_of(name_or_path):
        return from_config(cached, as_family)
    if hub.is_id(name_or_path):
        raise UserError(_not_cached(name_or_path))
    raise UserError(
        f"model {shown(name_or_path)} is neither a preset nor a path to a config.json or .stg file"
        f"{did_you_mean(name_or_path.lower(), PRESETS)}; "
        "run `stagewright models` for the presets, or give the path of a config.json or .stg file"
    )


def _not_cached(name: str) -> str:
    """The error about an id of the hub, with the preset of that model or of one like it."""
    same = [p for p in PRESETS if f"huggingface.co/{name}/" in PRESETS[p].source]
    hint = did_you_mean(name.rpartition("/")[2].lower(), PRESETS)
    if same:
        hint = f"; the preset {same[0]} is this model"
    return (
        f"model {name!r} is neither a path nor in the cache of the Hugging Face hub "
        f"({hub.cache_folder()}){hint}; `hf download {name} config.json` fetches its config"
    )


def from_config(path: str | Path, as_family: str = "") -> ModelConfig:
    """The model of a config.json, or of the directory that holds one, which names the model.

    `as_family` is as in `resolve`.
    """
    file, data = _load(Path(path))
    like, fields, notes = hf.read(str(file), data, as_family)
    name = printable(hub.name_of(file) if file.name == "config.json" else file.stem)
    try:
        model = replace(PRESETS[like], name=name, source=str(file), notes=notes, **fields)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return _quantized(model, file, data)


def _quantized(model: ModelConfig, file: Path, data: Json) -> ModelConfig:
    """The model as its checkpoint stores it: as its config.json says, or the file beside that."""
    given = quantization.given(data, hf.TEXT_PARTS)
    beside = file.parent / "hf_quant_config.json"
    if given is None and file.name == "config.json" and beside.is_file():
        given = _load(beside)[1]
    if given is None:
        return replace(model, quantization=None)
    stored, notes = quantization.read_quantization(str(file), given, model)
    stored = stored and replace(stored, file=str(file))
    return replace(model, quantization=stored, notes=(*model.notes, *notes))


def _load(file: Path) -> tuple[Path, Json]:
    try:
        if file.is_dir():
            if not (file / "config.json").exists() and (file / "manifest.json").exists():
                raise UserError(
                    f"{file}: holds the traces of a run, no config.json; for their run use "
                    f"--config {file / 'manifest.json'}"
                )
            file /= "config.json"
        if not file.exists():
            raise UserError(f"{file}: no such file; give a config.json or its directory")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}; check the path") from None
    content = read_bytes(file, "a config.json or its directory", MOST_BYTES)
    try:
        data: object = json.loads(content)
        refuse_half_characters(content, data)
    except RecursionError:
        raise UserError(f"{file}: nested too deep for a config.json; check the path") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}; check the path") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds {shown(data)}, wanted a JSON object; check the path")
    return file, cast(Json, data)
