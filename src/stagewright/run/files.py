"""Run files: settings in YAML, flat or by section, or the manifest of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown  # short whatever the file holds
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.files import from_yaml, manifest_head, read_text
from stagewright.model import json as model_json
from stagewright.model.config import ModelConfig
from stagewright.run.sections import ALIASES, EXPERIMENT, SECTIONS
from stagewright.run.validation import hint_of_setting

_SETTINGS_TOO = EXPERIMENT.keys() | {"model"}
"""Words that name a setting, whatever section they name besides."""


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a run file in YAML or an earlier run's manifest holds."""
    # A manifest lists every file: json reads in a second what yaml reads in a minute.
    if Path(path).suffix == ".json":
        values = manifest_head(path, "a run file, or the manifest of an earlier run")
    else:
        values = from_yaml(read_text(path, "a run file in YAML"), path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: got {shown(values)}, wanted settings, one per line, such as tp: 8"
        )
    return {str(key): value for key, value in cast("dict[object, Any]", values).items()}


def is_manifest(values: Mapping[str, Any]) -> bool:
    """Whether a file holds what an earlier run has recorded, not settings."""
    return "stagewright" in values and isinstance(values.get("run"), dict)


def recorded_model(values: Mapping[str, Any], path: str | Path) -> ModelConfig | None:
    """The model in an earlier run's manifest; None for a run file, which names it."""
    if not is_manifest(values):
        return None
    try:
        return model_json.from_json(values.get("model"), values.get("modules", {}))
    except TypeError as error:
        raise UserError(f"{path}: cannot read the model of this manifest: {error}") from None


def flat(values: Mapping[str, Any], path: str | Path | None = None) -> dict[str, Any]:
    """Settings by our names, without the sections that they may be grouped by.

    >>> flat({"model": "gpt2", "parallelism": {"tp": 8}, "micro_batch_size": 1})
    {'model': 'gpt2', 'tp': 8, 'micro_batch_size': 1}
    >>> flat({"tensor_model_parallel_size": 8})
    {'tp': 8}
    """
    where = "" if path is None else f"{path}: "
    result: dict[str, Any] = {}

    def add(name: str, value: object) -> None:
        name = ALIASES.get(name, name)
        if name in result:
            raise UserError(f"{where}{name} comes twice; keep one")
        result[name] = value

    for name, value in values.items():
        if name not in SECTIONS or (name in _SETTINGS_TOO and not isinstance(value, Mapping)):
            add(name, value)
            continue
        if not (value is None or isinstance(value, Mapping)):
            wanted = "its settings, one per line and indented"
            raise UserError(f"{where}{name} is a section, got {shown(value)}, wanted {wanted}")
        for inner, setting in cast("Mapping[object, Any]", value or {}).items():
            _check_section(name, str(inner), where)
            add(str(inner), setting)
    return result


def _check_section(section: str, name: str, where: str) -> None:
    """Refuse a setting that belongs to another section."""
    known = ALIASES.get(name, name)
    if known == "model":
        home = "model"
    elif known in EXPERIMENT:
        home = EXPERIMENT[known].section
    else:
        hint = hint_of_setting(name, EXPERIMENT)
        raise UserError(f"{where}{section}: unknown setting {name!r}{hint}")
    if home != section:
        raise UserError(f"{where}{name} is a setting of {home}, got it in {section}; move it there")
