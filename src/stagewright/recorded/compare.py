"""A measured step beside a simulated one: where their times differ, part by part.

Both sides are recordings in one form (the simulated step as `views.kineto` writes it), so that
kernels are typed, and times divided into parts, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from stagewright.recorded.rank import Kernel
from stagewright.recorded.steps import PARTS, RecordedStep, transfer_of

_Key = TypeVar("_Key", bound=Hashable)

BY_EXTENTS = ("gemm", "grouped_gemm", "conv", "attention")
"""Families whose kernels have equal extents on both sides, where both compute the same."""


class Total(NamedTuple):
    """Kernels of one kind on the mean rank."""

    number: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    """Seconds of waiting for other ranks, beyond `seconds`."""

    @property
    def mean(self) -> Total:
        """The same number of kernels, with the time of one."""
        number = self.number or 1.0
        return Total(self.number, self.seconds / number, self.waiting / number)


@dataclass(frozen=True, eq=False)
class ComparedSide:
    """A step of some ranks; figures are of the mean rank."""

    steps: tuple[RecordedStep, ...]

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return sum(step.duration for step in self.steps) / len(self.steps) * 1e-9

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        sums = {part: sum(step.parts[part] for step in self.steps) for part in PARTS}
        return {part: ns / len(self.steps) * 1e-9 for part, ns in sums.items()}

    @cached_property
    def families(self) -> dict[str, Total]:
        """Kernels that compute or copy, by family."""
        return self._totals(lambda kernel: None if kernel.comm else kernel.family)

    @cached_property
    def kernels(self) -> dict[str, Total]:
        """Products and attention by extents and data type."""
        return self._totals(
            lambda kernel: _extents(kernel) if kernel.family in BY_EXTENTS else None
        )

    @cached_property
    def transfers(self) -> dict[tuple[str, int, int], Total]:
        """Collectives and messages by kind, ranks and bytes."""

        def key(kernel: Kernel) -> tuple[str, int, int] | None:
            comm = kernel.comm
            return comm and (comm.kind or "unknown", comm.size, comm.bytes)

        return self._totals(key)

    @property
    def brief_kernels(self) -> float:
        """Number of norms and element-wise kernels."""
        return sum(self.families.get(name, Total()).number for name in ("norm", "elementwise"))

    @property
    def upper_bounds(self) -> int:
        """Number of transfers that include waiting, since other ranks were not read."""
        comms = [k.comm for step in self.steps for k in step.kernels if k.comm is not None]
        return sum(comm.transfer < 0 and comm.size != 1 for comm in comms)

    def _totals(self, key: Callable[[Kernel], _Key | None]) -> dict[_Key, Total]:
        """Totals of kernels by key, longest first; a kernel whose key is None does not count."""
        sums: dict[_Key, list[int]] = {}
        for step in self.steps:
            for kernel in step.kernels:
                if (of := key(kernel)) is None:
                    continue
                own = kernel.duration if kernel.comm is None else transfer_of(kernel)
                total = sums.setdefault(of, [0, 0, 0])
                for i, added in enumerate((1, own, kernel.duration - own)):
                    total[i] += added
        ranks = len(self.steps)
        totals = {
            of: Total(count / ranks, own / ranks * 1e-9, waiting / ranks * 1e-9)
            for of, (count, own, waiting) in sums.items()
        }
        return dict(sorted(totals.items(), key=lambda item: (-item[1].seconds, str(item[0]))))


def _extents(kernel: Kernel) -> str:
    """Extents and data type of a kernel; its name where they were not recorded."""
    if kernel.shape is None:
        return f"{kernel.family} {kernel.name.split('(')[0][:60]}"
    return f"{kernel.shape} {kernel.dtype}".removeprefix("gemm batch=1 ").strip()


@dataclass(frozen=True, eq=False)
class StepComparison:
    """A measured and a simulated step of the same ranks."""

    measured: ComparedSide
    simulated: ComparedSide

    @property
    def error(self) -> float:
        """Simulated over measured step, less 1."""
        return self.simulated.seconds / self.measured.seconds - 1

    @property
    def matched_products(self) -> float | None:
        """Share of the measured products' time of sizes that are simulated; None: sizes unknown."""
        sized = {
            name: total
            for name, total in self.measured.kernels.items()
            if "=" in name and not name.startswith("attention")
        }
        seconds = sum(total.seconds for total in sized.values())
        matched = sum(t.seconds for name, t in sized.items() if name in self.simulated.kernels)
        return matched / seconds if seconds else None

    @cached_property
    def difference(self) -> dict[str, float]:
        """Seconds by which each part is longer in the measured step; their sum is that of all."""
        return {
            part: self.measured.parts[part] - self.simulated.parts[part]
            for part in PARTS
            if self.measured.parts[part] or self.simulated.parts[part]
        }
