"""Live ranges: the values of a pipeline rank with the first and last row that touches each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.lifetimes import Touch, Value
from stagewright.lower.assembly.rank_rows import RankRows
from stagewright.lower.assembly.segments import NEXT, STEP
from stagewright.program.columns import CATEGORIES, Values


def live_ranges(values: Mapping[int, Sequence[Value]], rank: RankRows) -> Values:
    """The values of a rank's stages, by stage, as columns with their first and last rows.

    A value is a row of the table; it has an instance for each microbatch, or one for all.
    """
    names: dict[str, int] = {}
    table: list[tuple[int, int, int, int, int]] = []
    columns: list[list[Int]] = []
    for stage, of_stage in values.items():
        first = len(table)
        # Values made by the same actions, and freed by the same rule, are found together.
        alike: dict[tuple[int, int, bool, bool, bool], list[int]] = {}
        for v in of_stage:
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
                 CATEGORIES.index(v.category), v.size)
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
    return Values(
        name.astype(np.int32),
        of.astype(np.int32),
        layer.astype(np.int32),
        category.astype(np.uint8),
        size,
        *body,
        names=tuple(names),
    )


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
            rows[there[:, None], columns] = rank.rows(actions[there], at, absent=-1)
    last = np.maximum.reduceat(rows, start, axis=1)
    first = np.minimum.reduceat(np.where(rows < 0, np.iinfo(np.int64).max, rows), start, axis=1)
    if once:
        first, last, microbatches = first.min(axis=0), last.max(axis=0), np.array([-1])
    value, microbatch = np.broadcast_arrays(values, microbatches[:, None])
    touched_at_all = last.ravel() >= 0
    return [c.ravel()[touched_at_all] for c in (value, microbatch, first, last)]
