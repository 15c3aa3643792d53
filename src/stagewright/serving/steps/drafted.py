"""Step times with the passes of what drafts: behind each step of the model, as many as drafts.

As in vllm-project/vllm@82720b1e `vllm/v1/spec_decode/llm_base_proposer.py` (`propose`): a first
pass over all tokens of the step, prompts and wrong drafts included, samples one draft of each
request; then each further draft is a pass with one token of each request. `draft_extend` and
`draft_forward` of SGLang (python/sglang/srt/speculative/eagle_worker.py) and `MTPEagleWorker` of
TensorRT-LLM (tensorrt_llm/_torch/speculative/mtp.py) run the same passes.

What drafts reads the tokens that the step sampled on the GPU and does not wait for the host
(`GPUModelRunner.sample_tokens` of vLLM, vllm/v1/worker/gpu_model_runner.py, calls
`propose_draft_token_ids` before `_bookkeeping_sync`): so a host that works beside the GPU works
beside both, the step and its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.serving.engines.plans import Plan, PlannedSteps
from stagewright.serving.engines.times import DecodeRuns
from stagewright.serving.hosts import HostTimes
from stagewright.serving.steps.step_times import StepTimes


@dataclass(frozen=True, eq=False)
class DraftedTimes(DecodeRuns):
    """Seconds of the steps of one replica and of the passes that draft for the next ones.

    Takes what `StepTimes` takes: the sums of the step that the model computes.
    """

    model: StepTimes
    """Of the model that verifies drafts."""
    first: StepTimes
    """Of the pass over all tokens."""
    later: StepTimes
    """Of a pass with one token of each request."""
    number: int
    """Drafts of a request."""
    more: int
    """Tokens of each request that the first pass has besides: a model of its own reads the token
    that the step sampled, too, a head reads it in place of the step's first one."""
    host: HostTimes | None = None
    """What the engine's host adds to each step, which `model` then does not add."""

    @property
    def most_tokens(self) -> int:
        """Of a step, as the tables are made."""
        return self.model.most_tokens

    def with_host(self, host: HostTimes) -> DraftedTimes:
        """These times with what an engine's host adds to each step."""
        return replace(self, host=host)

    def of_replica(self, host: HostTimes) -> DraftedTimes:
        """As `StepTimes.of_replica`."""
        model = self.model.of_replica(host)
        in_each_step = model.host is not None
        return self.with_host(host) if in_each_step else replace(self, model=model)

    def decode(self, requests: int, keys: int) -> float:
        """As `StepTimes.decode`."""
        upto = keys + self.more * requests
        again = (self.number - 1) * self.later.decode(requests, upto)
        found = self.model.decode(requests, keys) + self.first.decode(requests, upto) + again
        return found if self.host is None else self.host.after(found, requests)

    def decode_once(self, requests: int, keys: int) -> float:
        """As `StepTimes.decode_once`."""
        upto = keys + self.more * requests
        again = (self.number - 1) * self.later.decode_once(requests, upto)
        found = self.model.decode_once(requests, keys) + self.first.decode_once(requests, upto)
        found += again
        return found if self.host is None else self.host.after(found, requests)

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """As `StepTimes.line`: lines add up, as far as all of them hold."""
        upto = keys + self.more * requests
        a, b, c = (
            of.line(requests, at)
            for of, at in ((self.model, keys), (self.first, upto), (self.later, upto))
        )
        again = self.number - 1
        first, grows = a[0] + b[0] + again * c[0], a[1] + b[1] + again * c[1]
        steps = min(a[2], b[2], c[2] if again else a[2])
        if self.host is not None:
            steps, first, grows = self.host.run_after((steps, first, grows), requests)
        return first, grows, steps

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """As `StepTimes.step`."""
        found = self.model.step(tokens, pairs, keys, requests, decoding, decoding_keys)
        found += self.drafts(tokens, pairs, keys, requests, decoding, decoding_keys)
        return found if self.host is None else self.host.after(found, requests)

    def of_all(self, of: PlannedSteps, mean: float) -> Plan:
        """As `StepTimes.of_all`: drafts count as if all replicas had as many tokens."""
        return self.model.of_all(of, mean)

    def plans_of_all(self, active: Sequence[PlannedSteps], mean: float) -> list[Plan]:
        """As `StepTimes.plans_of_all`."""
        return self.model.plans_of_all(active, mean)

    def drafts(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """Seconds of the passes that draft, behind a step of any requests."""
        if decoding == requests:
            keys = decoding_keys or keys
        upto = keys + self.more * requests
        first = self.first.step(
            tokens + self.more * requests,
            pairs + self.more * upto,
            upto,
            requests,
            decoding,
            (decoding_keys or keys if decoding else 0) + self.more * decoding,
        )
        return first + (self.number - 1) * self.later.decode(requests, upto)
