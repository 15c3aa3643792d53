"""Settings of operation become what happens to instances."""

from __future__ import annotations

import math
from dataclasses import replace
from reprlib import repr as shown

from stagewright.errors import UserError
from stagewright.run.sections.serving import OperationSection
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.operation import Failure, InstanceEvents, Scaling


def operation_of(
    asked: OperationSection, instances: int, prompts: int = 0
) -> InstanceEvents | None:
    """What happens to so many instances; None where nothing does.

    Before them `prompts` instances are numbered that compute prompts only: they fail, too.
    Raises UserError for settings that contradict each other.
    """
    if asked == OperationSection():
        return None
    _refuse_idle(asked)
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
        failures=_failures(asked.fail_at, prompts + most),
        on_failure=asked.on_failure,
        start_up_time=asked.start_up_time,
        scaling=scaling,
    )


def operated(deployment: Deployment, asked: OperationSection) -> Deployment:
    """Deployment with these events; as many instances as may serve at a time."""
    counts = [group.settings.instances for group in deployment.groups]
    prompts = [group.role == "prefill" for group in deployment.groups]
    first = sum(many for many, only in zip(counts, prompts, strict=True) if only)
    operation = operation_of(asked, sum(counts) - first, first)
    deployment = replace(deployment, operation=operation)
    if operation is None or operation.scaling is None:
        return deployment
    groups: list[InstanceGroup] = []
    for group, only in zip(deployment.groups, prompts, strict=True):
        most = group.settings.instances if only else operation.scaling.max_instances
        engines = replace(group.settings, instances=most)
        groups.append(replace(group, settings=engines))
    return replace(deployment, groups=tuple(groups))


def _refuse_idle(asked: OperationSection) -> None:
    """Raise a UserError for a setting of failures or of autoscaling where there is none."""
    fails = asked.fail_at is not None
    scales = asked.min_instances is not None or asked.max_instances is not None
    usual = OperationSection()
    for name, counts, of in (
        ("on_failure", fails, "--fail-at"),
        ("start_up_time", fails or scales, "--fail-at and --max-instances"),
        ("adjustment_interval", scales, "--max-instances"),
        ("kv_scale_up_threshold", scales, "--max-instances"),
        ("kv_scale_down_threshold", scales, "--max-instances"),
    ):
        if not counts and getattr(asked, name) != getattr(usual, name):
            raise UserError(f"--{name.replace('_', '-')} is of {of}; give that, or leave it out")


def _failures(text: str | None, instances: int) -> tuple[Failure, ...]:
    found: list[Failure] = []
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
        found.append(failure)
    return tuple(found)
