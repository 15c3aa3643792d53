"""Settings of events during serving: full queues, failures, autoscaling."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Seconds, Share, Text, duration, setting, whole

Interval = Annotated[float, duration(least=1e-3)]
"""At most a thousand adjustments a second."""
Instances = Annotated[int, whole(1, 1_000_000)]


@dataclass(frozen=True, kw_only=True)
class OperationSection:
    """Events of instances during serving, by SGLang's and Dynamo's names."""

    max_queued_requests: Count | None = setting(
        None, "Reject a request if this many wait at its engine.", unset="no limit"
    )
    fail_at: Text | None = setting(
        None,
        "Failures of instances: seconds:instance, such as 12.5:0,30:2.",
        unset="none",
        metavar="LIST",
    )
    on_failure: Literal["requeue", "fail"] = setting(
        "requeue", "Requests of a failed instance: compute them elsewhere, or fail them."
    )
    start_up_time: Seconds | None = setting(
        None,
        "Time from the start or the failure of an instance until it serves.",
        unset="start: 0; failure: never",
        metavar="TIME",
    )
    min_instances: Instances | None = setting(
        None, "Minimum number of instances that serve.", unset="--instances"
    )
    max_instances: Instances | None = setting(
        None, "Maximum number of instances that serve (autoscaling).", unset="--instances"
    )
    adjustment_interval: Interval = setting(
        30.0, "Time between two adjustments of the number of instances.", metavar="TIME"
    )
    kv_scale_up_threshold: Share = setting(
        0.9, "Use of the KV cache above which an instance starts."
    )
    kv_scale_down_threshold: Share = setting(
        0.5, "Use of the KV cache below which an instance leaves."
    )
