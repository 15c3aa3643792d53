"""Host (CPU) overhead: per step of an engine, and before a request reaches the router."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stagewright.run.sections.execution import ServingEngine
from stagewright.serving.batch import UNLIMITED, DecodeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host overhead of an engine (s)."""

    per_step: float = 0.0
    """Seconds to schedule a step, to prepare its inputs and to process its tokens."""
    per_request_step: float = 0.0
    """Seconds per request in the step, up to `max_requests`."""
    max_requests: int = UNLIMITED
    """Requests of a step in the measurements; with more of them the host takes no longer."""
    overlaps_gpu: bool = False
    """The host works while the GPU runs another step: the longer of both counts."""
    exposed_per_step: float = 0.0
    """Seconds of each step during which the GPU waits in any case."""
    exposed_per_request: float = 0.0
    """Seconds per request in the step during which the GPU waits in any case."""
    per_request: float = 0.0
    """Seconds from the user to the router: HTTP, queues between processes."""
    per_prompt_token: float = 0.0
    """Seconds of the tokenizer per token of the prompt."""

    def seconds_to_router(self, prompt_tokens: int) -> float:
        """Seconds from the user to the router: HTTP, queues, tokenizer."""
        return self.per_request + self.per_prompt_token * prompt_tokens

    def step(self, requests: float) -> float:
        """Host seconds of a step that the GPU may hide."""
        return self.per_step + self.per_request_step * min(requests, self.max_requests)

    def exposed(self, requests: float) -> float:
        """Host seconds of a step during which the GPU waits."""
        exposed = self.exposed_per_step + self.exposed_per_request * requests
        return exposed if self.overlaps_gpu else exposed + self.step(requests)

    def step_interval(self, step: float, requests: float) -> float:
        """Seconds from the begin of a step to that of the next, of which the GPU takes `step`."""
        if self.overlaps_gpu:
            step = max(step, self.step(requests))
        return step + self.exposed(requests)

    def run_with_host(self, run: DecodeRun, requests: int) -> DecodeRun:
        """Run whose steps have the `step_interval` as duration, as long as they are a series."""
        exposed = self.exposed(requests)
        host = self.step(requests) if self.overlaps_gpu else 0.0
        if run.seconds >= host:
            return DecodeRun(run.steps, run.seconds + exposed, run.growth)
        steps = run.steps
        if run.growth > 0.0:  # up to the first step that takes the GPU longer
            steps = min(steps, max(1, math.ceil((host - run.seconds) / run.growth)))
        return DecodeRun(steps, host + exposed, 0.0)


NO_HOST = HostTimes()
"""Host that takes no time."""
HOSTS: Mapping[ServingEngine, HostTimes] = {
    "vllm": HostTimes(
        per_step=1.2e-3,
        per_request_step=3e-5,
        max_requests=128,
        exposed_per_step=126e-6,
        exposed_per_request=4e-6,
        per_request=6.5e-3,
    ),
    "trtllm": HostTimes(
        per_step=0.8e-3,
        per_request_step=3e-5,
        max_requests=128,
        per_request=15e-3,
        per_prompt_token=2.9e-6,
    ),
    "sglang": HostTimes(
        per_step=1.6e-3,
        per_request_step=4e-5,
        max_requests=512,
        per_request=25e-3,
        per_prompt_token=2.9e-6,
    ),
}
"""Host times by serving engine (the program).

`per_step`, `per_request_step`: fitted to times per output token of 70% of the closed loops of dense
models (`benchmarks/fit_requests.py steps`). vLLM 0.12.0 (2025-12) and TensorRT-LLM 1.0.0rc3
(2025-08) on H100 did not schedule ahead, and had up to 128 users. SGLang 0.5.1 and 0.5.6 (2025-08
and 2026-01) on H100 and H200 did, and had up to 512, so that it tells something only where the host
takes longer than the GPU. The mean error of the rows that were held out falls from 11% to 3% (5
rows of vLLM) and from 18% to 10% (11 of TensorRT-LLM); it stays at 8% (7 of SGLang).

`exposed_per_step`, `exposed_per_request`: Inference-Sim's fit to vLLM 0.15 (2026-02), which
schedules ahead (github.com/inference-sim/inference-sim, docs/guide/latency-models.md).

`per_request` of vLLM: the TTFT in Inference-Sim's training data (vLLM 0.15.1, cached prompts of 570
to 790 tokens) minus the steps that a request waits for.

`per_request` and `per_prompt_token` of TensorRT-LLM and SGLang: fitted to TTFT of 70% of the closed
loops of up to 128 users on H100 and H200 (`benchmarks/fit_requests.py queue`). The mean error of
the rows held out, on B200 and B300, too, falls from 32% to 17% (30 rows of TensorRT-LLM) and from
40% to 23% (9 of SGLang)."""
