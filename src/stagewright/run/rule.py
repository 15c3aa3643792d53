"""A rule of runs: a requirement in words, the settings that decide it, and its errors.

Errors are a generator: each `yield`, inside an `if`, is a sentence that says what is wrong and what
to change. The first one is raised, so that later conditions may rely on earlier ones.

>>> @rule("tp is even", "tp")
... def even(run: Run, model: ModelConfig) -> Errors:
...     if run.tp % 2:
...         yield f"tp={run.tp} is odd; {nearest(run.tp, 2)}"
>>> from stagewright.model.presets import PRESETS
>>> even.check(Run(model="gpt2", tp=3), PRESETS["gpt2"])
Traceback (most recent call last):
stagewright.errors.UserError: tp=3 is odd; use 2 or 4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stagewright.errors import UserError, divisors
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

MOST_FLOPS = 2**56
"""Limit of one kernel: sums over a step then stay within 64 bits."""

ALL: tuple[str, ...] = ("*",)
"""Marks a rule that may read any setting."""

EACH: tuple[str, ...] = ("+",)
"""Marks a rule that looks at each setting by itself."""

Errors = Iterator[str]


@dataclass(frozen=True, slots=True)
class RunRule:
    """A requirement of runs: a search checks it once for all runs with the same settings there."""

    name: str
    """The requirement in words."""
    reads: tuple[str, ...]
    """The settings of a run that decide it, beside the model and the mode; or `ALL`, or `EACH`."""
    errors: Callable[[Run, ModelConfig], Errors]

    def check(self, run: Run, model: ModelConfig) -> None:
        """Raise the first of the errors of a run as a UserError."""
        for error in self.errors(run, model):
            raise UserError(error)


def rule(name: str, *reads: str) -> Callable[[Callable[[Run, ModelConfig], Errors]], RunRule]:
    """Make a rule of a generator of errors."""
    return lambda errors: RunRule(name, reads, errors)


def not_divided(
    name: str, degree: int, size: int, of: str, fit: int | None = None, end: str = ""
) -> Errors:
    """Error of a degree that does not divide a size; `fit` has the divisors to propose.

    >>> list(not_divided("tp", 3, 8, "heads of toy")), list(not_divided("tp", 2, 8, "heads"))
    (['tp=3 does not divide the 8 heads of toy; use 1, 2, 4 or 8'], [])
    """
    if size % degree:
        use = divisors(size if fit is None else fit)
        yield f"{name}={degree} does not divide the {size} {of}; use {use}{end}"


def nearest(number: int, step: int) -> str:
    """The multiples of a step around a number, as advice.

    >>> nearest(1000, 6), nearest(1, 6)
    ('use 996 or 1002', 'use 6')
    """
    below = number // step * step
    return f"use {below} or {below + step}" if below else f"use {step}"
