"""What a step makes of the moments that it starts from, part by part.

An `Effect` is what a schedule needs of the response of an action; a `Move` is what is left of it in
a step where some inputs are missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float
from stagewright.explore.actions import GPU, GRADIENT, HOST, MESSAGE, STREAMS
from stagewright.explore.responses import LiveResponse, Moments

Part: TypeAlias = "tuple[tuple[Float, tuple[int, ...]], ...]"
"""Seconds [configurations], and the inputs of a `Response` that they are behind; inputs without an
effect are left out."""


class Effect(NamedTuple):
    """A `Response` by its parts."""

    moments: tuple[Part, ...]
    """By moment of a rank; empty: it leaves that as it is."""
    sent: tuple[Part, ...]
    """By action of a step."""


def plain(seconds: Float) -> Effect:
    """A step that takes so long, and whose launches take no time."""
    ends = ((seconds, (GPU, MESSAGE, GRADIENT)),)
    return Effect((ends, *[()] * (MESSAGE - 1)), (ends, ends))


def effect(of: LiveResponse) -> Effect:
    """The parts of a response."""
    kernels = of.moments[GPU]
    gpu = _part(kernels)
    sent = [of.sent] if of.sent_gradient is None else [of.sent, of.sent_gradient]
    parts = tuple(gpu if _equal(each, kernels) else _part(each) for each in sent)
    host = _changed(_part(of.moments[HOST]), HOST)
    streams = [_changed(_part(of.late(each)), each) for each in STREAMS]
    return Effect((gpu, host, *streams), parts)


def _equal(some: Moments, others: Moments) -> bool:
    return all(
        one is other or (one is not None and other is not None and np.array_equal(one, other))
        for one, other in zip(some, others, strict=True)
    )


def _part(moments: Moments) -> Part:
    """The inputs that have an effect, those of equal seconds together."""
    found: list[tuple[Float, tuple[int, ...]]] = []
    for nth, column in enumerate(moments):
        if column is None:
            continue
        for place, (seconds, inputs) in enumerate(found):
            if seconds is column or np.array_equal(seconds, column):
                found[place] = seconds, (*inputs, nth)
                break
        else:
            found.append((column, (nth,)))
    return tuple(found)


def _changed(part: Part, own: int) -> Part:
    """A part, empty where it is its own input and no later."""
    same = len(part) == 1 and part[0][1] == (own,) and not part[0][0].any()
    return () if same else part


Inputs: TypeAlias = "tuple[int, ...]"
"""Numbers of inputs: those of a `Response`, and from `FIRST_JOINED` on those of a pattern."""
FIRST_JOINED = GRADIENT + 1


@dataclass(frozen=True)
class Pattern:
    """What a step makes, and which inputs that is behind."""

    joined: tuple[Inputs, ...]
    """Inputs of which the latest counts: they are further inputs."""
    parts: tuple[Inputs | None, ...]
    """Of each moment, and of what each of its actions hands on; None: as that of its kernels.
    Empty: the step leaves that as it is."""

    @cached_property
    def inputs(self) -> Sequence[int]:
        """Those of a `Response` that anything is behind."""
        every = {nth for part in (*self.joined, *self.parts) for nth in part or ()}
        return sorted(nth for nth in every if nth < FIRST_JOINED)

    @cached_property
    def begins(self) -> Sequence[int]:
        """Where each part begins among all, behind each other."""
        return [*itertools.accumulate((len(part or ()) for part in self.parts), initial=0)]


class Move(NamedTuple):
    """An effect of a step that some inputs come to."""

    pattern: Pattern
    seconds: Sequence[Float]
    """Behind the inputs of all parts: [configurations] each."""

    @classmethod
    def of(cls, effect: Effect, messages: tuple[bool, ...]) -> Self:
        """The effect in a step whose actions wait for messages or not, as `messages` says."""
        there = {*range(MESSAGE)}
        there |= {MESSAGE + nth for nth, comes in enumerate(messages) if comes}
        joined: list[Inputs] = []
        every: list[Float] = []

        def behind(part: Part) -> Inputs:
            found: list[int] = []
            for seconds, inputs in part:
                own = tuple(nth for nth in inputs if nth in there)
                if len(own) > 1 and own not in joined:
                    joined.append(own)
                if own:
                    found.append(FIRST_JOINED + joined.index(own) if len(own) > 1 else own[0])
                    every.append(seconds)
            return tuple(found)

        own = [behind(part) for part in effect.moments]
        sent = [None if part is effect.moments[GPU] else behind(part) for part in effect.sent]
        return cls(Pattern(tuple(joined), (*own, *sent)), every)
