"""Tuples of numbers that several groups of candidates have, and what is made of runs with them.

A group's candidates differ in numbers; groups differ in other settings, and often have the same
tuples. What a graph or a block follows from in these settings, it has read
(`settings_read.BySettingsRead`); which tuples it holds for, its questions have asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from typing import NamedTuple, TypeVar

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.run.settings import Run
from stagewright.time.columns.row_kinds import Known
from stagewright.varying import Cases, Number, Varying

_Made = TypeVar("_Made")


class Tuples(NamedTuple):
    """Tuples of numbers, in columns."""

    cases: Cases
    numbers: Mapping[str, Number]
    """By setting."""
    met: dict[bytes, Number]
    """Whole numbers that follow from these."""

    def one(self, number: Number) -> Number:
        """The same object for equal whole numbers of all tuples; any other number as it is."""
        if not isinstance(number, Varying) or not number.is_whole or number.above.dtype == object:
            return number
        return self.met.setdefault(number.above.tobytes(), number)


_MOST_GRAPHS = 4096
"""Graphs of blocks that are kept: of some hundred groups of candidates, in tens of MB."""
_MOST_NUMBERS = 1 << 23
"""Numbers in the durations that are kept of a machine: 64 MiB."""


class Shared:
    """What candidates of one model have in common, also those that are evaluated one lot after
    another."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.by_settings = BySettingsRead()
        self._durations: dict[Hashable, Known] = {}
        self._graphs = BySettingsRead()
        self._blocks = BySettingsRead()
        self._tuples: dict[Hashable, Tuples] = {}

    def forget_blocks(self) -> None:
        """Drop blocks with numbers, which take most of the memory, and graphs and durations once
        there are many. What settings alone decide stays: a few entries for each kind of run."""
        self._blocks = BySettingsRead()
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs = BySettingsRead()
            self._tuples.clear()
        for on, known in [*self._durations.items()]:
            if known.rows.count > _MOST_NUMBERS:
                del self._durations[on]

    def durations(self, on: Hashable) -> Known:
        """What is known of durations on machines that have `on` in common."""
        return self._durations.setdefault(on, Known.none())

    def tuples(self, columns: Mapping[str, Int], count: int) -> Tuples:
        """So many tuples, of which none has been asked yet: the same for equal columns."""
        key = count, *((name, column.tobytes()) for name, column in columns.items())
        if key not in self._tuples:
            cases = Cases(count)
            numbers = {name: cases.varying(column) for name, column in columns.items()}
            found = self._tuples[key] = Tuples(cases, numbers, {})
            for number in numbers.values():
                found.one(number)
        found = self._tuples[key]
        found.cases.alike = np.ones(found.cases.count, dtype=bool)
        return found

    def graph(
        self, what: Hashable, run: Run, tuples: Tuples, make: Callable[[Run], _Made]
    ) -> _Made:
        """As `block`, of what has no numbers itself: it is kept when blocks are forgotten."""
        return _made(self._graphs, what, run, tuples, make)

    def block(
        self, what: Hashable, run: Run, tuples: Tuples, make: Callable[[Run], _Made]
    ) -> _Made:
        """What `make` makes of a run that has the numbers of tuples, as `BySettingsRead.of` has it.

        Tuples that answer its questions otherwise than the first are no longer alike.
        """
        return _made(self._blocks, what, run, tuples, make)


def _made(
    known: BySettingsRead,
    what: Hashable,
    run: Run,
    tuples: Tuples,
    make: Callable[[Run], _Made],
) -> _Made:
    cases = tuples.cases

    def answered(run: Run) -> tuple[_Made | UserError | TypeError, Bool]:
        before, cases.alike = cases.alike, np.ones(cases.count, dtype=bool)
        try:
            return make(run), cases.alike
        except (UserError, TypeError) as error:
            return copy(error), cases.alike  # as `BySettingsRead` keeps errors
        finally:
            cases.alike = before

    found, alike = known.of((what, cases), run, answered)
    cases.alike = cases.alike & alike
    if isinstance(found, (UserError, TypeError)):
        raise copy(found)
    return found
