"""What happens to instances while they serve: full queues, failures, more and fewer of them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Real, Share, Text, setting

Seconds = Annotated[float, Real(ge=0, le=1e9)]
Interval = Annotated[float, Real(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class OperationSection:
    """What happens to instances while they serve; SGLang's and Dynamo's names."""

    max_queued_requests: Count | None = setting(
        None,
        "A request that finds so many waiting at its engine is refused.",
        unset="any number waits",
    )
    fail_at: Text | None = setting(
        None,
        "Instances that fail: seconds:instance, such as 12.5:0,30:2.",
        unset="none",
        metavar="LIST",
    )
    on_failure: Literal["requeue", "fail"] = setting(
        "requeue",
        "Whether requests of a failed instance are computed again elsewhere, or fail.",
    )
    start_up_time: Seconds | None = setting(
        None,
        "Seconds until an instance serves that is started, or has failed.",
        unset="started: at once; failed: never",
        metavar="S",
    )
    min_instances: Count | None = setting(
        None, "Fewest instances that serve.", unset="as many as --instances"
    )
    max_instances: Count | None = setting(
        None, "Most instances that serve (autoscaling).", unset="as many as --instances"
    )
    adjustment_interval: Interval = setting(
        30.0, "Seconds between adjustments of their number.", metavar="S"
    )
    kv_scale_up_threshold: Share = setting(
        0.9, "Use of the KV cache above which an instance is started."
    )
    kv_scale_down_threshold: Share = setting(
        0.5, "Use of the KV cache below which an instance leaves."
    )
