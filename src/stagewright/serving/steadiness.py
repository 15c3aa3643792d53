"""Measured window of a serving run, and whether a longer run would have the same figures.

A run begins with an empty server, and drains after the last arrival; neither says what the server
sustains. The window lies between: from the first arrival after the warm-up to the last arrival. A
run is steady if requests arrive for much longer than one takes, the number in flight does not grow,
and both halves of the window have the same throughput and the same share of requests that keep the
limits. If more requests arrive than are served, the queue grows all the time: each second later
adds (arrival rate / service rate - 1) s of waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.numbers import duration, plural
from stagewright.serving.workload import Records

WARM_UP = 0.2
"""Share of the requests, in order of arrival, before the window."""
SPAN = 5.0
"""Mean times of a request for which requests of a steady run arrive at least: the warm-up then
takes one of them, after which as many requests finish as arrive."""
MAX_CHANGE = 0.1
"""Change of throughput, and of the share of requests that keep the limits, between the halves of
the window of a steady run."""
MAX_GROWTH = 0.05
"""Growth of the requests in flight, in requests that arrive, of a steady run; also how much more
requests may come than are served, where this can be told from chance."""
MIN_REQUESTS = 100
"""Measured requests from which on chance leaves anything to tell."""
SIGMAS = 3.0
"""Deviations of Poisson arrivals that are taken for chance."""


class Window(NamedTuple):
    """Measured part of a run (s since it began)."""

    begins: float
    ends: float
    whole: bool
    """From the first arrival to the last token: ramp and drain count."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.ends - self.begins

    def overlap(self, begins: Float, ends: Float) -> Float:
        """Seconds of each span within the window."""
        if self.whole:
            return ends - begins
        seconds = np.minimum(ends, self.ends)
        seconds -= np.maximum(begins, self.begins)
        return np.maximum(seconds, 0.0, out=seconds)

    def share(self, begins: Float, ends: Float) -> Float:
        """Share of each span within the window; of an instant: 1 or 0."""
        spans = ends - begins
        shares = self.contains(ends).astype(np.float64)
        np.divide(self.overlap(begins, ends), spans, out=shares, where=spans > 0)
        return shares

    def contains(self, times: Float) -> Bool:
        """True for times after the begin of the window, up to its end."""
        if self.whole:
            return np.isfinite(times)
        return (times > self.begins) & (times <= self.ends)

    def measures(self, arrival: Float) -> Bool:
        """True for requests of which latencies count: those that arrive in the window."""
        return arrival >= self.begins


def arrival_window(arrived: Float, requests: int) -> Window | None:
    """Window of a workload of `requests`, by the arrivals so far; None: still in the warm-up."""
    before = int(requests * WARM_UP)
    if len(arrived) <= before:
        return None
    return Window(float(np.partition(arrived, before)[before]), float(arrived.max()), False)


def window_of(records: Records, *, whole_run: bool = False) -> Window:
    """Window of a run; the whole run if asked for, or if the window is shorter than a request."""
    arrival, finish = (np.frombuffer(c) for c in (records.arrival, records.finish))
    done = np.isfinite(finish)
    if not done.any():
        return Window(0.0, 0.0, True)
    mean = float(finish.mean(where=done) - arrival.mean(where=done))
    arrived = arrival if done.all() else arrival[np.isfinite(arrival)]
    window = arrival_window(arrived, len(arrival))
    if whole_run or window is None or window.seconds < mean:
        return Window(float(arrived.min()), float(np.nanmax(finish)), True)
    return window


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Comparison of the halves of the time between the warm-up and the last arrival."""

    steady: bool
    overloaded: bool
    """More requests come than are served."""
    arrival_rate: float
    """Requests that come per second."""
    throughput_change: float
    """Finished requests per second in the second half over those of the first, less 1."""
    in_flight: tuple[int, int]
    """Requests in flight at the begin and at the end."""
    reason: str
    """Why the run is not steady; empty if it is."""
    wanted_requests: int
    """Requests that are enough, and arrive for `SPAN` times as long as one takes."""

    def sentence(self, served_rate: float) -> str:
        """Verdict in words; `served_rate` is that of the whole window (requests per second).

        Where more come than are served, those in flight have tokens, too: count these.
        """
        come, served = (
            f"{x:.3g}" if x < 100 else f"{x:,.0f}" for x in (self.arrival_rate, served_rate)
        )
        if self.overloaded:
            return (
                f"overloaded: {come} requests/s come, {served} are "
                "served; waiting times grow with the length of the run"
            )
        if not self.steady:
            return f"not steady: {self.reason}"
        return (
            f"steady: {come} requests/s come, {served} are served "
            f"(throughput {self.throughput_change:+.1%} in the second half)"
        )


def steadiness_of(
    arrival: Float, waits: Float, finish: Float, keeps: Bool, *, closed: bool
) -> Steadiness:
    """Steadiness of a run, by columns of its finished requests (s).

    `waits`: seconds in queues; `keeps`: requests that keep the limits; `closed`: in a closed loop.
    """
    window = arrival_window(arrival, len(arrival))
    if window is None or not window.seconds:
        return Steadiness(
            False, False, math.nan, math.nan, (0, 0), "all requests arrive at once", 0
        )
    first, last, _ = window
    middle = (first + last) / 2
    inside = window.measures(arrival)
    count = int(inside.sum())
    noise = SIGMAS / math.sqrt(count)
    first_half = int(((finish > first) & (finish <= middle)).sum())
    second_half = int(((finish > middle) & (finish <= last)).sum())
    change = second_half / first_half - 1 if first_half else math.inf
    begin, end = (int(((arrival <= at) & (finish > at)).sum()) for at in (first, last))
    shares = [
        float(keeps[half].mean()) if half.any() else 0.0
        for half in (inside & (arrival <= middle), inside & (arrival > middle))
    ]
    waiting_growth = _slope(arrival[inside], waits[inside])
    overloaded = not closed and waiting_growth > max(MAX_GROWTH, noise)
    mean, span = float((finish - arrival).mean()), last - float(arrival.min())
    wanted = math.ceil(max(len(arrival) * SPAN * mean / span, MIN_REQUESTS / (1 - WARM_UP)))
    reason = ""
    if overloaded:
        reason = "more requests come than are served"
    elif count < MIN_REQUESTS:
        reason = (
            f"{plural(count, 'measured request is', 'measured requests are')} too few; from "
            f"{wanted:,} requests on (--num-requests) it could be told"
        )
    elif span < SPAN * mean:
        reason = (
            f"requests arrive for {duration(span)} and take {duration(mean)} each; from "
            f"{plural(wanted, 'request', 'requests')} on (--num-requests) it could be told"
        )
    elif not closed and abs(end - begin) > max(MAX_GROWTH * count, SIGMAS * math.sqrt(begin + end)):
        reason = f"{begin:,} requests are in flight at the begin, {end:,} at the end"
    elif abs(change) > max(MAX_CHANGE, 2 * noise):  # of halves, each with half of the requests
        reason = f"the second half has {change:+.1%} throughput"
    elif abs(shares[1] - shares[0]) > max(MAX_CHANGE, noise):  # deviation of a share: 0.5 at most
        reason = f"{shares[0]:.0%} of the first half keep the limits, {shares[1]:.0%} of the second"
    return Steadiness(
        not reason, overloaded, count / window.seconds, change, (begin, end), reason, wanted
    )


def _slope(times: Float, values: Float) -> float:
    """Slope of a straight line through values over times, by least squares."""
    centred = times - times.mean()
    square = float((centred * centred).sum())
    return float((centred * values).sum()) / square if square else 0.0
