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
"""Segments that a request may share, as numbers, and the tokens up to the end of each. Requests
whose chains begin with equal segments have equal tokens up to the end of the last equal one; where
that end differs, up to the lesser: a session is one segment, which grows with its turns."""

NO_CHAIN: Chain = ((), ())


def fold(chains: Sequence[Chain]) -> list[Chain]:
    """Merge segments of chains without changing what requests share.

    A chain ends where no other request continues it: what follows is private. Successive segments
    of the same requests become one.

    >>> fold([((1, 2, 3), (16, 32, 48)), ((1, 2, 4), (16, 32, 40))])
    [((1,), (32,)), ((1,), (32,))]
    """
    requests = Counter(chain.from_iterable(segments for segments, _ in chains))
    predecessor_of: dict[int, int] = {}
    several: set[int] = set()  # segments that follow different ones
    for segments, _ in chains:
        for segment, previous in zip(segments, (-1, *segments), strict=False):
            if predecessor_of.setdefault(segment, previous) != previous:
                several.add(segment)
    merged: list[Chain] = []
    for segments, ends in chains:
        merged_segments, merged_ends, last_count = list[int](), list[int](), 0
        for segment, end in zip(segments, ends, strict=True):
            count = requests[segment]
            if count == 1:
                break
            if count == last_count and segment not in several:
                merged_ends[-1] = end
            else:
                merged_segments.append(segment)
                merged_ends.append(end)
            last_count = count
        merged.append((tuple(merged_segments), tuple(merged_ends)))
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
    """Requests as columns; each stands after those that it waits for.

    `arrival` need not ascend.
    """

    name: str
    arrival: array[float]
    """Seconds since the first request; of a follow-up, since its predecessors are done."""
    prompt: array[int]
    """Tokens."""
    output: array[int]
    """Tokens that the request gets, at least 1."""
    chains: Sequence[Chain] | None = None
    """A chain may reach beyond the prompt: it then names the output for the session's next turn."""
    predecessor: array[int] | None = None
    """Request that must be done before this one arrives, or -1; it is earlier in the columns."""
    session: array[int] | None = None
    """Number of the user's session of each request."""
    concurrency: int | None = None
    """Largest number of sessions in flight; a request without predecessor or follow-up is one."""
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of rows of a trace that are no requests, by reason."""
    stages: tuple[float, ...] = ()
    """Seconds at which stages of the load begin, where it has several."""
    classes: tuple[RequestClass, ...] = ()
    class_of: array[int] | None = None
    """Index of each request's class among `classes`."""
    further_predecessors: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    """Other requests that must be done before a request with a `predecessor` arrives."""

    def __len__(self) -> int:
        return len(self.prompt)

    def predecessors(self, request: int) -> tuple[int, ...]:
        """Requests that must be done before this one arrives."""
        if self.predecessor is None or self.predecessor[request] < 0:
            return ()
        return (self.predecessor[request], *self.further_predecessors.get(request, ()))


def with_classes(workload: Workload, classes: tuple[RequestClass, ...], seed: int) -> Workload:
    """Draw the class of each session's requests, by the shares of the classes.

    >>> two = (RequestClass(name="chat", share=3), RequestClass(name="batch"))
    >>> work = Workload("w", array("d", [0.0] * 5), array("i", [1] * 5), array("i", [1] * 5))
    >>> list(with_classes(work, two, seed=0).class_of)
    [0, 0, 0, 1, 0]
    """
    draw, numbers = Random(f"classes {seed}"), range(len(classes))
    weights = [request_class.share for request_class in classes]
    class_of_session: dict[int, int] = {}
    class_of = array("i")
    for request in range(len(workload)):
        session = ~request if workload.session is None else workload.session[request]
        if session not in class_of_session:
            class_of_session[session] = draw.choices(numbers, weights)[0]
        class_of.append(class_of_session[session])
    return replace(workload, classes=classes, class_of=class_of)


def with_past(workload: Workload, tokens: int) -> Workload:
    """Prepend a private earlier session of some tokens to each prompt.

    Raises UserError where prompts have named beginnings already.
    """
    if workload.chains is not None:
        raise UserError("--past-context is for prompts that have nothing in common with others")
    chains: list[Chain] = [((request,), (tokens,)) for request in range(len(workload))]
    return replace(_lengthen(workload, tokens), chains=chains)


def with_cached_share(workload: Workload, share: float) -> Workload:
    """Let a share of each prompt be in the cache already, as a beginning that all prompts have.

    An engine computes it once, with its first request. Raises UserError where prompts have named
    beginnings already.
    """
    if workload.chains is not None:
        raise UserError(
            "--prefix-cache-hit-rate is for prompts of which nothing else says what they have in "
            "common; leave it out with hash_ids, sessions, --system-prompt and --past-context"
        )
    chains: list[Chain] = [((0,), (round(share * tokens),)) for tokens in workload.prompt]
    return replace(workload, chains=chains)


def with_concurrency(workload: Workload, concurrency: int) -> Workload:
    """Limit the number of sessions in flight."""
    if not 1 <= concurrency <= LARGEST:
        raise UserError(f"--concurrency is {concurrency}, wanted at least 1")
    name = f"{workload.name}, at most {concurrency} in flight"
    if workload.predecessor is None and not any(workload.arrival):
        name = f"{concurrency} users"
    return replace(workload, concurrency=concurrency, name=name)


def with_documents(workload: Workload, tokens: int) -> Workload:
    """Append documents of some tokens to each prompt.

    Raises UserError for sessions, whose later prompts hold the earlier ones.
    """
    if workload.predecessor is not None:
        raise UserError(
            "adds_tokens is for single requests; a session's later prompts hold the earlier ones"
        )
    return _lengthen(workload, tokens)


def _lengthen(workload: Workload, tokens: int) -> Workload:
    """Add tokens to each prompt; raises UserError where these are too many."""
    longest = max(workload.prompt, default=0)
    if longest + tokens >= LARGEST:
        raise UserError(f"{tokens} tokens more than prompts of up to {longest} are too many")
    return replace(workload, prompt=array("i", (tokens + prompt for prompt in workload.prompt)))


class Accepted(NamedTuple):
    """Requests that some engine can serve, and reasons for the others."""

    workload: Workload
    rejected: Mapping[str, int]
    shortened: int
    """Requests whose output ends at `max_model_len`."""


TOO_LONG = "the prompt leaves no token below max_model_len"
NEVER_FITS = "prompt and output need more blocks than the KV cache has"
PROMPT_EXCEEDS_STEP = "the prompt has more tokens than a step, and is not computed in chunks"
EARLIER_TURN_REJECTED = "an earlier turn of the session was rejected"


LONGEST = 1e9
"""Largest time of an arrival (s), some 30 years."""


def accept(
    workload: Workload,
    max_model_len: int,
    kv_tokens: int,
    max_prompt: int = LARGEST,
    prefill_kv_tokens: int = LARGEST,
) -> Accepted:
    """Leave out requests that no engine could serve, as vLLM does when a request arrives.

    `kv_tokens`: tokens of a request that the KV cache can hold; `prefill_kv_tokens`: that of
    instances that compute prompts only. `max_prompt`: tokens of a prompt that can be computed. vLLM
    ends a request at `max_model_len` (vllm-project/vllm@00024d31 `vllm/v1/core/sched/utils.py`,
    `check_stop`). A request does not wait for further predecessors that are left out. Raises
    UserError for times of arrival that are negative or nan, or too far apart.
    """
    times = np.frombuffer(workload.arrival)
    if len(times) and not (times.min() >= 0 and times.max() <= LONGEST):
        raise UserError(
            f"requests arrive {times.min():g} to {times.max():g} s after the first one, wanted 0 "
            f"to {LONGEST:g}: later times are no longer exact to a microsecond"
        )
    prompt = np.frombuffer(workload.prompt, np.int32).astype(np.int64)
    asked = np.frombuffer(workload.output, np.int32).astype(np.int64)
    max_output = max_model_len - prompt
    output = np.minimum(asked, max_output)
    never_fits = (prompt + output - 1 > kv_tokens) | (prompt > prefill_kv_tokens)
    reasons = ("", TOO_LONG, PROMPT_EXCEEDS_STEP, NEVER_FITS, EARLIER_TURN_REJECTED)
    reason = np.select([max_output < 1, prompt > max_prompt, never_fits], [1, 2, 3], 0)
    if workload.predecessor is not None and reason.any():
        for request, predecessor in enumerate(workload.predecessor):
            if predecessor >= 0 and reason[predecessor] and not reason[request]:
                reason[request] = reasons.index(EARLIER_TURN_REJECTED)
    kept = np.flatnonzero(reason == 0)
    rejected = Counter(workload.rejected)
    for number, count in enumerate(np.bincount(reason)[1:], 1):
        if count:
            rejected[reasons[number]] += int(count)
    shortened = int((asked > max_output)[kept].sum())
    accepted = replace(workload, output=array("i", output.astype(np.int32).tobytes()))
    if len(kept) < len(workload):
        accepted = _select(accepted, kept)
    return Accepted(accepted, dict(rejected), shortened)


def _select(workload: Workload, kept: Int) -> Workload:
    """Select requests by their indices, which ascend."""

    def column(values: array[Any]) -> array[Any]:
        return array(values.typecode, np.frombuffer(values, values.typecode)[kept].tobytes())

    index = np.full(len(workload) + 1, -1, np.int32)  # the last one is index[-1] = -1
    index[kept] = np.arange(len(kept))
    predecessor = None
    if workload.predecessor is not None:
        old = np.frombuffer(workload.predecessor, np.int32)[kept]
        predecessor = array("i", index[old].tobytes())
    further_predecessors = {
        int(index[request]): tuple(int(index[n]) for n in others if index[n] >= 0)
        for request, others in workload.further_predecessors.items()
        if index[request] >= 0
    }
    return replace(
        workload,
        arrival=column(workload.arrival),
        prompt=column(workload.prompt),
        output=column(workload.output),
        chains=None if workload.chains is None else [workload.chains[request] for request in kept],
        predecessor=predecessor,
        further_predecessors=further_predecessors,
        session=None if workload.session is None else column(workload.session),
        class_of=None if workload.class_of is None else column(workload.class_of),
    )


@dataclass(frozen=True, eq=False)
class Records:
    """Columns of events of each request (s since the run began); nan: it did not happen."""

    arrival: array[float]
    """Time at which the user sent it."""
    reached: array[float]
    """Time at which it entered an engine's queue, after HTTP and tokenizer."""
    scheduled: array[float]
    """Time at which an engine first computed a part of it."""
    first: array[float]
    """Time of its first token."""
    finish: array[float]
    engine: array[int]
    """Number of its engine, or -1."""
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

    def with_lower_bounds(self, prefilled: array[float], at: float) -> Records:
        """Records at time `at`, with lower bounds of first tokens that users have not seen.

        `prefilled`: times at which prompts were complete, nan before that. A first token that is
        noted no later, of a request that is not done, is not seen before `at`.
        """
        first, complete = np.frombuffer(self.first), np.frombuffer(prefilled)
        unseen = (first <= complete) & np.isnan(np.frombuffer(self.finish))
        later = np.where(unseen, np.maximum(first, at), first)
        return replace(self, first=array("d", later.tobytes()))
