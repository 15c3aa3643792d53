"""At least what an action of a pipeline takes, whatever comes before it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.explore.actions import GPU, HOST, MESSAGE
from stagewright.explore.responses import SENT, seconds_behind
from stagewright.explore.shared.played import EqualRows


class LeastAction(NamedTuple):
    """At least what an action takes: seconds [combinations] each."""

    busy: Float
    """In which kernels run."""
    whole: Float
    """From the end of the kernels before it to the end of its own."""
    after: Float
    """From the message that it waits for to the end of its kernels."""
    passed: Float
    """From the message that it waits for to its own; of the first stage, to the end of kernels."""
    sent: Float
    """From the end of the kernels before it to its message."""
    launched: Float
    """In which the host launches it."""

    @classmethod
    def of(cls, rows: EqualRows, busy: Float) -> LeastAction:
        """What a response says (`responses.seconds_behind`)."""
        whole = np.maximum(busy, seconds_behind(rows, GPU, GPU))
        after: Float = np.maximum(seconds_behind(rows, GPU, MESSAGE), 0.0)
        sent: Float = np.maximum(seconds_behind(rows, SENT, GPU), 0.0)
        # The first stage waits for no message to begin, and makes none at the end.
        behind: Float = np.where(after > 0, after, sent)
        handed_on = seconds_behind(rows, SENT, MESSAGE)
        passed: Float = np.where(handed_on > 0, handed_on, behind)
        launched = np.maximum(seconds_behind(rows, HOST, HOST), 0.0)
        return cls(busy, whole, after, passed, sent, launched)
