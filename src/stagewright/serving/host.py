"""Host (CPU) overhead: per step of an engine, and before a request reaches the router."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stagewright.serving.batch import DecodeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host overhead of an engine (s)."""

    per_step: float = 0.0
    """Seconds to schedule a step and to process its tokens."""
    per_request_step: float = 0.0
    """Seconds per request in the step."""
    overlaps_gpu: bool = False
    """The host works while the GPU runs the previous step: the longer of both counts."""
    per_request: float = 0.0
    """Seconds from the user to the router: HTTP, queues between processes."""
    per_prompt_token: float = 0.0
    """Seconds of the tokenizer per token of the prompt."""

    def seconds_to_router(self, prompt_tokens: int) -> float:
        """Seconds from the user to the router: HTTP, queues, tokenizer."""
        return self.per_request + self.per_prompt_token * prompt_tokens

    def step(self, requests: float) -> float:
        """Host seconds of a step."""
        return self.per_step + self.per_request_step * requests

    def step_interval(self, step: float, requests: float) -> float:
        """Seconds from the begin of a step to that of the next, of which the GPU takes `step`."""
        host = self.step(requests)
        if not self.overlaps_gpu:
            return step + host
        return step if step > host else host

    def run_with_host(self, run: DecodeRun, requests: int) -> DecodeRun:
        """Run whose steps have the `step_interval` as duration, as long as they are a series."""
        host = self.step(requests)
        if not self.overlaps_gpu:
            return DecodeRun(run.steps, run.seconds + host, run.growth)
        if run.seconds >= host:
            return run
        steps = run.steps
        if run.growth > 0.0:  # up to the first step that takes the GPU longer
            steps = min(steps, max(1, math.ceil((host - run.seconds) / run.growth)))
        return DecodeRun(steps, host, 0.0)


NO_HOST = HostTimes()
"""Host that takes no time."""
HOSTS: Mapping[str, HostTimes] = {
    "vllm": HostTimes(per_step=126e-6, per_request_step=4e-6, per_request=6.5e-3),
    "tensorrt-llm": HostTimes(
        per_step=1.5e-3, per_request_step=1e-4, overlaps_gpu=True, per_request=25e-3
    ),
    "sglang": HostTimes(per_request=30e-3, per_prompt_token=5.9e-6),
}
"""Host times by serving engine (the program), which is named like its scheduler.

vLLM: 126 us for a step and 4 us for a request in it, of Inference-Sim's fit to vLLM 0.15 on H100
(github.com/inference-sim/inference-sim, docs/guide/latency-models.md). `per_request`: the TTFT in
its training data (vLLM 0.15.1, cached prompts of 570 to 790 tokens) minus the steps that a request
waits for.

TensorRT-LLM, whose scheduler prepares a step while the GPU runs the previous one: fitted to TPOT of
70% of the rows of dense models in `data/measured/inference.csv` (`benchmarks/fit_requests.py`).

`per_request` and `per_prompt_token` of TensorRT-LLM and SGLang: fitted to TTFT of 70% of the closed
loops (`benchmarks/fit_requests.py queue`). The mean error of the other rows falls from 40% to 24%
(17 rows of TensorRT-LLM) and from 47% to 42% (5 of SGLang)."""
