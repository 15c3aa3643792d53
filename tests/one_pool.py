"""Engines of one pool that serve a workload."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.serving.engine import Engine
from stagewright.serving.host import HostTimes
from stagewright.serving.lockstep import LockstepGroup
from stagewright.serving.routers import Router
from stagewright.serving.simulation import Outcome, Pool, ServingSimulation
from stagewright.serving.workload import Records, Workload

NO_HOST = HostTimes()


def serve(
    workload: Workload,
    engine: Callable[[Workload, Records], Engine],
    count: int,
    router: Router,
    host: HostTimes = NO_HOST,
    together: int = 1,
) -> Outcome:
    """Serve a workload on `count` engines, which step in groups of `together`."""
    records = Records.of(len(workload))
    engines = [engine(workload, records) for _ in range(count)]
    if together > 1:
        for first in range(0, count, together):
            LockstepGroup(engines[first : first + together])
    pool = Pool("both", range(count), router, dict.fromkeys(range(count), host))
    return ServingSimulation(workload, records, engines, [pool]).run()
