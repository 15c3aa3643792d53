"""What the ranks of a pipeline have come to while an order is played, for many configurations.

Steps of a wave that are alike are one operation on arrays [steps, configurations], whichever ranks
they are on and however long they take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float, Int, latest, taken
from stagewright.explore.actions import GPU, MESSAGE, STREAMS
from stagewright.explore.pipeline.effects import FIRST_JOINED, Move, Pattern
from stagewright.explore.pipeline.waves import Waves

_Rows: TypeAlias = "int | slice | Int"


class RankEnds(NamedTuple):
    """When ranks are done with all actions, in seconds: [ranks, configurations], or
    [configurations] of the latest of some ranks. Moments are in the order of their numbers."""

    gpu: Float
    host: Float
    aside: Float
    replicated: Float
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
        return cls(RankEnds(*np.zeros((MESSAGE, ranks, configurations))), {})

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
        columns = {id(each): each for move in moves.values() for each in move.seconds}
        number = {of: nth for nth, of in enumerate(columns)}
        kinds = tuple(
            _StepOfTable(what, move.pattern, tuple(number[id(of)] for of in move.seconds))
            for what, move in moves.items()
        )
        took, delayed = taken([*columns.values()], mine), taken(delays, mine)
        for steps in _steps_at_once(some, kinds):
            self._play(steps, took, delayed, slots)
        for action, slot in some.behind.items():
            self.sent[action] = slots[slot].copy()

    def _play(self, steps: _AlikeSteps, took: Float, delays: Float, slots: Float) -> None:
        """Play steps that are alike; in `slots` is what actions hand on to others."""
        pattern, ranks = steps.pattern, steps.ranks
        inputs: dict[int, Float] = {}
        for nth in pattern.inputs:
            if nth < MESSAGE:
                inputs[nth] = _of(self.ends[nth], ranks)
            else:
                sent = _of(slots, steps.source[nth - MESSAGE])
                inputs[nth] = sent + _of(delays, steps.way[nth - MESSAGE])
        for nth, joined in enumerate(pattern.joined, FIRST_JOINED):
            inputs[nth] = latest([inputs[own] for own in joined])

        def moved(part: int) -> Float:
            """The latest of the inputs of a part of the pattern, each after its seconds."""
            places = zip(
                pattern.parts[part] or (), steps.seconds[pattern.begins[part] :], strict=False
            )
            first, *others = [inputs[nth] + _of(took, rows) for nth, rows in places]
            for other in others:
                np.maximum(first, other, out=first)
            return first

        made = {nth: moved(nth) for nth in range(len(self.ends)) if pattern.parts[nth]}
        kernels = made[GPU] if GPU in made else _of(self.ends.gpu, ranks)
        for nth, (sends, target) in enumerate(
            zip(steps.sends, steps.target, strict=True), len(self.ends)
        ):
            if sends:
                slots[target] = kernels if pattern.parts[nth] is None else moved(nth)
        for nth, ends in made.items():
            beside = nth in STREAMS
            self.ends[nth][ranks] = np.maximum(_of(self.ends[nth], ranks), ends) if beside else ends


class _AlikeSteps(NamedTuple):
    """Steps of different ranks with one pattern, that need nothing of each other."""

    pattern: Pattern
    ranks: _Rows
    seconds: Sequence[_Rows]
    """What they take, by place of the pattern: rows of a table."""
    source: Sequence[_Rows]
    """By action of a step, as what follows: the slots of what it needs."""
    way: Sequence[_Rows]
    """On which way that comes."""
    sends: Sequence[bool]
    """Whether it hands on anything to others."""
    target: Sequence[_Rows]
    """The slots of that."""


class _StepOfTable(NamedTuple):
    """What the steps of one kind make, and what they take: rows of a table."""

    what: int
    pattern: Pattern
    seconds: tuple[int, ...]


@lru_cache(maxsize=256)  # many sets of configurations are played in one order
def _steps_at_once(some: Waves, kinds: tuple[_StepOfTable, ...]) -> Sequence[_AlikeSteps]:
    """Those of the steps of each wave that are alike, by the kinds of steps."""
    number = {of: nth for nth, of in enumerate(dict.fromkeys(kind.pattern for kind in kinds))}
    count = 1 + max((kind.what for kind in kinds), default=0)
    pattern, seconds = (
        np.zeros(count, dtype=np.int64),
        np.zeros((count, max((len(kind.seconds) for kind in kinds), default=0)), np.int64),
    )
    for what, of, own in kinds:
        pattern[what], seconds[what, : len(own)] = number[of], own
    sends = some.target >= 0
    key = (some.wave * len(number) + pattern[some.what]) * 4 + sends @ np.array([1, 2])
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    what, begin, every = some.what[order], edges[:-1], [*number]
    alike = zip(
        pattern[what[begin]].tolist(),
        _rows(some.rank[order], edges),
        zip(*(_rows(column, edges) for column in seconds[what].T), strict=True),
        zip(*(_rows(column, edges) for column in some.source[order].T), strict=True),
        zip(*(_rows(column, edges) for column in some.way[order].T), strict=True),
        sends[order][begin].tolist(),
        zip(*(_rows(column, edges) for column in some.target[order].T), strict=True),
        strict=True,
    )
    return [_AlikeSteps(every[nth], *columns) for nth, *columns in alike]


def _rows(numbers: Int, edges: Int) -> list[_Rows]:
    """Rows of a matrix between each two edges: one where all are the same, a slice where they are
    equally far apart."""
    begin, end = edges[:-1], edges[1:]
    first, last = numbers[begin], numbers[end - 1]
    apart = numbers[np.minimum(begin + 1, end - 1)] - first
    nth = np.arange(len(numbers)) - np.repeat(begin, end - begin)
    expected = np.repeat(first, end - begin) + nth * np.repeat(apart, end - begin)
    even = np.add.reduceat(numbers != expected, begin) == 0
    borders = zip(begin.tolist(), end.tolist(), strict=True)
    spans = zip(first.tolist(), last.tolist(), apart.tolist(), even.tolist(), borders, strict=True)
    return [
        numbers[slice(*border)] if not same or step < 0
        else slice(low, high + 1, step) if step
        else low
        for low, high, step, same, border in spans
    ]  # fmt: skip


def _of(matrix: Float, rows: _Rows) -> Float:
    """Rows of a matrix; those of a slice are not copied."""
    return matrix.take(rows, axis=0) if isinstance(rows, np.ndarray) else matrix[rows]
