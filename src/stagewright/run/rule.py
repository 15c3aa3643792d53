"""A check of a run as a row: when a run is refused, and what is said then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stagewright.errors import UserError, divisors
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

MOST_FLOPS = 2**56
"""Limit of one kernel: sums over a step then stay within 64 bits."""

Facts = Callable[[Run, ModelConfig], Mapping[str, object]]


def _nothing(run: Run, model: ModelConfig) -> Mapping[str, object]:
    return {}


def _always(run: Run, model: ModelConfig) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Refuse:
    """Runs of a kind are refused."""

    when: Callable[[Run, ModelConfig], object]
    why: str
    """A format string over `run`, `model` and the names of `facts`."""
    facts: Facts = _nothing

    def check(self, run: Run, model: ModelConfig) -> None:
        """Raise a UserError if the run is of that kind."""
        if self.when(run, model):
            raise UserError(self.why.format(run=run, model=model, **self.facts(run, model)))


@dataclass(frozen=True, slots=True)
class Divide:
    """A degree must divide a size of the model."""

    degree: str
    """A setting by name."""
    size: Callable[[ModelConfig], int]
    of: str
    """Unit that the size counts: a format string over `model`."""
    when: Callable[[Run, ModelConfig], object] = _always
    fit: Callable[[ModelConfig], int] | None = None
    """A number whose divisors are proposed. None: the size."""

    def check(self, run: Run, model: ModelConfig) -> None:
        """Raise a UserError with the degrees that fit."""
        if not self.when(run, model):
            return
        degree, size = getattr(run, self.degree), self.size(model)
        fit = self.fit(model) if self.fit else size
        require_divides(self.degree, degree, size, self.of.format(model=model), fit)


ALL: tuple[str, ...] = ("*",)
"""Marks a check that may read any setting."""

EACH: tuple[str, ...] = ("+",)
"""Marks a check that looks at each setting by itself."""


@dataclass(frozen=True, slots=True)
class RunCheck:
    """A check of a run and the settings that decide it: a search makes it once for all runs that
    have the same values there."""

    name: str
    """Requirement in words."""
    reads: tuple[str, ...]
    """The settings of a run that decide it, beside the model and the mode; or `ALL`, or `EACH`."""
    check: Callable[[Run, ModelConfig], None]
    """Raises a UserError that says what to change."""


def require_divides(
    name: str, degree: int, size: int, of: str, fit: int | None = None, end: str = ""
) -> None:
    """Raise a UserError unless the degree divides the size; `fit` has the divisors to propose.

    >>> require_divides("tp", 3, 8, "heads of toy")
    Traceback (most recent call last):
    stagewright.errors.UserError: tp=3 does not divide the 8 heads of toy; use 1, 2, 4 or 8
    """
    if size % degree:
        use = divisors(size if fit is None else fit)
        raise UserError(f"{name}={degree} does not divide the {size} {of}; use {use}{end}")


def apply(rows: Iterable[Refuse | Divide], run: Run, model: ModelConfig) -> None:
    """Check all rows in order."""
    for row in rows:
        row.check(run, model)


def nearest(number: int, step: int) -> str:
    """The multiples of a step around a number, as advice.

    >>> nearest(1000, 6), nearest(1, 6)
    ('use 996 or 1002', 'use 6')
    """
    below = number // step * step
    return f"use {below} or {below + step}" if below else f"use {step}"
