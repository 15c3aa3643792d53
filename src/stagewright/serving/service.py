"""Settings become engines, and engines serve a workload."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run.sections.declare import LARGEST
from stagewright.run.sections.serving import EngineSection, WorkloadSection
from stagewright.serving.cluster import Heard, Outcome, in_blocks, serve
from stagewright.serving.engines.blocks import KvBlocks
from stagewright.serving.engines.drafts import Drafts
from stagewright.serving.engines.engine import Engine, Scheduler
from stagewright.serving.engines.times import BatchTimes
from stagewright.serving.hosts import HOSTS, HostTimes
from stagewright.serving.instances import Instance
from stagewright.serving.metrics import ServingSummary, Slo, summarize
from stagewright.serving.requests import Accepted, Records, Workload, accept
from stagewright.serving.routers import router_of
from stagewright.serving.schedulers.named import BatchLimits, refuse_chunks_below_a_block
from stagewright.serving.schedulers.priority import VllmByPriority
from stagewright.serving.schedulers.vllm import Vllm

SAMPLES = 200
"""Moments at which the state of each engine is noted, while requests arrive."""


@dataclass(frozen=True, eq=False)
class Service:
    """Instances that are alike, and how they serve."""

    instance: Instance
    engines: EngineSection
    limits: BatchLimits
    scheduler: Scheduler
    watch: Callable[[Scheduler], Scheduler] | None = None
    """What stands between an engine and its scheduler; called for each engine, in order."""

    def __post_init__(self) -> None:
        """Raises UserError for a scheduler whose chunks are smaller than a block of the cache."""
        refuse_chunks_below_a_block(self.scheduler, self.instance.cache.block_size)

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.instance.gpus * self.engines.instances

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return self.instance.run.max_model_len or self.instance.model.max_position_embeddings

    @property
    def blocks(self) -> int:
        """Blocks of the cache of one engine; vLLM keeps one that stands for none (`null_block`)."""
        return self.engines.num_gpu_blocks or self.instance.cache.blocks - 1

    @property
    def host(self) -> HostTimes:
        """What the engine's host takes; nothing of a scheduler that nobody has measured."""
        return HOSTS.get(self.engines.scheduler, HostTimes())

    @property
    def drafts(self) -> Drafts | None:
        """Drafts of a step, and how many are right; raises UserError where nothing says that.

        vLLM has places for as many tokens more as there are drafts, which the draft model writes
        (`num_lookahead_tokens`, vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py`).
        """
        number, asked = self.instance.run.num_speculative_tokens, self.engines
        length, rate = asked.acceptance_length, asked.acceptance_rate
        if not number:
            if length is not None or rate is not None:
                raise UserError(
                    "--acceptance-length and --acceptance-rate are of drafts, of which there are "
                    "none; give --num-speculative-tokens"
                )
            return None
        slots = 1 + number * (2 if isinstance(self.scheduler, Vllm) else 1)
        if (length is None) == (rate is None):
            raise UserError(
                f"--num-speculative-tokens {number}: how many drafts are right decides how many "
                f"tokens a step gives; give --acceptance-length (1 to {number + 1}) or "
                "--acceptance-rate (0 to 1), and not both"
            )
        if length is not None:
            return Drafts.of_length(number, length, slots)
        return Drafts.of_rate(number, rate or 0.0, slots)

    @property
    def room(self) -> int:
        """Tokens of the longest request that the cache of an engine has room for."""
        cache = self.instance.cache
        return (self.blocks - cache.blocks_per_request) * cache.block_size - self._draft_room

    @property
    def _draft_room(self) -> int:
        """Tokens of drafts for which the longest request keeps room."""
        return 0 if self.drafts is None else self.drafts.slots - 1

    def check_room(self) -> None:
        """Raise a UserError where the cache has no room for a single token of a request."""
        if self.room > 0:
            return
        cache = self.instance.cache
        size, own = cache.block_size, cache.blocks_per_request
        lacking = -(-(1 - self.room) // size)
        raise UserError(
            f"the KV cache of an engine has {self.blocks:,} blocks of {size} tokens, wanted at "
            f"least {self.blocks + lacking:,}: each request takes {own:,} of them for states and "
            f"windows, {self._draft_room:,} tokens for drafts, and its own tokens; give more "
            "--num-gpu-blocks, or without that option more --gpu-memory-utilization or a layout on "
            "more GPUs"
        )

    @property
    def most_prompt(self) -> int:
        """Tokens of the longest prompt that a step may have; any, where prompts are cut."""
        chunked: bool = getattr(self.scheduler, "enable_chunked_prefill", True)
        return LARGEST if chunked else self.limits.tokens

    def scheduler_for(self, workload: Workload) -> Scheduler:
        """The scheduler of an engine that serves such a workload."""
        made = self._scheduler_for(workload)
        return made if self.watch is None else self.watch(made)

    def _scheduler_for(self, workload: Workload) -> Scheduler:
        if self.engines.scheduling_policy == "fcfs":
            return copy(self.scheduler)
        if type(self.scheduler) is not Vllm or self.instance.run.num_speculative_tokens:
            raise UserError(
                "--scheduling-policy priority is vLLM's, without speculative decoding here; leave "
                "out --scheduler and --num-speculative-tokens, or the policy"
            )
        places = workload.class_of or array("i", bytes(4 * len(workload)))
        levels = [each.priority for each in workload.classes] or [0]
        return VllmByPriority.of(self.scheduler, array("i", (levels[n] for n in places)))

    def engines_of(self, workload: Workload) -> EngineParts:
        """What engines are made of that serve such a workload."""
        cache = self.instance.cache
        return EngineParts(
            lambda: KvBlocks(
                self.blocks,
                cache.block_size,
                self.engines.enable_prefix_caching,
                cache.blocks_per_request,
            ),
            self.instance.times.of_replica(self.host),
            max(max(workload.arrival) / SAMPLES, 0.05),
            self.drafts,
        )

    def serve(self, workload: Workload, slo: Slo, heard: Heard | None = None) -> ServedRun:
        """Serve a workload to its end."""
        outcome, accepted = self.run(workload, heard)
        summary = summarize(outcome, slo, self.gpus, accepted.rejected, accepted.shortened)
        return ServedRun(outcome, summary)

    def run(self, workload: Workload, heard: Heard | None = None) -> tuple[Outcome, Accepted]:
        """What becomes of a workload."""
        self.check_room()
        accepted = accept(workload, self.max_model_len, self.room, self.most_prompt)
        check_accepted(accepted, self.max_model_len, self.room)
        of = in_blocks(accepted.workload, self.instance.cache.block_size)
        parts = self.engines_of(of)

        def engine(workload: Workload, records: Records) -> Engine:
            made = Engine(
                workload,
                records,
                parts.blocks(),
                self.scheduler_for(workload),
                parts.times,
                parts.every,
            )
            made.drafts = parts.drafts
            return made

        count = self.engines.instances * self.instance.replicas
        together = self.instance.replicas if self.instance.barrier else 1
        router = router_of(self.engines.router)
        return serve(of, engine, count, router, self.host, heard, together), accepted


class EngineParts(NamedTuple):
    """What engines of a service have in common."""

    blocks: Callable[[], KvBlocks]
    """Makes an empty cache."""
    times: BatchTimes
    every: float
    """Seconds between moments at which an engine notes its state."""
    drafts: Drafts | None


def check_accepted(accepted: Accepted, max_model_len: int, room: int) -> None:
    """Raise a UserError where no request is left."""
    if not len(accepted.workload):
        why = "; ".join(f"{count} x {what}" for what, count in accepted.rejected.items())
        raise UserError(
            f"no request can be served: {why} (max_model_len {max_model_len}, KV cache of "
            f"{room} tokens)"
        )


def slo_of(asked: WorkloadSection) -> Slo:
    """The limits that are asked for, in seconds."""

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1000

    return Slo(ttft=seconds(asked.ttft), tpot=seconds(asked.tpot), e2e=seconds(asked.e2e))


@dataclass(frozen=True, eq=False)
class ServedRun:
    """What became of a workload, and its numbers."""

    outcome: Outcome
    summary: ServingSummary
