"""Step times that are linear in the sums of a batch, and engines of one pool that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.serving.batch import UNLIMITED, BatchPlan, DecodeRun
from stagewright.serving.engine import Engine
from stagewright.serving.host import HostTimes
from stagewright.serving.lockstep import LockstepGroup
from stagewright.serving.routers import Router
from stagewright.serving.simulation import Outcome, Pool, ServingSimulation
from stagewright.serving.workload import Records, Workload


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """Step time linear in tokens, requests and cached keys (s).

    >>> _, seconds, growth = LinearTimes(0.005, per_key=1e-6).linear_run(2, 100)
    >>> round(seconds, 6), round(growth, 6)
    (0.0051, 2e-06)
    """

    base: float
    per_token: float = 0.0
    per_request: float = 0.0
    per_key: float = 0.0

    def linear_run(self, requests: int, keys: int) -> DecodeRun:
        """Run of any number of steps (`StepTimes.linear_run`)."""
        seconds = self.base + (self.per_token + self.per_request) * requests + self.per_key * keys
        return DecodeRun(UNLIMITED, seconds, self.per_key * requests)

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Like `StepTimes.step`; pairs cost nothing besides their tokens and keys."""
        of_tokens = self.base + self.per_token * tokens
        return of_tokens + self.per_request * requests + self.per_key * keys

    def group_runs(self, plans: Sequence[BatchPlan], mean_tokens: float) -> list[DecodeRun]:
        """Runs of replicas, which do not depend on the tokens of others."""
        return [plan.run for plan in plans]


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
