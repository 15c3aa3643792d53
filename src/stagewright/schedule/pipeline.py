"""What a pipeline is, whatever the number of its microbatches."""

from __future__ import annotations

from typing import NamedTuple

from stagewright.schedule.actions import Order
from stagewright.schedule.schedules import SCHEDULES, known_order


class Pipeline(NamedTuple):
    """A schedule on a number of ranks, whatever the number of microbatches and the stages."""

    schedule: str
    pp: int
    vpp: int = 1
    group: int | None = None
    """Microbatches that pass through the chunks of a rank together; None: the schedule says."""

    def order(self, microbatches: int) -> Order:
        """What each rank does with so many microbatches."""
        return known_order(self.schedule, self.pp, microbatches, self.vpp, self.group)

    def enough(self, microbatches: int) -> int:
        """Of so many microbatches those after which no more of them are in flight, in a schedule
        that alternates.

        >>> Pipeline("1f1b", 2).enough(100), Pipeline("gpipe", 2).enough(100)
        (8, 100)
        """
        of = SCHEDULES.get(self.schedule)
        if of is None or of.forwards_first:
            return microbatches
        alike = self.group or (2 * self.pp if of.pairs_ranks else self.pp)
        # Rounds: more chunks fill up in no more.
        most = max(2 * (min(self.vpp, 2) + 1), of.fills + 2)
        return min(microbatches, most * (self.group or self.pp) + microbatches % alike)
