"""What steps of layouts have in common: it is found once.

Steps of decode and of prompts have the same blocks, and layouts many kernels that take equally
long. Nothing here decides what a step takes: each entry is known by all that it follows from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from stagewright.lower.assembly.assemble import Assembly
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.variants import BlockVariant
from stagewright.serving.steps.terms import Term
from stagewright.time.columns.row_kinds import Known
from stagewright.time.hardware import Hardware
from stagewright.varying import Cases


class LoweredBatches(NamedTuple):
    """The blocks of a step with numbers of many batches, and the program of those that are kept."""

    blocks: Mapping[BlockVariant, LoweredBlock]
    program: Assembly
    cases: Cases
    """Which of the batches are lowered alike."""


KnownTerms = dict[object, Term]
"""Terms by what they take with all probes."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownSteps:
    """What is known of steps of one model when those of another layout, or of other batches, come.

    Durations and terms are of one machine each; lowered batches are of one layout.
    """

    durations: dict[str, Known]
    terms: dict[Hashable, KnownTerms]
    lowered: dict[Hashable, LoweredBatches]

    @classmethod
    def none(cls) -> Self:
        """Nothing is known."""
        return cls({}, {}, {})

    def of_layout(self) -> Self:
        """What is known when the steps of another layout come."""
        durations = {where: known.of_structure() for where, known in self.durations.items()}
        self.durations.update(durations)
        return type(self)(self.durations, self.terms, {})

    def durations_on(self, hardware: Hardware) -> Known:
        """Of kernels and collectives on this hardware."""
        return self.durations.setdefault(repr(hardware), Known.none())

    def terms_on(self, hardware: Hardware, block_size: int) -> KnownTerms:
        """Of steps on this hardware whose caches have blocks of so many tokens."""
        return self.terms.setdefault((repr(hardware), block_size), {})
