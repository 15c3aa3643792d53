"""Actions that were played, and what follows for any number of layers: once for all structures.

Many structures have equal actions: those that differ only in what happens once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, digest, distinct_columns, distinct_rows, taken
from stagewright.explore.actions import (
    NEVER,
    ActionColumns,
    ActionPlaces,
    TimedAction,
    played,
)
from stagewright.explore.class_rows import ClassRows
from stagewright.explore.templates import nearest


class EqualRows(NamedTuple):
    """A table in which many rows are equal."""

    distinct: Float
    """Each row once, or few times: [distinct, columns]."""
    of: Int
    """Which of these each row is: [rows]."""

    def row(self, number: int) -> Float:
        """One of the rows: [columns]."""
        return self.distinct[self.of[number]]

    def expanded(self) -> Float:
        """All rows: [rows, columns]."""
        return self.distinct[self.of]

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The columns of several tables behind each other."""
        if len(parts) == 1:
            return parts[0]
        first, of = distinct_rows([part.of for part in parts])
        return cls(np.concatenate([part.distinct[part.of[first]] for part in parts], axis=1), of)


@dataclass(frozen=True, slots=True, eq=False)
class LinearRows:
    """An action's response as a function of the layers of its stage: [rows, cases].

    Rows are the fields of `Response` by input, and sums over its kernels (`SUMS`). Most of them
    occur many times: what starts before every time, what a layer adds nothing to.
    """

    table: Float
    """Each distinct row once: [distinct, cases]. All else knows rows by their numbers here."""
    base: Int
    """Of a stage with `layers`: [rows]."""
    more: Int
    """What one layer more of each variant adds: [variants, rows]."""
    layers: tuple[int, ...]
    """Of each variant that the base has; none where it says nothing of other layers."""
    axes: tuple[str, ...]
    """What the last rows are of: those of waits (`ActionColumns.waits`)."""
    few: Mapping[tuple[float, ...], Int] = field(default_factory=dict[tuple[float, ...], Int])
    """As `base`, of stages with other layers of each variant (`templates.Kind.few`)."""
    _distinct: dict[Hashable, tuple[list[Int], Int]] = field(
        default_factory=dict[Hashable, tuple[list[Int], Int]], init=False
    )
    """Of rows that have been asked for: the distinct ones in the base and what is added to it, and
    which of these each row is."""

    @classmethod
    def of(
        cls,
        base: Float,
        more: Sequence[Float],
        few: Mapping[tuple[int, ...], Float],
        layers: tuple[int, ...],
        axes: tuple[str, ...],
    ) -> Self:
        """From whole tables [rows, cases] each."""
        every = np.concatenate([base, *more, *few.values()])
        first, of = distinct_columns(every.T)
        return cls._numbered(every[first], of, len(base), [*few], layers, axes)

    @classmethod
    def _numbered(
        cls,
        table: Float,
        of: Int,
        rows: int,
        few: Sequence[tuple[float, ...]],
        layers: tuple[int, ...],
        axes: tuple[str, ...],
    ) -> Self:
        """From the rows of the base, of all variants, and of `few`, behind each other."""
        base, others = np.split(of.reshape(-1, rows), [1])
        more, alone = np.split(others, [len(layers)])
        return cls(table, base[0], more, layers, axes, dict(zip(few, alone, strict=True)))

    @classmethod
    def concatenated(cls, parts: Sequence[Self], axes: tuple[str, ...]) -> Self:
        """The cases of several behind each other, with waits along all of `axes`."""
        some = parts[0]
        others = len(some.base) - len(some.axes)  # rows before those of axes
        rows = others + len(axes)
        numbers: list[Int] = []
        for part in parts:
            place = [*range(others), *(others + axes.index(axis) for axis in part.axes)]
            every = np.stack([part.base, *part.more, *(part.few[layers] for layers in some.few)])
            own = np.full((len(every), rows), len(part.table))  # a row of zeros
            own[:, place] = every
            numbers.append(own.ravel())
        first, of = distinct_rows(numbers)  # what is equal in all parts
        table = np.concatenate(
            [
                np.concatenate([part.table, np.zeros((1, part.table.shape[1]))])[own[first]]
                for part, own in zip(parts, numbers, strict=True)
            ],
            axis=1,
        )
        return cls._numbered(table, of, rows, [*some.few], some.layers, axes)

    def at(self, cases: Int, layers: Float, rows: slice) -> EqualRows:
        """Some rows of some cases, with so many layers of each variant."""
        counts: list[float] = layers.tolist()
        has = nearest(counts, self.few, self.layers)
        further = [count - own for count, own in zip(counts, has, strict=True)]
        differ = tuple(nth for nth, count in enumerate(further) if count)
        key = has, differ, rows.start, rows.stop
        if key not in self._distinct:
            base = self.few.get(has, self.base)
            every = [base[rows], *(self.more[nth][rows] for nth in differ)]
            first, of = distinct_rows(every)
            self._distinct[key] = [each[first] for each in every], of
        (base, *others), of = self._distinct[key]
        found = self._taken(base, cases)
        for nth, more in zip(differ, others, strict=True):
            found += self._taken(more, cases) * further[nth]
        return EqualRows(found, of)

    def _taken(self, rows: Int, cases: Int) -> Float:
        """Some rows of the table, of some cases: [rows, cases]."""
        return taken([self.table[number] for number in rows.tolist()], cases)

    def classes(self, rows: slice) -> Int:
        """Numbers of cases, equal where these rows are, whatever the layers: [cases]."""
        every = [of[rows] for of in (self.base, *self.more, *self.few.values())]
        return distinct_columns(self.table[np.unique(np.concatenate(every))])[1]


@dataclass(slots=True, eq=False)
class AwaitedRows:
    """Rows of an action that has not been played yet."""

    base: TimedAction
    more: tuple[TimedAction, ...]
    """By variant: the action with `added` layers more of it."""
    few: Mapping[tuple[int, ...], TimedAction]
    """By layers of each variant: the action with these."""
    layers: tuple[int, ...]
    """Of each variant that the base has."""
    added: int
    cases: Int
    """The first of tuples for which all rows take as long: [cases]."""
    waiting: list[AwaitedRows]
    """All that are played with the first one that is asked for."""
    rows: LinearRows | None = None

    @property
    def actions(self) -> list[TimedAction]:
        """Those of the base, with more layers, and with few."""
        return [self.base, *self.more, *self.few.values()]

    @property
    def shape(self) -> Hashable:
        """Equal for rows that are found together."""
        actions = (*(of.shape for of in self.actions),)
        return actions, self.layers, self.added, (*self.few,)

    def linear(self) -> LinearRows:
        """The rows, once all that waits has been played."""
        if self.rows is None:
            _play(self.waiting)
        assert self.rows is not None, "all that waits has been played"
        return self.rows


_TOGETHER = 1024
"""Configurations that are played together, or those of one structure: with more, the moments of an
action's places outgrow a CPU's cache, and with few, numpy takes longer for a call than for them."""


_RECENT = 8
"""Actions that are not played again while they are the latest ones: a few, of some hundred
kilobytes each."""


def _play(waiting: list[AwaitedRows]) -> None:
    """Play the actions whose rows are awaited, those that differ in times only together."""
    alike: dict[Hashable, list[AwaitedRows]] = {}
    for one in waiting:
        alike.setdefault(one.shape, []).append(one)
    waiting.clear()
    lots = [lot for every in alike.values() for lot in _lots(every)]
    # Lots of one base one after another: with and without few layers, they have actions in common.
    of_base: dict[TimedAction, list[list[AwaitedRows]]] = {}
    for lot in lots:
        of_base.setdefault(lot[0].base, []).append(lot)
    recent = _RecentlyPlayed()
    for lot in itertools.chain.from_iterable(of_base.values()):
        _play_lot(lot, recent)


def _lots(every: Iterable[AwaitedRows]) -> Iterator[list[AwaitedRows]]:
    """Rows of one `shape` that are found together."""
    lot: list[AwaitedRows] = []
    for one in every:
        if lot and sum(len(of.cases) for of in lot) + len(one.cases) > _TOGETHER:
            yield lot
            lot = []
        lot.append(one)
    yield lot


class _RecentlyPlayed:
    """The actions that were played last, by what they are and for which tuples."""

    def __init__(self) -> None:
        """None was played yet."""
        self._known: dict[Hashable, ActionColumns] = {}

    def played(self, every: Sequence[tuple[TimedAction, Int]]) -> ActionColumns:
        """As `actions.played`."""
        key = tuple((action, digest(cases)) for action, cases in every)
        if key not in self._known:
            if len(self._known) == _RECENT:
                del self._known[next(iter(self._known))]
            self._known[key] = played(every)
        return self._known[key]


def _play_lot(lot: Sequence[AwaitedRows], recent: _RecentlyPlayed) -> None:
    """Find rows of one `shape`."""
    some, cases = lot[0], [of.cases for of in lot]
    columns = [
        recent.played([*zip(actions, cases, strict=True)])
        for actions in zip(*(of.actions for of in lot), strict=True)
    ]
    axes = (*dict.fromkeys(axis for each in columns for axis in each.waits),)
    base, *tables = (_rows(each, axes) for each in columns)
    with_more, with_few = tables[: len(some.more)], tables[len(some.more) :]
    differ = [np.where(base > NEVER / 2, one - base, 0.0) / some.added for one in with_more]
    ends = np.cumsum([0, *map(len, cases)]).tolist()
    for of, mine in zip(lot, map(slice, ends[:-1], ends[1:]), strict=True):
        few = {layers: one[:, mine] for layers, one in zip(of.few, with_few, strict=True)}
        more = [one[:, mine] for one in differ]
        of.rows = LinearRows.of(base[:, mine], more, few, of.layers, axes)


@dataclass(frozen=True, slots=True, eq=False)
class LinearResponse:
    """The response of an action: many tuples have the same."""

    rows: LinearRows | AwaitedRows
    """Shared by structures whose actions are equal."""
    of: Int
    """Which case each tuple has, in the smallest type that holds it: [tuples]."""

    @property
    def cases(self) -> LinearRows:
        """The rows of the cases, played if they have not been."""
        return self.rows.linear() if isinstance(self.rows, AwaitedRows) else self.rows

    def at(self, tuples: Int, layers: Float, rows: slice) -> EqualRows:
        """Some rows of some tuples, with so many layers of each variant."""
        return self.cases.at(self.of[tuples], layers, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """The actions that were played, by what they are: those of many structures are equal."""

    actions: dict[bytes, TimedAction]
    """Equal ones are one object."""
    responses: dict[Hashable, LinearResponse]
    cases: dict[Hashable, tuple[Int, Int]]
    """The first of tuples for which some rows take as long, and which of these each tuple has."""
    waiting: list[AwaitedRows] = field(default_factory=list[AwaitedRows])
    """Actions that are played when one of them is asked for."""

    @classmethod
    def none(cls) -> Self:
        """None was played yet."""
        return cls({}, {}, {})

    def action(self, rows: ClassRows, places: ActionPlaces, mine: slice) -> TimedAction:
        """The action of some places of a rank class."""
        seconds, drawn = rows.seconds[mine], rows.drawn[mine]
        launch, waits = rows.launch[mine], rows.waits
        waits = None if waits is None else waits[mine]
        key = digest(places.content, rows.none, seconds, drawn, launch, waits)
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
            rows = AwaitedRows(base, (*more,), few, layers, added, first, self.waiting)
            self.waiting.append(rows)
            self.responses[key] = LinearResponse(rows, of)
        return self.responses[key]

    def _cases(self, every: Sequence[TimedAction]) -> tuple[Int, Int]:
        """Tuples for which the rows of some actions take as long (`cases`)."""
        numbers = {n for of in every for n in (*of.seconds, *of.drawn)}
        launches = [of.launch for of in every if of.launch.shape[1] > 1]
        key = frozenset(numbers), digest(*launches)
        if key not in self.cases:
            table = every[0].known.table(sorted(numbers))
            first, of = distinct_columns(np.concatenate([table, *launches]))
            self.cases[key] = first, of.astype(np.min_scalar_type(len(first)))
        return self.cases[key]


def _rows(of: ActionColumns, axes: Sequence[str]) -> Float:
    zero = np.zeros_like(of.busy)
    waits = [of.waits.get(axis, zero) for axis in axes]
    some = of.response
    pair = () if some.sent_gradient is None else (some.sent_gradient,)
    fields = some.behind, *some.moments, some.sent, some.end, *some.chains, *pair
    return np.concatenate([*fields, np.stack([of.busy, of.drawn, *waits])])
