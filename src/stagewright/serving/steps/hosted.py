"""Step times with host overhead, and with the experts that replicas share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.serving.batch import BatchPlan, DecodeRun, DecodeRuns
from stagewright.serving.host import HostTimes


class GpuTimes(DecodeRuns):
    """Seconds that the GPUs of one replica take for its steps."""

    @property
    def share_experts(self) -> bool:
        """True if experts get the tokens of all replicas."""
        raise NotImplementedError

    def in_group(self, seconds: float, tokens: int, mean_tokens: float) -> float:
        """Seconds of a step with `tokens` where replicas have `mean_tokens` on average.

        `seconds`: of the step if all replicas had equal numbers of tokens.
        """
        raise NotImplementedError

    def with_host(self, host: HostTimes) -> HostedTimes:
        """Add the host overhead of an engine to each step."""
        return HostedTimes(self, host)

    def of_replica(self, host: HostTimes) -> HostedTimes:
        """Like `with_host`, for a replica of a lockstep group.

        Where replicas share experts and the host works next to the GPU, only `group_runs` adds the
        host: the GPU's time depends on the tokens of all replicas.
        """
        return HostedTimes(self, host, self.share_experts and host.beside)


@dataclass(frozen=True, slots=True, eq=False)
class HostedTimes(DecodeRuns):
    """Seconds from the begin of a step of one replica to that of the next one."""

    gpu: GpuTimes
    host: HostTimes
    host_in_group: bool = False
    """Only `group_runs` adds the host."""

    def linear_run(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Like `BatchTimes.linear_run`."""
        seconds, growth, steps = run = self.gpu.linear_run(requests, keys)
        if self.host_in_group:
            return run
        host = self.host
        if not host.beside:
            return seconds + host.per_step + host.per_request_step * requests, growth, steps
        steps, seconds, growth = host.run_after(DecodeRun(steps, seconds, growth), requests)
        return seconds, growth, steps

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Like `BatchTimes.step`."""
        seconds = self.gpu.step(tokens, pairs, keys, requests, num_decodes, decode_keys)
        return seconds if self.host_in_group else self.host.after(seconds, requests)

    def group_runs(self, plans: Sequence[BatchPlan], mean_tokens: float) -> list[DecodeRun]:
        """Runs of replicas whose experts get the tokens of all, of times `of_replica`.

        `mean_tokens`: tokens of a replica's step on average.
        """
        in_group = self.gpu.in_group
        runs = [
            run._replace(seconds=in_group(run.seconds, tokens, mean_tokens))
            for run, tokens, _ in plans
        ]
        if not self.host_in_group:
            return runs
        run_after = self.host.run_after
        return [run_after(run, plan.requests) for run, plan in zip(runs, plans, strict=True)]
