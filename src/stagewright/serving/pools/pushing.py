"""Caches that leave a prefill instance while the prompt is computed, chunk by chunk or by layer.

What a request has whatever its length (windows) leaves with its last chunk.

* By chunk: SGLang sends the pages of a chunk when its step is done (sgl-project/sglang
  `python/sglang/srt/disaggregation/prefill.py`, `send_kv_chunk`).
* By layer: a layer's keys and values of the step's tokens leave when the layer is computed
  (`save_kv_layer` of vLLM's `P2pNcclConnector`, vllm-project/vllm
  `vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py`;
  `MooncakeLayerwiseConnector` of vLLM Ascend). Layers take equal parts of a step. What comes last
  is exposed: the last layer's messages, or as many layers as the links are behind.

The instance that decodes is chosen when a request comes, as proxies do that name both to the
prefill instance (`examples/online_serving/disaggregated_serving_p2p_nccl_xpyd` in vLLM), and takes
what comes in a buffer beside its blocks; the request goes to it when the prompt is done.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from stagewright.serving.pools.engines import PromptEngine
from stagewright.serving.pools.links import Links
from stagewright.serving.pools.parts import Pools
from stagewright.serving.requests import Push


class Part(NamedTuple):
    """Tokens of a prompt that a step has computed."""

    request: int
    tokens: int
    last: bool
    """Whether the prompt is done: what does not grow with its length is sent then."""
    began: float
    """When the step began."""
    ended: float


class PushingEngine(PromptEngine):
    """An engine that says after each step which tokens' caches it has computed."""

    __slots__ = ("computed", "sent")

    def __init__(self, *parts: object) -> None:
        """As `PromptEngine`."""
        super().__init__(*parts)  # pyright: ignore[reportArgumentType]
        self.computed: list[Part] = []
        """What is in the cache and has not been sent; who sends it empties the list."""
        self.sent: dict[int, int] = {}
        """Tokens of each request whose prompt is not done that have been sent."""

    def _finish(self) -> None:
        for request, _ in self._decision.chunks:
            done, sent = self.done(request), self.sent.get(request, 0)
            if done > sent:  # who was preempted computes again what has been sent
                last = done == self.prompt[request]
                self.computed.append(Part(request, done - sent, last, self.now, self.end))
                self.sent[request] = done
                if last:
                    del self.sent[request]
        super()._finish()


class Pushes:
    """Caches on their way while their prompts are computed."""

    def __init__(self, pools: Pools, links: Links) -> None:
        """Nothing has been sent."""
        assert pools.handover is not None
        assert pools.transfer is not None
        self.to: dict[int, int | None] = {}
        """By request, the engine that decodes it."""
        self._handover, self._transfer, self._layer = pools.handover, pools.transfer, pools.layer
        self._links, self._by_layer = links, pools.pushes == "layer"

    def push(self, engine: PushingEngine) -> None:
        """Send what an engine has computed in its last step."""
        of = self._handover
        for request, tokens, last_part, began, ended in engine.computed:
            source, target = of.engine[request], self.to[request]
            assert target is not None
            seconds, size = self._transfer(source, target, tokens, last_part)
            leaves, last = ended, 0.0
            if self._by_layer and self._layer is not None:
                layers, last = self._layer(source, target, tokens, last_part)
                leaves = began + (ended - began) / layers
            begins = self._links.send(source, target, leaves, seconds)
            arrives = max(begins + seconds, ended + last)
            self._links.hold(source, target, arrives)
            if math.isnan(of.begins[request]):
                of.begins[request] = begins
            of.arrives[request] = arrives
            of.pushes.append(Push(request, tokens, last_part, began, ended, begins, arrives))
            of.bytes[request] += size
            of.tokens[request] += tokens
        engine.computed.clear()

    def arrival(self, at: float, request: int) -> float:
        """When all that has been sent of a request is there, `at` or later."""
        return max(at, self._handover.arrives[request])
