"""Actions that were played, and what follows for any number of layers: once for all structures.

Many structures have equal actions: those that differ only in what happens once per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_columns
from stagewright.explore.actions import NEVER, ActionColumns, ActionPlaces, TimedAction
from stagewright.explore.class_rows import ClassRows
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
    axes: tuple[str, ...]
    """What the last rows are of: those of waits (`ActionColumns.waits`)."""
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
class LinearResponse:
    """The response of an action: many tuples have the same."""

    cases: LinearRows
    """Shared by structures whose actions are equal."""
    of: Int
    """Which case each tuple has: [tuples]."""

    def at(self, tuples: Int, layers: Float, rows: slice) -> Float:
        """[rows, candidates]: of some tuples, with so many layers of each variant."""
        return self.cases.at(self.of[tuples], layers, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """The actions that were played, by what they are: those of many structures are equal."""

    actions: dict[Hashable, TimedAction]
    """Equal ones are one object."""
    responses: dict[Hashable, LinearResponse]
    cases: dict[Hashable, tuple[Int, Int]]
    """The first of tuples for which some rows take as long, and which of these each tuple has."""

    @classmethod
    def none(cls) -> Self:
        """None was played yet."""
        return cls({}, {}, {})

    def action(self, rows: ClassRows, places: ActionPlaces, mine: slice) -> TimedAction:
        """The action of some places of a rank class."""
        seconds, drawn = rows.seconds[mine], rows.drawn[mine]
        launch, waits = rows.launch[mine], rows.waits
        waits = None if waits is None else waits[mine]
        host = None if waits is None else (launch.tobytes(), waits.tobytes())
        key = places.content, rows.none, seconds.tobytes(), drawn.tobytes(), host
        if key not in self.actions:
            kinds, kind = np.unique([*seconds, rows.none], return_inverse=True)
            each, first, often = np.unique(drawn, return_index=True, return_counts=True)
            order = np.argsort(first)  # sums are the same in whatever order rows were numbered
            counts = dict(zip(each[order].tolist(), often[order].tolist(), strict=True))
            self.actions[key] = TimedAction(
                places, rows.known, kinds.tolist(), kind[:-1], counts, launch, waits
            )
        return self.actions[key]

    def response(
        self,
        base: TimedAction,
        more: Sequence[TimedAction],
        few: Mapping[tuple[int, ...], TimedAction],
        layers: tuple[int, ...],
        added: int,
    ) -> LinearResponse:
        """The response of an action of a base with these layers, by the same action of the programs
        with `added` layers more of each variant, and with few layers."""
        key = base, (*more,), (*few.items(),), layers, added
        if key not in self.responses:
            first, of = self._cases([base, *more, *few.values()])
            rows, *others = (each.play(first) for each in (base, *more, *few.values()))
            axes = (*dict.fromkeys(axis for each in (rows, *others) for axis in each.waits),)
            base_rows, *tables = (_rows(each, axes) for each in (rows, *others))
            with_more = tables[: len(more)]
            differ = [
                np.where(base_rows > NEVER / 2, one - base_rows, 0.0) / added for one in with_more
            ]
            with_few: dict[tuple[float, ...], Float] = {}
            with_few |= zip(few, tables[len(more) :], strict=True)
            cases = LinearRows(base_rows, np.stack(differ), layers, axes, with_few)
            self.responses[key] = LinearResponse(cases, of)
        return self.responses[key]

    def _cases(self, every: Sequence[TimedAction]) -> tuple[Int, Int]:
        """Tuples for which the rows of some actions take as long (`cases`)."""
        numbers = {n for of in every for n in (*of.seconds, *of.drawn)}
        launches = [of.launch for of in every if of.launch.shape[1] > 1]
        key = frozenset(numbers), *(launch.tobytes() for launch in launches)
        if key not in self.cases:
            table = every[0].known.table(sorted(numbers))
            self.cases[key] = distinct_columns(np.concatenate([table, *launches]))
        return self.cases[key]


def _rows(played: ActionColumns, axes: Sequence[str]) -> Float:
    zero = np.zeros_like(played.busy)
    waits = [played.waits.get(axis, zero) for axis in axes]
    moments = [field for field in played.response if field is not None]
    return np.concatenate([*moments, np.stack([played.busy, played.drawn, *waits])])
