"""Serving metrics of one simulated step: TTFT, TPOT, ISL, OSL, requests per second.

Those of requests over time, with queues, are in `serving.metrics`.

- *ISL*, input sequence length: tokens of a request's prompt, those in the cache included.
- *OSL*, output sequence length: tokens that a request generates (`output_length`).
- *TTFT*, time to first token: of the last request of a prefill step, without waiting in a queue.
- *TPOT*, time per output token, or ITL: the time between two tokens of a request.
- *Tokens/s per user*: 1 / TPOT.

A disaggregated step has two groups, each with its ranks, step and memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stagewright.program.fit import Fit
from stagewright.run.lengths import Groups
from stagewright.run.requests import groups
from stagewright.run.settings import Run


@dataclass(frozen=True, slots=True)
class Served:
    """Serving metrics of a step that is repeated; rates are of all GPUs."""

    what: str
    """`prefill`, `decode`, or `mixed`: decode with chunks of prompts."""
    step_seconds: float
    requests: int
    """Of the step: prompts in prefill, else those that decode."""
    isl: float | None = None
    """Mean tokens of a prompt; in prefill only."""
    context_length: float | None = None
    """Mean cached tokens of a request that decodes."""
    osl: int | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    """With draft tokens: if all are accepted; a step is then a multiple of it."""
    requests_per_second: float | None = None
    """Of decode only where `osl` is known."""
    input_tokens_per_second: float = 0.0
    """New tokens of prompts."""
    output_tokens_per_second: float = 0.0
    output_tokens_per_second_per_user: float | None = None
    tokens_per_second_per_gpu: float = 0.0
    """Output tokens in decode, input tokens in prefill."""

    def entry(self) -> dict[str, Any]:
        """Metrics for JSON, without those that do not apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """One of the two groups of ranks of a disaggregated step."""

    name: str
    first_rank: int
    gpus: int
    served: Served
    fit: Fit

    def entry(self) -> dict[str, Any]:
        """Metrics, ranks and memory for JSON."""
        last = self.first_rank + self.gpus - 1
        ranks = {"gpus": self.gpus, "first_rank": self.first_rank, "last_rank": last}
        return ranks | self.served.entry() | {"memory": self.fit.entry()}


def served(run: Run, seconds: float, gpus: int) -> Served:
    """Serving metrics of a resolved run of inference whose step takes `seconds`."""
    workload = groups(run)
    new_tokens = 1 + run.num_speculative_tokens
    # Rows of requests may mix prompts with requests that decode.
    decoding = [g for g in workload if g.new_tokens == new_tokens and g.context_length]
    prompts = [g for g in workload if g not in decoding]
    if run.mode == "prefill" or not decoding:
        return _prefill(workload, seconds, gpus)
    requests = sum(g.count for g in decoding)
    tpot = seconds / new_tokens
    rate, osl = requests / tpot, run.output_length
    return Served(
        what="mixed" if prompts else "decode",
        step_seconds=seconds,
        requests=requests,
        context_length=sum(g.count * (g.context_length or 0) for g in decoding) / requests,
        osl=osl,
        tpot_seconds=tpot,
        requests_per_second=None if osl is None else rate / osl,
        input_tokens_per_second=_new_tokens(prompts) / seconds,
        output_tokens_per_second=rate,
        output_tokens_per_second_per_user=1 / tpot,
        tokens_per_second_per_gpu=rate / gpus,
    )


def _prefill(workload: Groups, seconds: float, gpus: int) -> Served:
    requests, tokens = sum(g.count for g in workload), _new_tokens(workload)
    cached = sum(g.count * (g.context_length or 0) for g in workload)
    return Served(
        what="prefill",
        step_seconds=seconds,
        requests=requests,
        isl=(tokens + cached) / requests,
        ttft_seconds=seconds,
        requests_per_second=requests / seconds,
        input_tokens_per_second=tokens / seconds,
        tokens_per_second_per_gpu=tokens / seconds / gpus,
    )


def _new_tokens(workload: Groups | list[Any]) -> int:
    return sum(g.count * (g.new_tokens or 0) for g in workload)


def limiting(prefill: Served, decode: Served) -> tuple[str | None, float]:
    """Group that limits the requests per second, and the OSL at which both limit.

    Above that OSL decode limits, below it prefill; None if the run has no `osl`.
    """
    balance = decode.output_tokens_per_second / (prefill.requests_per_second or 1.0)
    if decode.osl is None:
        return None, balance
    return ("decode" if decode.osl > balance else "prefill"), balance
