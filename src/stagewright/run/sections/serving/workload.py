"""Which requests come, and what users want of them; names of clients are those of vLLM's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Number, Real, Share, Switch, Text, setting

Positive = Annotated[float, Real(gt=0, le=1e9)]
Seconds = Annotated[float, Real(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class WorkloadSection:
    """Which requests arrive, and when: a trace, a profile, or drawn ones."""

    requests: Text | None = setting(
        None,
        "A trace: .jsonl or .csv (.gz), Mooncake's, Azure's or with columns arrival, prompt, "
        "output; or inference-perf's profile (.yaml).",
        metavar="FILE",
    )
    rate: Positive | None = setting(None, "Requests (or sessions) per second.", metavar="R")
    concurrency: Count | None = setting(
        None,
        "Users, each of whom sends the next request when one is done (a closed loop).",
        names=("max-concurrency",),
    )
    isl: Count | None = setting(
        None, "Tokens of a prompt; of sessions, of a question.", names=("input-len",)
    )
    osl: Count | None = setting(None, "Tokens of an output.", names=("output-len",))
    num_requests: Count | None = setting(
        None,
        "Requests, or the first ones of a trace; of sessions, how many.",
        unset="1000; a trace: all",
        names=("num-prompts",),
    )
    range_ratio: Share = setting(
        1.0, "Lengths are uniform in [X, 1] of isl and osl.", names=("random-range-ratio",)
    )
    arrival: Literal["poisson", "gamma", "constant"] = setting(
        "poisson", "How requests of --rate arrive."
    )
    burstiness: Positive = setting(
        1.0, "Shape of gamma arrivals: below 1 in bursts, 1 is Poisson.", rare=True
    )
    burst_size: Count = setting(1, "Requests that arrive at one moment.", rare=True)
    turns: Count = setting(1, "Turns of a session: each prompt has all that was said before.")
    think_time: Seconds = setting(
        0.0, "Mean seconds between an answer and the next question.", metavar="S", rare=True
    )
    system_prompt: Number = setting(0, "Tokens that all sessions begin with.", rare=True)
    classes: Text | None = setting(
        None,
        "A .yaml of classes of requests: rows of name, share, priority, and ttft, tpot, e2e in "
        "milliseconds.",
        metavar="FILE",
    )
    past_context: Number = setting(
        0,
        "Tokens of an earlier session that each prompt begins with, which nobody else has.",
        rare=True,
    )
    speed: Positive = setting(1.0, "A trace's requests come X times as fast.")
    seed: Number = setting(0, "Of what is drawn: the same seed gives the same bytes.")
    whole_run: Switch = setting(
        False, "Measure the whole run: its begin and, after the last arrival, its end, too."
    )
    ttft: Positive | None = setting(
        None, "Most milliseconds to the first token of a good request.", metavar="MS"
    )
    tpot: Positive | None = setting(
        None, "Most milliseconds per further token of a good request.", metavar="MS"
    )
    e2e: Positive | None = setting(
        None, "Most milliseconds to the last token of a good request.", metavar="MS"
    )
