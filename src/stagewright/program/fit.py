"""Compare the peak of the fullest rank with the memory of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stagewright.program.columns import RankClass

NEARLY_FULL = 0.9
"""Share of a device's memory that tensors fill; context, workspaces and fragmentation add to it."""


class Held(NamedTuple):
    """Bytes of a rank class at its peak, by category of tensors, and `allowance` if set."""

    of: RankClass
    by_category: Mapping[str, int]
    seconds: float | None = None
    """Time of the peak in a simulated step; None: memory is constant."""

    @property
    def size(self) -> int:
        """Total bytes."""
        return sum(self.by_category.values())


class Fit(NamedTuple):
    """Memory of a device, and the rank class that needs the most."""

    device_memory: int
    """Bytes that a rank may use."""
    fullest: Held
    num_exceeding: int
    """Number of rank classes that exceed the device."""
    num_classes: int
    """Number of rank classes."""

    @property
    def fits(self) -> bool:
        """True if every rank fits."""
        return not self.num_exceeding

    @property
    def peak(self) -> int:
        """Peak bytes of the fullest rank: tensors and, if set, the allowance."""
        return self.fullest.size

    def entry(self) -> dict[str, object]:
        """Fields for JSON, in bytes; `seconds` if the step was simulated."""
        time = {} if self.fullest.seconds is None else {"seconds": self.fullest.seconds}
        return {
            "fits": self.fits,
            "device_memory": self.device_memory,
            "peak": self.peak,
            "pipeline_rank": self.fullest.of.pipeline_rank,
            **time,
            "by_category": dict(self.fullest.by_category),
        }


def fit_of(held: Iterable[Held], device_memory: int) -> Fit:
    """Compare the peak of each rank class with the memory of a device."""
    peaks = list(held)
    num_exceeding = sum(peak.size > device_memory for peak in peaks)
    fullest = max(peaks, key=lambda peak: peak.size)
    return Fit(device_memory, fullest, num_exceeding, len(peaks))


def held_at_peak(rank_class: RankClass) -> Held:
    """Bytes of a class at the peak of its program in issue order, allowance included."""
    by_category = {k: int(v) for k, v in rank_class.memory.items() if k != "peak" and v}
    return Held(rank_class, by_category)
