"""Live ranges: the values of a pipeline rank with the first and last row that touches each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.lifetimes import Value
from stagewright.lower.assembly.rank_rows import HALVES, UNSHARD, RankRows
from stagewright.lower.assembly.segments import NEXT, STEP, Numbers
from stagewright.program.columns import CATEGORIES, Values
from stagewright.varying import first_of

_MOST = np.iinfo(np.int64).max
_CATEGORY = {name: nth for nth, name in enumerate(CATEGORIES)}


def live_ranges(values: Mapping[int, Sequence[Value]], rank: RankRows) -> Values:
    """The values of a rank's stages, by stage, as columns with their first and last rows.

    A value is a row of the table; it has an instance for each microbatch, or one for all.
    """
    names = Numbers[str]()
    bytes_of: dict[int, int] = {}
    """By id of a size."""
    table: list[list[int]] = [[] for _ in range(5)]
    count = 0
    columns: list[list[Int]] = []
    for stage, of_stage in values.items():
        first, count = count, count + len(of_stage)
        touches = _Touches.of(of_stage, rank)
        made, halves, singles = (x[touches.begin[:-1]].tolist() for x in touches.made())
        always = np.flatnonzero(np.diff(touches.begin) == 0)  # allocated all the time
        columns.append([first + always, *(np.full(len(always), x) for x in (-1, -1, rank.total))])
        # Values made by the same actions, and freed by the same rule, are found together.
        alike: dict[tuple[int, int, bool, bool, bool], list[int]] = {}
        for nth, v in enumerate(of_stage):
            if v.touches:
                once = singles[nth] or v.whole
                key = made[nth], halves[nth], once, v.lasts, v.lasts_halved
                alike.setdefault(key, []).append(nth)
            if id(v.size) not in bytes_of:
                bytes_of[id(v.size)] = first_of(v.size)
        own = (
            names.each(v.name for v in of_stage), [stage] * len(of_stage),
            [v.layer for v in of_stage], [_CATEGORY[v.category] for v in of_stage],
            [bytes_of[id(v.size)] for v in of_stage],
        )  # fmt: skip
        for column, more in zip(table, own, strict=True):
            column += more
        for (owner, half, once, lasts, lasts_halved), nths in alike.items():
            rows = np.array(nths)
            instances = _instances(first + rows, touches.of_values(rows), owner, half, once, rank)
            if lasts:
                instances[3] = np.full_like(instances[3], rank.total - 1)
            elif lasts_halved:
                halved = rank.by_microbatch[owner, 1] != rank.by_microbatch[owner, 2]
                instances[3] = np.where(halved[instances[1]], rank.total - 1, instances[3])
            columns.append(instances)
    name, of, layer, category, size = np.array(table, dtype=np.int64)
    columns = columns or [[np.array([], dtype=np.int64)] * 4]  # a program may hold no value
    body = [np.concatenate(c).astype(np.int32) for c in zip(*columns, strict=True)]
    every = itertools.chain.from_iterable(values.values())
    numbers = {v: number for number, v in enumerate(every)}
    body = _with_their_rows(body, numbers, rank)
    _keep_weights(body, numbers, rank)
    _take_first_gradients(body, numbers, rank)
    return Values(
        name.astype(np.int32),
        of.astype(np.int32),
        layer.astype(np.int32),
        category.astype(np.uint8),
        size,
        *body,
        names=tuple(names.table),
    )


def _with_their_rows(
    body: Sequence[NDArray[np.int32]], numbers: Mapping[Value, int], rank: RankRows
) -> list[NDArray[np.int32]]:
    """The instances without values whose needed row an action lacks; an `UNSHARD` may have it."""
    value, microbatch, first, last = body
    there = np.ones(len(value), dtype=bool)
    needs = [(number, *v.needs) for v, number in numbers.items() if v.needs is not None]
    number, whose, stage, places = np.array(needs, dtype=np.int64).reshape(-1, 4).T
    half, once = rank.places(whose, stage, places)
    for nth in np.flatnonzero(~once).tolist():
        at = np.flatnonzero(value == number[nth])
        actions = rank.by_microbatch[int(stage[nth]), int(half[nth])][microbatch[at]]
        place = places[[nth]]
        ahead = rank.gathered_ahead(actions, place)[:, 0]
        there[at] = np.maximum(ahead, rank.rows(actions, place, absent=-1)[:, 0]) >= 0
        last[at] = np.where(ahead < 0, last[at], first[at])  # weights are copied out at once
        first[at] = np.where(ahead < 0, first[at], np.minimum(first[at], ahead))
    return [column[there] for column in body]


def _keep_weights(
    body: Sequence[NDArray[np.int32]], numbers: Mapping[Value, int], rank: RankRows
) -> None:
    """Weights that a backward has gathered live until the action that uses them next, in place."""
    value, microbatch, first, last = body
    for stage in rank.stages.values():
        if not stage.values.kept_weights:
            continue
        uses: list[tuple[tuple[bool, int], bool]] = [
            ((a.kind == "F", a.microbatch), int(rank.supplier[i]) == i)
            for i, a in enumerate(rank.actions)
            if a.stage == stage.stage and a.kind != UNSHARD and rank.uses_weights(a)
        ]
        for ahead, again in stage.values.kept_weights:
            at: dict[tuple[bool, int], int] = {}
            for forward, v in ((True, ahead), (False, again)):
                rows = np.flatnonzero(value == numbers[v])
                mine = microbatch[rows].tolist()
                at |= {(forward, m): int(i) for i, m in zip(rows, mine, strict=True)}
            for (before, _), (after, gathers) in itertools.pairwise(uses):
                i, j = at.get(before), at.get(after)
                if i is not None and j is not None and not gathers:
                    last[i] = max(last[i], first[j] - 1)


def _take_first_gradients(
    body: Sequence[NDArray[np.int32]], numbers: Mapping[Value, int], rank: RankRows
) -> None:
    """The first gradient that a sum is made of has no bytes besides the sum, in place."""
    value, _, first, last = body
    for stage in rank.stages.values():
        for gradient, total in stage.values.first_gradients:
            (begins,) = first[value == numbers[total]]
            taken = (value == numbers[gradient]) & (last == begins) & (first < begins)
            last[taken] = begins - 1


class _Touches(NamedTuple):
    """The touches of values behind each other; `begin` are the first of each value, and the end."""

    begin: Int
    place: Int
    stage: Int
    """-1: after all actions."""
    half: Int
    """Which half of its stage's actions a touch is in, as an index of `HALVES`."""
    once: Bool
    """Rows that are there once per step."""
    next: Bool
    """Rows of the next microbatch."""

    @classmethod
    def of(cls, values: Sequence[Value], rank: RankRows) -> _Touches:
        """The touches of values of a rank."""
        begin = np.cumsum([0, *(len(v.touches) for v in values)])
        flat = list(itertools.chain.from_iterable(
            itertools.chain.from_iterable(v.touches for v in values)
        ))  # fmt: skip
        whose, stage, place = np.array(flat, dtype=np.int64).reshape(-1, 3).T
        half, once = rank.places(whose, stage, place)
        return cls(begin, place, np.where(whose == STEP, -1, stage), half, once, whose == NEXT)

    def made(self) -> tuple[Int, Int, Bool]:
        """Stage, half, and once or not of each touch, and of none behind them all."""
        stage, half = np.append(self.stage, 0), np.append(self.half, 0)
        return stage, half, np.append(self.once, False)

    def of_values(self, values: Int) -> _Touches:
        """Those of some values, by their numbers."""
        counts = np.diff(self.begin)[values]
        begin = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(int(begin[-1])) + np.repeat(self.begin[values] - begin[:-1], counts)
        return _Touches(
            begin, self.place[at], self.stage[at], self.half[at], self.once[at], self.next[at]
        )

    def kinds(self) -> Iterator[tuple[tuple[int, int, bool, bool], Int]]:
        """Stage, half, once or not, of the next microbatch or not; and the touches that are so."""
        key = ((self.stage + 1) * len(HALVES) + self.half) * 4 + 2 * self.once + self.next
        for number in np.flatnonzero(np.bincount(key)).tolist():
            rest, flags = divmod(number, 4)
            stage, half = divmod(rest, len(HALVES))
            yield (stage - 1, half, flags > 1, flags % 2 == 1), np.flatnonzero(key == number)


def _instances(
    values: Int, touches: _Touches, owner: int, half: int, once: bool, rank: RankRows
) -> list[Int]:
    """Value, microbatch, first and last row of values that a half of a stage's actions makes."""
    makers = rank.by_microbatch.get((owner, half), np.array([0]))
    microbatches = np.flatnonzero(makers >= 0) if owner >= 0 else np.array([0])
    rows = np.full((len(microbatches), len(touches.place)), -1, dtype=np.int64)
    for (stage, touching_half, single, next_microbatch), columns in touches.kinds():
        at = touches.place[columns]
        if stage < 0:
            rows[:, columns] = rank.end + at
        elif single and once:
            action = np.array([rank.once[stage, touching_half]])
            rows[:, columns] = rank.rows(action, at, absent=-1)
        else:
            actions = rank.by_microbatch[stage, touching_half]
            actions = (np.append(actions[1:], -1) if next_microbatch else actions)[microbatches]
            there = np.flatnonzero(actions >= 0)
            found = rank.rows(actions[there], at, absent=-1)
            if stage >= 0 and not touching_half:
                found = np.maximum(found, rank.gathered_ahead(actions[there], at))
            rows[there[:, None], columns] = found
    start = touches.begin[:-1]
    last = np.maximum.reduceat(rows, start, axis=1)
    first = np.minimum.reduceat(np.where(rows < 0, _MOST, rows), start, axis=1)
    if once:
        first, last, microbatches = first.min(axis=0), last.max(axis=0), np.array([-1])
    value, microbatch = np.broadcast_arrays(values, microbatches[:, None])
    touched_at_all = last.ravel() >= 0
    return [c.ravel()[touched_at_all] for c in (value, microbatch, first, last)]
