"""Metrics of a serving run: latencies, rates, goodput, use of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.numbers import duration, finite, plural
from stagewright.serving.engine import Engine
from stagewright.serving.simulation import Outcome
from stagewright.serving.steadiness import Steadiness, Window, steadiness_of, window_of
from stagewright.serving.step_log import LogSpan, gap_quantiles
from stagewright.serving.workload import Records, Workload

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a distribution."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Float) -> Spread:
        """Distribution of equally likely values, without those that are nan; nan of none."""
        values = values[np.isfinite(values)]
        if not len(values):
            return cls(*[math.nan] * 4)
        return cls(float(values.mean()), *map(float, np.quantile(values, [*QUANTILES.values()])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency limits of a good request (s); None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


class RequestLimits(NamedTuple):
    """Latency limits of each request (s); infinite: no limit."""

    ttft: Float
    tpot: Float
    e2e: Float

    @classmethod
    def of(cls, work: Workload, slo: Slo) -> Self:
        """Limits of each request's class, or else those of all."""

        def column(name: str) -> Float:
            common = getattr(slo, name)
            of_classes = [getattr(request_class, name) for request_class in work.classes]
            limits = [common if limit is None else limit for limit in of_classes or [None]]
            by_class = np.array([np.inf if limit is None else limit for limit in limits], float)
            if work.class_of is None:
                return np.broadcast_to(by_class[:1], len(work))
            return by_class[np.array(work.class_of, dtype=np.int64)]

        return cls(column("ttft"), column("tpot"), column("e2e"))

    @property
    def loosest(self) -> Slo:
        """Limits that no request may exceed: the largest of all requests."""
        largest = {name: float(getattr(self, name).max(initial=0)) for name in self._fields}
        return Slo(**{name: limit for name, limit in largest.items() if limit < np.inf})


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Columns of some requests: moments (s since the run began), and times that follow (s)."""

    number: Int
    """Places in the workload."""
    arrival: Float
    scheduled: Float
    """Begin of the first step with the request."""
    first: Float
    finish: Float
    output: Int
    """Tokens."""

    @classmethod
    def of(cls, outcome: Outcome) -> RequestTimes:
        """Times of all finished requests."""
        times = cls._of_all(outcome.workload, outcome.records)
        return times.take(np.isfinite(times.finish))

    @classmethod
    def at_least(cls, work: Workload, records: Records, at: float) -> RequestTimes:
        """Lower bounds of times of all requests at time `at`; nan before their arrival."""
        times = cls._of_all(work, records)
        scheduled, first, finish = (
            np.where(np.isnan(c), at, c) for c in (times.scheduled, times.first, times.finish)
        )
        return replace(times, scheduled=scheduled, first=first, finish=finish)

    @classmethod
    def _of_all(cls, work: Workload, records: Records) -> RequestTimes:
        arrival, scheduled, first, finish = (
            np.frombuffer(c)
            for c in (records.arrival, records.scheduled, records.first, records.finish)
        )
        output = np.array(work.output, dtype=np.int64)
        return cls(np.arange(len(work)), arrival, scheduled, first, finish, output)

    def take(self, chosen: Bool) -> RequestTimes:
        """Times of some of the requests."""
        return RequestTimes(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @property
    def queue(self) -> Float:
        """Seconds from sending to the first step with the request; HTTP and tokenizer included."""
        return self.scheduled - self.arrival

    @property
    def ttft(self) -> Float:
        """Seconds from the arrival to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> Float:
        """Seconds per token from the first token to the last; nan for a single token."""
        further = self.output - 1
        return np.where(further > 0, (self.finish - self.first) / np.maximum(further, 1), np.nan)

    @property
    def e2e(self) -> Float:
        """Seconds from the arrival to the last token."""
        return self.finish - self.arrival

    @property
    def interactivity(self) -> float:
        """Tokens/s of a user, end to end: 1 / 90th percentile of E2E per output token.

        The metric of InferenceX's AgentX (SemiAnalysisAI/InferenceX@843c6254 `MODELS.md`), over
        all of its requests; nan where none is done.
        """
        per_token = self.e2e / self.output
        return 1 / float(np.quantile(per_token, 0.9)) if len(per_token) else math.nan

    def missed(self, limits: RequestLimits) -> MissedLimits:
        """Requests that miss limits (goodput of DistServe, arXiv 2401.09670)."""
        ttft, tpot, e2e = (limit[self.number] for limit in limits)
        return MissedLimits(self.ttft > ttft, self.tpot > tpot, self.e2e > e2e)


class MissedLimits(NamedTuple):
    """Masks of requests that miss limits."""

    ttft: Bool
    """Requests that miss the TTFT limit."""
    tpot: Bool
    """Requests that miss the TPOT limit."""
    e2e: Bool
    """Requests that miss the E2E limit."""

    @property
    def any_limit(self) -> Bool:
        """Requests that miss some limit."""
        return self.ttft | self.tpot | self.e2e

    @property
    def binding(self) -> str:
        """The limit that most requests miss; empty if none is missed."""
        count, name = max((int(getattr(self, name).sum()), name) for name in self._fields)
        return name.upper() if count else ""


def gap_spread(rows: Float) -> Spread:
    """Distribution of gaps between tokens (`StepLog.gaps`), each token weighted equally."""
    first, last, steps, requests = rows.T
    weights = steps * requests
    count = float(weights.sum())
    if not count:
        return Spread.of(np.zeros(0))
    mean = float(((first + last) * weights).sum()) / 2 / count
    return Spread(mean, *gap_quantiles(rows, [*QUANTILES.values()]))


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Summary of a class of requests that arrive in the measured window (s, shares of 1)."""

    requests: int
    """Number of accepted requests."""
    done: int
    good: float
    """Share of those accepted that kept the limits of the class."""
    ttft: Spread
    tpot: Spread
    e2e: Spread

    def values(self) -> dict[str, Any]:
        """Return one object for JSON."""
        spreads = {name: _values(getattr(self, name)) for name in ("ttft", "tpot", "e2e")}
        return {"requests": self.requests, "done": self.done, "good": self.good, **spreads}


@dataclass(frozen=True, slots=True)
class ServingSummary:
    """Summary of a run (s, tokens, shares of 1).

    Numbers of requests, and the preemptions, are of the whole run. Rates, and uses of engines, are
    means over the window; latencies and shares are of the requests that arrive in it.
    """

    requests: int
    """Finished requests."""
    unfinished: int
    rejected: Mapping[str, int]
    shortened: int
    seconds: float
    """Seconds from the first arrival to the last token."""
    window: Window
    measured: int
    """Requests that arrive in the window."""
    steadiness: Steadiness
    queue: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    good: float
    """Share of requests, rejected and unfinished ones included, that kept the limits."""
    binding: str
    """The limit that most requests missed: TTFT, TPOT or E2E; empty if none was missed."""
    goodput: float
    """Requests per second that finished and kept the limits."""
    request_rate: float
    """Requests per second that finished."""
    token_rate: float
    """Output tokens per second over the mean output: requests per second in which unfinished ones
    count by their tokens so far."""
    output_rate: float
    """Output tokens per second."""
    total_rate: float
    """Prompt and output tokens per second."""
    gpus: int
    user_rate: float
    """Output tokens per second of the median user: 1 / median TPOT."""
    mean_running: float
    """Mean number of requests between their first step and their last token, on all engines."""
    mean_waiting: float
    hit_rate: float
    """Share of prompt tokens that were cached."""
    preemptions: int
    kv_mean: float
    """Mean share of the blocks that requests hold, over equidistant samples."""
    kv_peak: float
    """The largest of these shares, on any engine."""
    transfer: Spread | None = None
    """Seconds from a prompt's end to the arrival of its cache; None: no transfers."""
    transfer_bytes: float = 0.0
    """Bytes of all caches that were sent."""
    classes: Mapping[str, ClassSummary] = field(default_factory=dict[str, "ClassSummary"])
    """Summary of each class of requests."""
    stages: Mapping[str, Spread] = field(default_factory=dict[str, Spread])
    """Seconds in each stage before the prompt, waiting included, of its requests."""

    @property
    def measured_span(self) -> str:
        """Measured window in words."""
        begins, ends, whole = self.window
        if whole:
            return "measured over the whole run"
        return (
            f"measured from {duration(begins)} (warm-up) to {duration(ends)} (last arrival): "
            f"{plural(self.measured, 'request', 'requests')}"
        )

    @property
    def verdict(self) -> str:
        """Sentence that says whether the run is steady or overloaded."""
        overloaded = self.steadiness.overloaded
        return self.steadiness.sentence(self.token_rate if overloaded else self.request_rate)

    def values(self) -> dict[str, Any]:
        """Return one object for JSON."""
        spreads = ("queue", "ttft", "tpot", "itl", "e2e")
        if self.transfer is not None:
            spreads += ("transfer",)
        objects = (*spreads, "window", "steadiness")
        values: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name not in objects
        }
        values["window"] = self.window._asdict()
        values |= {
            "steady": self.steadiness.steady,
            "overloaded": self.steadiness.overloaded,
            "verdict": self.verdict,
            "arrival_rate": finite(self.steadiness.arrival_rate),
            "throughput_change": finite(self.steadiness.throughput_change),
            "in_flight": [*self.steadiness.in_flight],
        }
        for name in spreads:
            spread: Spread = getattr(self, name)
            values[name] = _values(spread)
        values["classes"] = {name: summary.values() for name, summary in self.classes.items()}
        values["stages"] = {name: _values(spread) for name, spread in self.stages.items()}
        values["user_rate"] = finite(self.user_rate)
        return values | {"output_rate_per_gpu": self.output_rate / self.gpus}


def _values(spread: Spread) -> dict[str, float | None]:
    return {name: finite(getattr(spread, name)) for name in Spread.__slots__}


def summarize(
    outcome: Outcome,
    slo: Slo,
    gpus: int,
    rejected: Mapping[str, int],
    shortened: int = 0,
    *,
    whole_run: bool = False,
) -> ServingSummary:
    """Compute the metrics of a run; `gpus` of all engines."""
    work, records = outcome.workload, outcome.records
    window = window_of(records, whole_run=whole_run)
    limits, done = RequestLimits.of(work, slo), RequestTimes.of(outcome)
    keeps = ~done.missed(limits).any_limit
    times = done.take(window.measures(done.arrival))
    missed, tpot = times.missed(limits), Spread.of(times.tpot)
    in_window = ~(np.frombuffer(records.arrival) < window.begins)
    total = int(in_window.sum()) * (1 + sum(rejected.values()) / max(1, len(work)))
    prompt, cached = (np.frombuffer(c, np.int32) for c in (work.prompt, records.cached))
    output_tokens = float(window.contains(done.first).sum())
    output_tokens += float(window.share(done.first, done.finish) @ (done.output - 1))
    prompt_tokens = float(window.share(done.scheduled, done.first) @ prompt[done.number])
    per_second = 1 / window.seconds if window.seconds else 0.0
    use = np.concatenate([_use_of_cache(engine, window) for engine in outcome.engines])
    gaps = [engine.step_log.gaps(logged_in(engine, window)) for engine in outcome.engines]
    return ServingSummary(
        requests=len(done.number),
        unfinished=len(work) - len(done.number) - sum(outcome.refused.values()),
        rejected={**rejected, **outcome.refused},
        shortened=shortened,
        seconds=max(0.0, float(done.finish.max(initial=0.0) - np.nanmin(records.arrival))),
        window=window,
        measured=int(in_window.sum()),
        steadiness=steadiness_of(
            done.arrival, done.queue + _transfer_queue(outcome, done), done.finish, keeps,
            closed=work.concurrency is not None,
        ),
        queue=Spread.of(times.queue),
        ttft=Spread.of(times.ttft),
        tpot=tpot,
        itl=gap_spread(np.concatenate(gaps)),
        e2e=Spread.of(times.e2e),
        good=int((~missed.any_limit).sum()) / total if total else 0.0,
        binding=missed.binding,
        goodput=float((keeps & window.contains(done.finish)).sum()) * per_second,
        request_rate=float(window.contains(done.finish).sum()) * per_second,
        token_rate=output_tokens * per_second / max(float(np.mean(work.output)), 1.0),
        output_rate=output_tokens * per_second,
        total_rate=(output_tokens + prompt_tokens) * per_second,
        gpus=gpus,
        user_rate=1 / tpot.p50 if tpot.p50 > 0 else math.nan,
        mean_running=float(window.overlap(done.scheduled, done.finish).sum()) * per_second,
        mean_waiting=float(window.overlap(done.arrival, done.scheduled).sum()) * per_second,
        hit_rate=float(
            cached[in_window].sum(dtype=np.int64) / max(1, prompt[in_window].sum(dtype=np.int64))
        ),
        preemptions=sum(records.preempted),
        kv_mean=float(use.mean()) if len(use) else 0.0,
        kv_peak=float(use.max()) if len(use) else 0.0,
        **_sent(outcome, in_window),
        classes=_by_class(work, times, missed, in_window),
        stages={
            name: Spread.of(np.array(column)[in_window]) for name, column in outcome.stages.items()
        },
    )  # fmt: skip


def _transfer_queue(outcome: Outcome, done: RequestTimes) -> Float:
    """Seconds for which caches of requests wait for links."""
    handover = outcome.handover
    if handover is None:
        return np.zeros(len(done.number))
    waits = np.array(handover.begins) - np.array(handover.prefilled)
    return np.nan_to_num(np.maximum(waits[done.number], 0.0))


def logged_in(engine: Engine, window: Window) -> LogSpan | None:
    """Part of an engine's log in the window; None: all of it."""
    if window.whole:
        return None
    end = engine.step_log.end(engine.now)
    return engine.samples.log_span(window.begins, window.ends, end)


def _use_of_cache(engine: Engine, window: Window) -> Float:
    """Shares of the blocks that requests hold, at the samples in the window; else at all."""
    seconds, shares = np.array(engine.samples.seconds), np.array(engine.samples.blocks)
    inside = (seconds >= window.begins) & (seconds <= window.ends)
    return (shares[inside] if inside.any() else shares) / engine.kv_cache.size


def _by_class(
    work: Workload, times: RequestTimes, missed: MissedLimits, in_window: Bool
) -> dict[str, ClassSummary]:
    """Summary of each class, of requests in the window."""
    if work.class_of is None:
        return {}
    class_of, kept = np.array(work.class_of), ~missed.any_limit
    summaries: dict[str, ClassSummary] = {}
    for index, request_class in enumerate(work.classes):
        in_class = class_of[times.number] == index
        requests = int(((class_of == index) & in_window).sum())
        of_class = times.take(in_class)
        summaries[request_class.name] = ClassSummary(
            requests,
            len(of_class.number),
            float(kept[in_class].sum()) / requests if requests else 0.0,
            *map(Spread.of, (of_class.ttft, of_class.tpot, of_class.e2e)),
        )
    return summaries


def _sent(outcome: Outcome, in_window: Bool) -> dict[str, Any]:
    """Metrics of KV transfers; none without disaggregation."""
    handover = outcome.handover
    if handover is None:
        return {}
    seconds = np.array(handover.arrives) - np.array(handover.prefilled)
    return {
        "transfer": Spread.of(seconds[in_window]),
        "transfer_bytes": float(sum(handover.bytes)),
    }
