"""A pipeline schedule is, per pipeline rank, an ordered list of actions such as `2F0`: an `Order`.

Idle slots, sends and receives are not stored: all three follow from what an action needs.

>>> order = ((Action.parse("0F0"), Action.parse("0B0")), (Action.parse("1F0"), Action.parse("1B0")))
>>> needs(order[0][-1], stages=2)
[0F0, 1B0]
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import NamedTuple

from stagewright.errors import UserError

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time slots of an action in pictures and bubble fractions: a backward costs two forwards."""

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """One unit of work: what is done (`kind`), for which virtual stage and microbatch.

    The kinds are `F` forward, `B` full backward, `I` the half of backward that makes the gradient
    of the stage's input, and `W` the half that makes the gradients of its weights.
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        """The form `2F0`, which `parse` reads."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from the text that `str` prints; any other text is a UserError.

        >>> Action.parse("2F0").stage
        2
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise UserError(
                f"{text!r} is not a pipeline action; wanted stage, kind (F, B, I or W) and "
                "microbatch, such as 2F0; correct it"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))


class Overlap(NamedTuple):
    """A forward and a backward of two microbatches that run at once (DeepSeek-V3, section 3.2.1).

    Each computes while the other communicates: their kernels take turns on the rank.
    """

    forward: Action
    backward: Action

    def __repr__(self) -> str:
        """As in torch's files: `(0F3;3B1)OVERLAP_F_B`."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleStep = Action | Overlap

Order = tuple[tuple[ScheduleStep, ...], ...]
"""What each pipeline rank does, in order. Which stages a rank holds follows from it."""


def parts(step: ScheduleStep) -> tuple[Action, ...]:
    """The actions of a step."""
    return (step.forward, step.backward) if isinstance(step, Overlap) else (step,)


def flat(steps: Iterable[ScheduleStep]) -> list[Action]:
    """The actions of all steps, those of an overlap forward first.

    >>> f0, f1, b0 = map(Action.parse, ("0F0", "0F1", "0B0"))
    >>> flat([f0, Overlap(f1, b0)])
    [0F0, 0F1, 0B0]
    """
    return [action for step in steps for action in parts(step)]


def shared_stages(order: Order) -> frozenset[int]:
    """The stages that every rank holds a part of: all ranks run their actions, at one time.

    >>> f0 = Action.parse("0F0")
    >>> shared_stages(((f0, Action.parse("1F0")), (f0, Action.parse("2F0"))))
    frozenset({0})
    """
    met: set[Action] = set()
    shared: set[int] = set()
    for steps in order:
        mine = {*flat(steps)}
        shared |= {a.stage for a in mine & met}
        met |= mine
    return frozenset(shared)


def stage_count(order: Order) -> int:
    """How many virtual stages an order has: one more than the largest stage number."""
    return 1 + max((a.stage for steps in order for a in flat(steps)), default=-1)


def needs(
    action: Action, stages: int, halves: Container[tuple[int, int]] | None = None
) -> list[Action]:
    """What must have ended, here or on another rank, before `action` can start.

    Where an order mixes full backwards with halves, the gradient that a backward waits for comes
    from either: pass `halved(order)` to get the one that is there. Without it, the other stage is
    taken to do as this one does.

    >>> needs(Action.parse("1F3"), stages=4), needs(Action.parse("1B3"), stages=4)
    ([0F3], [1F3, 2B3])
    >>> needs(Action.parse("1B3"), 4, halves={(2, 3)}), needs(Action.parse("1W3"), 4)
    ([1F3, 2I3], [1I3])
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    forward = Action(stage, "F", microbatch)
    if stage == stages - 1:
        return [forward]
    if halves is not None:
        kind = "I" if (stage + 1, microbatch) in halves else "B"
    return [forward, Action(stage + 1, kind, microbatch)]


def halved(order: Order) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs whose backward is done in halves."""
    return frozenset((a.stage, a.microbatch) for s in order for a in flat(s) if a.kind == "I")
