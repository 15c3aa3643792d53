"""Instances from settings: groups with their layout and machine, failures and autoscaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any, NamedTuple

from stagewright.api.rows import read_rows, refuse_without_effect
from stagewright.errors import UserError, either
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.requests import ranks_of_text
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.serving import (
    OF_ONE_STEP,
    EngineSection,
    OperationSection,
    PoolSection,
)
from stagewright.run.settings import Run
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.disaggregation import Role
from stagewright.serving.engine import Scheduler
from stagewright.serving.operation import Failure, InstanceEvents, Scaling
from stagewright.serving.routers import router_of
from stagewright.serving.stages import PromptStages
from stagewright.serving.workload import Workload
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

Values = Mapping[str, Any]
"""Settings by name: how a group of instances differs from the others."""

ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


class Given(NamedTuple):
    """What is given as an object in place of settings."""

    workload: Workload | None = None
    scheduler: Scheduler | None = None
    config: ModelConfig | None = None
    pools: Sequence[Values] | None = None
    stages: Sequence[Values] | None = None
    classes: Sequence[Values] | None = None


def groups_of(
    asked: PoolSection, engines: EngineSection, given: Sequence[Values] | None = None
) -> list[Values]:
    """Settings of each group of instances; `given`: rows in place of a file.

    Raises UserError for settings that contradict each other.
    """
    source = asked.pools if given is None else given
    prefill = asked.prefill_instances
    if source is not None:
        if prefill or asked.prefill or asked.prefill_hardware or engines.instances > 1:
            raise UserError(
                "--pools says which instances there are; leave out --instances and --prefill..., "
                "or the file"
            )
        example = "- {serves: prefill, instances: 2, tp: 4}"
        where, rows = read_rows(source, "groups of instances", example)
        for name in (name for row in rows for name in row):
            if str(name) in OF_ONE_STEP or not isinstance(name, str):
                raise UserError(f"{where}: {shown(name)} is no setting of a group of instances")
        return rows
    needs = prefill is not None, "--prefill-instances N"
    refuse_without_effect(
        asked, prefill=needs, prefill_hardware=needs, prefill_router=needs, kv_transfer=needs
    )
    if prefill is None:
        return [{"instances": engines.instances}]
    row: dict[str, Any] = {"serves": "prefill", "instances": prefill}
    if asked.prefill is not None:
        row |= {"etp": None, "layers_per_stage": None} | ranks_of_text(asked.prefill).settings()
    if asked.prefill_hardware is not None:
        row["hardware"] = asked.prefill_hardware
    return [row, {"serves": "decode", "instances": engines.instances}]


def deployment_of(
    experiment: Experiment,
    hardware: Hardware,
    engines: EngineSection,
    pools: PoolSection,
    operation: OperationSection,
    given: Given,
    stages: PromptStages | None = None,
) -> Deployment:
    """Groups of instances with their step times, and what happens to them during a run."""
    router_of(pools.prefill_router, "--prefill-router")
    groups: list[InstanceGroup] = []
    for row in groups_of(pools, engines, given.pools):
        groups.append(_group(row, experiment, hardware, engines, given, groups))
    deployment = Deployment(
        tuple(groups), pools.prefill_router, stages, kv_transfer=pools.kv_transfer
    )
    if pools.kv_transfer != "prompt" and not deployment.disaggregated:
        raise UserError("--kv-transfer is of --prefill-instances N: give how many there are")
    prefill = sum(group.settings.instances for group in groups if group.role == "prefill")
    others = sum(group.settings.instances for group in groups) - prefill
    events = instance_events(operation, others, prefill)
    if events is not None and events.scaling is not None:  # as many as may serve at a time
        most = events.scaling.max_instances
        groups = [
            group
            if group.role == "prefill"
            else replace(group, settings=replace(group.settings, instances=most))
            for group in groups
        ]
    return replace(deployment, groups=tuple(groups), operation=events)


def _group(
    row: Values,
    experiment: Experiment,
    hardware: Hardware,
    engines: EngineSection,
    given: Given,
    others: Sequence[InstanceGroup],
) -> InstanceGroup:
    """The group of a row, whose settings replace those of all; step times are shared."""
    values = {"instances": 1, **row}
    role = values.pop("serves", "both")
    if role not in ROLES:
        raise UserError(f"serves is {shown(role)}, wanted {either(ROLES)}")
    name = values.pop("hardware", None)
    if name is not None and not isinstance(name, str):
        raise UserError(f"hardware is {shown(name)}, wanted a name or a file")
    engines = with_settings(engines, values)
    own = {n: values[n] for n in values if n not in EngineSection.__dataclass_fields__}
    for setting in own:
        if setting in ("model", "max_model_len", "kv_block_size") or setting not in SETTINGS:
            raise UserError(
                f"{shown(setting)} cannot differ between groups of instances; wanted serves, "
                "instances, hardware, settings of a layout (tp, pp, ...) or of an engine"
            )
    run, cluster = experiment.run, experiment.cluster
    if own:
        run = Run.of({**run.given(), **own, "model": run.model, "mode": "decode"})
    machine = Machine.of(
        hardware if name is None else hardware_of(name),
        gpus=run.world_size,
        topology=cluster.topology,
        algorithm=cluster.algorithm,
    )
    model = (given.config or model_of(run.model, run.as_family or "")).with_overrides(
        num_layers=run.layers, vocab_size=run.vocab, mtp_num_layers=run.mtp_num_layers
    )
    return InstanceGroup.of(
        run, model, machine, engines, experiment.execution,
        role=role, scheduler=given.scheduler, others=others,
    )  # fmt: skip


# ---- failures and autoscaling --------------------------------------------------------------------


def instance_events(
    asked: OperationSection, instances: int, prefill: int = 0
) -> InstanceEvents | None:
    """Limits of queues, failures and autoscaling of `instances`; None without any.

    Instances are numbered after `prefill` ones that compute prompts only, which fail, too. Raises
    UserError for settings that contradict each other.
    """
    if asked == OperationSection():
        return None
    fails = asked.fail_at is not None
    scales = asked.min_instances is not None or asked.max_instances is not None
    scaling_only = scales, "--max-instances"
    refuse_without_effect(
        asked,
        on_failure=(fails, "--fail-at"),
        start_up_time=(fails or scales, "--fail-at and --max-instances"),
        adjustment_interval=scaling_only,
        kv_scale_up_threshold=scaling_only,
        kv_scale_down_threshold=scaling_only,
    )
    least = asked.min_instances or instances
    most = asked.max_instances or instances
    if not least <= instances <= most:
        raise UserError(
            f"--instances {instances} must lie between --min-instances {least} and --max-instances "
            f"{most}: so many serve from the beginning"
        )
    scaling = None
    if least < most:
        up, down = asked.kv_scale_up_threshold, asked.kv_scale_down_threshold
        if down >= up:
            raise UserError(
                f"--kv-scale-down-threshold {down:g} must be below --kv-scale-up-threshold {up:g}"
            )
        scaling = Scaling(
            min_instances=least,
            max_instances=most,
            interval=asked.adjustment_interval,
            up=up,
            down=down,
        )
    return InstanceEvents(
        instances=instances,
        max_queued_requests=asked.max_queued_requests,
        failures=_failures(asked.fail_at, prefill + most),
        on_failure=asked.on_failure,
        start_up_time=asked.start_up_time,
        scaling=scaling,
    )


def _failures(text: str | None, instances: int) -> tuple[Failure, ...]:
    failures: list[Failure] = []
    for part in [] if text is None else text.split(","):
        seconds, colon, number = part.partition(":")
        try:
            failure = Failure(float(seconds), int(number) if colon else 0)
        except ValueError:
            failure = Failure(math.nan, 0)
        if not (0 <= failure.seconds < math.inf and 0 <= failure.instance < instances):
            raise UserError(
                f"--fail-at: {shown(part)} is no failure; wanted seconds:instance, such as 12.5:0, "
                f"of instances 0 to {instances - 1}"
            )
        failures.append(failure)
    return tuple(failures)
