"""Requests that are drawn: when they arrive, how long they are, and what they have in common.

All draws are Python's Mersenne Twister, whose `random()` is the same for a seed in every version:
the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal

from stagewright.errors import UserError
from stagewright.run.sections.declare import LARGEST
from stagewright.serving.workload import Chain, Workload, with_concurrency

MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and outputs: uniform in [ratio, 1] of the longest, as InferenceX's are."""

    isl: int
    osl: int
    range_ratio: float = 1.0
    """InferenceX: 0.8 (SemiAnalysisAI/InferenceX, `random_range_ratio`); 1: all are as long."""

    def __post_init__(self) -> None:
        """Refuse what is no length."""
        for name, value in (("--isl", self.isl), ("--osl", self.osl)):
            if not 1 <= value < LARGEST:
                raise UserError(f"{name} is {value}, wanted 1 to {LARGEST - 1} tokens")
        if not 0 < self.range_ratio <= 1:
            raise UserError(f"--range-ratio is {self.range_ratio}, wanted more than 0, at most 1")

    def draw(self, random: Random) -> tuple[int, int]:
        """Tokens of a prompt and of its output."""
        return self._one(self.isl, random), self._one(self.osl, random)

    def _one(self, longest: int, random: Random) -> int:
        if self.range_ratio == 1:
            return longest
        shortest = max(1, math.floor(longest * self.range_ratio))
        return shortest + int(random.random() * (longest - shortest + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrival process of an open loop."""

    rate: float
    """Requests per second; infinite: all arrive at once."""
    process: Literal["poisson", "gamma", "constant"] = "poisson"
    burstiness: float = 1.0
    """The shape of gamma's gaps, vLLM's word (`vllm bench serve --burstiness`): below 1, requests
    come in bursts; 1 is Poisson."""
    burst_size: int = 1
    """Requests that arrive at one moment; the moments are that much rarer."""

    def __post_init__(self) -> None:
        """Refuse rates and shapes that are none."""
        if not self.rate > 0:
            raise UserError(f"--rate is {self.rate:g}, wanted requests per second, more than 0")
        if not (0 < self.burstiness < math.inf):
            raise UserError(
                f"--burstiness is {self.burstiness:g}, wanted more than 0; 1 is Poisson"
            )
        if self.burst_size < 1:
            raise UserError(f"--burst-size is {self.burst_size}, wanted at least 1")

    def describe(self) -> str:
        """The process and its rate in words."""
        if self.rate == math.inf:
            return "all requests at once"
        return f"{self.process}, {self.rate:g} requests/s"

    def gap(self, random: Random) -> float:
        """Seconds between two moments of arrival."""
        mean = self.burst_size / self.rate
        if not mean:
            return 0.0
        match self.process:
            case "constant":
                return mean
            case "gamma":
                return random.gammavariate(self.burstiness, mean / self.burstiness)
            case _:
                return -math.log(1.0 - random.random()) * mean


def check_count(requests: int) -> int:
    """A number of requests; raises UserError for one that nobody can wait for."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise UserError(f"--num-requests is {requests}, wanted 1 to {MAX_REQUESTS}")
    return requests


def open_loop(requests: int, arrivals: Arrivals, lengths: Lengths, seed: int = 0) -> Workload:
    """Requests that arrive whatever the engines do; no two have a prefix in common.

    >>> work = open_loop(3, Arrivals(rate=10), Lengths(isl=1024, osl=256), seed=7)
    >>> [round(t, 4) for t in work.arrival], list(work.prompt)
    ([0.0, 0.0391, 0.0555], [1024, 1024, 1024])
    """
    random = Random(seed)
    at, when = 0.0, array("d")
    prompt, output = array("i"), array("i")
    for nth in range(check_count(requests)):
        if nth and nth % arrivals.burst_size == 0:
            at += arrivals.gap(random)
        when.append(at)
        isl, osl = lengths.draw(random)
        prompt.append(isl)
        output.append(osl)
    return Workload(arrivals.describe(), when, prompt, output)


def closed_loop(requests: int, concurrency: int, lengths: Lengths, seed: int = 0) -> Workload:
    """Closed loop of users, each with one request at a time (InferenceX's client)."""
    return with_concurrency(
        open_loop(requests, Arrivals(rate=math.inf), lengths, seed), concurrency
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Sessions of several turns: each prompt is all that was said before, and something new."""

    turns: int
    think_time: float = 0.0
    """Mean seconds between an answer and the next question (exponential)."""
    system_prompt: int = 0
    """Tokens that all sessions begin with."""


def sessions(
    count: int, arrivals: Arrivals, lengths: Lengths, conversations: Conversations, seed: int = 0
) -> Workload:
    """`count` sessions; isl is the tokens of a question, osl those of an answer.

    >>> work = sessions(1, Arrivals(rate=1), Lengths(isl=10, osl=5), Conversations(turns=2))
    >>> list(work.prompt), list(work.predecessor)
    ([10, 25], [-1, 0])
    """
    turns, think_time = conversations.turns, conversations.think_time
    system_prompt = conversations.system_prompt
    if turns < 1 or not 0 <= think_time < math.inf or system_prompt < 0:
        raise UserError("--turns, --think-time and --system-prompt: wanted 1, 0 and 0 or more")
    random, begin = Random(seed), 0.0
    when, prompt, output = array("d"), array("i"), array("i")
    predecessor, session_of, chains = array("i"), array("i"), list[Chain]()
    for session in range(check_count(count * turns) // turns):
        begin += arrivals.gap(random) if session and session % arrivals.burst_size == 0 else 0.0
        segments, past = (0, 1 + session), system_prompt
        for turn in range(turns):
            isl, osl = lengths.draw(random)
            think = 0.0 if not turn else -math.log(1.0 - random.random()) * think_time
            when.append(think if turn else begin)
            prompt.append(min(past + isl, LARGEST - 1))
            output.append(osl)
            predecessor.append(len(predecessor) - 1 if turn else -1)
            session_of.append(session)
            past = min(past + isl + osl, LARGEST - 1)
            chains.append((segments, (system_prompt, past)))
    name = f"{count} sessions of {turns} turns"
    return Workload(name, when, prompt, output, chains, predecessor, session_of)


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Stage of load: requests at a mean rate."""

    rate: float
    duration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompts of inference-perf's `shared_prefix`: groups, each with a system prompt of its own."""

    num_unique_system_prompts: int
    num_users_per_system_prompt: int
    system_prompt_len: int
    question_len: int
    output_len: int


def load_in_stages(stages: tuple[LoadStage, ...], prefix: SharedPrefix, seed: int = 0) -> Workload:
    """Requests of inference-perf (kubernetes-sigs/inference-perf): the users' prompts in turn.

    Each user has one question; requests go through all users in a shuffled order, again and again
    (`SharedPrefixDataGenerator`). So a prompt that comes again is cached, if it has been kept.

    Gaps are exponential and scaled to the duration of a stage: so are those of its load type
    `constant` (`ConstantLoadTimer` of inference_perf/loadgen/load_timer.py@fd04341, and since),
    whose rate alone is constant.
    """
    random = Random(seed)
    users = [
        (group, user)
        for group in range(prefix.num_unique_system_prompts)
        for user in range(prefix.num_users_per_system_prompt)
    ]
    random.shuffle(users)
    head, whole = prefix.system_prompt_len, prefix.system_prompt_len + prefix.question_len
    chains: list[Chain] = [
        ((group, len(users) + nth), (head, whole)) for nth, (group, _) in enumerate(users)
    ]
    when, begin, begins = array("d"), 0.0, list[float]()
    for stage in stages:
        begins.append(begin)
        count = round(stage.rate * stage.duration)
        gaps = [-math.log(1.0 - random.random()) for _ in range(count)]
        scale = stage.duration / math.fsum(gaps) if count else 0.0
        when.extend(begin + scale * at for at in accumulate(gaps))
        begin += stage.duration
    count = check_count(len(when))
    return Workload(
        "stages of " + ", ".join(f"{s.rate:g}" for s in stages) + " requests/s",
        when,
        array("i", [whole]) * count,
        array("i", [prefix.output_len]) * count,
        [chains[nth % len(users)] for nth in range(count)],
        session=array("i", (nth % len(users) for nth in range(count))),
        stages=tuple(begins),
    )
