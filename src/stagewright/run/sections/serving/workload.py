"""Settings of the requests and of their latency limits."""

from dataclasses import dataclass
from reprlib import repr as shown
from typing import Annotated, Literal

from stagewright.errors import UserError
from stagewright.run.sections.declare import (
    Count,
    Exactly,
    Number,
    Seconds,
    Share,
    Switch,
    Text,
    read_time,
    real,
    setting,
)

Positive = Annotated[float, real(gt=0, le=1e9)]
Rate = Annotated[float, Exactly("float", gt=0, allow_inf_nan=True)]
"""Requests per second; `inf`: all at once, as clients of vLLM and SGLang say."""
DOUBTFUL = {"ttft": 5, "tpot": 1, "e2e": 5}
"""Limits without a unit below these many milliseconds may have been meant in seconds."""


def milliseconds(value: object, name: str, where: str = "") -> float:
    """Milliseconds of a latency limit: a number, or a number with the unit us, ms or s.

    Raises UserError for what is neither, and for a number without a unit that looks like seconds;
    errors begin with `where`.

    >>> milliseconds("2s", "ttft"), milliseconds("500ms", "ttft"), milliseconds(300, "ttft")
    (2000.0, 500.0, 300.0)
    """
    limit, unit = read_time(value) or (0.0, "")
    limit *= 1e3 if unit else 1
    if not 0 < limit <= 1e9:
        raise UserError(
            f"{where}{name} is {shown(value)}, wanted milliseconds, or a time such as 500ms or 2s"
        )
    if not unit and limit < DOUBTFUL[name]:
        plain = f"{limit:g}"
        raise UserError(
            f"{where}{name} is {plain}, which is {plain} ms; were seconds meant? Write {plain}s, "
            f"or {plain}ms"
        )
    return limit


def latency_limit(name: str) -> Exactly:
    """A latency limit in milliseconds, which text may give with a unit; `name` is the setting's."""
    return Exactly("float", lambda value: milliseconds(value, name))


TtftLimit = Annotated[float, latency_limit("ttft")]
TpotLimit = Annotated[float, latency_limit("tpot")]
E2eLimit = Annotated[float, latency_limit("e2e")]


@dataclass(frozen=True, kw_only=True)
class WorkloadSection:
    """Requests and their arrivals: recorded, or drawn."""

    requests: Text | None = setting(
        None,
        "A trace: .jsonl or .csv (.gz), Mooncake's, Azure's or with columns arrival, prompt, "
        "output; a result of vLLM's, SGLang's or AIPerf's client; or conversations in Weka's "
        "format (a file or a folder).",
        metavar="FILE",
    )
    rate: Rate | None = setting(
        None, "Requests (or sessions) per second; inf: all at once.", metavar="R"
    )
    concurrency: Count | None = setting(
        None,
        "Maximum requests (or sessions) in flight. Without --rate a closed loop: a "
        "user's next request follows the answer.",
    )
    isl: Count | None = setting(
        None, "Input sequence length (tokens); of sessions, of each question."
    )
    osl: Count | None = setting(None, "Output sequence length (tokens).")
    num_requests: Count | None = setting(
        None, "Number of requests, or of sessions.", unset="1000; a trace: all"
    )
    range_ratio: Share = setting(1.0, "Lengths are uniform in [X, 1] times isl and osl.")
    arrival: Literal["poisson", "gamma", "constant"] = setting(
        "poisson", "Arrival process of --rate."
    )
    burstiness: Positive = setting(1.0, "Shape of gamma arrivals: below 1 in bursts, 1 is Poisson.")
    burst_size: Count = setting(1, "Requests that arrive at the same time.")
    turns: Count = setting(1, "Turns of a session; each prompt contains the turns before.")
    think_time: Seconds = setting(
        0.0, "Mean time between an answer and the next question.", metavar="TIME"
    )
    system_prompt: Number = setting(0, "Tokens of a prefix that all sessions share.")
    prefix_cache_hit_rate: Share = setting(
        0.0, "Share of each prompt that is cached: a prefix that all prompts share.", metavar="R"
    )
    classes: Text | None = setting(
        None,
        "A .yaml of classes of requests: rows of name, share, priority, and limits ttft, tpot, "
        "e2e.",
        metavar="FILE",
    )
    past_context: Number = setting(
        0, "Tokens of an earlier session at the start of each prompt, not shared."
    )
    idle_gap_cap: Seconds = setting(
        10.0,
        "Longest pause between two requests of an agent, of a trace in Weka's format.",
        metavar="TIME",
    )
    trajectory_start_max_ratio: Share = setting(
        0.0,
        "Start the first --concurrency agents at a random time, up to this share of "
        "their recording (AgentX: 1).",
    )
    speed: Positive = setting(1.0, "Speed-up of a trace's arrivals.")
    seed: Number = setting(0, "Random seed; the same seed gives identical output.")
    whole_run: Switch = setting(False, "Measure the whole run, ramp and drain included.")
    ttft: TtftLimit | None = setting(
        None, "TTFT limit: milliseconds, or a time such as 2s.", metavar="TIME"
    )
    tpot: TpotLimit | None = setting(
        None, "TPOT limit: milliseconds, or a time such as 50ms.", metavar="TIME"
    )
    e2e: E2eLimit | None = setting(
        None, "E2E limit: milliseconds, or a time such as 10s.", metavar="TIME"
    )
