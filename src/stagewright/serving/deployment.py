"""Deployment: groups of equal instances behind one address, which serve a workload.

Either all groups serve whole requests, or some compute prompts and the others decode: then the
cache of each request goes over the network between them (`kv_transfer`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Self

from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.run.sections.declare import LARGEST
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving import EngineSection, WorkloadSection
from stagewright.run.sections.serving.pools import KvPush
from stagewright.run.settings import Run
from stagewright.serving.disaggregation import (
    PrefillEngine,
    RemoteKvEngine,
    RemoteKvScheduler,
    Role,
)
from stagewright.serving.engine import Engine, Scheduler
from stagewright.serving.host import HOSTS, NO_HOST, HostTimes
from stagewright.serving.instance import Instance, make_instance
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.kv_transfer import Handover, KvTransferCost, KvTransfers
from stagewright.serving.lockstep import LockstepGroup
from stagewright.serving.metrics import ServingSummary, Slo, summarize
from stagewright.serving.operation import InstanceEvents
from stagewright.serving.routers import router_of
from stagewright.serving.schedulers.named import (
    BatchLimits,
    batch_limits,
    class_of,
    engine_of,
    refuse_chunks_below_a_block,
    refuse_others,
    scheduler_of,
)
from stagewright.serving.schedulers.static import Static
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import (
    Outcome,
    Pool,
    ProgressCallback,
    ServingSimulation,
    StopEarly,
    chains_in_blocks,
)
from stagewright.serving.speculative import Drafts, drafter_of
from stagewright.serving.stages import PromptStages
from stagewright.serving.workload import Accepted, Records, Workload, accept, with_documents
from stagewright.time.network import Machine

SAMPLES = 200
"""Samples of the state of each engine while requests arrive."""


@dataclass(frozen=True, eq=False)
class InstanceGroup:
    """Equal instances: their layout, settings of their engines, and role.

    Raises UserError for a scheduler whose chunks are smaller than a block of the cache.
    """

    instance: Instance
    settings: EngineSection
    role: Role = "both"
    own_scheduler: Scheduler | None = None
    """Scheduler of each engine in place of the one that the settings name."""
    watch: Callable[[Scheduler], Scheduler] | None = None
    """Function that replaces the scheduler of each engine, in order (to observe it)."""

    @classmethod
    def of(
        cls,
        run: Run,
        model: ModelConfig,
        machine: Machine,
        settings: EngineSection,
        execution: Execution | None = None,
        *,
        role: Role = "both",
        scheduler: Scheduler | None = None,
        others: Iterable[InstanceGroup] = (),
    ) -> Self:
        """Make the step times of a layout, or share those of an equal group among `others`.

        Kernels are those of the engine whose scheduler it is, unless the execution names one.
        Raises UserError as `make_instance` does, and for settings of another scheduler.
        """
        limits = batch_limits(settings, machine.hardware)
        memory = settings.gpu_memory_utilization, settings.free_gpu_memory_fraction
        if scheduler is None:
            refuse_others(settings)
        router_of(settings.router)
        drafts = settings.speculative_method, settings.speculative_model
        engine = engine_of(class_of(settings.scheduler) if scheduler is None else type(scheduler))
        for other in others:
            instance, its = other.instance, other.settings
            if (
                (instance.run, instance.machine, other.limits) == (run, machine, limits)
                and (its.gpu_memory_utilization, its.free_gpu_memory_fraction) == memory
                and (its.speculative_method, its.speculative_model) == drafts
                and engine_of(type(other.scheduler)) == engine
            ):
                return cls(instance, settings, role, scheduler)
        execution = execution or Execution()
        if execution.serving_engine is None:
            execution = replace(execution, serving_engine=engine)
        instance = make_instance(
            run, model, machine, execution, max_tokens=limits.tokens, max_requests=limits.requests,
            gpu_memory_utilization=memory[0], free_gpu_memory_fraction=memory[1],
            drafter=drafter_of(settings, run, model),
        )  # fmt: skip
        return cls(instance, settings, role, scheduler)

    def __post_init__(self) -> None:
        """Check the scheduler."""
        refuse_chunks_below_a_block(self.scheduler, self.instance.cache.block_size)

    @cached_property
    def limits(self) -> BatchLimits:
        """Limits of a step."""
        return batch_limits(self.settings, self.instance.machine.hardware)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Scheduler, of which each engine has a copy."""
        if self.own_scheduler is not None:
            return self.own_scheduler
        return scheduler_of(self.settings, self.limits, self.instance.run.pp)

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.instance.gpus * self.settings.instances

    @property
    def num_engines(self) -> int:
        """Engines of all instances: one for each rank of attention data parallelism."""
        return self.settings.instances * self.instance.replicas

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of a request."""
        return self.instance.run.max_model_len or self.instance.model.max_position_embeddings

    @property
    def num_blocks(self) -> int:
        """KV blocks of one engine; vLLM reserves one as placeholder (`null_block`)."""
        return self.settings.num_gpu_blocks or self.instance.cache.num_blocks - 1

    @property
    def host(self) -> HostTimes:
        """Host times of the engine whose scheduler this is, or derives from; zero of others.

        What schedules a step while the one before runs, hides it behind that.
        """
        engine = engine_of(type(self.scheduler))
        host = HOSTS[engine] if engine else NO_HOST
        return replace(host, overlaps_gpu=bool(getattr(self.scheduler, "async_scheduling", False)))

    @property
    def scheduler_name(self) -> str:
        """Name of the scheduler in the settings; of an object that differs, its class."""
        named = class_of(self.settings.scheduler)
        scheduler = type(self.scheduler)
        return self.settings.scheduler if scheduler is named else scheduler.__name__

    @property
    def drafts(self) -> Drafts | None:
        """Drafts of a step and their acceptance; raises UserError where that is not given.

        vLLM also has slots for tokens that the draft model writes, as many as there are drafts
        (`num_lookahead_tokens`, vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py`).
        """
        number = self.instance.run.num_speculative_tokens
        length, rate = self.settings.acceptance_length, self.settings.acceptance_rate
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
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that fits into the cache of an engine."""
        cache = self.instance.cache
        return (self.num_blocks - cache.blocks_per_request) * cache.block_size - self._draft_tokens

    @property
    def _draft_tokens(self) -> int:
        """Cache positions that the longest request needs for drafts."""
        return 0 if self.drafts is None else self.drafts.slots - 1

    def check_max_request_tokens(self) -> None:
        """Raise UserError where the cache cannot hold a single token of a request."""
        if self.max_request_tokens > 0:
            return
        cache = self.instance.cache
        size, per_request = cache.block_size, cache.blocks_per_request
        lacking = -(-(1 - self.max_request_tokens) // size)
        raise UserError(
            f"the KV cache of an engine has {self.num_blocks:,} blocks of {size} tokens, wanted at "
            f"least {self.num_blocks + lacking:,}: each request takes {per_request:,} of them for "
            f"states and windows, {self._draft_tokens:,} tokens for drafts, and its own tokens; "
            "give more --num-gpu-blocks, or without that option more --gpu-memory-utilization or a "
            "layout on more GPUs"
        )

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt; any, where prompts are computed in chunks."""
        chunked: bool = getattr(self.scheduler, "enable_chunked_prefill", True)
        return LARGEST if chunked else self.limits.tokens

    def scheduler_for(self, workload: Workload) -> Scheduler:
        """Scheduler of one engine for a workload."""
        scheduler = self._scheduler_for(workload)
        return scheduler if self.watch is None else self.watch(scheduler)

    def _scheduler_for(self, workload: Workload) -> Scheduler:
        if self.settings.scheduling_policy == "fcfs":
            return copy(self.scheduler)
        if type(self.scheduler) is not Vllm or self.instance.run.num_speculative_tokens:
            raise UserError(
                "--scheduling-policy priority is vLLM's, without speculative decoding here; leave "
                "out --scheduler and --num-speculative-tokens, or the policy"
            )
        classes = workload.class_of or array("i", bytes(4 * len(workload)))
        levels = [request_class.priority for request_class in workload.classes] or [0]
        return replace(self.scheduler, priority=array("i", (levels[n] for n in classes)))

    def serve(self, workload: Workload, slo: Slo, *, whole_run: bool = False) -> ServedRun:
        """Serve a workload on these instances alone."""
        return Deployment((self,)).serve(workload, slo, whole_run=whole_run)


@dataclass(frozen=True, eq=False)
class ServedRun:
    """Outcome of a workload, and its metrics."""

    outcome: Outcome
    summary: ServingSummary


@dataclass(frozen=True, eq=False)
class Deployment:
    """Groups of instances behind one address.

    Raises UserError where the roles of groups leave requests without a prompt or without decode.
    """

    groups: tuple[InstanceGroup, ...]
    prefill_router: str = "round_robin"
    stages: PromptStages | None = None
    """Stages of requests before their prompts."""
    operation: InstanceEvents | None = None
    """Limits of queues, failures and scaling."""
    kv_transfer: KvPush = "prompt"
    """Part of a cache that leaves a prefill instance when it is computed."""

    def __post_init__(self) -> None:
        """Check the roles, and what operation requires."""
        roles = {group.role for group in self.groups}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise UserError(
                f"instances are for {' and '.join(sorted(roles)) or 'nothing'}; wanted some for "
                "prefill and some for decode, or all for both"
            )
        if any(g.role == "decode" and isinstance(g.scheduler, Static) for g in self.groups):
            raise UserError(
                "scheduler static forms batches of whole requests, so its instances cannot decode "
                "for others; choose vllm, sglang or tensorrt-llm"
            )
        changes = self.operation is not None and (self.operation.failures or self.operation.scaling)
        replicated = any(group.instance.replicas > 1 for group in self.groups)
        stores = self.stages is not None and self.stages.tiers
        if changes and (replicated or stores):
            raise UserError(
                "failures and autoscaling are of instances without attention data parallelism or "
                "stores; leave out --fail-at and --max-instances, or these"
            )
        if changes and self.kv_transfer != "prompt":
            raise UserError(
                f"--kv-transfer {self.kv_transfer} with failures or autoscaling is not modelled; "
                "leave out --fail-at and --max-instances, or use --kv-transfer prompt"
            )
        scales = self.operation is not None and self.operation.scaling
        decode_groups = self._decode_groups
        if scales and len(decode_groups) > 1:
            raise UserError(
                "autoscaling is of instances that are alike; wanted one group that serves "
                f"{decode_groups[0].role} beside --max-instances, got {len(decode_groups)}"
            )

    @property
    def _prefill_groups(self) -> list[InstanceGroup]:
        """Groups that compute prompts."""
        return [group for group in self.groups if group.role != "decode"]

    @property
    def _decode_groups(self) -> list[InstanceGroup]:
        """Groups that decode; their instances may be scaled."""
        return [group for group in self.groups if group.role != "prefill"]

    @property
    def disaggregated(self) -> bool:
        """True if prompts and decode are on different instances."""
        return len({group.role for group in self.groups}) > 1

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(group.gpus for group in self.groups)

    def serve(
        self,
        workload: Workload,
        slo: Slo,
        progress: ProgressCallback | None = None,
        *,
        whole_run: bool = False,
    ) -> ServedRun:
        """Serve a workload to its end; `whole_run`: measure its ramp and drain, too."""
        outcome, accepted = self.run(workload, progress)
        return self.summarize(outcome, accepted, slo, whole_run=whole_run)

    def summarize(
        self, outcome: Outcome, accepted: Accepted, slo: Slo, *, whole_run: bool = False
    ) -> ServedRun:
        """Compute the metrics of a run of this deployment."""
        gpus = self.gpus
        if outcome.instances:  # those that served at one time
            never = len(outcome.engines) - max(count for _, count in outcome.instances)
            gpus -= never * self._decode_groups[0].instance.gpus
        summary = summarize(
            outcome, slo, gpus, accepted.rejected, accepted.shortened, whole_run=whole_run
        )
        return ServedRun(outcome, summary)

    def run(
        self,
        workload: Workload,
        progress: ProgressCallback | None = None,
        stop_early: StopEarly | None = None,
    ) -> tuple[Outcome, Accepted]:
        """Simulate a workload, to its end or until `stop_early`; return what was accepted, too."""
        if self.stages is not None and self.stages.added_tokens:
            workload = with_documents(workload, self.stages.added_tokens)
        accepted = self.accept(workload)
        prefill_groups, decode_groups = self._prefill_groups, self._decode_groups
        requests = chains_in_blocks(accepted.workload, decode_groups[0].instance.cache.block_size)
        records = Records.of(len(requests))
        handover = Handover.of(len(requests) * self.disaggregated)
        engines: list[Engine] = []
        group_of: list[InstanceGroup] = []
        for group in self.groups:
            engines += self._engines(group, requests, records, handover)
            group_of += [group] * group.num_engines
        transfers, router = None, decode_groups[0].settings.router
        if self.disaggregated:
            between = cache(transfer_between)
            transfers = KvTransfers(
                handover,
                len(engines),
                lambda source, target: between(group_of[source], group_of[target]),
                self.kv_transfer,
            )
            pools = [
                _pool("prefill", group_of, requests, self.prefill_router),
                _pool("decode", group_of, requests, router),
            ]
        else:
            pools = [_pool("both", group_of, requests, router)]
        stages, operation = self.stages, self.operation
        if stages is not None:
            bytes_per_token = prefill_groups[0].instance.cache.bytes_per_token
            stages = replace(stages, bytes_per_token=bytes_per_token)
        if operation is not None and operation.scaling is None:
            operation = replace(operation, instances=len(engines))  # all serve
        simulation = ServingSimulation(
            requests, records, engines, pools, transfers=transfers, stages=stages,
            operation=operation, progress=progress, stop_early=stop_early,
        )  # fmt: skip
        return simulation.run(), accepted

    def accept(self, workload: Workload) -> Accepted:
        """Leave out requests that no instance can serve; raises UserError where none is left."""
        prefill_groups, decode_groups = self._prefill_groups, self._decode_groups
        for groups in (decode_groups, prefill_groups):
            max(groups, key=lambda group: group.max_request_tokens).check_max_request_tokens()
        max_model_len = max(group.max_model_len for group in decode_groups)
        kv_tokens = max(group.max_request_tokens for group in decode_groups)
        max_prompt = max(group.max_prompt for group in prefill_groups)
        prefill_kv_tokens = max(group.max_request_tokens for group in prefill_groups)
        accepted = accept(workload, max_model_len, kv_tokens, max_prompt, prefill_kv_tokens)
        if not len(accepted.workload):
            why = "; ".join(f"{count} x {reason}" for reason, count in accepted.rejected.items())
            raise UserError(
                f"no request can be served: {why} (max_model_len {max_model_len}, KV cache of "
                f"{kv_tokens} tokens)"
            )
        return accepted

    def _engines(
        self, group: InstanceGroup, workload: Workload, records: Records, handover: Handover
    ) -> list[Engine]:
        """Create the engines of a group, idle, in lockstep where its replicas share experts."""
        instance, drafts = group.instance, group.drafts
        times = instance.times.of_replica(group.host)
        sample_every = max(max(workload.arrival) / SAMPLES, 0.05)
        if group.role == "prefill":
            workload = replace(workload, output=array("i", [1]) * len(workload))
        remote = group.role != "both" or self.operation is not None
        remote = remote or (self.stages is not None and bool(self.stages.tiers))
        to_the_end = isinstance(group.scheduler, TensorRtLlm)
        engines: list[Engine] = []
        for _ in range(group.num_engines):
            kv_cache = PagedKvCache(
                group.num_blocks,
                instance.cache.block_size,
                group.settings.enable_prefix_caching,
                instance.cache.blocks_per_request,
            )
            scheduler = group.scheduler_for(workload)
            if remote:
                scheduler = RemoteKvScheduler(scheduler, group.limits.requests, to_the_end)
            args = (workload, records, kv_cache, scheduler, times, sample_every)
            if group.role == "prefill":
                pushes = self.kv_transfer != "prompt"
                engine = PrefillEngine(handover.prefilled, *args, pushes=pushes)
            elif remote:
                sent = group.role == "decode" and not isinstance(group.scheduler, Vllm)
                engine = RemoteKvEngine(*args, role=group.role, with_first_token=sent)
            else:
                engine = Engine(*args)
            engine.drafts = drafts
            engines.append(engine)
        if instance.barrier:
            for begin in range(0, len(engines), instance.replicas):
                LockstepGroup(engines[begin : begin + instance.replicas])
        return engines


def _pool(role: Role, group_of: list[InstanceGroup], workload: Workload, router: str) -> Pool:
    """Pool of the engines of a role."""
    groups = {number: group for number, group in enumerate(group_of) if group.role == role}

    def fits(request: int, engine: int) -> bool:
        prompt, group = workload.prompt[request], groups[engine]
        if role != "decode" and prompt > group.max_prompt:
            return False
        tokens = prompt if role == "prefill" else prompt + workload.output[request] - 1
        return tokens <= group.max_request_tokens

    limits = {(group.max_request_tokens, group.max_prompt) for group in groups.values()}
    hosts = {number: group.host for number, group in groups.items()}
    return Pool(role, [*groups], router_of(router), hosts, fits if len(limits) > 1 else None)


def transfer_between(source: InstanceGroup, target: InstanceGroup) -> KvTransferCost:
    """Transfer of a request's cache from a prefill instance to a decode instance."""
    first, second = source.instance, target.instance
    hardware = first.machine.hardware, second.machine.hardware
    transfer = KvTransferCost.between(first.run, second.run, second.model, hardware)
    drafters = first.drafter, second.drafter
    if drafters[0] is None or drafters[1] is None:
        return transfer
    # vLLM's connectors send the caches of all layers, including those of the drafter.
    layouts = drafters[0].run, drafters[1].run
    return transfer.with_second_model(KvTransferCost.between(*layouts, drafters[1].model, hardware))


def slo_of(settings: WorkloadSection) -> Slo:
    """Latency limits of the settings, in seconds."""

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1000

    return Slo(ttft=seconds(settings.ttft), tpot=seconds(settings.tpot), e2e=seconds(settings.e2e))
