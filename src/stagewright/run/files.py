"""Run files: settings in YAML, flat or by section, or the manifest of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown  # short whatever the file holds
from typing import Any, cast

from stagewright.errors import UserError, did_you_mean
from stagewright.files import from_yaml, manifest_head, read_text
from stagewright.launch import files as launch
from stagewright.launch.names import canonical
from stagewright.model import json as model_json
from stagewright.model.config import ModelConfig
from stagewright.run.other_names import SAME, Pending, is_setting_name, translate
from stagewright.run.sections import EXPERIMENT, SECTIONS
from stagewright.run.sections.declare import text_of
from stagewright.run.sections.serving import SERVING
from stagewright.run.validation import hint_of_setting

_SETTINGS_TOO = EXPERIMENT.keys() | {"model"}
"""Words that name a setting, whatever section they name besides."""

_TOML = re.compile(r"""\[\[?[\w."' -]+\]\]?\s*(#|$)|["']?[\w.-]+["']?\s*=""")
"""The first line of a file in TOML that says something."""

RECORDED = ("cluster", "execution")
"""Sections that a manifest holds beside its run, each where something of it was given."""


def launched(
    path: str | Path | None, settings: Mapping[str, Any]
) -> tuple[str | None, Mapping[str, Any]]:
    """Run file and settings; a launch file as the model is the run file, where there is none."""
    model: object = settings.get("model")
    if path is None and isinstance(model, str | Path) and launch.find(model):
        return str(model), {name: v for name, v in settings.items() if name != "model"}
    return None if path is None else str(path), settings


def read_settings(path: str | Path) -> dict[str, Any]:
    """Settings in a run file in YAML, the manifest of an earlier run, or another tool's file."""
    if launch.find(path):
        return {name: v for name, v in launch.settings(path).items() if name not in SERVING}
    # A manifest lists every file: json reads in a second what yaml reads in a minute.
    if Path(path).suffix == ".json":
        values = manifest_head(path, "a run file, or the manifest of an earlier run")
    else:
        text = read_text(path, "a run file in YAML")
        _refuse_toml(text, path)
        values = from_yaml(text, path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: got {shown(values)}, wanted settings, one per line, such as tp: 8"
        )
    found = {str(key): value for key, value in cast("dict[object, Any]", values).items()}
    found["hardware"] = _sibling_hardware(found.get("hardware"), path)
    return {key: value for key, value in found.items() if value is not None or key != "hardware"}


def _sibling_hardware(hardware: object, path: str | Path) -> object:
    """The path of a hardware file that lies beside the run file, and not in the working directory.

    `search` writes the two beside each other.
    """
    if not isinstance(hardware, str) or not hardware.endswith((".yaml", ".yml")):
        return hardware
    place = Path(path).parent / Path(hardware).name
    return hardware if Path(hardware).exists() or not place.exists() else str(place)


def _refuse_toml(text: str, path: str | Path) -> None:
    """Raise a UserError for a file of TOML, such as torchtitan's job configurations.

    The name says so, or the first line: a section in brackets, or a key before an equals sign.
    """
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if Path(path).suffix.lower() == ".toml" or _TOML.match(first):
        raise UserError(
            f"{path}: looks like TOML, wanted a run file in YAML, such as tp: 8; write a section "
            "[training] as training: with its settings indented below; sections and settings may "
            "keep torchtitan's names"
        )


def is_manifest(values: Mapping[str, Any]) -> bool:
    """True for a record of an earlier run: it holds results besides settings."""
    return "stagewright" in values and isinstance(values.get("run"), dict)


def model_of_manifest(values: Mapping[str, Any], path: str | Path) -> ModelConfig | None:
    """The model in an earlier run's manifest; None for a run file, which names it."""
    if not is_manifest(values):
        return None
    try:
        return model_json.from_json(values.get("model"), values.get("modules", {}))
    except TypeError as error:
        raise UserError(f"{path}: cannot read the model of this manifest: {error}") from None


def settings_of(
    values: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
) -> tuple[dict[str, Any], Pending]:
    """Settings of a run file or a manifest by our names, and a `Pending`.

    A `Pending` is what can only be computed once the whole run is known: `Run.completed` does so.
    `overrides`, by the names of any tool, go before. `path` is where the values stood, for errors.
    """
    over, follows = translate(overrides or {})
    where = "" if path is None else f"{path}: "
    if is_manifest(values):
        settings, pending = _recorded(values, where), Pending()
    else:
        settings, pending = translate(flat(values, path), where)
        if path is not None and launch.find(path):
            settings = launch.complete(str(path), settings, over)
        elif path is not None:
            _refuse_sizes_alone({**settings, **over}, where)
    fills = follows.fills or pending.fills
    replaced = {*over, *follows.makes()}
    settings = {name: value for name, value in settings.items() if name not in replaced} | over
    if fills and settings.get("nodes") is None and settings.get("dp") is None:
        raise UserError(
            f"{'' if follows.fills else where}--parallelism.data_parallel_shard_degree is -1, all "
            "ranks that are left, which needs --nodes and --hardware; add these, or give it as a "
            "number"
        )
    if not follows.options:
        follows = pending.without(over)
    return settings, follows


def layout_of_script(model: str) -> dict[str, Any]:
    """Settings of the layout and the batch that a script gives and that are no defaults."""
    if launch.find(model) is None:
        return {}
    settings, _ = translate(launch.read(model).settings)
    framework = str(settings.get("framework"))
    return {
        of.name: settings[of.name]
        for of in EXPERIMENT.values()
        if of.section in ("parallelism", "batch")
        and settings.get(of.name, of.default_of(framework)) != of.default_of(framework)
    }


def _refuse_sizes_alone(settings: Mapping[str, Any], where: str) -> None:
    """Raise a UserError if a run file names a script as model and does not repeat its layout."""
    if settings.get("mode", "train") != "train":
        return
    model = str(settings.get("model"))
    script = layout_of_script(model)
    if missing := [name for name in script if name not in settings]:
        lines = ", ".join(f"{name}: {text_of(script[name])}" for name in missing)
        raise UserError(
            f"{where}model: {model} gives the sizes of the model alone; add the batch and the "
            f"layout, such as {lines}, or name the script in place of this file: --config {model}"
        )


def _recorded(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a manifest: of the run, and those of the machine and the execution."""
    settings = dict(cast("dict[str, Any]", values["run"]))
    for section in RECORDED:
        more = values.get(section, {})
        if not isinstance(more, dict):
            raise UserError(f"{where}{section} is {shown(more)}, wanted settings by name")
        settings |= cast("dict[str, Any]", more)
    return settings


def flat(values: Mapping[str, Any], path: str | Path | None = None) -> dict[str, Any]:
    """Settings without the sections that they may be grouped by, ours or torchtitan's.

    >>> flat({"model": "gpt2", "parallelism": {"tp": 8}, "micro_batch_size": 1})
    {'model': 'gpt2', 'tp': 8, 'micro_batch_size': 1}
    >>> flat({"training": {"seq_len": 4096}})
    {'training.seq_len': 4096}
    """
    where = "" if path is None else f"{path}: "
    result: dict[str, Any] = {}

    def add(name: str, value: object) -> None:
        if name in result:
            raise UserError(f"{where}{name} comes twice; keep one")
        result[name] = value

    for name, value in values.items():
        grouped = isinstance(value, Mapping)
        if name not in SECTIONS or (name in _SETTINGS_TOO and not grouped):
            if grouped and not is_setting_name(canonical(name)) and name not in _SETTINGS_TOO:
                for inner, setting in cast("Mapping[object, Any]", value).items():
                    _check_foreign(name, str(inner), where)
                    add(f"{name}.{inner}", setting)
            else:
                add(name, cast("object", value))
            continue
        if not (value is None or grouped):
            wanted = "its settings, one per line and indented"
            raise UserError(f"{where}{name} is a section, got {shown(value)}, wanted {wanted}")
        for inner, setting in cast("Mapping[object, Any]", value or {}).items():
            foreign = f"{name}.{inner}"
            if is_setting_name(canonical(foreign)):
                add(foreign, setting)
            else:
                _check_section(name, str(inner), where)
                add(str(inner), setting)
    return result


def _check_foreign(section: str, name: str, where: str) -> None:
    """Refuse a section that neither we nor torchtitan have, and settings that we do not know."""
    if is_setting_name(canonical(f"{section}.{name}")):
        return
    if not any(each.startswith(f"{canonical(section)}_") for each in SAME):
        hint = did_you_mean(section, SECTIONS) or f"; known: {', '.join(SECTIONS)}"
        raise UserError(f"{where}unknown section {section!r}{hint}")
    raise UserError(f"{where}unknown setting {f'{section}.{name}'!r}{hint_of_setting(name)}")


def _check_section(section: str, name: str, where: str) -> None:
    """Refuse a setting that belongs to another section."""
    own = canonical(name)
    own = SAME.get(own, own)
    if own == "model":
        home = "model"
    elif own in EXPERIMENT:
        home = EXPERIMENT[own].section
    elif is_setting_name(own):
        return
    else:
        raise UserError(f"{where}{section}: unknown setting {name!r}{hint_of_setting(name)}")
    if home != section:
        raise UserError(f"{where}{name} is a setting of {home}, got it in {section}; move it there")
