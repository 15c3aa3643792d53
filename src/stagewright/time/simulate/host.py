"""Host of a rank: one thread that launches tasks in issue order, ahead of the GPU.

Launches take time and follow each other without a gap; a task starts once it is launched and all
its dependencies have ended. The host runs ahead of the GPU until it needs a result: it then waits
for the end of a task before it launches the next one.

>>> waits = np.array([False, True, False])
>>> launched, last_wait = launch_times(np.array([2, 2, 2]), waits, np.array([12, 22, 34]))
>>> launched.tolist(), last_wait.issue_index.tolist(), last_wait.end.tolist()
([2, 4, 24], [-1, -1, 1], [0, 0, 22])
"""

from __future__ import annotations

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


def launch_times(cost: Int, waits: Bool, ends: Int) -> tuple[Int, LastHostWait]:
    """End of each launch, and the last wait before it.

    Arrays are by issue index, times in ticks. `ends`: of the tasks that are launched.
    """
    total = cost.cumsum()
    delay = np.zeros_like(ends)
    delay[1:] = np.where(waits[:-1], ends[:-1] - total[:-1], 0)
    latest = np.maximum.accumulate(np.maximum(delay, 0))
    increases = np.diff(latest, prepend=0) > 0
    index = np.where(increases, np.arange(-1, len(ends) - 1), FROM_START)
    index = np.maximum.accumulate(index)
    end = np.where(index == FROM_START, 0, latest + total[index])
    return total + latest, LastHostWait(index, end)
