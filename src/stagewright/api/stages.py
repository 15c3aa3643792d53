"""Stages of requests before their prompts, from rows of settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from stagewright.api.rows import Positive, Seconds, Whole, WholeOrZero, YamlRow, read_row, read_rows
from stagewright.errors import UserError, either
from stagewright.serving.stages import IvfPq, PromptStages, StageCost, StoreTier


class _StationRow(YamlRow):
    seconds: Seconds = 0.0
    per_request: Seconds = 0.0
    per_token: Seconds = 0.0
    servers: Whole = 1
    batch: Whole = 1
    parameters: Positive | None = None
    tflops: Positive | None = None


class _SearchRow(YamlRow):
    dimensions: Whole
    centroids: Whole
    probes: Whole
    sub_quantizers: Whole
    vectors: Whole
    candidates: Whole
    tflops: Positive
    bandwidth_gb_s: Positive
    servers: Whole = 1
    batch: Whole = 1
    adds_tokens: Whole = 1


class _StoreRow(YamlRow):
    name: str = ""
    bandwidth_gb_s: Positive
    capacity_gb: Positive = math.inf
    latency_ms: Seconds = 0.0
    shared_by: Whole = 1
    reads: WholeOrZero = 1
    network_gb_s: Positive = math.inf
    network_latency_ms: Seconds = 0.0
    preloaded: bool = False


STAGES: Mapping[str, type[YamlRow]] = {
    "embed": _StationRow,
    "search": _SearchRow,
    "rerank": _StationRow,
    "tool": _StationRow,
    "store": _StoreRow,
}


def stages_of(
    source: str | Sequence[Mapping[str, Any]] | None, seed: int, past: int = 0
) -> PromptStages | None:
    """The stages of a file or of a caller's rows; None without any.

    `past`: tokens of an earlier session that each prompt begins with. Raises UserError for a row
    that cannot be understood.
    """
    if source is None:
        return None
    where, rows = read_rows(source, "stages", "- {stage: embed, seconds: 0.01}")
    stations: list[StageCost] = []
    tiers: list[StoreTier] = []
    added = 0
    for number, row in enumerate(rows, 1):
        place = f"{where}, row {number}"
        stage = row.get("stage")
        if not isinstance(stage, str) or stage not in STAGES:
            raise UserError(f"{place}: stage is {shown(stage)}, wanted {either(STAGES)}")
        others = {name: value for name, value in row.items() if name != "stage"}
        values = read_row(STAGES[stage], others, place).given()
        added += values.pop("adds_tokens", 0)
        if stage == "store":
            values.setdefault("name", f"store {number}")
            tiers.append(StoreTier(**values))
        elif stage == "search":
            machine = {n: values.pop(n) for n in ("tflops", "bandwidth_gb_s")}
            machine |= {name: values.pop(name, 1) for name in ("servers", "batch")}
            stations.append(IvfPq(**values).cost(**machine))
        else:
            stations.append(_station(stage, values, place))
    names = [of.name for of in (*stations, *tiers)]
    for name in names:
        if names.count(name) > 1 or name == "retrieve":
            raise UserError(f"{where}: several stages are {shown(name)}; one of a kind is enough")
    return PromptStages(
        stations=tuple(stations), tiers=tuple(tiers), added_tokens=added, past=past, seed=seed
    )


def _station(stage: str, values: dict[str, Any], where: str) -> StageCost:
    """The cost of a station; a model of `parameters` takes 2 FLOPs each for a token."""
    parameters, tflops = values.pop("parameters", None), values.pop("tflops", None)
    if (parameters is None) != (tflops is None):
        raise UserError(f"{where}: parameters and tflops say together how long a token takes")
    if parameters is not None and tflops is not None:
        values["per_token"] = values.get("per_token", 0.0) + 2 * parameters / (tflops * 1e12)
    if not values.keys() & {"seconds", "per_request", "per_token"}:
        raise UserError(f"{where}: {stage} lacks seconds, or parameters and tflops")
    return StageCost(name=stage, follow_ups=stage == "tool", **values)
