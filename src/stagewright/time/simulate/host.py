"""The host of a rank: one thread that launches its tasks in issue order, ahead of the GPU.

A launch takes the host some time, and the next one begins when it is done; a task starts once it is
launched and all that it depends on has ended. The host runs ahead of the GPU until it has to
know a result: it then waits for the end of a task before it launches the next one.

>>> thread = HostThread(np.array([2, 2, 2]), np.array([False, True, False]))
>>> thread.launched(np.array([[12], [22], [34]])).ravel().tolist()
[2, 4, 24]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int

FROM_START = -1
"""Stands for the start of the step, where the host has waited for no task yet."""


class HostWork(NamedTuple):
    """What the host of a rank class does, by row of its tasks."""

    seconds: Float  # that the launch of a task takes
    waits: Bool  # the host waits for the end of the task before it launches the next one


class Since(NamedTuple):
    """Since when the host has launched without waiting, by place."""

    place: Int  # the task that the host waited for last, `FROM_START` for none
    end: Int  # when that task ended: ticks


@dataclass(frozen=True, eq=False)
class HostThread:
    """The launches of a rank class; arrays are by place in issue order, times in ticks."""

    cost: Int
    waits: Bool

    @classmethod
    def of(cls, work: HostWork, rows: Int, tick: float) -> HostThread:
        """The launches of rows in issue order; `tick` in seconds."""
        return cls(np.rint(work.seconds[rows] / tick).astype(np.int64), work.waits[rows])

    @cached_property
    def total(self) -> Int:
        """Ticks of all launches up to each place, its own included."""
        return self.cost.cumsum()

    def launched(self, ends: Int) -> Int:
        """When each place has been launched, given the ends of all: ticks, (places, lanes)."""
        total = self.total[:, None]
        return total + self._latest(ends - total)[0]

    def since(self, ends: Int) -> Since:
        """The waits after which the host launches without a pause; `ends` by place."""
        latest, place = self._latest((ends - self.total)[:, None])
        found = place[:, 0]
        end = np.where(found == FROM_START, 0, latest[:, 0] + self.total[found])
        return Since(found, end)

    def _latest(self, ahead: Int) -> tuple[Int, Int]:
        """By place the largest of 0 and `ahead` of the waits before it, and the place of that."""
        waited = np.zeros_like(ahead)
        waited[1:] = np.where(self.waits[:-1, None], ahead[:-1], 0)
        latest = np.maximum.accumulate(np.maximum(waited, 0), axis=0)
        later = np.diff(latest, axis=0, prepend=0) > 0
        place = np.where(later, np.arange(-1, len(ahead) - 1)[:, None], FROM_START)
        return latest, np.maximum.accumulate(place, axis=0)
