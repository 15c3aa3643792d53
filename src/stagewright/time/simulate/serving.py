"""A simulated step of inference in the words of serving: TTFT, TPOT, ISL, OSL, requests per second.

- *ISL*, input sequence length: tokens of a request's prompt, those in the cache before included.
- *OSL*, output sequence length: tokens that a request gets in all (`output_length`).
- *TTFT*, time to first token: of the last of the requests of a prefill step that arrive together,
  without waiting in a queue.
- *TPOT*, time per output token, or ITL: the time between two tokens of a request.
- *Tokens/s per user*: 1 / TPOT.

A disaggregated step has two groups, each with ranks, a step and memory of its own.
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
    """What requests get from a step that is run over and over; rates are of all GPUs together."""

    what: str
    """`prefill`, `decode`, or `mixed`: decode beside chunks of prompts."""
    step_seconds: float
    requests: int
    """Of the step: prompts in prefill, else those that get tokens."""
    isl: float | None = None
    """Mean tokens of a prompt; in prefill only."""
    context_length: float | None = None
    """Mean tokens in the cache of a request that gets tokens."""
    osl: int | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    """With draft tokens: if all are accepted; a step is then several times as long."""
    requests_per_second: float | None = None
    """Of decode only where `osl` is known."""
    input_tokens_per_second: float = 0.0
    """New tokens of prompts."""
    output_tokens_per_second: float = 0.0
    output_tokens_per_second_per_user: float | None = None
    tokens_per_second_per_gpu: float = 0.0
    """Output tokens in decode, input tokens in prefill."""

    def entry(self) -> dict[str, Any]:
        """The same for JSON, without what does not apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """One of the two groups of ranks of a disaggregated step, as it runs by itself."""

    name: str
    first_rank: int
    gpus: int
    served: Served
    fit: Fit

    def entry(self) -> dict[str, Any]:
        """The same for JSON."""
        last = self.first_rank + self.gpus - 1
        own = {"gpus": self.gpus, "first_rank": self.first_rank, "last_rank": last}
        return own | self.served.entry() | {"memory": self.fit.entry()}


def served(run: Run, seconds: float, gpus: int) -> Served:
    """The step of a resolved run of inference, which takes so long."""
    asked = groups(run)
    if run.mode == "prefill":
        return _prefill(asked, seconds, gpus)
    drafted = 1 + run.num_speculative_tokens
    # Rows of requests may mix prompts with requests that get tokens.
    gets = [g for g in asked if g.new_tokens == drafted and g.context_length]
    prompts = [g for g in asked if g not in gets]
    if not gets:
        return _prefill(asked, seconds, gpus)
    requests = sum(g.count for g in gets)
    tpot = seconds / drafted
    rate, osl = requests / tpot, run.output_length
    return Served(
        what="mixed" if prompts else "decode",
        step_seconds=seconds,
        requests=requests,
        context_length=sum(g.count * (g.context_length or 0) for g in gets) / requests,
        osl=osl,
        tpot_seconds=tpot,
        requests_per_second=None if osl is None else rate / osl,
        input_tokens_per_second=_new_tokens(prompts) / seconds,
        output_tokens_per_second=rate,
        output_tokens_per_second_per_user=1 / tpot,
        tokens_per_second_per_gpu=rate / gpus,
    )


def _prefill(asked: Groups, seconds: float, gpus: int) -> Served:
    requests, tokens = sum(g.count for g in asked), _new_tokens(asked)
    cached = sum(g.count * (g.context_length or 0) for g in asked)
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


def _new_tokens(asked: Groups | list[Any]) -> int:
    return sum(g.count * (g.new_tokens or 0) for g in asked)


def limiting(prefill: Served, decode: Served) -> tuple[str | None, float]:
    """Which group limits the requests per second, and the OSL at which both do as many.

    None where no `osl` is given: above that OSL decode limits, below it prefill.
    """
    balance = decode.output_tokens_per_second / (prefill.requests_per_second or 1.0)
    if decode.osl is None:
        return None, balance
    return ("decode" if decode.osl > balance else "prefill"), balance
