"""The workload that settings ask for: a trace, a profile of inference-perf, or drawn requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.files import from_yaml, read_text
from stagewright.run.sections.serving import WorkloadSection
from stagewright.serving.workload import RequestClass, Workload, in_classes, with_past
from stagewright.serving.workloads import traces
from stagewright.serving.workloads.synthetic import (
    Arrivals,
    Conversations,
    Lengths,
    LoadStage,
    SharedPrefix,
    closed_loop,
    open_loop,
    sessions,
    staged,
)

REQUESTS = 1000
"""Drawn where nothing says how many."""


def workload_of(
    asked: WorkloadSection, classes: Sequence[Mapping[str, Any]] | None = None
) -> Workload:
    """The requests that are asked for; `classes` are rows that a caller has in place of a file.

    Raises UserError where settings contradict each other.
    """
    found = _without_past(asked)
    if classes is not None:
        found = in_classes(found, _classes(classes, "classes"), asked.seed)
    elif asked.classes is not None:
        values = from_yaml(read_text(asked.classes, "classes of requests in YAML"), asked.classes)
        found = in_classes(found, _classes(values, asked.classes), asked.seed)
    return with_past(found, asked.past_context) if asked.past_context else found


def _without_past(asked: WorkloadSection) -> Workload:
    _refuse_idle(asked)
    if asked.requests is not None:
        _refuse_beside_trace(asked)
        if Path(asked.requests).suffix in (".yaml", ".yml"):
            return profile(asked.requests, asked.seed)
        return traces.read(asked.requests, speed=asked.speed, limit=asked.num_requests)
    if (asked.rate is None) == (asked.concurrency is None):
        raise UserError(
            "give one of --requests FILE, --rate R (requests per second), --concurrency N (users)"
        )
    if asked.isl is None or asked.osl is None:
        raise UserError("give --isl and --osl: tokens of a prompt and of its output")
    lengths = Lengths(isl=asked.isl, osl=asked.osl, range_ratio=asked.range_ratio)
    count = asked.num_requests or REQUESTS
    if asked.rate is None:
        assert asked.concurrency is not None
        return closed_loop(count, asked.concurrency, lengths, asked.seed)
    arrivals = Arrivals(
        rate=asked.rate,
        process=asked.arrival,
        burstiness=asked.burstiness,
        burst_size=asked.burst_size,
    )
    if asked.turns > 1 or asked.system_prompt:
        of = Conversations(
            turns=asked.turns, think_time=asked.think_time, system_prompt=asked.system_prompt
        )
        return sessions(count, arrivals, lengths, of, asked.seed)
    return open_loop(count, arrivals, lengths, asked.seed)


def _classes(values: object, path: str) -> tuple[RequestClass, ...]:
    """The classes of rows; raises UserError for what is none."""
    rows = [*cast("Sequence[Any]", values)] if isinstance(values, list | tuple) else []
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"{path}: got {shown(cast('object', values))}, wanted a list of classes, such as "
            "- {name: chat, share: 0.8, priority: 0, ttft: 500}"
        )
    found: list[RequestClass] = []
    for row in cast("list[dict[str, Any]]", rows):
        name, priority = row.get("name"), row.get("priority", 0)
        where = f"{path}: class {shown(name)}"
        for key in row:
            if key not in ("name", "share", "priority", "ttft", "tpot", "e2e"):
                raise UserError(
                    f"{where}: {shown(key)} is unknown, wanted name, share, priority, ttft, "
                    "tpot or e2e"
                )
        if not isinstance(name, str) or name in [each.name for each in found]:
            raise UserError(f"{where}: wanted a name of its own")
        if type(priority) is not int or abs(priority) > 1_000_000:
            raise UserError(f"{where}: priority is {shown(priority)}, wanted a whole number")
        share = _number(row, "share", where) if "share" in row else 1.0
        limits = {n: _number(row, n, where) / 1e3 for n in ("ttft", "tpot", "e2e") if n in row}
        found.append(RequestClass(name=name, share=share, priority=priority, **limits))
    return tuple(found)


def _refuse_idle(asked: WorkloadSection) -> None:
    """Raise a UserError for a setting that says nothing of the requests that are asked for."""
    rate, trace = asked.rate is not None, asked.requests is not None
    profiled = trace and Path(asked.requests or "").suffix in (".yaml", ".yml")
    usual = WorkloadSection()
    for name, counts, of in (
        ("speed", trace and not profiled, "a trace (--requests)"),
        ("num_requests", not profiled, "a trace, --rate or --concurrency, not of a profile"),
        ("range_ratio", not trace, "--isl and --osl"),
        ("arrival", rate, "--rate"),
        ("burstiness", asked.arrival == "gamma", "--arrival gamma"),
        ("burst_size", rate, "--rate"),
        ("turns", rate, "--rate (of sessions per second)"),
        ("think_time", asked.turns > 1, "sessions of several --turns"),
        ("system_prompt", rate, "--rate (of sessions per second)"),
    ):
        if not counts and getattr(asked, name) != getattr(usual, name):
            raise UserError(f"--{name.replace('_', '-')} is of {of}; give that, or leave it out")


def _refuse_beside_trace(asked: WorkloadSection) -> None:
    for name in ("rate", "concurrency", "isl", "osl"):
        if getattr(asked, name) is not None:
            raise UserError(
                f"--requests and --{name} both say which requests come; give one of the two"
            )


def profile(path: str, seed: int = 0) -> Workload:
    """A profile of inference-perf (kubernetes-sigs/inference-perf) with `data.type: shared_prefix`:
    `load.stages` of `rate` and `duration`, `load.type` constant or poisson."""
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
    lengths = _mapping(data, "shared_prefix", path)
    counts = {
        of.name: int(_number(lengths, of.name, f"{path}: shared_prefix", whole=True))
        for of in fields(SharedPrefix)
    }
    return staged(
        tuple(_stage(each, path) for each in stages),
        SharedPrefix(**counts),
        load.get("type") == "poisson",
        seed,
    )


def _stage(value: Any, path: str) -> LoadStage:
    where = f"{path}: load.stages"
    if not isinstance(value, dict):
        raise UserError(f"{where} has {shown(value)}, wanted rate and duration")
    row = cast("dict[str, Any]", value)
    return LoadStage(_number(row, "rate", where), _number(row, "duration", where))


def _mapping(values: Any, name: str, path: str) -> Mapping[str, Any]:
    found = cast("dict[str, Any]", values).get(name) if isinstance(values, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{path}: {name} is {shown(found)}, wanted a section of inference-perf's")
    return cast("dict[str, Any]", found)


def _number(values: Mapping[str, Any], name: str, where: str, *, whole: bool = False) -> float:
    value: Any = values.get(name)
    kinds = (int,) if whole else (int, float)
    if type(value) in kinds and 0 < value <= 1e9:
        return value
    raise UserError(f"{where}: {name} is {shown(value)}, wanted a number above 0")
