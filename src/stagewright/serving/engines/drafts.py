"""Speculative decoding: how many of a step's drafts are right, drawn with a seed.

A step gives a request the tokens up to the first draft that is wrong, and one behind them: 1 to K +
1 tokens of K drafts. Their mean number is the *acceptance length*. Two models of it:

* a length, as engines force it for benchmarks (vLLM's `synthetic_acceptance_length`, SGLang's
  `SGLANG_SIMULATE_ACC_LEN`, TensorRT-LLM's `TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`): of length
  3.78, two drafts are always right and a third with probability 0.78, the least variance;
* a rate, the probability that a draft is right if those before it are (Leviathan et al., ICML 2023,
  arXiv 2211.17192, section 3.1): the length is (1 - a^(K + 1)) / (1 - a).

SemiAnalysisAI/InferenceX@843c6254 `golden_al_distribution/` has measured lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stagewright.errors import UserError

DRAWS = 1 << 14


@dataclass(frozen=True)
class Drafts:
    """Drafts of each request in a step, and how many tokens come of them."""

    number: int
    """Drafts."""
    right: tuple[float, ...]
    """By draft, the probability that all up to it are right."""
    slots: int
    """Places of the cache that a step has beyond the tokens computed before it."""
    seed: int = 0
    _made: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Draw the tokens of steps: as often as is probable, in any order."""
        made = [1] * DRAWS
        for share in self.right:
            for nth in range(round(share * DRAWS)):
                made[nth] += 1
        random.Random(self.seed).shuffle(made)
        object.__setattr__(self, "_made", made)

    @classmethod
    def of_length(cls, number: int, length: float, slots: int, seed: int = 0) -> Drafts:
        """With an acceptance length, and the least variance.

        >>> Drafts.of_length(4, 2.75, slots=5).right
        (1.0, 0.75, 0.0, 0.0)
        """
        if not 1 <= length <= number + 1:
            raise UserError(
                f"--acceptance-length is {length:g}, wanted 1 to {number + 1}: of "
                f"{number} drafts at most as many are right, and one token comes behind them"
            )
        return cls(
            number, tuple(min(max(length - 1 - n, 0.0), 1.0) for n in range(number)), slots, seed
        )

    @classmethod
    def of_rate(cls, number: int, rate: float, slots: int, seed: int = 0) -> Drafts:
        """With the probability that a draft is right if those before it are.

        >>> Drafts.of_rate(2, 0.5, slots=3).length
        1.75
        """
        return cls(number, tuple(rate ** (n + 1) for n in range(number)), slots, seed)

    @property
    def length(self) -> float:
        """Tokens of a step, in the mean."""
        return 1 + sum(self.right)

    @property
    def most(self) -> int:
        """Tokens of a step, at most."""
        return 1 + sum(share > 0 for share in self.right)

    def made(self, request: int, got: int) -> int:
        """Tokens of a step of a request that has got so many."""
        return self._made[(request * 7919 + got * 10007) % DRAWS]
