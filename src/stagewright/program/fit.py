"""Compare the peak of the fullest rank with the memory of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stagewright.program.columns import RankClass

NEARLY_FULL = 0.9
"""Share of a device's memory that tensors fill; context, workspaces and fragmentation add to it."""
RESERVED_SHARE = 0.2
"""Share of a device's memory to leave free where an allocator keeps what it reserved: enough in 11
of the 14 rows of docs/accuracy/memory.md."""


class Peak(NamedTuple):
    """Bytes of the ranks of a class when they have the most in use."""

    rank_class: RankClass
    by_category: Mapping[str, int]
    """Tensors by category, those with bytes, and `allowance` if set."""
    seconds: float | None = None
    """First time of the peak in a simulated step; None: in program order."""

    @property
    def size(self) -> int:
        """Total bytes."""
        return sum(self.by_category.values())


class Fit(NamedTuple):
    """Memory of a device, and the rank class that needs the most."""

    device_memory: int
    """Bytes that a rank may use."""
    fullest: Peak
    num_exceeding: int
    """Number of rank classes that exceed the device."""
    num_classes: int
    """Number of rank classes."""
    left_out: str = ""
    """Flags of a launch file whose effect is left out and would reduce memory; with some, the peak
    is an upper bound."""

    @property
    def fits(self) -> bool:
        """True if every rank fits."""
        return not self.num_exceeding

    @property
    def cannot_fit(self) -> bool:
        """True if a rank exceeds the device, and not by an upper bound alone."""
        return not self.fits and not self.left_out

    @property
    def verdict(self) -> str:
        """Words on a rank that exceeds the device; empty: all fit."""
        if self.fits:
            return ""
        if self.left_out:
            return f"an upper bound, so it may fit (without {self.left_out})"
        return "it does not fit"

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
            "pipeline_rank": self.fullest.rank_class.pipeline_rank,
            **({"upper_bound_without": self.left_out} if self.left_out else {}),
            **time,
            "by_category": dict(self.fullest.by_category),
        }


def fit_of(peaks: Iterable[Peak], device_memory: int, left_out: str = "") -> Fit:
    """Compare the peak of each rank class with the memory of a device.

    `left_out`: flags whose effect would reduce the peaks.
    """
    peaks = [*peaks]
    num_exceeding = sum(peak.size > device_memory for peak in peaks)
    fullest = max(peaks, key=lambda peak: peak.size)
    return Fit(device_memory, fullest, num_exceeding, len(peaks), left_out)


def peak_in_program_order(rank_class: RankClass) -> Peak:
    """Peak of a class while rows run in program order, allowance included."""
    by_category = {k: int(v) for k, v in rank_class.memory.items() if k != "peak" and v}
    return Peak(rank_class, by_category)
