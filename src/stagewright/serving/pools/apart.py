"""Prompts first and decode behind them, each played by itself: the same times in less time.

Instances that compute prompts do not look at those that decode, unless blocks are lacking for
prompts whose caches wait to be read. So prompts are played once for a number of instances, and
decode as often as there are layouts and numbers of instances for it. Both are plain here: requests
have nothing in common and wait for nobody, vLLM's rules, no drafts, nobody is preempted. `Unusual`
says where something else is needed: then `InstanceGroups` play all in one order of events.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from stagewright.arrays import Float
from stagewright.serving.cluster import serve
from stagewright.serving.engines.blocks import KvBlocks
from stagewright.serving.engines.decisions import FOREVER
from stagewright.serving.engines.engine import Engine
from stagewright.serving.pools.agenda import BATCH_END, OTHER
from stagewright.serving.pools.links import Links
from stagewright.serving.pools.loop import ASKED, Enough
from stagewright.serving.pools.plain_decode import InStep, PlainDecoder, Unusual
from stagewright.serving.requests import Records, Workload
from stagewright.serving.routers import router_of
from stagewright.serving.service import Service


def refuse_unusual(workload: Workload, services: Sequence[Service]) -> None:
    """Raise `Unusual` where requests or rules are not plain."""
    depends = workload.after is not None or workload.concurrency is not None
    for each in services:
        plain = getattr(each.scheduler_for(workload), "plain", None)
        if plain is None or each.drafts is not None or each.engines.router != "round_robin":
            raise Unusual
    if depends or workload.chains is not None:
        raise Unusual


@dataclass(frozen=True, eq=False)
class PromptsDone:
    """When the prompts of a workload are done on some instances, one after the other."""

    service: Service
    records: Records
    """`finish` is when a prompt is done."""

    @classmethod
    def of(cls, service: Service, workload: Workload) -> PromptsDone:
        """Played with as many blocks as it takes."""
        one = array("i", [1]) * len(workload)
        cache, parts = service.instance.cache, service.engines_of(workload)

        def engine(workload: Workload, records: Records) -> Engine:
            blocks = KvBlocks(FOREVER, cache.block_size, False, cache.blocks_per_request)
            scheduler = service.scheduler_for(workload)
            return Engine(workload, records, blocks, scheduler, parts.times)

        replicas = service.instance.replicas
        outcome = serve(
            replace(workload, output=one),
            engine,
            service.engines.instances * replicas,
            router_of("round_robin"),
            service.host,
            together=replicas if service.instance.barrier else 1,
        )
        if outcome.stopped:
            raise KeyboardInterrupt
        records = outcome.records
        delays = map(service.host.before_prefill, workload.prompt)
        records.arrival[:] = array("d", map(float.__sub__, records.reached, delays))
        return cls(service, records)

    def check_blocks(self, workload: Workload, read: Float, until: float) -> None:
        """Raise `Unusual` where blocks may not suffice `until` then, held until they are `read`."""
        cache, records = self.service.instance.cache, self.records
        prompt = np.frombuffer(workload.prompt, np.int32).astype(np.int64)
        held = -(-prompt // cache.block_size) + cache.blocks_per_request
        engine = np.frombuffer(records.engine, np.int32)
        begins = np.frombuffer(records.scheduled)
        for nth in range(int(engine.max(initial=0)) + 1):
            mine = (engine == nth) & (begins <= until)
            at = np.concatenate([begins[mine], read[mine]])
            change = np.concatenate([held[mine], -held[mine]])
            order = np.lexsort((-change, at))
            if np.cumsum(change[order]).max(initial=0) > self.service.blocks:
                raise Unusual


Seconds = Callable[[int], float]


@dataclass(frozen=True, eq=False)
class DecodedAfter:
    """What became of requests whose prompts were computed elsewhere."""

    records: Records
    arrives: array[float]
    """When the cache of each was there; nan: it was not sent."""
    cut: bool
    """Whether the rest need not be known."""


def decode_after(
    prompts: PromptsDone, service: Service, of: Workload, transfer: Seconds, enough: Enough
) -> DecodedAfter:
    """Decode on the instances of a service, until all is done or somebody has `enough` of it.

    `transfer`: seconds of a cache of so many tokens alone on its links.
    """
    play = _Decode(prompts, service, of, transfer)
    cut = enough(of, play.records, 0.0) or play.run(enough)
    arrives, until = np.frombuffer(play.arrives), play.now if cut else math.inf
    prompts.check_blocks(of, np.where(np.isnan(arrives), math.inf, arrives), until)
    records = play.records.known(play.earliest, play.now) if cut else play.records
    return DecodedAfter(records, play.arrives, cut)


class _Decode:
    """Requests on their way from their prompts to their ends."""

    def __init__(
        self, prompts: PromptsDone, service: Service, of: Workload, transfer: Seconds
    ) -> None:
        records = prompts.records
        self.of, self.transfer = of, transfer
        self.source = records.engine
        self.comes = service.host.reached(records.finish, of.prompt)
        self.order = sorted(range(len(of)), key=self.comes.__getitem__)
        nan = array("d", [math.nan]) * len(of)
        self.arrives = nan[:]
        # A first token is not there before the cache is.
        self.earliest = array("d", map(float.__add__, self.comes, map(transfer, of.prompt)))
        self.records = replace(
            records,
            reached=nan[:],
            first=self.earliest[:],
            finish=nan[:],
            engine=array("i", records.engine),
        )
        replicas = service.instance.replicas
        count = service.engines.instances * replicas
        together = replicas if service.instance.barrier else 1
        every = [PlainDecoder(service, of, self.records) for _ in range(count)]
        firsts = range(0, count, together)
        units = [InStep(every[nth : nth + together], nth) for nth in firsts]
        self.units = [units[nth // together] for nth in range(count)]
        self.replicas = every
        # Instances of prompts first, as a request's `source` numbers them; then the replicas.
        self.sources = max(records.engine, default=0) + 1
        self.links = Links(self.sources + count)
        self.events: list[tuple[float, int, int]] = []
        self.done: int = 0
        self.now: float = 0.0

    def run(self, enough: Enough) -> bool:
        """All events, or up to where that is enough."""
        events, comes, order, reached = self.events, self.comes, self.order, self.records.reached
        engine, units, replicas = self.records.engine, self.units, self.replicas
        count, total, place = len(replicas), len(order), 0
        every = max(1, total // ASKED)
        ask = every
        while events or place < total:
            if place < total and (not events or comes[order[place]] <= events[0][0]):
                request = order[place]
                nth, at = place % count, comes[request]
                place += 1
                engine[request] = nth
                reached[request] = at
                replicas[nth].inbox.append(request)
            else:
                at, kind, nth = heappop(events)
                if kind == BATCH_END:
                    unit = units[nth]
                    if unit.end != at:
                        continue  # the batch was cut since
                    unit.advance()
                    if unit.end < math.inf:
                        heappush(events, (unit.end, BATCH_END, nth))
                    self._send(at, unit)
                    if self.done >= ask:
                        ask = self.done // every * every + every
                        if enough(self.of, self.records.known(self.earliest, at), at):
                            self.now = at
                            return True
                    continue
                request, nth = nth, engine[nth]
                reached[request] = at
                replicas[nth].loading -= 1
                replicas[nth].inbox.append(~request)
            unit = units[nth]
            end = unit.end
            unit.arrives(replicas[nth], at)
            if unit.end != end:
                heappush(events, (unit.end, BATCH_END, nth))
        return False

    def _send(self, at: float, unit: InStep) -> None:
        """Send the caches for which there are blocks, and count what is done."""
        for nth, replica in enumerate(unit.replicas, unit.first):
            self.done += replica.completed
            replica.completed = 0
            for request in replica.wanted:
                seconds = self.transfer(self.of.prompt[request])
                target = self.sources + nth
                ends = self.links.send(self.source[request], target, at, seconds) + seconds
                self.arrives[request] = ends
                heappush(self.events, (ends, OTHER, request))
            replica.wanted.clear()
