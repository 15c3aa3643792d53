"""What happens to instances while they serve: full queues, failures, more and fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stagewright.serving.engines.engine import Engine

QUEUE_FULL = "the queue of its instance was full"
FAILED = "its instance failed"
NONE_SERVES = "all instances had failed"


class Failure(NamedTuple):
    """An instance that fails."""

    seconds: float
    """Since the run began."""
    instance: int
    """Its number, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Instances come and go with the load, one at a time.

    The rule of Dynamo's load-based planner (docs.nvidia.com/dynamo/archive/0.3.1/architecture/
    planner.html): at every adjustment the mean use of the KV cache of the instances is compared
    with two thresholds (0.9 and 0.5 there), and one instance is started or leaves; while one
    starts nothing is adjusted. Where failures leave fewer than `least`, one is started whatever the
    load. Who leaves gets no new requests and serves those that it has.
    """

    least: int
    most: int
    interval: float
    up: float
    down: float

    def change(self, engines: Sequence[Engine], instances: int) -> int:
        """1, -1 or 0 instances more, where these engines of so many instances serve."""
        if instances < self.least:
            return 1
        used = sum(1 - e.blocks.free / e.blocks.size for e in engines) / max(1, len(engines))
        if used > self.up and instances < self.most:
            return 1
        return -1 if used < self.down and instances > self.least else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvents:
    """What may happen to instances; by default nothing does."""

    instances: int
    """That serve from the beginning."""
    max_queued_requests: int | None = None
    """A request that finds so many waiting at its engine is refused (SGLang's option)."""
    failures: tuple[Failure, ...] = ()
    on_failure: Literal["requeue", "fail"] = "requeue"
    start_up_time: float | None = None
    """Seconds until a new instance serves; of a failed one, None: it stays away."""
    scaling: Scaling | None = None
