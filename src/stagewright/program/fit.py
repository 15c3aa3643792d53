"""Whether a step fits into the memory of a device: what the fullest rank holds, and the room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stagewright.program.columns import RankClass

NEARLY_FULL = 0.9
"""Share of a device's memory that tensors fill; context, workspaces and fragmentation add to it."""


class Held(NamedTuple):
    """What the ranks of a class hold at their peak, in bytes by category.

    The categories are those of tensors and, with `memory_allowance`, `allowance`.
    """

    of: RankClass
    by_category: Mapping[str, int]
    seconds: float | None = None
    """When, in a simulated step; None where the same is held all the time."""

    @property
    def size(self) -> int:
        """Bytes of all categories together."""
        return sum(self.by_category.values())


class Fit(NamedTuple):
    """The memory of a device beside what the fullest rank holds."""

    device_memory: int
    """Bytes that a rank may use."""
    fullest: Held
    over: int
    """Kinds of ranks that hold more than the device does."""
    kinds: int

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return not self.over

    @property
    def peak(self) -> int:
        """The most bytes that any rank holds: its peak of tensors and, where set, its allowance."""
        return self.fullest.size

    def entry(self) -> dict[str, object]:
        """The same for JSON; bytes, and seconds where a simulated step has a moment of its peak."""
        moment = {} if self.fullest.seconds is None else {"seconds": self.fullest.seconds}
        return {
            "fits": self.fits,
            "device_memory": self.device_memory,
            "peak": self.peak,
            "pipeline_rank": self.fullest.of.pipeline_rank,
            **moment,
            "by_category": dict(self.fullest.by_category),
        }


def fit_of(held: Iterable[Held], device_memory: int) -> Fit:
    """Compare what each kind of ranks holds with the memory of a device."""
    every = list(held)
    over = sum(each.size > device_memory for each in every)
    return Fit(device_memory, max(every, key=lambda each: each.size), over, len(every))


def held_at_peak(of: RankClass) -> Held:
    """What a class holds at the peak of its program, in the order of issue; allowance included."""
    return Held(of, {k: int(v) for k, v in of.memory.items() if k != "peak" and v})
