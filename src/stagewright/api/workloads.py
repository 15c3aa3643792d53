"""The workload that settings ask for: a trace, a client's result, or drawn requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Annotated, Any

from pydantic import Field

from stagewright.api.rows import YamlRow, read_row, read_rows, refuse_without_effect
from stagewright.errors import UserError
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
    """The requests of these settings; `classes`: rows in place of a file.

    Raises UserError for settings that contradict each other.
    """
    work = _requests(asked)
    rows = asked.classes if classes is None else classes
    if rows is not None:
        work = with_classes(work, _classes(rows), asked.seed)
    if asked.past_context:
        work = with_past(work, asked.past_context)
    if asked.prefix_cache_hit_rate:
        work = with_cached_share(work, asked.prefix_cache_hit_rate)
    return work


def _requests(asked: WorkloadSection) -> Workload:
    """The requests, before classes and cached prefixes."""
    if asked.requests is None:
        return _drawn(asked)
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


class _ClassRow(YamlRow):
    name: str
    share: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    ttft: Any = None
    tpot: Any = None
    e2e: Any = None


def _classes(source: str | Sequence[Mapping[str, Any]]) -> tuple[RequestClass, ...]:
    """The classes of a file or of a caller's rows; raises UserError for any other row."""
    example = "- {name: chat, share: 0.8, priority: 0, ttft: 500}"
    where, rows = read_rows(source, "classes", example)
    classes: list[RequestClass] = []
    for number, row in enumerate(rows, 1):
        values = read_row(_ClassRow, row, f"{where}, row {number}").given()
        name = values["name"]
        if name in [of.name for of in classes]:
            raise UserError(
                f"{where}: several classes are {shown(name)}; wanted names of their own"
            )
        for limit in values.keys() & {"ttft", "tpot", "e2e"}:
            values[limit] = milliseconds(values[limit], limit, f"{where}: class {name}: ") / 1e3
        classes.append(RequestClass(**values))
    return tuple(classes)


def _refuse_idle(asked: WorkloadSection, *, agents: bool = False) -> None:
    """Raise a UserError for a setting without effect on these requests."""
    trace = asked.requests is not None
    rate, sessions = asked.rate is not None, "--rate or --concurrency (of sessions)"
    weka = "conversations in Weka's format (--requests)"
    refuse_without_effect(
        asked,
        speed=(trace, "a trace (--requests)"),
        idle_gap_cap=(agents, weka),
        trajectory_start_max_ratio=(agents, weka),
        range_ratio=(not trace, "--isl and --osl"),
        arrival=(rate, "--rate"),
        burstiness=(asked.arrival == "gamma", "--arrival gamma"),
        burst_size=(rate, "--rate"),
        turns=(not trace, sessions),
        think_time=(asked.turns > 1, "sessions of several --turns"),
        system_prompt=(not trace, sessions),
    )
