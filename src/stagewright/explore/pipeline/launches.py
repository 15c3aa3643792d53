"""Steps whose kernels never wait for their launch, since the host is far enough ahead of them.

A step adds to the moment of its rank's kernels, and to that of its host. Where each step adds more
to the former, by `lead` seconds at least, the host is `lead` ahead of the kernels once a rank has
done its first step, and stays so. What begins h seconds after the host's moment at the earliest,
and k seconds after the kernels', does not wait for the host if h - k is at most `lead`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from stagewright.arrays import Float
from stagewright.explore.actions import GPU, HOST, StepKind
from stagewright.explore.pipeline.effects import Effect, Part

Effects: TypeAlias = "Mapping[tuple[StepKind, bool], Effect]"
"""Of the steps of an order; and whether a step does what happens once per step."""

_ROUNDING = 1e-9
"""Seconds by which a host is at least further ahead than it has to be: far more than what sums of
seconds in another order differ by."""


def without_launches(effects: Effects) -> Effects:
    """Effects without the host where no configuration's kernels wait for it.

    Those of a rank's first step stay as they are: it is the first forward of a stage, and does what
    happens once per step.
    """
    lead = _lead(effects.values())
    if lead is None or (lead < 0).any():
        return effects
    usual = {id(of): of for (_, once), of in effects.items() if not once}
    less = {key: _without_host(of, lead) for key, of in usual.items()}
    return {key: of if key[1] else less[id(of)] for key, of in effects.items()}


def _lead(effects: Iterable[Effect]) -> Float | None:
    """Seconds that every step adds to the moment of its kernels more than to that of its host, at
    least: [configurations]; None: a step's host waits for what its kernels do not wait for."""
    found: list[Float] = []
    for of in effects:
        kernels = _by_input(of.moments[GPU])
        if GPU not in kernels:
            return None
        host = _by_input(of.moments[HOST]) or {HOST: np.zeros_like(kernels[GPU])}
        for own, seconds in host.items():
            behind = kernels.get(GPU if own == HOST else own)
            if behind is None:
                return None
            found.append(behind - seconds)
    return np.minimum.reduce(found)


def _without_host(of: Effect, lead: Float) -> Effect:
    """An effect of a step that begins with its host so far ahead of the kernels before it."""
    known: dict[int, Part] = {}  # equal parts stay one object

    def less(part: Part) -> Part:
        return known.setdefault(id(part), _part_without_host(part, lead))

    kept = [part if nth == HOST else less(part) for nth, part in enumerate(of.moments)]
    return Effect((*kept,), tuple(less(part) for part in of.sent))


def _part_without_host(part: Part, lead: Float) -> Part:
    by = _by_input(part)
    if HOST not in by or GPU not in by or (by[HOST] + _ROUNDING > by[GPU] + lead).any():
        return part
    every = [(seconds, tuple(own for own in inputs if own != HOST)) for seconds, inputs in part]
    return tuple((seconds, inputs) for seconds, inputs in every if inputs)


def _by_input(part: Part) -> dict[int, Float]:
    return {own: seconds for seconds, inputs in part for own in inputs}
