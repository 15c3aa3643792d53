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
from stagewright.serving.engines.plans import Plan, PlannedSteps, plan_of_all
from stagewright.serving.engines.times import series

NOTHING: Plan = (0, 0.0, 0.0)


class Lockstep:
    """Engines that step together; it is moved on in time in their place."""

    __slots__ = ("_ahead", "_plan", "end", "engines", "now")

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Engines of one instance, which have nothing to do yet."""
        self.engines = tuple(engines)
        self.now = 0.0
        self.end = math.inf
        """When the step, or the run of steps, of all ends, or something arrives."""
        self._plan: Plan = NOTHING  # what is under way
        self._ahead = self.engines[0].decides_ahead
        for engine in self.engines:
            engine.unit = self

    def arrives(self, engine: Engine) -> None:
        """Something has come into an engine's inbox."""
        arrival = engine.next_arrival
        steps, first, grows = self._plan
        if not steps:
            self.end = min(self.end, arrival)
        elif steps > 1 and engine.interruptible and len(engine.inbox) == 1:
            fewer = engine.steps_until(arrival - self.now, first, grows, steps)
            if fewer < steps:
                self._go((fewer, first, grows))

    def advance(self, until: float) -> None:
        """Carry out all that ends by then; what is under way then has been decided."""
        while self.end <= until:
            steps, first, grows = self._plan
            seen = end = self.end
            if steps and self._ahead:
                seen = self.now + (series(first, grows, steps - 1) if steps > 1 else 0.0)
            decide: list[Engine] = []
            for engine in self.engines:
                goes_on = engine.goes_on(end, seen)
                if goes_on is None:
                    engine.carry_out(end, seen)
                if not goes_on:
                    decide.append(engine)
            self.now = end
            for engine in decide:  # all steps have ended
                engine.decide()
            self._begin()

    def _begin(self) -> None:
        """What engines have decided begins, and the slowest says how long all take."""
        active: list[PlannedSteps] = []
        for engine in self.engines:
            if (planned := engine.planned_steps) is not None:
                active.append(planned)
        if not active:
            self._plan = NOTHING
            self.end = min(engine.end for engine in self.engines)
            for engine in self.engines:
                engine.end = self.end
            return
        of_all = getattr(self.engines[0].times, "plans_of_all", None)
        steps, first, grows = plan_of_all(active, of_all, len(self.engines))
        for engine in self.engines if steps > 1 else ():
            if steps > 1 and engine.inbox and engine.interruptible:
                gap = engine.next_arrival - self.now
                if gap < series(first, grows, steps):
                    steps = engine.steps_until(gap, first, grows, steps)
        self._go((steps, first, grows))

    def _go(self, plan: Plan) -> None:
        self._plan = plan
        self.end = self.now + series(plan[1], plan[2], plan[0])
        for engine in self.engines:
            engine.keep_pace(plan, self.end)
