"""Metrics of a serving run: latencies, rates, goodput, use of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Float
from stagewright.serving.samples import StepLog, gap_quantiles
from stagewright.serving.simulation import Outcome
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
        """Distribution of equally likely values; nan of none."""
        if not len(values):
            return cls(*[float("nan")] * 4)
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
        """The limits that no request may exceed."""
        largest = {name: float(getattr(self, name).max(initial=0)) for name in self._fields}
        return Slo(**{name: limit for name, limit in largest.items() if limit < np.inf})


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Columns of some requests, in seconds."""

    number: np.ndarray[Any, np.dtype[np.int64]]
    """Places in the workload."""
    queue: Float
    """Seconds from the arrival to the first step with the request."""
    ttft: Float
    """Seconds from the arrival to the first token."""
    tpot: Float
    """Seconds per token from the first token to the last; nan for a single token."""
    e2e: Float

    @classmethod
    def of(cls, outcome: Outcome) -> RequestTimes:
        """Times of all finished requests."""
        records = outcome.records
        finish = np.frombuffer(records.finish)
        number = np.flatnonzero(np.isfinite(finish))
        finished = number if len(number) < len(finish) else slice(None)  # all of them: no copies
        arrival, first, scheduled, finish = (
            np.frombuffer(c)[finished]
            for c in (records.arrival, records.first, records.scheduled, records.finish)
        )
        further_tokens = np.frombuffer(outcome.workload.output, np.int32)[finished] - 1
        tpot = finish - first
        np.divide(tpot, further_tokens, out=tpot, where=further_tokens > 0)
        tpot[further_tokens < 1] = np.nan
        return cls(number, scheduled - arrival, first - arrival, tpot, finish - arrival)

    def interactivity(self, work: Workload) -> float:
        """Tokens/s of a user, end to end: 1 / 90th percentile of E2E per output token.

        The metric of InferenceX's AgentX (SemiAnalysisAI/InferenceX@843c6254 `MODELS.md`), over
        all of its requests; nan where none is done.
        """
        per_token = self.e2e / np.frombuffer(work.output, np.int32)[self.number]
        return 1 / float(np.quantile(per_token, 0.9)) if len(per_token) else float("nan")

    @classmethod
    def at_least(cls, work: Workload, records: Records, at: float) -> RequestTimes:
        """Lower bounds of times of all requests at time `at`; nan before their arrival."""
        arrival, first, scheduled, finish = (
            np.frombuffer(c)
            for c in (records.arrival, records.first, records.scheduled, records.finish)
        )
        further_tokens = np.frombuffer(work.output, np.int32) - 1
        until = np.where(np.isnan(finish), at, finish)
        tpot = np.where(further_tokens > 0, (until - first) / np.maximum(further_tokens, 1), np.nan)
        queue, ttft = (np.where(np.isnan(c), at, c) - arrival for c in (scheduled, first))
        return cls(np.arange(len(work)), queue, ttft, tpot, until - arrival)

    def places(self, requests: int) -> np.ndarray[Any, np.dtype[np.int64]] | slice:
        """Index of these requests in a column: a slice, without a copy, if all finished."""
        return self.number if len(self.number) < requests else slice(None)

    def missed(self, limits: RequestLimits) -> MissedLimits:
        """Requests that miss limits (goodput of DistServe, arXiv 2401.09670)."""
        at = self.places(len(limits.ttft))
        ttft, tpot = self.ttft > limits.ttft[at], self.tpot > limits.tpot[at]
        return MissedLimits(ttft, tpot, ttft | tpot | (self.e2e > limits.e2e[at]))


class MissedLimits(NamedTuple):
    """Masks of requests that miss limits."""

    ttft: np.ndarray[Any, np.dtype[np.bool_]]
    """Requests that miss the TTFT limit."""
    tpot: np.ndarray[Any, np.dtype[np.bool_]]
    """Requests that miss the TPOT limit."""
    any_limit: np.ndarray[Any, np.dtype[np.bool_]]
    """Requests that miss some limit."""


def gap_spread(logs: Sequence[StepLog]) -> Spread:
    """Distribution of the gaps between tokens, each token weighted equally."""
    parts = [rows for log in logs for rows in log.gap_parts() if len(rows)]
    count = total = 0.0
    for rows in parts:
        first, last, steps, requests = rows.T
        weights = steps * requests
        count += float(weights.sum())
        total += float(((first + last) * weights).sum()) / 2
    if not count:
        return Spread.of(np.zeros(0))
    return Spread(total / count, *gap_quantiles(parts, [*QUANTILES.values()]))


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Summary of a class of requests (s, shares of 1). Seconds, shares of 1."""

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
    """Summary of a run (s, tokens, shares of 1). Seconds, tokens, shares of 1."""

    requests: int
    """Done."""
    unfinished: int
    rejected: Mapping[str, int]
    shortened: int
    seconds: float
    """Seconds from the first arrival to the last token."""
    queue: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    good: float
    """Share of all requests, rejected and unfinished ones included, that kept the limits."""
    goodput: float
    """Such requests per second."""
    request_rate: float
    """Requests that were done per second."""
    output_rate: float
    """Output tokens per second."""
    total_rate: float
    """Prompt and output tokens per second."""
    gpus: int
    user_rate: float
    """Output tokens per second of the median user: 1 / median TPOT."""
    mean_running: float
    """Requests that are between their first step and their last token, over all engines."""
    mean_waiting: float
    hit_rate: float
    """Share of prompt tokens that were in a cache."""
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

    def values(self) -> dict[str, Any]:
        """Return one object for JSON."""
        spreads = ("queue", "ttft", "tpot", "itl", "e2e")
        if self.transfer is not None:
            spreads += ("transfer",)
        values: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name not in spreads
        }
        for name in spreads:
            spread: Spread = getattr(self, name)
            values[name] = _values(spread)
        values["classes"] = {name: summary.values() for name, summary in self.classes.items()}
        values["stages"] = {name: _values(spread) for name, spread in self.stages.items()}
        return values | {"output_rate_per_gpu": self.output_rate / self.gpus}


def _values(spread: Spread) -> dict[str, float]:
    return {name: getattr(spread, name) for name in Spread.__slots__}


def summarize(
    outcome: Outcome, slo: Slo, gpus: int, rejected: Mapping[str, int], shortened: int = 0
) -> ServingSummary:
    """The numbers of a run; `gpus` of all engines."""
    times = RequestTimes.of(outcome)
    work, records = outcome.workload, outcome.records
    finished = times.places(len(work))
    output, prompt = (np.frombuffer(c, np.int32)[finished] for c in (work.output, work.prompt))
    finish = np.frombuffer(records.finish)[finished]
    begin = min((at for at in records.arrival if at == at), default=0.0)
    seconds = float(finish.max()) - begin if len(finish) else 0.0
    classes, keep = _by_class(outcome, times, slo)
    good = int(keep.sum())
    total = len(work) + sum(rejected.values())
    per_second = 1 / seconds if seconds else 0.0
    shares = [np.array(e.samples.blocks) / e.blocks.size for e in outcome.engines]
    samples = np.concatenate(shares) if shares else np.zeros(0)
    has_tpot = np.isfinite(times.tpot)
    tpot = Spread.of(times.tpot if has_tpot.all() else times.tpot[has_tpot])
    return ServingSummary(
        requests=len(times.number),
        unfinished=len(work) - len(times.number) - sum(outcome.refused.values()),
        rejected={**rejected, **outcome.refused},
        shortened=shortened,
        seconds=seconds,
        queue=Spread.of(times.queue),
        ttft=Spread.of(times.ttft),
        tpot=tpot,
        itl=gap_spread([engine.step_log for engine in outcome.engines]),
        e2e=Spread.of(times.e2e),
        good=good / total if total else 0.0,
        goodput=good * per_second,
        request_rate=len(finish) * per_second,
        output_rate=float(output.sum()) * per_second,
        total_rate=float(output.sum() + prompt.sum()) * per_second,
        gpus=gpus,
        user_rate=1 / tpot.p50 if tpot.p50 > 0 else float("nan"),
        mean_running=float((times.e2e - times.queue).sum()) * per_second,
        mean_waiting=float(times.queue.sum()) * per_second,
        hit_rate=sum(records.cached) / max(1, sum(work.prompt)),
        preemptions=sum(records.preempted),
        kv_mean=float(samples.mean()) if len(samples) else 0.0,
        kv_peak=float(samples.max()) if len(samples) else 0.0,
        **_sent(outcome),
        classes=classes,
        stages={name: _spread(np.array(column)) for name, column in outcome.stages.items()},
    )


def _by_class(
    outcome: Outcome, times: RequestTimes, slo: Slo
) -> tuple[dict[str, ClassSummary], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Summary of each class, and mask of finished requests that keep their limits."""
    work, good = outcome.workload, kept(outcome, times, slo)
    if work.class_of is None:
        return {}, good
    class_of = np.array(work.class_of)
    summaries: dict[str, ClassSummary] = {}
    for index, request_class in enumerate(work.classes):
        in_class = class_of[times.number] == index
        requests = int((class_of == index).sum())
        summaries[request_class.name] = ClassSummary(
            requests,
            int(in_class.sum()),
            float(good[in_class].sum()) / requests if requests else 0.0,
            Spread.of(times.ttft[in_class]),
            _spread(times.tpot[in_class]),
            Spread.of(times.e2e[in_class]),
        )
    return summaries, good


def kept(outcome: Outcome, times: RequestTimes, slo: Slo) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mask of finished requests that keep the limits of their class, or the common ones."""
    return ~times.missed(RequestLimits.of(outcome.workload, slo)).any_limit


def _spread(values: Float) -> Spread:
    """Distribution of the values that are not nan."""
    return Spread.of(values[np.isfinite(values)])


def _sent(outcome: Outcome) -> dict[str, Any]:
    """Metrics of KV transfers; none without disaggregation."""
    handover = outcome.handover
    if handover is None:
        return {}
    seconds = np.array(handover.arrives) - np.array(handover.prefilled)
    return {
        "transfer": _spread(seconds),
        "transfer_bytes": float(sum(handover.bytes)),
    }
