"""Messages between neighbouring ranks of pipelines, of many configurations at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_rows
from stagewright.time.collectives import messages_seconds
from stagewright.time.network import Machine


class NeighbourMessages(NamedTuple):
    """Messages between neighbouring ranks of pipelines."""

    size: Float
    """Bytes: [configurations]."""
    stride: Int
    """Distance between the ranks of two neighbouring stages: [configurations]."""
    beyond: Int
    """Ranks of a stage along axes slower than the pipeline's: [configurations]."""
    pp: int | Int
    """Ranks of a pipeline, of all or of each: [configurations]."""
    machine: Machine

    def take(self, configurations: Int) -> Self:
        """The messages of some configurations."""
        own = self.size[configurations], self.stride[configurations], self.beyond[configurations]
        return self._replace(size=own[0], stride=own[1], beyond=own[2])

    def classes(self, ways: Collection[tuple[int, int]]) -> Int:
        """Numbers of configurations, equal where messages on these ways take the same time."""
        first, of = distinct_rows([self.size, self.stride, self.beyond])
        some = self.take(first)
        if not ways:
            return np.zeros(len(of), dtype=np.int64)
        return distinct_rows([some.seconds(a, b) for a, b in ways])[1][of]

    def seconds(self, a: int, b: int) -> Float:
        """Seconds of a message from rank `a` of the pipeline to rank `b`: [configurations]."""
        found = messages_seconds(self.size, 0, self.machine)
        if a == b:
            return 0 * found
        block = 1
        for level, tier in enumerate(self.machine.tiers[:-1], 1):
            block *= tier.size
            crosses = self._crosses(min(a, b), max(a, b), block)
            found = np.where(crosses, messages_seconds(self.size, level, self.machine), found)
        return found

    def _crosses(self, low: int, high: int, block: int) -> Bool:
        """Whether some of the ranks of two stages are in different blocks: [configurations]."""
        stride, whole = self.stride, self.pp * self.stride
        if high > low + 1:
            return (whole > block) | ((self.beyond > 1) & (block % whole != 0))
        found = np.zeros(len(stride), dtype=bool)
        # Where pipelines fill whole blocks, all lie as the first ones do.
        alike = np.where(whole % block == 0, 1, np.minimum(self.beyond, block))
        for nth in range(int(alike.max(initial=1))):
            at = low * stride + nth * whole
            border = (at // block + 1) * block
            found |= (border < at + 2 * stride) & (nth < alike)
        return found
