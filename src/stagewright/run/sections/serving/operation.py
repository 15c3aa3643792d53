"""Settings of events during serving: full queues, failures, autoscaling."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Real, Share, Text, setting

Seconds = Annotated[float, Real(ge=0, le=1e9)]
Interval = Annotated[float, Real(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class OperationSection:
    """Events of instances during serving, by SGLang's and Dynamo's names."""

    max_queued_requests: Count | None = setting(
        None,
        "A request that finds so many waiting at its engine is refused.",
        unset="any number waits",
        rare=True,
    )
    fail_at: Text | None = setting(
        None,
        "Instances that fail: seconds:instance, such as 12.5:0,30:2.",
        unset="none",
        metavar="LIST",
        rare=True,
    )
    on_failure: Literal["requeue", "fail"] = setting(
        "requeue",
        "Whether requests of a failed instance are computed again elsewhere, or fail.",
        rare=True,
    )
    start_up_time: Seconds | None = setting(
        None,
        "Seconds until an instance serves that is started, or has failed.",
        unset="started: at once; failed: never",
        metavar="S",
        rare=True,
    )
    min_instances: Count | None = setting(
        None, "Fewest instances that serve.", unset="as many as --instances", rare=True
    )
    max_instances: Count | None = setting(
        None, "Most instances that serve (autoscaling).", unset="as many as --instances", rare=True
    )
    adjustment_interval: Interval = setting(
        30.0, "Seconds between adjustments of their number.", metavar="S", rare=True
    )
    kv_scale_up_threshold: Share = setting(
        0.9, "Use of the KV cache above which an instance is started.", rare=True
    )
    kv_scale_down_threshold: Share = setting(
        0.5, "Use of the KV cache below which an instance leaves.", rare=True
    )
