"""Live ranges: the values of a pipeline rank with the first and last row that touches each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.lower.assembly.lifetimes import Touch, Value
from stagewright.lower.assembly.rank_rows import UNSHARD, RankRows
from stagewright.lower.assembly.segments import NEXT, STEP
from stagewright.program.columns import CATEGORIES, Values
from stagewright.varying import first_of


def live_ranges(values: Mapping[int, Sequence[Value]], rank: RankRows) -> Values:
    """The values of a rank's stages, by stage, as columns with their first and last rows.

    A value is a row of the table; it has an instance for each microbatch, or one for all.
    """
    names: dict[str, int] = {}
    table: list[tuple[int, int, int, int, int]] = []
    numbers: dict[Value, int] = {}
    columns: list[list[Int]] = []
    for stage, of_stage in values.items():
        first = len(table)
        # Values made by the same actions, and freed by the same rule, are found together.
        alike: dict[tuple[int, int, bool, bool, bool], list[int]] = {}
        for v in of_stage:
            numbers[v] = len(table)
            if not v.touches:  # allocated all the time
                instance = len(table), -1, -1, rank.total
                columns.append([np.array([x]) for x in instance])
            else:
                made = v.touches[0]
                once = rank.is_once(made) or v.whole
                key = made[1], rank.half(made), once, v.lasts, v.lasts_halved
                alike.setdefault(key, []).append(len(table))
            table.append(
                (names.setdefault(v.name, len(names)), stage, v.layer,
                 CATEGORIES.index(v.category), first_of(v.size))
            )  # fmt: skip
        for (owner, half, once, lasts, lasts_halved), rows in alike.items():
            touched = [of_stage[i - first].touches for i in rows]
            instances = _instances(np.array(rows), touched, owner, half, once, rank)
            if lasts:
                instances[3] = np.full_like(instances[3], rank.total - 1)
            elif lasts_halved:
                halved = rank.by_microbatch[owner, 1] != rank.by_microbatch[owner, 2]
                instances[3] = np.where(halved[instances[1]], rank.total - 1, instances[3])
            columns.append(instances)
    name, of, layer, category, size = np.array(table, dtype=np.int64).reshape(-1, 5).T
    columns = columns or [[np.array([], dtype=np.int64)] * 4]  # a program may hold no value
    body = [np.concatenate(c).astype(np.int32) for c in zip(*columns, strict=True)]
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
        names=tuple(names),
    )


def _with_their_rows(
    body: Sequence[NDArray[np.int32]], numbers: Mapping[Value, int], rank: RankRows
) -> list[NDArray[np.int32]]:
    """The instances without values whose needed row an action lacks; an `UNSHARD` may have it."""
    value, microbatch, first, last = body
    there = np.ones(len(value), dtype=bool)
    for v, number in numbers.items():
        if v.needs is None or rank.is_once(v.needs):
            continue
        at = np.flatnonzero(value == number)
        actions = rank.by_microbatch[v.needs[1], rank.half(v.needs)][microbatch[at]]
        place = np.array([v.needs[2]])
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


def _instances(
    values: Int,
    touched: Sequence[Sequence[Touch]],
    owner: int,
    half: int,
    once: bool,
    rank: RankRows,
) -> list[Int]:
    """Value, microbatch, first and last row of values that a half of a stage's actions makes."""
    touches = [touch for of_value in touched for touch in of_value]
    start = np.cumsum([0, *(len(of_value) for of_value in touched)])[:-1]
    makers = rank.by_microbatch.get((owner, half), np.array([0]))
    microbatches = np.flatnonzero(makers >= 0) if owner >= 0 else np.array([0])
    rows = np.full((len(microbatches), len(touches)), -1, dtype=np.int64)
    groups: dict[tuple[int, int, bool, bool], list[int]] = {}
    for i, touch in enumerate(touches):
        key = (-1, 0, True, False) if touch[0] == STEP else (
            touch[1], rank.half(touch), rank.is_once(touch), touch[0] == NEXT
        )  # fmt: skip
        groups.setdefault(key, []).append(i)
    for (stage, touching_half, single, next_microbatch), columns in groups.items():
        at = np.array([touches[i][2] for i in columns])
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
    last = np.maximum.reduceat(rows, start, axis=1)
    first = np.minimum.reduceat(np.where(rows < 0, np.iinfo(np.int64).max, rows), start, axis=1)
    if once:
        first, last, microbatches = first.min(axis=0), last.max(axis=0), np.array([-1])
    value, microbatch = np.broadcast_arrays(values, microbatches[:, None])
    touched_at_all = last.ravel() >= 0
    return [c.ravel()[touched_at_all] for c in (value, microbatch, first, last)]
