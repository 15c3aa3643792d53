"""How long a step of an engine takes: what the event loop asks, and a linear answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class BatchTimes(Protocol):
    """Seconds of the steps of one engine, by sums over the requests of its batch.

    `keys` are tokens in the cache after the step, summed over the requests: context and new ones.
    `pairs` are those of a query and a key: `new * context + new * (new + 1) / 2` of each request.
    """

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Seconds of the next step if each request gets a token in it and in those that follow.

        Returns also by how much each further step is longer, and for how many steps that holds, the
        next one included: at least 1.
        """
        ...

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """A step of any requests, of which `decoding` get a token beside chunks of prompts.

        `decoding_keys` are those of `keys` that belong to these.
        """
        ...


class DecodeRuns:
    """Runs of decode steps of the same requests, of whose times pieces are arithmetic series."""

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """As `BatchTimes.line`."""
        raise NotImplementedError

    def decode(self, requests: int, keys: int) -> float:
        """Seconds of a step in which so many requests get a token, and their drafts.

        keys: in the cache after the step, summed over the requests.
        """
        return self.line(requests, keys)[0]

    def decode_run(self, requests: int, keys: int, steps: int) -> float:
        """Seconds of several decode steps of the same requests."""
        total, left = 0.0, steps
        while left > 0:
            first, grows, alike = self.line(requests, keys)
            count = min(left, alike)
            total += series(first, grows, count)
            keys += requests * count
            left -= count
        return total

    def steps_within(self, requests: int, keys: int, seconds: float, most: int) -> int:
        """The fewest decode steps that take at least so many seconds, or `most`."""
        done, left = 0, seconds
        while done < most and left > 0:
            first, grows, alike = self.line(requests, keys)
            count = min(most - done, alike)
            whole = series(first, grows, count)
            if whole >= left:
                return done + terms_within(first, grows, left, count)
            done, left, keys = done + count, left - whole, keys + requests * count
        return done


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """A step takes `base` seconds, and so many more for each token, request and cached key.

    >>> first, grows, _ = LinearTimes(0.005, per_key=1e-6).line(2, 100)
    >>> round(first, 6), round(grows, 6)
    (0.0051, 2e-06)
    """

    base: float
    per_token: float = 0.0
    per_request: float = 0.0
    per_key: float = 0.0

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Steps in which each request gets a token: their times are an arithmetic series."""
        first = self.base + (self.per_token + self.per_request) * requests + self.per_key * keys
        return first, self.per_key * requests, 1 << 60

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """A step of any requests; pairs cost nothing besides their tokens and keys."""
        alone = self.base + self.per_token * tokens
        return alone + self.per_request * requests + self.per_key * keys


def series(first: float, grows: float, steps: int) -> float:
    """The sum of an arithmetic series of so many terms."""
    return steps * (first + grows * (steps - 1) * 0.5)


def terms_within(first: float, grows: float, total: float, most: int) -> int:
    """The least number of terms of a series, at least 1, whose sum is `total` or more; or `most`.

    >>> [terms_within(2.0, 1.0, total, most=9) for total in (5.0, 5.1, 99.0)]
    [2, 3, 9]
    """
    if grows > 0.0:
        half = first - grows * 0.5
        guess = int(2.0 * total / (half + math.sqrt(half * half + 2.0 * grows * total)))
    else:
        guess = int(total / first)
    steps = guess if 1 < guess < most else 1 if guess < most else most
    grows *= 0.5
    while steps > 1 and (steps - 1) * (first + grows * (steps - 2)) >= total:
        steps -= 1
    while steps < most and steps * (first + grows * (steps - 1)) < total:
        steps += 1
    return steps
