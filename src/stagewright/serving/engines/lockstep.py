"""Replicas that share experts: their steps begin together, and the slowest says when they end.

Ranks of attention data parallelism exchange tokens in every layer with experts, so that none is a
step ahead of the others; one with nothing to do takes part with an empty batch, and experts get the
tokens of all. vLLM: all engines
step while any of them has requests (vllm-project/vllm@00024d31 `vllm/v1/engine/core.py`,
`DPEngineCoreProc.run_busy_loop`, `execute_dummy_batch`); SGLang: `scheduler_dp_attn_mixin.py`,
`prepare_mlp_sync_batch`; TensorRT-LLM: `enable_attention_dp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.serving.engines.engine import Engine
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
        plans = self._plans()
        if not plans:
            self.end = min(engine.end for engine in self.engines)
            for engine in self.engines:
                engine.end = self.end
            return
        steps = min(plan[0] for plan in plans)
        first, grows = max(plan[1:] for plan in plans)
        for _, least, faster in plans:
            if faster > grows:  # that engine is the slowest from some step on
                steps = min(steps, int((first - least) / (faster - grows)) + 1)
        for engine in self.engines:
            if steps > 1 and engine.inbox and engine.interruptible:
                gap = engine.next_arrival - self.now
                if gap < series(first, grows, steps):
                    steps = engine.steps_until(gap, first, grows, steps)
        self._go(steps, first, grows)

    def _plans(self) -> list[tuple[int, float, float]]:
        """What engines with a batch would do, with experts that get the tokens of all."""
        plans = [engine.planned for engine in self.engines if engine.planned[0]]
        tokens = [engine.planned_tokens for engine in self.engines if engine.planned[0]]
        beside = getattr(self.engines[0].times, "beside_replicas", None)
        mean = sum(tokens) / len(self.engines)
        if beside is None:
            return plans
        return [
            (steps, beside(first, own, mean), grows)
            for (steps, first, grows), own in zip(plans, tokens, strict=True)
        ]

    def _go(self, steps: int, first: float, grows: float) -> None:
        self.end = self.now + series(first, grows, steps)
        for engine in self.engines:
            engine.keep_pace(steps, first, grows, self.end)
