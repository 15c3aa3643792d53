"""Actions such as `2F0`, and orders: a list of actions for each pipeline rank.

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
    """Forward or backward (`kind`) of one virtual stage for one microbatch.

    The kinds are `F` forward, `B` full backward, `I` the half of backward that makes the gradient
    of the stage's input, and `W` the half that makes the gradients of its weights.
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        """Format as `2F0`, which `parse` reads."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text that `str` prints; raises UserError for any other text.

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
    """Forward and backward of two microbatches at once (DeepSeek-V3, section 3.2.1).

    Each computes while the other communicates: their kernels take turns on the rank.
    """

    forward: Action
    backward: Action

    def __repr__(self) -> str:
        """Format as in torch's files: `(0F3;3B1)OVERLAP_F_B`."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleStep = Action | Overlap

Order = tuple[tuple[ScheduleStep, ...], ...]
"""Steps of each pipeline rank, in order; the stages of a rank follow from it."""


def parts(step: ScheduleStep) -> tuple[Action, ...]:
    """Actions of a step."""
    return (step.forward, step.backward) if isinstance(step, Overlap) else (step,)


def flat(steps: Iterable[ScheduleStep]) -> list[Action]:
    """Actions of all steps; of an overlap, the forward first.

    >>> f0, f1, b0 = map(Action.parse, ("0F0", "0F1", "0B0"))
    >>> flat([f0, Overlap(f1, b0)])
    [0F0, 0F1, 0B0]
    """
    return [action for step in steps for action in parts(step)]


def shared_stages(order: Order) -> frozenset[int]:
    """Stages that every rank holds a part of: all ranks run their actions at the same time.

    >>> f0 = Action.parse("0F0")
    >>> shared_stages(((f0, Action.parse("1F0")), (f0, Action.parse("2F0"))))
    frozenset({0})
    """
    of_earlier_ranks: set[Action] = set()
    shared: set[int] = set()
    for steps in order:
        actions = {*flat(steps)}
        shared |= {a.stage for a in actions & of_earlier_ranks}
        of_earlier_ranks |= actions
    return frozenset(shared)


def stage_count(order: Order) -> int:
    """Number of virtual stages of an order: one more than the largest stage."""
    return 1 + max((a.stage for steps in order for a in flat(steps)), default=-1)


def needs(
    action: Action, stages: int, halves: Container[tuple[int, int]] | None = None
) -> list[Action]:
    """Actions, on this or another rank, that must have ended before `action` can start.

    Where an order mixes full backwards with halves, the gradient that a backward waits for comes
    from either: pass `halved(order)` as `halves`. Without it, the other stage is assumed to split
    its backward if this one does.

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
    """Pairs (stage, microbatch) whose backward is split into halves."""
    return frozenset((a.stage, a.microbatch) for s in order for a in flat(s) if a.kind == "I")
