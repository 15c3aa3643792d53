"""Groups of instances, each with a layout, a machine and an engine of its own, that serve together.

Either all groups serve whole requests, or some compute prompts and the others decode: then the
cache of each request goes over the network between them (`serving.transfers`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from stagewright.errors import UserError
from stagewright.run.sections.serving.pools import KvPush
from stagewright.serving.cluster import Heard, Outcome, in_blocks
from stagewright.serving.engines.engine import Engine
from stagewright.serving.engines.lockstep import Lockstep
from stagewright.serving.metrics import Slo, summarize
from stagewright.serving.pools.engines import BringingEngine, DecodeEngine, PromptEngine, Pulls
from stagewright.serving.pools.loop import Enough, serve_in_pools
from stagewright.serving.pools.operation import InstanceEvents
from stagewright.serving.pools.parts import EnginePool, Pools
from stagewright.serving.pools.pushing import PushingEngine
from stagewright.serving.pools.stages import PromptStages
from stagewright.serving.requests import (
    Accepted,
    Handover,
    Records,
    Workload,
    accept,
    with_documents,
)
from stagewright.serving.routers import router_of
from stagewright.serving.schedulers.static import Static
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.service import ServedRun, Service, check_accepted
from stagewright.serving.transfers import KvTransfer

Phases = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, eq=False)
class InstanceGroup:
    """Instances that are alike, and what they are for."""

    service: Service
    serves: Phases = "both"

    @property
    def engines(self) -> int:
        """Engines of the group: ranks of attention data parallelism have one each."""
        return self.service.engines.instances * self.service.instance.replicas


class _Numbered(NamedTuple):
    """An engine among all."""

    group: InstanceGroup
    engine: Engine


@dataclass(frozen=True, eq=False)
class InstanceGroups:
    """Groups of instances behind one address.

    Raises UserError where the purposes of groups leave requests without a prompt or without decode.
    """

    groups: tuple[InstanceGroup, ...]
    prefill_router: str = "round_robin"
    stages: PromptStages | None = None
    """What requests pass before their prompts."""
    operation: InstanceEvents | None = None
    """What happens to instances meanwhile."""
    kv_transfer: KvPush = "prompt"
    """What of a cache leaves a prefill instance when it is computed."""

    def __post_init__(self) -> None:
        """Check the purposes."""
        purposes = {group.serves for group in self.groups}
        if purposes not in ({"both"}, {"prefill", "decode"}):
            raise UserError(
                f"instances are for {' and '.join(sorted(purposes)) or 'nothing'}; wanted some for "
                "prefill and some for decode, or all for both"
            )
        if any(
            g.serves == "decode" and isinstance(g.service.scheduler, Static) for g in self.groups
        ):
            raise UserError(
                "scheduler static forms batches of whole requests, so its instances cannot decode "
                "for others; choose vllm, sglang or tensorrt-llm"
            )

        changes = self.operation is not None and (self.operation.failures or self.operation.scaling)
        replicated = any(group.service.instance.replicas > 1 for group in self.groups)
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
        if scales and len(self._scaled) > 1:
            raise UserError(
                "autoscaling is of instances that are alike; wanted one group that serves "
                f"{self._scaled[0].serves} beside --max-instances, got {len(self._scaled)}"
            )

    @property
    def _scaled(self) -> list[InstanceGroup]:
        """The groups whose instances may come and go: not those for prompts alone."""
        return [group for group in self.groups if group.serves != "prefill"]

    @property
    def disaggregated(self) -> bool:
        """Whether prompts and decode are on instances of their own."""
        return len({group.serves for group in self.groups}) > 1

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(group.service.gpus for group in self.groups)

    def serve(self, workload: Workload, slo: Slo, heard: Heard | None = None) -> ServedRun:
        """Serve a workload to its end."""
        outcome, accepted = self.run(workload, heard)
        gpus = self.gpus
        if outcome.instances:  # those that have served at a time
            never = len(outcome.engines) - max(count for _, count in outcome.instances)
            gpus -= never * self._scaled[0].service.instance.gpus
        summary = summarize(outcome, slo, gpus, accepted.rejected, accepted.shortened)
        return ServedRun(outcome, summary)

    def run(
        self, workload: Workload, heard: Heard | None = None, enough: Enough | None = None
    ) -> tuple[Outcome, Accepted]:
        """What becomes of a workload, up to its end or until somebody has `enough` of it."""
        if self.stages is not None and self.stages.added_tokens:
            workload = with_documents(workload, self.stages.added_tokens)
        accepted = self.accepted(workload)
        last = [g.service for g in self.groups if g.serves != "prefill"]
        first = [g.service for g in self.groups if g.serves != "decode"]
        of = in_blocks(accepted.workload, last[0].instance.cache.block_size)
        records, handover = Records.of(len(of)), Handover.of(len(of))
        places = [
            _Numbered(group, engine)
            for group in self.groups
            for engine in self._engines(group, of, records, handover)
        ]
        router = last[0].engines.router
        engines = [place.engine for place in places]
        if self.disaggregated:
            between = cache(transfer_between)
            pools = Pools(
                engines,
                _pool(places, "decode", of, self.prefill_router),
                _pool(places, "prefill", of, router),
                _transfers(places, between),
                handover,
                _layers(places, between),
                self.kv_transfer,
            )
        else:
            pools = Pools(engines, _pool(places, "decode", of, router))
        if self.stages is not None:
            size = first[0].instance.cache.bytes_per_token
            pools = replace(pools, stages=replace(self.stages, bytes_per_token=size))
        operation = self.operation
        if operation is not None and operation.scaling is None:
            operation = replace(operation, instances=len(engines))  # all serve
        pools = replace(pools, operation=operation)
        return serve_in_pools(of, records, pools, heard, enough), accepted

    def accepted(self, workload: Workload) -> Accepted:
        """The requests that some instances can serve; raises UserError where none is left."""
        last = [g.service for g in self.groups if g.serves != "prefill"]
        first = [g.service for g in self.groups if g.serves != "decode"]
        for services in (last, first):
            max(services, key=lambda service: service.room).check_room()
        most = max(service.max_model_len for service in last)
        room = max(service.room for service in last)
        accepted = accept(
            workload,
            most,
            room,
            max(service.most_prompt for service in first),
            max(service.room for service in first),
        )
        check_accepted(accepted, most, room)
        return accepted

    def _engines(
        self, group: InstanceGroup, of: Workload, records: Records, handover: Handover
    ) -> list[Engine]:
        service = group.service
        parts = service.engines_of(of)
        scheduler = service.scheduler
        if group.serves == "prefill":
            one = array("i", [1]) * len(of)
            of = replace(of, output=one)
        made: list[Engine] = []
        for _ in range(group.engines):
            args = (of, records, parts.blocks())
            rest = (parts.times, parts.every)
            to_their_ends = isinstance(scheduler, TensorRtLlm)
            own = service.scheduler_for(of)
            pulls = Pulls(own, service.limits.requests, to_their_ends)
            match group.serves:
                case "prefill":
                    kind = PromptEngine if self.kv_transfer == "prompt" else PushingEngine
                    engine = kind(handover.prefilled, *args, pulls, *rest)
                case "decode":
                    sent = not isinstance(scheduler, Vllm)
                    engine = DecodeEngine(*args, pulls, *rest, with_first_token=sent)
                case "both" if self.operation or (self.stages and self.stages.tiers):
                    engine = BringingEngine(*args, pulls, *rest)
                case _:
                    engine = Engine(*args, own, *rest)
            engine.drafts = parts.drafts
            made.append(engine)
        if service.instance.barrier:
            together = service.instance.replicas
            for begin in range(0, len(made), together):
                Lockstep(made[begin : begin + together])
        return made


def _pool(places: list[_Numbered], without: Phases, of: Workload, router: str) -> EnginePool:
    """The engines among which a router chooses: all but those that serve `without`."""
    numbers = [nth for nth, place in enumerate(places) if place.group.serves != without]
    services = {nth: places[nth].group.service for nth in numbers}
    prompts_only = places[numbers[0]].group.serves == "prefill"
    computed_elsewhere = without == "prefill" and len(numbers) < len(places)

    def fits(request: int, nth: int) -> bool:
        prompt, service = of.prompt[request], services[nth]
        if not (computed_elsewhere or prompt <= service.most_prompt):
            return False
        return (prompt if prompts_only else prompt + of.output[request] - 1) <= service.room

    weakest = {min(numbers, key=lambda n: services[n].room)}
    weakest.add(min(numbers, key=lambda n: services[n].most_prompt))
    alike = all(fits(request, nth) for request in range(len(of)) for nth in weakest)
    hosts = {nth: service.host for nth, service in services.items()}
    return EnginePool(numbers, router_of(router), hosts, None if alike else fits)


def transfer_between(first: Service, second: Service) -> KvTransfer:
    """The cache of a request on its way from an instance of one service to one of another."""
    one, two = first.instance, second.instance
    hardware = one.machine.hardware, two.machine.hardware
    found = KvTransfer.between(one.run, two.run, two.model, hardware)
    drafts = one.drafter, two.drafter
    if drafts[0] is None or drafts[1] is None:
        return found
    # vLLM's connectors send the caches of all layers, those of what drafts included.
    layouts = drafts[0].run, drafts[1].run
    return found.beside(KvTransfer.between(*layouts, drafts[1].model, hardware))


_Between = Callable[[Service, Service], KvTransfer]


def _transfers(
    places: list[_Numbered], between: _Between
) -> Callable[[int, int, int, bool], tuple[float, int]]:
    """As `Pools.transfer`."""

    @cache
    def of_groups(
        first: InstanceGroup, second: InstanceGroup, tokens: int, last: bool
    ) -> tuple[float, int]:
        way = between(first.service, second.service)
        return way.seconds(tokens, last), way.bytes(tokens, last)

    def transfer(source: int, target: int, tokens: int, last: bool) -> tuple[float, int]:
        return of_groups(places[source].group, places[target].group, tokens, last)

    return transfer


def _layers(
    places: list[_Numbered], between: _Between
) -> Callable[[int, int, int, bool], tuple[int, float]]:
    """Layers of a stage of the first engine, and seconds of one layer's cache of so many tokens."""

    def layer(source: int, target: int, tokens: int, last: bool) -> tuple[int, float]:
        first = places[source].group
        made = first.service.instance
        many = max(1, made.model.num_layers // made.run.pp)
        way = between(first.service, places[target].group.service)
        return many, way.seconds(tokens, last, parts=many)

    return layer
