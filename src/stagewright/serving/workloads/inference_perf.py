"""Profiles of inference-perf (kubernetes-sigs/inference-perf): stages of load, shared prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.files import from_yaml, read_text
from stagewright.serving.workload import Workload
from stagewright.serving.workloads.synthetic import LoadStage, SharedPrefix, load_in_stages


def read_profile(path: str, seed: int = 0) -> Workload:
    """Requests of a profile with `data.type: shared_prefix`.

    `load.stages` are rows of `rate` and `duration`, `load.type` is constant or poisson. Raises
    UserError for any other profile.
    """
    values = from_yaml(read_text(path, "a profile of inference-perf"), path)
    load, data = _mapping(values, "load", path), _mapping(values, "data", path)
    if data.get("type") != "shared_prefix":
        raise UserError(
            f"{path}: data.type is {shown(data.get('type'))}, wanted shared_prefix; for other "
            "lengths give --rate, --isl and --osl"
        )
    if load.get("type", "constant") not in ("constant", "poisson"):
        raise UserError(f"{path}: load.type is {shown(load['type'])}, wanted constant or poisson")
    listed = load.get("stages")
    stages = cast("list[Any]", listed) if isinstance(listed, list) else []
    if not stages:
        raise UserError(f"{path}: load.stages is {shown(stages)}, wanted rows of rate and duration")
    prefix = _mapping(data, "shared_prefix", path)
    where = f"{path}: shared_prefix"
    counts = {
        field.name: int(_number(prefix, field.name, where, whole=True))
        for field in fields(SharedPrefix)
    }
    poisson = load.get("type") == "poisson"
    return load_in_stages(
        tuple(_stage(row, path) for row in stages), SharedPrefix(**counts), poisson, seed
    )


def _stage(value: Any, path: str) -> LoadStage:
    where = f"{path}: load.stages"
    if not isinstance(value, dict):
        raise UserError(f"{where} has {shown(value)}, wanted rate and duration")
    row = cast("dict[str, Any]", value)
    return LoadStage(_number(row, "rate", where), _number(row, "duration", where))


def _mapping(values: Any, name: str, path: str) -> Mapping[str, Any]:
    section = cast("dict[str, Any]", values).get(name) if isinstance(values, dict) else None
    if not isinstance(section, dict):
        raise UserError(f"{path}: {name} is {shown(section)}, wanted a section of inference-perf's")
    return cast("dict[str, Any]", section)


def _number(values: Mapping[str, Any], name: str, where: str, *, whole: bool = False) -> float:
    value: Any = values.get(name)
    kinds = (int,) if whole else (int, float)
    if type(value) in kinds and 0 < value <= 1e9:
        return value
    raise UserError(f"{where}: {name} is {shown(value)}, wanted a number above 0")
