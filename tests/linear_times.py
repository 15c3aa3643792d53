"""Step times that are linear in the sums of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.batch import UNLIMITED, DecodeRun


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """Step time linear in tokens, requests and cached keys (s).

    >>> _, seconds, growth = LinearTimes(0.005, per_key=1e-6).linear_run(2, 100)
    >>> round(seconds, 6), round(growth, 6)
    (0.0051, 2e-06)
    """

    base: float
    per_token: float = 0.0
    per_request: float = 0.0
    per_key: float = 0.0

    def linear_run(self, requests: int, keys: int) -> DecodeRun:
        """Run of any number of steps (`BatchTimes.linear_run`)."""
        seconds = self.base + (self.per_token + self.per_request) * requests + self.per_key * keys
        return DecodeRun(UNLIMITED, seconds, self.per_key * requests)

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Like `BatchTimes.step`; pairs cost nothing besides their tokens and keys."""
        of_tokens = self.base + self.per_token * tokens
        return of_tokens + self.per_request * requests + self.per_key * keys
