"""The workload that settings ask for: a trace, a client's result, a profile, or drawn requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.files import from_yaml, read_text
from stagewright.run.sections.serving import WorkloadSection
from stagewright.run.sections.serving.workload import milliseconds
from stagewright.serving.workload import (
    RequestClass,
    Workload,
    with_cached_share,
    with_classes,
    with_concurrency,
    with_past,
)
from stagewright.serving.workloads import traces
from stagewright.serving.workloads.clients import load_of
from stagewright.serving.workloads.inference_perf import read_profile
from stagewright.serving.workloads.synthetic import (
    Arrivals,
    Conversations,
    Lengths,
    open_loop,
    sessions,
)
from stagewright.serving.workloads.weka import is_agentic, read_conversations

REQUESTS = 1000
"""Drawn where nothing says how many."""


def workload_of(
    asked: WorkloadSection, classes: Sequence[Mapping[str, Any]] | None = None
) -> Workload:
    """The requests that are asked for; `classes` are rows that a caller has in place of a file.

    Raises UserError where settings contradict each other.
    """
    work = _requests(asked)
    if classes is not None:
        work = with_classes(work, _classes(classes, "classes"), asked.seed)
    elif asked.classes is not None:
        values = from_yaml(read_text(asked.classes, "classes of requests in YAML"), asked.classes)
        work = with_classes(work, _classes(values, asked.classes), asked.seed)
    if asked.past_context:
        work = with_past(work, asked.past_context)
    if asked.prefix_cache_hit_rate:
        work = with_cached_share(work, asked.prefix_cache_hit_rate)
    return work


def _requests(asked: WorkloadSection) -> Workload:
    """The requests, before classes and cached prefixes."""
    if asked.requests is None:
        return _drawn(asked)
    if Path(asked.requests).suffix in (".yaml", ".yml"):
        _refuse_idle(asked, profile=True)
        return read_profile(asked.requests, asked.seed)
    if is_agentic(asked.requests):
        return _agents(asked, asked.requests)
    summary = traces.summary_of(asked.requests)
    if summary is not None:
        if asked.speed != WorkloadSection.speed:
            raise UserError(f"--speed is of recorded times, which {asked.requests} has not")
        load = _completed(asked, load_of(summary))
        work, file = _drawn(load), Path(asked.requests).name
        return replace(work, name=f"{file}: {work.name}, {load.isl} and {load.osl} tokens")
    _refuse_idle(asked)
    _refuse_beside_trace(asked, "rate", "isl", "osl")
    work = traces.read(asked.requests, speed=asked.speed, limit=asked.num_requests)
    return work if asked.concurrency is None else with_concurrency(work, asked.concurrency)


def _completed(asked: WorkloadSection, load: Mapping[str, Any]) -> WorkloadSection:
    """Settings with those of a client's load where a user gave none."""
    usual = WorkloadSection()
    arrivals = ("rate", "concurrency", "arrival", "burstiness")
    own_arrivals = asked.rate is not None or asked.concurrency is not None
    missing = {
        name: value
        for name, value in load.items()
        if getattr(asked, name) == getattr(usual, name) and not (own_arrivals and name in arrivals)
    }
    return replace(asked, requests=None, **missing)


def _drawn(asked: WorkloadSection) -> Workload:
    """Requests that arrive at a rate, or in a closed loop."""
    if asked.rate is None and asked.concurrency is None:
        raise UserError(
            "give one of --requests FILE, --rate R (requests per second), --concurrency N (users)"
        )
    _refuse_idle(asked)
    if asked.isl is None or asked.osl is None:
        raise UserError("give --isl and --osl: tokens of a prompt and of its output")
    lengths = Lengths(isl=asked.isl, osl=asked.osl, range_ratio=asked.range_ratio)
    count, seed = asked.num_requests or REQUESTS, asked.seed
    arrivals = _arrivals(asked)
    if asked.turns > 1 or asked.system_prompt > 0:
        conversations = Conversations(
            turns=asked.turns, think_time=asked.think_time, system_prompt=asked.system_prompt
        )
        work = sessions(count, arrivals, lengths, conversations, seed)
    else:
        work = open_loop(count, arrivals, lengths, seed)
    return work if asked.concurrency is None else with_concurrency(work, asked.concurrency)


def _arrivals(asked: WorkloadSection) -> Arrivals:
    """The arrival process; without a rate, all arrive at once."""
    return Arrivals(
        rate=math.inf if asked.rate is None else asked.rate,
        process=asked.arrival,
        burstiness=asked.burstiness,
        burst_size=asked.burst_size,
    )


def _agents(asked: WorkloadSection, path: str) -> Workload:
    """Conversations of agents, which begin at a rate, in lanes, or all at once."""
    _refuse_idle(asked, agents=True)
    _refuse_beside_trace(asked, "isl", "osl")
    work = read_conversations(
        path,
        count=asked.num_requests,
        started=asked.concurrency or 0,
        start_share=asked.trajectory_start_max_ratio,
        arrivals=_arrivals(asked),
        idle_gap_cap=asked.idle_gap_cap,
        speed=asked.speed,
        seed=asked.seed,
    )
    return work if asked.concurrency is None else with_concurrency(work, asked.concurrency)


def _refuse_beside_trace(asked: WorkloadSection, *names: str) -> None:
    for name in names:
        if getattr(asked, name) is not None:
            raise UserError(
                f"--requests and --{name} both say which requests come; give one of the two"
            )


def _classes(values: object, path: str) -> tuple[RequestClass, ...]:
    """The classes of rows; raises UserError for what is none."""
    rows = [*cast("Sequence[Any]", values)] if isinstance(values, list | tuple) else []
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"{path}: got {shown(cast('object', values))}, wanted a list of classes, such as "
            "- {name: chat, share: 0.8, priority: 0, ttft: 500}"
        )
    classes: list[RequestClass] = []
    for row in cast("list[dict[str, Any]]", rows):
        name, priority, share = row.get("name"), row.get("priority", 0), row.get("share", 1.0)
        where = f"{path}: class {shown(name)}"
        for key in row:
            if key not in ("name", "share", "priority", "ttft", "tpot", "e2e"):
                raise UserError(
                    f"{where}: {shown(key)} is unknown, wanted name, share, priority, ttft, "
                    "tpot or e2e"
                )
        if not isinstance(name, str) or name in [known.name for known in classes]:
            raise UserError(f"{where}: wanted a name of its own")
        if type(priority) is not int or abs(priority) > 1_000_000:
            raise UserError(f"{where}: priority is {shown(priority)}, wanted a whole number")
        if type(share) not in (int, float) or not 0 < share <= 1e9:
            raise UserError(f"{where}: share is {shown(share)}, wanted a number above 0")
        limits = {
            key: milliseconds(row[key], key, f"{where}: ") / 1e3
            for key in ("ttft", "tpot", "e2e")
            if key in row
        }
        classes.append(RequestClass(name=name, share=share, priority=priority, **limits))
    return tuple(classes)


def _refuse_idle(asked: WorkloadSection, *, profile: bool = False, agents: bool = False) -> None:
    """Raise a UserError for a setting that says nothing of the requests that are asked for."""
    trace, rate = asked.requests is not None, asked.rate is not None
    usual = WorkloadSection()
    for name, counts, of in (
        ("speed", trace and not profile, "a trace (--requests)"),
        ("num_requests", not profile, "a trace, --rate or --concurrency, not of a profile"),
        ("concurrency", not profile, "a trace, --rate or lengths, not of a profile"),
        ("idle_gap_cap", agents, "conversations in Weka's format (--requests)"),
        ("trajectory_start_max_ratio", agents, "conversations in Weka's format (--requests)"),
        ("range_ratio", not trace, "--isl and --osl"),
        ("arrival", rate, "--rate"),
        ("burstiness", asked.arrival == "gamma", "--arrival gamma"),
        ("burst_size", rate, "--rate"),
        ("turns", not trace, "--rate or --concurrency (of sessions)"),
        ("think_time", asked.turns > 1, "sessions of several --turns"),
        ("system_prompt", not trace, "--rate or --concurrency (of sessions)"),
    ):
        if not counts and getattr(asked, name) != getattr(usual, name):
            raise UserError(f"--{name.replace('_', '-')} is of {of}; give that, or leave it out")
