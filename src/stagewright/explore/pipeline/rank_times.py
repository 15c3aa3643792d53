"""What the ranks of a pipeline have come to while an order is played, for many configurations.

Steps of a wave that are alike are one operation on arrays [steps, configurations], whichever ranks
they are on and however long they take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.explore.actions import ASIDE, GPU, MESSAGE, STORED
from stagewright.explore.pipeline.effects import FIRST_JOINED, Move, Pattern
from stagewright.explore.pipeline.waves import Waves

_Rows: TypeAlias = "slice | list[int]"


class RankEnds(NamedTuple):
    """When ranks are done with all actions: inputs of what comes after, in seconds
    [ranks, configurations]."""

    gpu: Float
    aside: Float
    host: Float
    stored: Float


class RankTimes(NamedTuple):
    """What the ranks have come to."""

    ends: RankEnds
    sent: dict[int, Float]
    """What actions have handed on to others that have not been done yet, by number:
    [configurations]."""

    @classmethod
    def start(cls, ranks: int, configurations: int) -> Self:
        """Nothing has been done."""
        return cls(RankEnds(*np.zeros((4, ranks, configurations))), {})

    def take(self, some: Int) -> Self:
        """That of some configurations."""
        sent = {action: column[some] for action, column in self.sent.items()}
        return type(self)(RankEnds(*(each.take(some, axis=1) for each in self.ends)), sent)

    def play(
        self, some: Waves, moves: Mapping[int, Move], delays: Sequence[Float], mine: Int
    ) -> None:
        """Play some steps, for configurations `mine` of all.

        `moves` are by kind of step (`OrderedSteps.kinds`), `delays` those of messages on each way
        (`OrderedSteps.ways`): those of all configurations.
        """
        slots = np.empty((some.slots, len(mine)))
        for action, slot in some.before.items():
            slots[slot] = self.sent.pop(action)
        took, delayed = _Seconds(moves, mine), _table(delays, mine)
        for steps in _alike(some, moves):
            self._play(steps, took, delayed, slots)
        for action, slot in some.behind.items():
            self.sent[action] = slots[slot].copy()

    def _play(self, steps: _AlikeSteps, took: _Seconds, delays: Float, slots: Float) -> None:
        """Play steps that are alike; in `slots` is what actions hand on to others."""
        pattern, ranks = steps.pattern, _rows(steps.rank)
        inputs: dict[int, Float] = {}
        for nth in pattern.inputs:
            if nth < MESSAGE:
                inputs[nth] = _of(self.ends[nth], ranks)
            else:
                sent = _of(slots, _rows(steps.source[nth - MESSAGE]))
                inputs[nth] = sent + _one_or_each(delays, steps.way[nth - MESSAGE])
        for nth, joined in enumerate(pattern.joined, FIRST_JOINED):
            inputs[nth] = reduce(np.maximum, [inputs[own] for own in joined])
        rows = [took.rows[what] for what in steps.what]

        def moved(part: int) -> Float:
            """The latest of the inputs of a part of the pattern, each after its seconds."""
            first, *others = (
                inputs[nth] + _one_or_each(took.table, [of[place] for of in rows])
                for place, nth in enumerate(pattern.parts[part] or (), pattern.begins[part])
            )
            for other in others:
                np.maximum(first, other, out=first)
            return first

        made = {nth: moved(nth) for nth in range(len(self.ends)) if pattern.parts[nth]}
        kernels = made[GPU] if GPU in made else _of(self.ends.gpu, ranks)
        for nth, target in enumerate(steps.target, len(self.ends)):
            if target[0] >= 0:
                slots[_rows(target)] = kernels if pattern.parts[nth] is None else moved(nth)
        for nth, ends in made.items():
            beside = nth in (ASIDE, STORED)
            self.ends[nth][ranks] = np.maximum(_of(self.ends[nth], ranks), ends) if beside else ends


class _Seconds:
    """What kinds of steps take."""

    def __init__(self, moves: Mapping[int, Move], some: Int) -> None:
        """`moves` by kind of step; of some configurations."""
        columns = {id(each): each for move in moves.values() for each in move.seconds}
        number = {of: nth for nth, of in enumerate(columns)}
        self.rows = {what: [number[id(of)] for of in move.seconds] for what, move in moves.items()}
        """By kind of step, where in the table its seconds are."""
        self.table = _table([*columns.values()], some)
        """[rows, configurations]."""


class _AlikeSteps(NamedTuple):
    """Steps of different ranks with one pattern, that need nothing of each other: [steps]."""

    pattern: Pattern
    rank: list[int]
    what: list[int]
    """Their kinds."""
    source: list[list[int]]
    """By action of a step, as what follows: the slots of what it needs."""
    way: list[list[int]]
    """On which way that comes."""
    target: list[list[int]]
    """The slots of what it hands on: of all steps, or -1 of all."""


def _alike(some: Waves, moves: Mapping[int, Move]) -> Iterator[_AlikeSteps]:
    """Those of the steps of each wave that are alike."""
    patterns: dict[Pattern, int] = {}
    number = np.zeros(1 + max(moves, default=0), dtype=np.int64)
    for what, move in moves.items():
        number[what] = patterns.setdefault(move.pattern, len(patterns))
    sends = (some.target >= 0) @ np.array([1, 2])
    key = (some.wave * len(patterns) + number[some.what]) * 4 + sends
    order = np.argsort(key, kind="stable")
    edges: list[int] = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1)).tolist()
    ranks, kinds = some.rank[order].tolist(), some.what[order].tolist()
    actions = [of[order].T.tolist() for of in (some.source, some.way, some.target)]
    every = [*patterns]
    of = number[some.what][order].tolist()
    for begin, end in itertools.pairwise(edges):
        own = ([column[begin:end] for column in columns] for columns in actions)
        yield _AlikeSteps(every[of[begin]], ranks[begin:end], kinds[begin:end], *own)


def _rows(numbers: list[int]) -> _Rows:
    """Rows of a matrix, as a slice where they are equally far apart."""
    first, last = numbers[0], numbers[-1]
    apart = numbers[1] - first if len(numbers) > 1 else 1
    if apart > 0 and numbers == [*range(first, last + 1, apart)]:
        return slice(first, last + 1, apart)
    return numbers


def _of(matrix: Float, rows: _Rows) -> Float:
    """Rows of a matrix; those of a slice are not copied."""
    return matrix[rows] if isinstance(rows, slice) else matrix.take(rows, axis=0)


def _one_or_each(matrix: Float, numbers: Sequence[int]) -> Float:
    """The row of a matrix that all numbers are, or one row for each."""
    one = numbers[0]
    if all(number == one for number in numbers):
        return matrix[one]
    return matrix.take(numbers, axis=0)


def _table(columns: Sequence[Float], some: Int) -> Float:
    """Some elements of columns: [columns, some]."""
    found = np.empty((len(columns), len(some)))
    for row, column in zip(found, columns, strict=True):
        column.take(some, out=row)
    return found
