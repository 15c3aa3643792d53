"""Actions that were played, and what follows for any number of layers: once for all structures.

Many structures have equal actions: those that differ only in what happens once per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_columns
from stagewright.explore.actions import ActionColumns, TimedAction
from stagewright.explore.templates import at_most


@dataclass(frozen=True, slots=True, eq=False)
class LinearRows:
    """An action's response as a function of the layers of its stage: [rows, cases].

    Rows are the fields of `Response` by input, and sums over its kernels (`SUMS`).
    """

    base: Float
    more: Float
    """[variants, rows, cases]: what one layer more adds."""
    layers: tuple[int, ...]
    """Of each variant that the base has."""
    few: Mapping[tuple[float, ...], Float] = field(default_factory=dict[tuple[float, ...], Float])
    """As the base, by other layers of each variant (`templates.Kind.few`)."""

    def at(self, cases: Int, layers: Float, rows: slice) -> Float:
        """[rows, cases]: some rows of some cases, with so many layers of each variant."""
        counts: list[float] = layers.tolist()
        few = at_most(counts)
        base, has = (self.few[few], few) if few in self.few else (self.base, self.layers)
        found = base[rows].take(cases, axis=1)
        for more, count, own in zip(self.more, counts, has, strict=True):
            if count != own:
                found += more[rows].take(cases, axis=1) * (count - own)
        return found

    def classes(self, rows: slice) -> Int:
        """Numbers of cases, equal where these rows are, whatever the layers: [cases]."""
        every = [self.base, *self.more, *self.few.values()]
        return distinct_columns(np.concatenate([each[rows] for each in every]))[1]


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """The actions that were played, by what they are: those of many structures are equal."""

    waits: dict[bytes, tuple[str, ...]]
    """What the kernels of each wait for (`ActionColumns.waits`)."""
    rows: dict[Hashable, LinearRows]
    columns: dict[bytes, ActionColumns]
    """Those of the template at hand: all take much memory, and few are asked for again."""

    @classmethod
    def none(cls) -> Self:
        """None was played yet."""
        return cls({}, {}, {})

    def of_template(self) -> Self:
        """What is known when another template comes."""
        return type(self)(self.waits, self.rows, {})

    def play(self, content: bytes, action: TimedAction) -> ActionColumns:
        """An action in columns."""
        if content not in self.columns:
            self.columns[content] = action.play()
            self.waits[content] = (*self.columns[content].waits,)
        return self.columns[content]

    def waits_of(self, content: bytes, action: TimedAction) -> tuple[str, ...]:
        """What the kernels of an action wait for."""
        if content not in self.waits:
            self.play(content, action)
        return self.waits[content]
