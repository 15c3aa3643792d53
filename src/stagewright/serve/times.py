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

    def decode(self, requests: int, keys: int) -> float:
        """A step in which each request gets a token."""
        ...

    def decode_run(self, requests: int, keys: int, steps: int) -> float:
        """The sum of `decode(requests, keys + n * requests)` for n from 0 to `steps` - 1."""
        ...

    def steps_within(self, requests: int, keys: int, seconds: float, most: int) -> int:
        """The least n for which `decode_run(requests, keys, n) >= seconds`, at most `most`."""
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


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """A step takes `base` seconds, and so many more for each token, request and cached key.

    >>> of = LinearTimes(0.005, per_key=1e-9)
    >>> round(of.decode_run(2, 100, 3) - sum(of.decode(2, 100 + 2 * n) for n in range(3)), 15)
    0.0
    >>> of.steps_within(2, 100, 0.012, most=9)
    3
    """

    base: float
    per_token: float = 0.0
    per_request: float = 0.0
    per_key: float = 0.0

    def decode(self, requests: int, keys: int) -> float:
        """A step in which each request gets a token."""
        return self.base + (self.per_token + self.per_request) * requests + self.per_key * keys

    def decode_run(self, requests: int, keys: int, steps: int) -> float:
        """The sum of steps, in closed form: their times are an arithmetic series."""
        grows = self.per_key * requests
        return steps * (self.decode(requests, keys) + grows * (steps - 1) / 2)

    def steps_within(self, requests: int, keys: int, seconds: float, most: int) -> int:
        """The least number of steps that take as long, by the series' quadratic equation."""
        first, grows = self.decode(requests, keys), self.per_key * requests
        linear = first - grows / 2
        n = math.ceil(2 * seconds / (linear + math.sqrt(linear * linear + 2 * grows * seconds)))
        while n > 0 and self.decode_run(requests, keys, n - 1) >= seconds:
            n -= 1
        while n < most and self.decode_run(requests, keys, n) < seconds:
            n += 1
        return min(n, most)

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
