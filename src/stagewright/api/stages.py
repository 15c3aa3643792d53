"""Rows of stages become stations and stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError, either
from stagewright.files import from_yaml, read_text
from stagewright.run.sections.serving import PoolSection
from stagewright.serving.stages import IvfPq, PromptStages, StageCost, StoreTier

_STATION = ("seconds", "per_request", "per_token", "servers", "batch")
_INDEX = ("dimensions", "centroids", "probes", "sub_quantizers", "vectors", "candidates")
_MACHINE = ("tflops", "bandwidth_gb_s", "servers", "batch")
_TIER = (
    *("name", "bandwidth_gb_s", "capacity_gb", "latency_ms", "shared_by", "reads"),
    *("network_gb_s", "network_latency_ms", "preloaded"),
)
_WHOLE = frozenset({*_INDEX, "servers", "batch", "shared_by", "reads", "adds_tokens"})
_MAY_BE_ZERO = frozenset(
    {"seconds", "per_request", "per_token", "latency_ms", "reads", "network_latency_ms"}
)
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed": ((*_STATION, "parameters", "tflops"), ()),
    "search": ((*_INDEX, *_MACHINE, "adds_tokens"), (*_INDEX, "tflops", "bandwidth_gb_s")),
    "rerank": ((*_STATION, "parameters", "tflops"), ()),
    "tool": (("seconds", "per_token", "servers"), ("seconds",)),
    "store": (_TIER, ("bandwidth_gb_s",)),
}
"""By stage: what a row of it may say, and what it must."""


def stages_of(
    asked: PoolSection,
    given: Sequence[Mapping[str, Any]] | None,
    seed: int,
    past: int = 0,
) -> PromptStages | None:
    """The stages that a file or a caller's rows say; None where there are none.

    `past`: tokens of an earlier session that each prompt begins with. Raises UserError for a row
    that cannot be understood.
    """
    if given is None and asked.stages is None:
        return None
    where, values = "stages", given
    if given is None:
        where = str(asked.stages)
        values = from_yaml(read_text(where, "a file of stages in YAML"), where)
    rows = [*cast("Sequence[Any]", values)] if isinstance(values, list | tuple) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"{where}: got {shown(cast('object', values))}, wanted a list of stages, such as "
            "- {stage: embed, seconds: 0.01}"
        )
    stations: list[StageCost] = []
    tiers: list[StoreTier] = []
    added = 0
    for nth, row in enumerate(cast("list[Mapping[Any, Any]]", rows), 1):
        kind, figures = _checked(row, f"{where}, row {nth}")
        if kind == "store":
            named: dict[str, Any] = {"name": f"store {nth}", **figures}
            tiers.append(StoreTier(**named))
        else:
            added += figures.pop("adds_tokens", 0)
            stations.append(_station(kind, figures, f"{where}, row {nth}"))
    names = [each.name for each in (*stations, *tiers)]
    for name in names:
        if names.count(name) > 1 or name == "retrieve":
            raise UserError(f"{where}: several stages are {shown(name)}; one of a kind is enough")
    return PromptStages(
        stations=tuple(stations), tiers=tuple(tiers), added_tokens=added, past=past, seed=seed
    )


def _checked(row: Mapping[Any, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The stage of a row, and its figures."""
    kind: Any = row.get("stage")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{where}: stage is {shown(kind)}, wanted {either(KINDS)}")
    may, must = KINDS[kind]
    figures: dict[str, Any] = {}
    for name, value in row.items():
        if name == "stage":
            continue
        if name not in may:
            raise UserError(f"{where}: {shown(name)} is no figure of {kind}; wanted {either(may)}")
        figures[name] = _figure(name, value, where)
    for name in must:
        if name not in figures:
            raise UserError(f"{where}: {kind} lacks {name}")
    return kind, figures


def _figure(name: str, value: Any, where: str) -> Any:
    kinds = {"name": (str,), "preloaded": (bool,)}.get(name)
    if kinds is not None:
        if type(value) in kinds:
            return value
        raise UserError(f"{where}: {name} is {shown(value)}, wanted {kinds[0].__name__}")
    whole = name in _WHOLE
    if isinstance(value, str):  # YAML reads 3e8 as text
        try:
            value = float(value)
        except ValueError:
            value = math.nan
    if type(value) is float and whole and value.is_integer():
        value = int(value)
    least = 0 if name in _MAY_BE_ZERO else 1 if whole else math.nextafter(0, 1)
    if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= 1e15:
        wanted = "a whole number" if whole else "a number"
        more = "0 or more" if least == 0 else "more than 0"
        raise UserError(f"{where}: {name} is {shown(value)}, wanted {wanted}, {more}")
    return value


def _station(kind: str, figures: dict[str, Any], where: str) -> StageCost:
    """The station of a row; the products of a model with so many parameters are 2 FLOPs each."""
    if kind == "search":
        machine = {name: figures.pop(name) for name in _MACHINE if name in figures}
        return IvfPq(**figures).cost(**{"servers": 1, "batch": 1, **machine})
    parameters, tflops = (figures.pop(name, None) for name in ("parameters", "tflops"))
    if (parameters is None) != (tflops is None):
        raise UserError(f"{where}: parameters and tflops say together how long a token takes")
    if parameters is not None and tflops is not None:
        figures["per_token"] = figures.get("per_token", 0.0) + 2 * parameters / (tflops * 1e12)
    if not figures.keys() & {"seconds", "per_request", "per_token"}:
        raise UserError(f"{where}: {kind} lacks seconds, or parameters and tflops")
    return StageCost(name=kind, follow_ups=kind == "tool", **figures)
