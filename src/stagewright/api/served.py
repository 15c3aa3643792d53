"""Requests served over time: what `stagewright.serve` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stagewright.api.endings import OF_SERVING, ResultFile, check_ending
from stagewright.api.operation import operated
from stagewright.api.pools import Given, Planned, deployment_of, rows_of
from stagewright.api.stages import stages_of
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError, did_you_mean
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.numbers import duration, plural
from stagewright.run.experiment import Experiment, section_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.other_names import setting_of
from stagewright.run.sections.serving import (
    OF_ONE_STEP,
    SERVING,
    EngineSection,
    OperationSection,
    PoolSection,
    WorkloadSection,
    by_own_names,
)
from stagewright.serving.capture import first_engine, step_at
from stagewright.serving.compare_log import compare, compare_rates, measured_run
from stagewright.serving.deployment import Deployment, InstanceGroup, ServedRun, slo_of
from stagewright.serving.energy import ServingExpense, serving_expense
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.serving.simulation import ProgressCallback
from stagewright.serving.workload import Workload
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.ownership import load as load_costs
from stagewright.views import serving as tables
from stagewright.views.pages.serving import serving_page
from stagewright.views.serving_perfetto import write_serving


@dataclass(frozen=True, eq=False)
class Serving(ServedRun):
    """A workload that was served, with its views."""

    group: InstanceGroup
    slo: Slo
    asked: Workload
    """The workload as it was given."""
    deployment: Deployment
    """All instances; `group` is the first group that decodes."""
    cluster: ClusterSection = field(default_factory=ClusterSection)
    """Says what a GPU-hour costs, by `price` or `costs`; else each hardware's price counts."""

    def step(self, seconds: float, engine: int = 0, *, instance: int | None = None) -> CompiledRun:
        """The step that an engine ran so many seconds after the run began, or last before.

        For `simulate`, `report` and `generate`: the trace of every rank. Engines, and instances,
        are numbered through all groups: those that compute prompts come first. Where an instance
        has several replicas, all have the batch of `engine`; `instance` names its first one. Where
        a request's cache is on its way between the instance and another one, the step is that of
        both, prefill ranks first, with the messages between them. Raises UserError where the
        engine ran no step.
        """
        number = engine if instance is None else first_engine(self.deployment, instance)
        return step_at(self.deployment, self.outcome, self.asked, seconds, number)

    def describe(self) -> str:
        """Name the workload, and the instances that served it."""
        return f"{self.outcome.workload.name}: {'; '.join(map(_group, self.groups))}"

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        """Instances that are alike, one group or several."""
        return self.deployment.groups

    @property
    def layout(self) -> str:
        """The model, and what of its run is not as by default."""
        return _layout(self.group)

    def __repr__(self) -> str:
        return f"<{self.summary.requests} requests served: {self.describe()}>"

    def _repr_html_(self) -> str:
        return self.latencies()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def latencies(self) -> Table:
        """Times of the measured requests: mean and percentiles."""
        return tables.latencies(self.summary)

    def engines(self) -> Table:
        """Requests, preemptions and use of the cache of each engine."""
        return tables.per_engine(self)

    def classes(self) -> Table:
        """Requests, times and goodput of each class of requests."""
        return tables.per_class(self.summary)

    def requests(self) -> Table:
        """A row for each request that is done."""
        return tables.requests(self, self.slo)

    def compare(self, log: str | os.PathLike[str]) -> Table:
        """The means and percentiles of a log, and those of this run, with errors.

        The log is a trace with `ttft`, and `e2e` or `latency`, or the result of a benchmark client
        (`serving.workloads.traces`, `.clients`), which was the workload:
        `stagewright.serve(..., requests=log)`.
        """
        measured = measured_run(os.fspath(log))
        return tables.compared(compare(measured, self.outcome, len(self.asked)))

    def compare_rates(self, log: str | os.PathLike[str]) -> Table:
        """Requests/s and output tokens/s of a client's result, and those of this run, with errors.

        Both are over the whole run, from the first arrival to the last token.
        """
        return tables.compared_rates(compare_rates(measured_run(os.fspath(log)), self.outcome))

    @property
    def interactivity(self) -> float:
        """Tokens/s of a user, end to end: 1 / 90th percentile of E2E per output token (AgentX)."""
        return RequestTimes.of(self.outcome).interactivity(self.outcome.workload)

    def closest(self) -> str:
        """Name the best times of requests if none keeps the limits; else empty."""
        if self.summary.good or any(each.limited for each in self.outcome.workload.classes):
            return ""
        times = RequestTimes.of(self.outcome)
        least = [
            f"{name.upper()} {duration(float(np.nanmin(values)))}"
            for name in ("ttft", "tpot", "e2e")
            if getattr(self.slo, name) is not None
            and np.isfinite(values := getattr(times, name)).any()
        ]
        all_at_once = ", but no request has all of these" if len(least) > 1 else ""
        return f"the least of all requests: {', '.join(least)}{all_at_once}" if least else ""

    def expense(self) -> ServingExpense:
        """Energy of the measured window, and its cost at the price of a GPU-hour."""
        price, costs = self.cluster.price, self.cluster.costs
        spent = serving_expense(self, self.groups, price)
        if price is not None or costs is None:
            return spent
        per_hour = load_costs(costs).usd_per_gpu_hour(spent.watts_per_gpu)
        return serving_expense(self, self.groups, per_hour)

    def perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the run for ui.perfetto.dev: requests of each engine, and counters."""
        write_serving(self.outcome, os.fspath(path), self.describe())

    def page(self) -> str:
        """The page of the run: timelines, percentiles and requests as bars, as HTML."""
        count = plural(self.summary.requests, "request", "requests")
        title = f"{self.group.instance.model.name}: {count} served"
        return serving_page(self, self.expense(), self.slo, title, self.describe())

    def values(self) -> dict[str, Any]:
        """The numbers as one object for JSON: seconds, tokens, shares of 1, joules, USD."""
        of = self.group
        return {
            "workload": self.outcome.workload.name,
            "run": self.layout,
            "instances": of.settings.instances,
            "pools": [*map(_values, self.groups)] if len(self.groups) > 1 else None,
            "kv_blocks": of.num_blocks,
            "kv_block_size": of.instance.cache.block_size,
            "max_num_batched_tokens": of.limits.tokens,
            "max_num_seqs": of.limits.requests,
            "stopped": self.outcome.stopped,
            **self.summary.values(),
            "interactivity": self.interactivity,
            "expense": self.expense()._asdict(),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the requests (.csv), the numbers and the requests (.json), or the page (.html)."""
        check_ending(path, OF_SERVING)
        ResultFile(
            self.requests, lambda: self.values() | {"rows": self.requests().rows}, self.page
        ).write(path)


def _layout(group: InstanceGroup) -> str:
    return group.instance.run.model_copy(update={"mode": "train"}).describe()


def _group(of: InstanceGroup) -> str:
    """A group of instances in words."""
    count, layout = of.settings.instances, _layout(of)
    purpose = "" if of.role == "both" else f" for {of.role}"
    many = f"{plural(count, 'instance', 'instances')}{purpose}, each "
    alone = count == 1 and not purpose
    return f"{'' if alone else many}{layout} on {of.instance.machine}"


def _values(group: InstanceGroup) -> dict[str, Any]:
    """A group of instances for JSON."""
    return {
        "serves": group.role,
        "instances": group.settings.instances,
        "run": _layout(group),
        "hardware": group.instance.machine.hardware.name,
        "gpus": group.gpus,
        "kv_blocks": group.num_blocks,
        "scheduler": group.scheduler_name,
    }


def sections_of(values: Mapping[str, Any]) -> ServingSections:
    """The sections that settings by name make."""
    return ServingSections(
        section_of(WorkloadSection, values),
        section_of(EngineSection, values),
        section_of(PoolSection, values),
        section_of(OperationSection, values),
    )


class ServingSections(NamedTuple):
    """Settings of serving by section."""

    workload: WorkloadSection
    engines: EngineSection
    pools: PoolSection = PoolSection()
    operation: OperationSection = OperationSection()


def serve(
    model: str | os.PathLike[str],
    hardware: str | os.PathLike[str] | Hardware,
    *,
    workload: Workload | None = None,
    config: ModelConfig | None = None,
    progress: ProgressCallback | None = None,
    **settings: Any,
) -> Serving:
    """Requests over time on engines with a layout of a model.

    `settings` are those of the workload and of the engines (`stagewright.run.sections.serving`), of
    a run in inference (`tp`, `pp`, `dp`, `kv_cache_dtype`, ...), of the machine and of the
    execution. `scheduler` is a name, or an object with a method `schedule`. `pools`, `stages` and
    `classes` are paths of files, or lists of rows, each a mapping of settings. `workload` replaces
    the requests that settings describe; `config` replaces the configuration that the model's name
    stands for. Raises `UserError` for settings that cannot be combined, and where no request can be
    served.

    >>> import stagewright as sw
    >>> found = sw.serve("llama3.1-8b", "h100-sxm", rate=4, isl=512, osl=64, num_requests=100)
    >>> found.summary.requests, found.summary.preemptions
    (100, 0)
    """
    of = hardware if isinstance(hardware, Hardware) else hardware_of(os.fspath(hardware))
    scheduler = settings.pop("scheduler", "vllm")
    if isinstance(scheduler, str):
        settings["scheduler"], scheduler = scheduler, None
    rows: dict[str, Any] = {
        name: settings.pop(name)
        for name in ("pools", "stages", "classes")
        if isinstance(settings.get(name), list | tuple)
    }
    settings = by_own_names(settings)
    own = {name: value for name, value in settings.items() if name in SERVING}
    others = {name: value for name, value in settings.items() if name not in SERVING}
    for name in others:
        if setting_of(name) not in EXPERIMENT:
            hint = did_you_mean(name, [*SERVING, *EXPERIMENT]) or "; see `stagewright serve --help`"
            raise UserError(f"unknown setting {name!r}{hint}")
    for name in sorted(map(setting_of, others)):
        if name in OF_ONE_STEP:
            raise UserError(f"{name} is of one step; requests over time are --requests or --rate")
    experiment = Experiment.of({}, {"model": os.fspath(model), **others, "mode": "decode"})
    sections = sections_of(own)
    if workload is not None:
        sections = sections._replace(workload=replace(sections.workload, requests=None))
    return served(experiment, of, sections, Given(workload, scheduler, config, **rows), progress)


def served(
    experiment: Experiment,
    hardware: Hardware,
    asked: ServingSections,
    given: Given | None = None,
    progress: ProgressCallback | None = None,
    instance: int = 0,
) -> Serving:
    """The requests that are asked for, on engines with the layout of an experiment.

    Raises UserError, before anything is served, where there is no such `instance`.
    """
    given = given or Given()
    if asked.workload.prefix_cache_hit_rate and not asked.engines.enable_prefix_caching:
        raise UserError(
            "--prefix-cache-hit-rate needs the prefix cache; leave out --no-enable-prefix-caching"
        )
    work = given.workload or workload_of(asked.workload, given.classes)
    slo, cluster = slo_of(asked.workload), experiment.cluster
    if cluster.costs is not None:
        if cluster.price is not None:
            raise UserError("price and costs both say what a GPU-hour costs; give one of the two")
        load_costs(cluster.costs)
    rows = rows_of(asked.pools, asked.engines, given.pools)
    past = asked.workload.past_context if given.workload is None else 0
    stages = stages_of(asked.pools, given.stages, asked.workload.seed, past)
    base = Planned("both", experiment, hardware, asked.engines)
    rows = rows or [{"instances": asked.engines.instances}]
    deployment = deployment_of(map(base.changed, rows), given, asked.pools, stages)
    deployment = operated(deployment, asked.operation)
    group = next(group for group in deployment.groups if group.role != "prefill")
    first_engine(deployment, instance)
    run = deployment.serve(work, slo, progress, whole_run=asked.workload.whole_run)
    return Serving(run.outcome, run.summary, group, slo, work, deployment, cluster)
