"""Results of benchmark clients: `vllm bench serve`, SGLang's bench_serving, AIPerf, GenAI-Perf.

A result has totals (means and percentiles of latencies, rates), and where the client was asked for
them (`--save-detailed`, `--output-details`) a list for each key with a value for each request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.serving.workloads.synthetic import Arrivals

TOTALS: Mapping[str, Mapping[str, str]] = {
    "vLLM": {"ttft": "{}_ttft_ms", "tpot": "{}_tpot_ms", "e2e": "{}_e2el_ms"},
    "SGLang": {"ttft": "{}_ttft_ms", "tpot": "{}_tpot_ms", "e2e": "{}_e2e_latency_ms"},
    "AIPerf and GenAI-Perf": {
        "ttft": "time_to_first_token.{}",
        "tpot": "inter_token_latency.{}",  # (request latency - TTFT) / (output tokens - 1)
        "e2e": "request_latency.{}",
    },
}
"""Key of a figure (ms) of each of our times, by tool."""
ROUNDING = 1e-3
"""Share by which rounded gaps may add up to more than a latency."""
_OF_AIPERF = ("time_to_first_token", "request_latency")
FIGURE_WORDS: Mapping[str, tuple[str, ...]] = {
    "mean": ("mean", "avg"),
    "p50": ("median", "p50"),
    **{name: (name,) for name in ("p90", "p95", "p99")},
}
"""Names of figures in the tools, by ours."""
RATES: Mapping[str, tuple[str, ...]] = {
    "requests/s": ("request_throughput", "request_throughput.avg"),
    "output tokens/s": ("output_throughput", "output_token_throughput.avg"),
}
"""Keys of rates in results of vLLM and SGLang, and of AIPerf and GenAI-Perf, by our name."""


def is_detailed(result: Mapping[str, Any]) -> bool:
    """True for a result of vLLM or SGLang with the requests."""
    return isinstance(result.get("input_lens"), list)


def is_summary(result: Mapping[str, Any]) -> bool:
    """True for a result with totals alone."""
    totals = "mean_ttft_ms" in result or "mean_e2el_ms" in result
    return totals or any(isinstance(result.get(key), dict) for key in _OF_AIPERF)


def figures_of(result: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Seconds by time (ttft, tpot, e2e) and figure (mean, p50, ...)."""
    figures: dict[tuple[str, str], float] = {}
    for keys in TOTALS.values():
        for time, key in keys.items():
            for figure, words in FIGURE_WORDS.items():
                values = [_number(result, key.format(word)) for word in words]
                value = next((value for value in values if value is not None), None)
                if value is not None and 0 < value < math.inf:
                    figures.setdefault((time, figure), value / 1e3)
    return figures


def rates_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Requests/s and output tokens/s over the whole run, as far as they are known."""
    values = {
        rate: value
        for rate, keys in RATES.items()
        for key in keys
        if (value := _number(result, key)) is not None
    }
    return {rate: value for rate, value in values.items() if 0 < value < math.inf}


def load_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the workload that a client sent: when requests came, how many, and how long."""
    config: Any = result.get("input_config", result)
    rate = _within(config, "request_rate")
    concurrency = _within(config, "max_concurrency" if config is result else "concurrency")
    load: dict[str, Any] = {}
    if concurrency is not None and 1 <= concurrency < math.inf:
        load["concurrency"] = int(concurrency)
    if rate is not None and rate > 0 and not (rate == math.inf and load):
        load["rate"] = rate
    burstiness = _number(result, "burstiness")
    if "rate" in load and burstiness is not None and burstiness not in (1.0, math.inf):
        load |= {"arrival": "gamma", "burstiness": burstiness}
    completed = _number(result, "completed") or 0.0
    count = _number(result, "num_prompts") or completed or _number(result, "request_count.avg")
    if count and math.isfinite(count):
        load["num_requests"] = round(count)
    for name, total, mean in (
        ("isl", "total_input_tokens", "input_sequence_length.avg"),
        ("osl", "total_output_tokens", "output_sequence_length.avg"),
    ):
        tokens = _number(result, mean)
        if tokens is None and completed:
            tokens = (_number(result, total) or 0.0) / completed
        if tokens and math.isfinite(tokens):
            load[name] = max(1, round(tokens))
    return load


def rows_of_result(
    result: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Keys and values of each request of a result, and where it is.

    Where the client does not say when it sent requests, they arrive as its rate says. Where
    `latencies` lacks (older vLLM, SGLang), they are `ttfts` and the sum of `itls`. Raises UserError
    for gaps that cannot be: no seconds, or more of them than the request took.
    """
    lengths: list[Any] = result["input_lens"]
    count = len(lengths)
    columns: dict[str, list[Any]] = {}
    for key in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors"):
        values: Any = result.get(key)
        if values is None:
            continue
        column = cast("list[Any]", values) if isinstance(values, list) else None
        if column is None or len(column) != count:
            raise UserError(
                f"{where}: {key} is {shown(result[key])}, wanted a list of {count} values"
            )
        columns[key] = column
    if "start_times" not in columns:
        columns["start_times"] = _drawn(result, count, where)
    gaps = [
        _sum_of_gaps(values, f"{where}, request {number}")
        for number, values in enumerate(columns.pop("itls", [None] * count), 1)
    ]
    if "ttfts" in columns:
        last = [
            first + total if total is not None and isinstance(first, int | float) else None
            for first, total in zip(columns["ttfts"], gaps, strict=True)
        ]
        _check_latencies(last, columns.setdefault("latencies", last), where)
    for number, values in enumerate(zip(*columns.values(), strict=True), 1):
        yield f"{where}, request {number}", dict(zip(columns, values, strict=True))


def _drawn(result: Mapping[str, Any], count: int, where: str) -> list[float]:
    """Times of arrival that the rate of a client makes."""
    load = load_of(result)
    if not {"rate", "concurrency"} & {*load}:
        raise UserError(
            f"{where}: has neither start_times nor request_rate nor max_concurrency; wanted one, "
            "to know when requests came"
        )
    arrivals = Arrivals(
        rate=load.get("rate", math.inf),
        process=load.get("arrival", "poisson"),
        burstiness=load.get("burstiness", 1.0),
    )
    draw, at, times = Random(0), 0.0, list[float]()
    for _ in range(count):
        times.append(at)
        at += arrivals.gap(draw)
    return times


def _sum_of_gaps(gaps: Any, where: str) -> float | None:
    """Seconds of a request from its first token to its last; None where gaps are not known."""
    if gaps is None:
        return None
    if not isinstance(gaps, list):
        raise UserError(f"{where}: itls is {shown(gaps)}, wanted a list of seconds")
    values = cast("list[Any]", gaps)
    for value in values:
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UserError(f"{where}: itls has {shown(value)}, wanted seconds, 0 or more")
    return math.fsum(values)


def _check_latencies(last: Sequence[float | None], latencies: Sequence[Any], where: str) -> None:
    """Raise UserError where the gaps of a request end later than its latency says."""
    for number, (end, latency) in enumerate(zip(last, latencies, strict=True), 1):
        if end and type(latency) in (int, float) and end > latency * (1 + ROUNDING):
            raise UserError(
                f"{where}, request {number}: ttfts and itls add up to {end:g} s, its latency is "
                f"{latency:g} s; wanted gaps that end with the request"
            )


def _number(result: Mapping[str, Any], key: str) -> float | None:
    """The number at a key, whose dots lead into nested objects."""
    value: Any = result
    for part in key.split("."):
        value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
    if value in ("inf", "Infinity"):
        return math.inf
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value == value else None


def _within(config: Any, key: str) -> float | None:
    """The first number with a key in a configuration, however deep it is, without its warm-up."""
    values: list[Any] = [config]
    while values:
        value = values.pop(0)
        if isinstance(value, dict) and cast("dict[str, Any]", value).get("name") != "warmup":
            section = cast("dict[str, Any]", value)
            number = _number(section, key)
            if number is not None:
                return number
            values += [inner for name, inner in section.items() if name != "warmup"]
        elif isinstance(value, list):
            values += cast("list[Any]", value)
    return None
