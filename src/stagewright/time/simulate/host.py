"""Host of a rank: one thread that launches tasks in issue order, ahead of the GPU.

Launches take time and follow each other without a gap; a task starts once it is launched and all
its dependencies have ended. The host runs ahead of the GPU until it needs a result: it then waits
for the end of a task before it launches the next one.

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
"""Issue index before the first wait of the host."""


class HostWork(NamedTuple):
    """Launches of the host of a rank class, by row of its tasks."""

    seconds: Float  # of the launch
    waits: Bool  # the host waits for the end of the task before it launches the next one


class LastHostWait(NamedTuple):
    """Last task that the host waited for before each launch, by issue index."""

    issue_index: Int  # of the task, `FROM_START` for none
    end: Int  # of the task: ticks


@dataclass(frozen=True, eq=False)
class HostThread:
    """Launches of a rank class; arrays are by issue index, times in ticks."""

    cost: Int
    waits: Bool

    @classmethod
    def of(cls, work: HostWork, rows: Int, tick: float) -> HostThread:
        """Launches of rows in issue order; `tick` in seconds."""
        return cls(np.rint(work.seconds[rows] / tick).astype(np.int64), work.waits[rows])

    @cached_property
    def total(self) -> Int:
        """Ticks of all launches up to and including each task's."""
        return self.cost.cumsum()

    def launched(self, ends: Int) -> Int:
        """End of each launch, given the ends of all tasks: ticks, [issue indices, lanes]."""
        total = self.total[:, None]
        return total + self._latest_wait(ends - total)[0]

    def last_wait(self, ends: Int) -> LastHostWait:
        """Waits after which the host launches without a pause; `ends` by issue index."""
        latest, issue_index = self._latest_wait((ends - self.total)[:, None])
        index = issue_index[:, 0]
        end = np.where(index == FROM_START, 0, latest[:, 0] + self.total[index])
        return LastHostWait(index, end)

    def _latest_wait(self, delay: Int) -> tuple[Int, Int]:
        """Running maximum of 0 and `delay` of earlier waits, and the issue index it is from."""
        waited = np.zeros_like(delay)
        waited[1:] = np.where(self.waits[:-1, None], delay[:-1], 0)
        latest = np.maximum.accumulate(np.maximum(waited, 0), axis=0)
        increases = np.diff(latest, axis=0, prepend=0) > 0
        index = np.where(increases, np.arange(-1, len(delay) - 1)[:, None], FROM_START)
        return latest, np.maximum.accumulate(index, axis=0)
