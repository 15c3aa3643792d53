"""Step times with what an engine's host adds, and with the experts that replicas share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.serving.engines.plans import Plan, PlannedSteps
from stagewright.serving.engines.times import BatchTimes, DecodeRuns
from stagewright.serving.hosts import HostTimes


class GpuTimes(DecodeRuns, BatchTimes):
    """Seconds that the GPUs of one replica take for its steps."""

    @property
    def share_experts(self) -> bool:
        """Whether experts get the tokens of all replicas."""
        raise NotImplementedError

    def beside_replicas(self, seconds: float, tokens: int, mean: float) -> float:
        """Seconds of a step with so many tokens whose replicas have `mean` of them in the mean.

        `seconds`: of the step where all have as many.
        """
        raise NotImplementedError

    def with_host(self, host: HostTimes) -> HostedTimes:
        """These times with what an engine's host adds to each step."""
        return HostedTimes(self, host)

    def of_replica(self, host: HostTimes) -> HostedTimes:
        """As `with_host`, for a replica whose steps `plans_of_all` times together with others'.

        Where replicas share experts, a host that works beside the GPU counts only there: how long
        the GPU takes is not known before the tokens of all are.
        """
        return HostedTimes(self, host, self.share_experts and host.beside)


@dataclass(frozen=True, slots=True, eq=False)
class HostedTimes(DecodeRuns):
    """Seconds from the begin of a step of one replica to that of the next one."""

    gpu: GpuTimes
    host: HostTimes
    later: bool = False
    """Only `plans_of_all` adds the host."""

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """As `BatchTimes.line`."""
        first, grows, steps = line = self.gpu.line(requests, keys)
        if self.later:
            return line
        steps, first, grows = self.host.run_after((steps, first, grows), requests)
        return first, grows, steps

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """As `BatchTimes.step`."""
        seconds = self.gpu.step(tokens, pairs, keys, requests, decoding, decoding_keys)
        return seconds if self.later else self.host.after(seconds, requests)

    def of_all(self, of: PlannedSteps, mean: float) -> Plan:
        """As `plans_of_all`, of a single replica."""
        return self.plans_of_all((of,), mean)[0]

    def plans_of_all(self, active: Sequence[PlannedSteps], mean: float) -> list[Plan]:
        """The steps of replicas whose experts get the tokens of all, of times `of_replica`.

        `mean`: tokens of a replica's step in the mean.
        """
        beside = self.gpu.beside_replicas
        plans = [
            (steps, beside(first, tokens, mean), grows)
            for (steps, first, grows), tokens, _ in active
        ]
        if not self.later:
            return plans
        run_after = self.host.run_after
        return [run_after(plan, of.requests) for plan, of in zip(plans, active, strict=True)]
