"""Bytes of the weights of stages."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, product
from stagewright.explore.bounding.stages import kind_of
from stagewright.explore.memory import Peaks
from stagewright.explore.template_memory import HELD, NOWHERE
from stagewright.explore.templates import MIDDLE, ONLY
from stagewright.program.columns import CATEGORIES

_WEIGHTS = CATEGORIES.index("parameters")


class StageWeights(NamedTuple):
    """Bytes of weights before ZeRO splits them: [stages, tuples] each."""

    of_layers: Float
    """Of the layers of a stage: no more than what every rank of it has."""
    all: Float
    """With those before the first layer and behind the last one: no less than what it has."""

    @classmethod
    def of(cls, peaks: Peaks, layers: Int, tuples: Int) -> Self:
        """Those of tuples in a pipeline; `layers` of each variant by stage."""
        at = next(k for k in peaks.stages if k in ((MIDDLE,), (ONLY,)))
        each = peaks.stages[at][HELD, NOWHERE].more[:, _WEIGHTS]
        stages, cases = layers.shape[1], peaks.cases[tuples]
        every = [
            peaks.stages[kind_of(s, stages),][HELD, NOWHERE].at(cases, layers[:, s].tolist())
            for s in range(stages)
        ]
        of_layers = product(layers.T, each)[:, cases]
        return cls(of_layers, np.stack([of[_WEIGHTS] for of in every]))
