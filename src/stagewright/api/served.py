"""Requests served over time: `stagewright.serve`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, NamedTuple

from stagewright.api.deployment import Given, deployment_of
from stagewright.api.experiments import with_launch_file
from stagewright.api.result import OF_SERVING, PublicResult, check_type, path_text
from stagewright.api.stages import stages_of
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError, did_you_mean
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.numbers import plural
from stagewright.run.experiment import Experiment, section_of
from stagewright.run.other_names import setting_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.cluster import ClusterSection
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
from stagewright.serving.command_lines import command_lines
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
from stagewright.views import serving as views
from stagewright.views.accuracy import GroupError, errors_of_serving
from stagewright.views.deviations import known_of_serving
from stagewright.views.pages.serving import serving_page
from stagewright.views.perfetto import write_serving
from stagewright.views.serving import (
    accuracy_notes,
    group_words,
    layout_words,
    serving_notes,
    serving_text,
)

_HARDWARE = "the name of hardware, a path or a Hardware"


@dataclass(frozen=True, eq=False)
class Serving(ServedRun, PublicResult):
    """Requests served over time; times in seconds, shares of 1.

    Attributes: `summary` has the numbers (`request_rate`, `output_rate`, `goodput`, `good`,
    `ttft`, `tpot`, `e2e`, `kv_mean`, ...), `outcome` the records of all requests and engines.

    Tables: `latencies`, `engines`, `classes`, `requests` (a row for each that is done); with a
    `log` of measurements that was the workload (a trace with `ttft`, and `e2e` or `latency`, or the
    result of a benchmark client) `compared` and `compared_rates`.
    """

    group: InstanceGroup
    """The first group of instances that decodes."""
    slo: Slo
    """Latency limits."""
    asked: Workload
    """The workload as it was given."""
    deployment: Deployment
    """All instances."""
    cluster: ClusterSection = field(default_factory=ClusterSection)
    """Price of a GPU-hour, by `price` or `costs`; else that of each hardware."""
    log: str | None = None
    """Log of measurements whose errors the page shows."""

    suffixes = OF_SERVING

    def __repr__(self) -> str:
        return f"<{self.summary.requests} requests served: {self.describe()}>"

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "latencies": lambda: views.latencies(self.summary),
            "engines": lambda: views.per_engine(self),
            "classes": lambda: views.per_class(self.summary),
            "requests": lambda: views.requests(self, self.slo),
            "compared": self._compared,
            "compared_rates": self._compared_rates,
        }

    def _compared(self, log: str) -> Table:
        return views.compared(compare(measured_run(log), self.outcome, len(self.asked)))

    def _compared_rates(self, log: str) -> Table:
        return views.compared_rates(compare_rates(measured_run(log), self.outcome))

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright serve`."""
        return serving_text(self, self.deployment.groups, self.slo, self.expense(), self.describe())

    def notes(self) -> list[str]:
        """Requests left out or cut short, and assumptions, in sentences."""
        return [*serving_notes(self, self.deployment.groups)]

    def commands(self, engine: str) -> list[str]:
        """Command lines with which `engine` (vllm, sglang or trtllm) serves so; `#`: comments."""
        return command_lines(self.deployment, engine)

    def step(self, seconds: float, engine: int = 0, *, instance: int | None = None) -> CompiledRun:
        """The step that an engine ran at a time since the run began, or last before.

        For `simulate`, `report` and `generate`: the trace of every rank. Engines, and instances,
        are numbered through all groups: those that compute prompts come first. If an instance has
        several replicas, all have the batch of `engine`; `instance` names its first one. If a
        request's cache is on its way between the instance and another one, the step is that of
        both, prefill ranks first, with the messages between them. Raises UserError if the engine
        ran no step.
        """
        check_type(seconds, "seconds since the run began", float, int)
        check_type(engine, "the number of an engine", int)
        if not math.isfinite(seconds):
            raise UserError(f"step({seconds}): wanted seconds since the run began")
        number = engine if instance is None else first_engine(self.deployment, instance)
        return step_at(self.deployment, self.outcome, self.asked, seconds, number)

    def describe(self) -> str:
        """Name the workload, and the instances that served it."""
        groups = "; ".join(map(group_words, self.deployment.groups))
        return f"{self.outcome.workload.name}: {groups}"

    def accuracy(self) -> list[GroupError]:
        """Errors to expect of TPOT, TTFT and throughput, from rows of such a server."""
        return errors_of_serving(self.deployment.groups)

    @property
    def interactivity(self) -> float:
        """Tokens/s of a user, end to end: 1 / 90th percentile of E2E per output token (AgentX)."""
        return RequestTimes.of(self.outcome).interactivity

    def expense(self) -> ServingExpense:
        """Energy of the measured window, and its cost at the price of a GPU-hour."""
        groups, price, costs = self.deployment.groups, self.cluster.price, self.cluster.costs
        expense = serving_expense(self, groups, price)
        if price is not None or costs is None:
            return expense
        per_hour = load_costs(costs).usd_per_gpu_hour(expense.watts_per_gpu)
        return serving_expense(self, groups, per_hour)

    def perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the run for ui.perfetto.dev: requests of each engine, and counters."""
        write_serving(self.outcome, path_text(path), self.describe())

    def to_dict(self) -> dict[str, Any]:
        """The object of `serve --json`: seconds, tokens, shares of 1, joules, USD."""
        group, groups = self.group, self.deployment.groups
        return {
            "workload": self.outcome.workload.name,
            "run": layout_words(group),
            "instances": group.settings.instances,
            "pools": [*map(_values, groups)] if len(groups) > 1 else None,
            "kv_blocks": group.num_blocks,
            "kv_block_size": group.instance.cache.block_size,
            "max_num_batched_tokens": group.limits.tokens,
            "max_num_seqs": group.limits.requests,
            "stopped": self.outcome.stopped,
            **self.summary.values(),
            "interactivity": self.interactivity,
            "expense": self.expense()._asdict(),
            "accuracy": [of.to_dict() for of in self.accuracy()],
            "remarks": [*self.notes(), *accuracy_notes(groups)],
        }

    def _rows(self) -> Table:
        return self.table("requests")

    def _json_rows(self) -> dict[str, Any]:
        return {"rows": self._rows().rows}

    def page(self) -> str:
        """The page that `write` writes as `.html`."""
        count = plural(self.summary.requests, "request", "requests")
        title = f"{self.group.instance.model.name}: {count} served"
        names = () if self.log is None else ("compared", "compared_rates")
        compared = [self.table(name, log=self.log) for name in names]
        return serving_page(
            self, self.expense(), self.slo, title, self.describe(), compared,
            [*known_of_serving(self.deployment.groups)],
        )  # fmt: skip


def _values(group: InstanceGroup) -> dict[str, Any]:
    """A group of instances for JSON."""
    return {
        "serves": group.role,
        "instances": group.settings.instances,
        "run": layout_words(group),
        "hardware": group.instance.machine.hardware.name,
        "gpus": group.gpus,
        "kv_blocks": group.num_blocks,
        "scheduler": group.scheduler_name,
    }


class ServingSections(NamedTuple):
    """Settings of serving by section."""

    workload: WorkloadSection
    engines: EngineSection
    pools: PoolSection = PoolSection()
    operation: OperationSection = OperationSection()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServingSections:
        """The sections of settings by name."""
        return cls(
            section_of(WorkloadSection, values),
            section_of(EngineSection, values),
            section_of(PoolSection, values),
            section_of(OperationSection, values),
        )


def serve(
    model: str | os.PathLike[str],
    hardware: str | os.PathLike[str] | Hardware,
    *,
    workload: Workload | None = None,
    config: ModelConfig | None = None,
    progress: ProgressCallback | None = None,
    **settings: Any,
) -> Serving:
    """Serve requests over time on engines with a layout of a model.

    `settings` are those of the workload and of the engines (the options of `stagewright serve`), of
    a run in inference (`tp`, `pp`, `dp`, `kv_cache_dtype`, ...), of the machine and of the
    execution. `scheduler` is a name, or an object with a method `schedule`. `pools`, `stages` and
    `classes` are paths of files, or lists of rows, each a mapping of settings. `workload` replaces
    the requests of the settings; `config` replaces the configuration of the model's name. Raises
    `UserError` for settings that cannot be combined, and if no request can be served.

    >>> import stagewright as sw
    >>> found = sw.serve("llama3.1-8b", "h100-sxm", rate=4, isl=512, osl=64, num_requests=100)
    >>> found.summary.requests, found.summary.preemptions
    (100, 0)
    """
    of = hardware if isinstance(hardware, Hardware) else hardware_of(path_text(hardware, _HARDWARE))
    check_type(workload, "workload as a Workload", Workload, NoneType)
    check_type(config, "config as a ModelConfig", ModelConfig, NoneType)
    model, settings = with_launch_file(model, settings, serves=True)
    scheduler = settings.pop("scheduler", "vllm")
    if isinstance(scheduler, str):
        settings["scheduler"], scheduler = scheduler, None
    elif not hasattr(scheduler, "schedule"):
        raise UserError(
            f"got {scheduler!r}, wanted scheduler as a name or an object that schedules"
        )
    rows: dict[str, Any] = {
        name: settings.pop(name)
        for name in ("pools", "stages", "classes")
        if isinstance(settings.get(name), list | tuple)
    }
    settings = by_own_names(settings)
    of_serving = {name: value for name, value in settings.items() if name in SERVING}
    others = {name: value for name, value in settings.items() if name not in SERVING}
    for name in others:
        if setting_of(name) not in EXPERIMENT:
            hint = did_you_mean(name, [*SERVING, *EXPERIMENT]) or "; see `stagewright serve --help`"
            raise UserError(f"unknown setting {name!r}{hint}")
    for name in sorted(map(setting_of, others)):
        if name in OF_ONE_STEP:
            raise UserError(f"{name} is of one step; requests over time are --requests or --rate")
    # The mode stands for inference here: that of each step follows from its batch.
    experiment = Experiment.of({}, {"model": path_text(model), **others, "mode": "decode"})
    sections = ServingSections.of(of_serving)
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
    """Serve the requests of these settings on engines with the layout of an experiment.

    Raises UserError, before anything is served, if there is no such `instance`.
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
    past = asked.workload.past_context if given.workload is None else 0
    stages = asked.pools.stages if given.stages is None else given.stages
    deployment = deployment_of(
        experiment, hardware, asked.engines, asked.pools, asked.operation, given,
        stages_of(stages, asked.workload.seed, past),
    )  # fmt: skip
    group = next(group for group in deployment.groups if group.role != "prefill")
    first_engine(deployment, instance)
    run = deployment.serve(work, slo, progress, whole_run=asked.workload.whole_run)
    return Serving(run.outcome, run.summary, group, slo, work, deployment, cluster)
