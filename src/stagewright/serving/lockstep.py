"""Lockstep group: engines that share experts, whose steps begin together.

Ranks of attention data parallelism exchange tokens in every layer with experts, so that none is a
step ahead of the others; an idle rank takes part with an empty batch, and experts get the tokens of
all ranks. In vLLM all engines step while any of them has requests (vllm-project/vllm@00024d31
`vllm/v1/engine/core.py`, `DPEngineCoreProc.run_busy_loop`, `execute_dummy_batch`). SGLang has
`prepare_mlp_sync_batch` (`scheduler_dp_attn_mixin.py`), TensorRT-LLM `enable_attention_dp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.serving.batch import NO_RUN, BatchPlan, DecodeRun, series_sum
from stagewright.serving.engine import Engine
from stagewright.serving.steps.step_times import StepTimes


class LockstepGroup:
    """Clock of several engines: a step of all takes as long as the slowest one's."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Group of idle engines of one instance."""
        self.engines = tuple(engines)
        self.now = 0.0
        self.next_event = math.inf
        """End of the current steps of all engines or, if idle, the next arrival."""
        self._run = NO_RUN
        self._times = engines[0].times
        for engine in self.engines:
            engine.clock = self

    def on_arrival(self, engine: Engine) -> None:
        """Wake up if idle; cut a decode run short so that the scheduler sees the request."""
        arrival, run = engine.next_arrival, self._run
        if not run.steps:
            self.next_event = min(self.next_event, arrival)
        elif run.steps > 1 and engine.interruptible and len(engine.arrivals) == 1:
            steps = engine.steps_until_visible(arrival - self.now, run)
            if steps < run.steps:
                self._start(run._replace(steps=steps))

    def advance(self, until: float) -> None:
        """Process all events up to `until`; afterwards a later batch is running."""
        while self.next_event <= until:
            steps, seconds, growth = self._run
            visible_until = end = self.next_event
            if steps and self.engines[0].async_scheduling:
                visible_until = self.now + series_sum(seconds, growth, steps - 1)
            for engine in self.engines:
                engine.finish_group_step(end, visible_until)
            self.now = end
            self._start_batches()

    def _start_batches(self) -> None:
        """Start the next batches; stop before the first step that an arrival could change."""
        plans = [plan for engine in self.engines if (plan := engine.plan_batch()) is not None]
        if not plans:
            self._run = NO_RUN
            self.next_event = min(engine.next_event for engine in self.engines)
            for engine in self.engines:
                engine.next_event = self.next_event
            return
        run = slowest_run(plans, self._times, len(self.engines))
        for engine in self.engines if run.steps > 1 else ():
            if run.steps > 1 and engine.arrivals and engine.interruptible:
                delay = engine.next_arrival - self.now
                if delay < run.duration:
                    run = run._replace(steps=engine.steps_until_visible(delay, run))
        self._start(run)

    def _start(self, run: DecodeRun) -> None:
        """Let all engines run these steps."""
        self._run = run
        self.next_event = self.now + run.duration
        for engine in self.engines:
            engine.follow(run, self.next_event)


def slowest_run(plans: Sequence[BatchPlan], times: StepTimes, replicas: int) -> DecodeRun:
    """Run of a group: the slowest replica's, for as many steps as it stays the slowest.

    `plans`: batches of the replicas that are not idle, at least one, of `replicas` in all.
    """
    runs = times.group_runs(plans, sum(plan.tokens for plan in plans) / replicas)
    steps = min(run.steps for run in runs)
    _, seconds, growth = max(runs, key=lambda run: run[1:])
    for _, first, faster in runs if steps > 1 else ():
        if faster > growth:  # that replica is the slowest from some step on
            steps = min(steps, int((seconds - first) / (faster - growth)) + 1)
    return DecodeRun(steps, seconds, growth)
