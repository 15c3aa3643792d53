"""Workloads: requests as columns, and the records of their simulation."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.run.sections.declare import LARGEST

Chain = tuple[tuple[int, ...], tuple[int, ...]]
"""Segments that a request may share: their keys, and the tokens up to each end. Requests
whose chains begin with equal keys have equal tokens up to the end of the last equal one; where that
end differs, up to the lesser: a session is one segment, which grows with its turns."""

NO_CHAIN: Chain = ((), ())


def folded(chains: Sequence[Chain]) -> list[Chain]:
    """Merge segments of chains without changing what requests share.

    A chain ends where no other request continues it: what follows is private. Successive segments
    of the same requests become one.

    >>> folded([((1, 2, 3), (16, 32, 48)), ((1, 2, 4), (16, 32, 40))])
    [((1,), (32,)), ((1,), (32,))]
    """
    requests = Counter(chain.from_iterable(keys for keys, _ in chains))
    before: dict[int, int] = {}
    several: set[int] = set()  # segments that follow different ones
    for keys, _ in chains:
        for key, previous in zip(keys, (-1, *keys), strict=False):
            if before.setdefault(key, previous) != previous:
                several.add(key)
    merged: list[Chain] = []
    for keys, ends in chains:
        merged_keys, merged_ends, last_count = list[int](), list[int](), 0
        for key, end in zip(keys, ends, strict=True):
            count = requests[key]
            if count == 1:
                break
            if count == last_count and key not in several:
                merged_ends[-1] = end
            else:
                merged_keys.append(key)
                merged_ends.append(end)
            last_count = count
        merged.append((tuple(merged_keys), tuple(merged_ends)))
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Class of requests with common latency limits (s); None: the common limit."""

    name: str
    share: float = 1.0
    """Weight of the class among all classes."""
    priority: int = 0
    """The lower, the earlier (vLLM's `priority` of a request)."""
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def limited(self) -> bool:
        """True if the class has limits."""
        return not self.ttft is self.tpot is self.e2e is None


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in the order in which they arrive, a place in each column for each."""

    name: str
    arrival: array[float]
    """Seconds since the first; of a follow-up, seconds after the request before it is done."""
    prompt: array[int]
    """Tokens."""
    output: array[int]
    """Tokens that the request gets, at least 1."""
    chains: Sequence[Chain] | None = None
    """A chain may reach beyond the prompt: it then names the output for the session's next turn."""
    after: array[int] | None = None
    """The request that must be done before, or -1; it stands earlier in the columns."""
    session: array[int] | None = None
    """Number of the user's session of each request."""
    concurrency: int | None = None
    """Sessions in flight at most; a request without predecessor or follow-up is a session."""
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows of a trace that are no requests: how many, by reason."""
    stages: tuple[float, ...] = ()
    """Seconds at which stages of the load begin, where it has several."""
    classes: tuple[RequestClass, ...] = ()
    class_of: array[int] | None = None
    """The place of each request's class among these."""
    joins: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Further requests that must be done before, of requests that have a predecessor."""

    def __len__(self) -> int:
        return len(self.prompt)

    def predecessors(self, request: int) -> tuple[int, ...]:
        """Requests that must be done before one arrives."""
        if self.after is None or self.after[request] < 0:
            return ()
        return (self.after[request], *self.joins.get(request, ()))


def in_classes(of: Workload, classes: tuple[RequestClass, ...], seed: int) -> Workload:
    """The same requests, each of a class that is drawn by the classes' shares; a session is of one.

    >>> two = (RequestClass(name="chat", share=3), RequestClass(name="batch"))
    >>> work = Workload("w", array("d", [0.0] * 5), array("i", [1] * 5), array("i", [1] * 5))
    >>> list(in_classes(work, two, seed=0).class_of)
    [0, 0, 0, 1, 0]
    """
    draw, numbers = Random(f"classes {seed}"), range(len(classes))
    weights = [each.share for each in classes]
    chosen: dict[int, int] = {}
    drawn = array("i")
    for request in range(len(of)):
        session = ~request if of.session is None else of.session[request]
        if session not in chosen:
            chosen[session] = draw.choices(numbers, weights)[0]
        drawn.append(chosen[session])
    return replace(of, classes=classes, class_of=drawn)


def with_past(of: Workload, tokens: int) -> Workload:
    """Prepend a private earlier session of some tokens to each prompt.

    Raises UserError where prompts have named beginnings already.
    """
    if of.chains is not None:
        raise UserError("--past-context is for prompts that have nothing in common with others")
    chains: list[Chain] = [((request,), (tokens,)) for request in range(len(of))]
    return replace(_lengthened(of, tokens), chains=chains)


def with_cached_share(of: Workload, share: float) -> Workload:
    """Let a share of each prompt be in the cache already, as a beginning that all prompts have.

    An engine computes it once, with its first request. Raises UserError where prompts have named
    beginnings already.
    """
    if of.chains is not None:
        raise UserError(
            "--prefix-cache-hit-rate is for prompts of which nothing else says what they have in "
            "common; leave it out with hash_ids, sessions, --system-prompt and --past-context"
        )
    chains: list[Chain] = [((0,), (round(share * tokens),)) for tokens in of.prompt]
    return replace(of, chains=chains)


def in_lanes(of: Workload, concurrency: int) -> Workload:
    """The same requests, of which at most `concurrency` sessions are in flight at a time."""
    if not 1 <= concurrency <= LARGEST:
        raise UserError(f"--concurrency is {concurrency}, wanted at least 1")
    name = f"{of.name}, at most {concurrency} in flight"
    if of.after is None and not any(of.arrival):
        name = f"{concurrency} users"
    return replace(of, concurrency=concurrency, name=name)


def with_documents(of: Workload, tokens: int) -> Workload:
    """Append documents of some tokens to each prompt.

    Raises UserError for sessions, whose later prompts hold the earlier ones.
    """
    if of.after is not None:
        raise UserError(
            "adds_tokens is for single requests; a session's later prompts hold the earlier ones"
        )
    return _lengthened(of, tokens)


def _lengthened(of: Workload, tokens: int) -> Workload:
    """The same requests with prompts of some tokens more; UserError where these are too many."""
    longest = max(of.prompt, default=0)
    if longest + tokens >= LARGEST:
        raise UserError(f"{tokens} tokens more than prompts of up to {longest} are too many")
    return replace(of, prompt=array("i", (tokens + prompt for prompt in of.prompt)))


class Accepted(NamedTuple):
    """The requests that an engine can serve, and why it cannot serve others."""

    workload: Workload
    rejected: Mapping[str, int]
    shortened: int
    """Requests whose output ends at `max_model_len`."""


TOO_LONG = "the prompt leaves no token below max_model_len"
NEVER_FITS = "prompt and output need more blocks than the KV cache has"
NOT_CUT = "the prompt has more tokens than a step, and is not computed in chunks"
LOST_TURN = "an earlier turn of the session was rejected"


LONGEST = 1e9
"""Seconds to the last arrival, some 30 years."""


def accept(
    workload: Workload,
    max_model_len: int,
    tokens: int,
    most_prompt: int = LARGEST,
    prompt_tokens: int = LARGEST,
) -> Accepted:
    """Leave out what no engine could serve, as vLLM does when a request arrives.

    `tokens` is the room of the KV cache, `prompt_tokens` that of instances for prompts only;
    `most_prompt`: tokens of a prompt that a step may have. vLLM ends a request at `max_model_len`
    (vllm-project/vllm@00024d31 `vllm/v1/core/sched/utils.py`, `check_stop`). A request that joins
    others does not wait for those that are left out. Raises UserError for times of arrival that
    are none, or too far apart.
    """
    times = np.frombuffer(workload.arrival)
    if len(times) and not (times.min() >= 0 and times.max() <= LONGEST):
        raise UserError(
            f"requests arrive {times.min():g} to {times.max():g} s after the first one, wanted 0 "
            f"to {LONGEST:g}: later times are no longer exact to a microsecond"
        )
    prompt = np.frombuffer(workload.prompt, np.int32).astype(np.int64)
    asked = np.frombuffer(workload.output, np.int32).astype(np.int64)
    room = max_model_len - prompt
    output = np.minimum(asked, room)
    never_fits = (prompt + output - 1 > tokens) | (prompt > prompt_tokens)
    reasons = ("", TOO_LONG, NOT_CUT, NEVER_FITS, LOST_TURN)
    reason = np.select([room < 1, prompt > most_prompt, never_fits], [1, 2, 3], 0)
    if workload.after is not None and reason.any():
        for request, before in enumerate(workload.after):
            if before >= 0 and reason[before] and not reason[request]:
                reason[request] = reasons.index(LOST_TURN)
    kept = np.flatnonzero(reason == 0)
    rejected = Counter(workload.rejected)
    for number, count in enumerate(np.bincount(reason)[1:], 1):
        if count:
            rejected[reasons[number]] += int(count)
    shortened = int((asked > room)[kept].sum())
    accepted = replace(workload, output=array("i", output.astype(np.int32).tobytes()))
    if len(kept) < len(workload):
        accepted = _chosen(accepted, kept)
    return Accepted(accepted, dict(rejected), shortened)


def _chosen(of: Workload, kept: Int) -> Workload:
    """Select requests by their ascending places."""

    def column(values: array[Any]) -> array[Any]:
        return array(values.typecode, np.frombuffer(values, values.typecode)[kept].tobytes())

    place = np.full(len(of) + 1, -1, np.int32)  # also of -1
    place[kept] = np.arange(len(kept))
    after = None
    if of.after is not None:
        before = np.frombuffer(of.after, np.int32)[kept]
        after = array("i", place[before].tobytes())
    joins = {
        int(place[request]): tuple(int(place[n]) for n in others if place[n] >= 0)
        for request, others in of.joins.items()
        if place[request] >= 0
    }
    return replace(
        of,
        arrival=column(of.arrival),
        prompt=column(of.prompt),
        output=column(of.output),
        chains=None if of.chains is None else [of.chains[request] for request in kept],
        after=after,
        joins=joins,
        session=None if of.session is None else column(of.session),
        class_of=None if of.class_of is None else column(of.class_of),
    )


@dataclass(frozen=True, eq=False)
class Records:
    """Columns of what happened to each request (s since the run began); nan: it did not."""

    arrival: array[float]
    """Time at which the user sent it."""
    reached: array[float]
    """Time at which it was in an engine's queue."""
    scheduled: array[float]
    """Time at which an engine first computed a part of it."""
    first: array[float]
    """Time of its first token."""
    finish: array[float]
    engine: array[int]
    """The engine's number, or -1."""
    cached: array[int]
    """Prompt tokens that were in the cache when it was scheduled first."""
    preempted: array[int]
    """Number of preemptions."""

    @classmethod
    def of(cls, requests: int) -> Records:
        """Create records of requests that have not arrived."""
        nan, zero = array("d", [float("nan")]), array("i", [0])
        return cls(
            nan * requests,
            nan * requests,
            nan * requests,
            nan * requests,
            nan * requests,
            array("i", [-1]) * requests,
            zero * requests,
            zero * requests,
        )

    def with_lower_bounds(self, least: array[float], at: float) -> Records:
        """Records known at time `at`, with lower bounds of first tokens.

        `least`: before this no first token can be there, nan where nothing is known; one that
        stands no later, of a request that is not done, comes after `at`.
        """
        first, early = np.frombuffer(self.first), np.frombuffer(least)
        open_ = (first <= early) & np.isnan(np.frombuffer(self.finish))
        later = np.where(open_, np.maximum(first, at), first)
        return replace(self, first=array("d", later.tobytes()))
