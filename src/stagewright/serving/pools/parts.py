"""What serving in pools is made of: engines, who chooses among them, what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stagewright.run.sections.serving.pools import KvPush
from stagewright.serving.engines.engine import Engine
from stagewright.serving.hosts import HostTimes
from stagewright.serving.pools.operation import InstanceEvents
from stagewright.serving.pools.stages import PromptStages
from stagewright.serving.requests import Handover
from stagewright.serving.routers import Router


@dataclass(frozen=True, eq=False)
class EnginePool:
    """Engines among which a router chooses."""

    numbers: Sequence[int]
    """Of all engines, those of the pool."""
    router: Router
    hosts: Mapping[int, HostTimes]
    """By engine: what lies between a user, or the pool before, and its queue."""
    fits: Callable[[int, int], bool] | None = None
    """Whether an engine can serve a request at all; None: each one can."""

    @cached_property
    def host(self) -> HostTimes:
        """What lies between a user and the router: the quickest host."""
        return min(self.hosts.values(), key=lambda host: host.before_prefill(1))

    @cached_property
    def _hosts_alike(self) -> bool:
        return len(set(self.hosts.values())) == 1

    def behind(self, nth: int, prompt: int) -> float:
        """Seconds between the router and the queue of an engine."""
        if self._hosts_alike:
            return 0.0
        return max(0.0, self.hosts[nth].before_prefill(prompt) - self.host.before_prefill(prompt))


@dataclass(frozen=True, eq=False)
class Pools:
    """All engines, and who does what."""

    engines: Sequence[Engine]
    front: EnginePool
    """Where requests arrive."""
    decode: EnginePool | None = None
    """Where requests go on, if `front` computes prompts only."""
    transfer: Callable[[int, int, int, bool], tuple[float, int]] | None = None
    """Seconds alone on the links, and bytes, from an engine to another of so many tokens, and
    whether these are the last of their prompt (`KvTransfer.bytes`)."""
    handover: Handover | None = None
    layer: Callable[[int, int, int, bool], tuple[int, float]] | None = None
    """Of the same, where caches leave layer by layer: layers, and seconds of the last one alone."""
    pushes: KvPush = "prompt"
    """What a prefill instance sends when it is computed."""
    stages: PromptStages | None = None
    """What requests pass before their prompts."""
    operation: InstanceEvents | None = None
    """What happens to instances meanwhile."""
