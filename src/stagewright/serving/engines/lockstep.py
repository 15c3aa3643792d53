"""Replicas that share experts: their steps begin together, and the slowest says when they end.

Ranks of attention data parallelism exchange tokens in every layer with experts, so that none is a
step ahead of the others; one with nothing to do takes part with an empty batch, and experts get the
tokens of all. In vLLM all engines step while any of them has requests (vllm-project/vllm@00024d31
`vllm/v1/engine/core.py`, `DPEngineCoreProc.run_busy_loop`, `execute_dummy_batch`). SGLang has
`prepare_mlp_sync_batch` (`scheduler_dp_attn_mixin.py`), TensorRT-LLM `enable_attention_dp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.serving.engines.engine import Engine
from stagewright.serving.engines.plans import PlannedSteps, plan_of_all
from stagewright.serving.engines.times import series


class Lockstep:
    """Engines that step together; it is moved on in time in their place."""

    __slots__ = ("end", "engines", "now")

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Engines of one instance, which have nothing to do yet."""
        self.engines = tuple(engines)
        self.now = 0.0
        self.end = math.inf
        """When the step, or the run of steps, of all ends, or something arrives."""
        for engine in self.engines:
            engine.unit = self

    def arrives(self, engine: Engine) -> None:
        """Something has come into an engine's inbox."""
        arrival = engine.next_arrival
        steps, first, grows = self._under_way()
        if not steps:
            self.end = min(self.end, arrival)
        elif steps > 1 and engine.interruptible and len(engine.inbox) == 1:
            fewer = engine.steps_until(arrival - self.now, first, grows, steps)
            if fewer < steps:
                self._go(fewer, first, grows)

    def advance(self, until: float) -> None:
        """Carry out all that ends by then; what is under way then has been decided."""
        while self.end <= until:
            steps, first, grows = self._under_way()
            seen = end = self.end
            if steps and self.engines[0].decides_ahead:
                seen = self.now + (series(first, grows, steps - 1) if steps > 1 else 0.0)
            for engine in self.engines:
                engine.carry_out(end, seen)
            self.now = end
            self._begin()

    def _under_way(self) -> tuple[int, float, float]:
        """Steps of all, the length of the first and by how much each one grows."""
        return max(engine.planned for engine in self.engines)

    def _begin(self) -> None:
        """Let each engine decide, and the slowest say how long all take."""
        for engine in self.engines:
            engine.decide()
        active = [
            PlannedSteps(engine.planned, engine.planned_tokens, engine.planned_requests)
            for engine in self.engines
            if engine.planned[0]
        ]
        if not active:
            self.end = min(engine.end for engine in self.engines)
            for engine in self.engines:
                engine.end = self.end
            return
        of_all = getattr(self.engines[0].times, "of_all", None)
        steps, first, grows = plan_of_all(active, of_all, len(self.engines))
        for engine in self.engines:
            if steps > 1 and engine.inbox and engine.interruptible:
                gap = engine.next_arrival - self.now
                if gap < series(first, grows, steps):
                    steps = engine.steps_until(gap, first, grows, steps)
        self._go(steps, first, grows)

    def _go(self, steps: int, first: float, grows: float) -> None:
        self.end = self.now + series(first, grows, steps)
        for engine in self.engines:
            engine.keep_pace(steps, first, grows, self.end)
