"""Step times with the passes of what drafts: after each step of the model, as many as drafts.

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

from dataclasses import dataclass

from stagewright.serving.steps.hosted import GpuTimes
from stagewright.serving.steps.step_times import StepTimes


@dataclass(frozen=True, eq=False)
class DraftedTimes(GpuTimes):
    """Seconds of the steps of one replica and of the drafter's passes for the next ones.

    Takes what `StepTimes` takes: the sums of the step that the model computes.
    """

    model: StepTimes
    """Step times of the model that verifies drafts."""
    first: StepTimes
    """Step times of the pass over all tokens."""
    later: StepTimes
    """Step times of a pass with one token of each request."""
    number: int
    """Drafts of a request."""
    more: int
    """Tokens of each request that the first pass has besides: a model of its own reads the token
    that the step sampled, too, a head reads it in place of the step's first one."""

    @property
    def most_tokens(self) -> int:
        """Tokens of a step for which the tables are made."""
        return self.model.most_tokens

    @property
    def share_experts(self) -> bool:
        """True if experts of the model get the tokens of all replicas."""
        return self.model.share_experts

    def linear_run(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Like `StepTimes.linear_run`: the sum of all passes' runs."""
        upto, again = keys + self.more * requests, self.number - 1
        a, b = self.model.linear_run(requests, keys), self.first.linear_run(requests, upto)
        c = self.later.linear_run(requests, upto) if again else (0.0, 0.0, a[2])
        first, grows = a[0] + b[0] + again * c[0], a[1] + b[1] + again * c[1]
        return first, grows, min(a[2], b[2], c[2])

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Like `StepTimes.step`."""
        seconds = self.model.step(tokens, pairs, keys, requests, num_decodes, decode_keys)
        return seconds + self.drafts(tokens, pairs, keys, requests, num_decodes, decode_keys)

    def in_group(self, seconds: float, tokens: int, mean_tokens: float) -> float:
        """Like `StepTimes.in_group`; drafts count as if replicas had equal numbers of tokens."""
        return self.model.in_group(seconds, tokens, mean_tokens)

    def drafts(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Seconds of the passes that draft, after a step of any requests."""
        if num_decodes == requests:
            keys = decode_keys or keys
        upto = keys + self.more * requests
        first = self.first.step(
            tokens + self.more * requests,
            pairs + self.more * upto,
            upto,
            requests,
            num_decodes,
            (decode_keys or keys if num_decodes else 0) + self.more * num_decodes,
        )
        return first + (self.number - 1) * self.later.decode(requests, upto)
