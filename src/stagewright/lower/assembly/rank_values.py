"""The values of a pipeline rank: all of them with their live ranges, or their bytes by action.

Copies of an action allocate and free the same bytes in the same rows, but for the first and the
last ones of a stage. So the bytes follow from a *short order*: the same actions for a few
microbatches, one of each class whose copies are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from stagewright.arrays import Int, distinct_numbers, sorted_values
from stagewright.lower.assembly.distinct_actions import Naming
from stagewright.lower.assembly.live_ranges import live_ranges, rank_columns, value_columns
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.rank_schedule import FORWARD, HALVES, RankSchedule
from stagewright.lower.assembly.segments import Numbers
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import NO_VALUES, Values
from stagewright.program.step import KINDS, MemoryChanges, Profiles, changed_bytes

Sizes = Mapping[Stage, Int]
"""Bytes of the values of stages, where they are not those of the stage."""


def relabelled(layer: Int, stage: Stage, naming: Naming) -> Int:
    """The layers of a stage's values in another stage with the same content."""
    found = layer.copy()
    for placed, here in zip(stage.blocks, naming.layers, strict=True):
        found[layer == placed.layer] = here
    return found


def rank_values(order: RankOrder, naming: Sequence[Naming], sizes: Sizes) -> Values:
    """The values of a rank with their first and last rows; `naming` is by stage of the rank."""
    columns, numbers = rank_columns(order.stages), Numbers[str]()
    layers = [
        relabelled(value_columns(stage).layer, stage, named)
        for stage, named in zip(order.stages, naming, strict=True)
    ]
    return Values(
        np.array(numbers.each(columns.names), dtype=np.int32),
        np.array([named.stage for named in naming], dtype=np.int32)[columns.stage],
        np.concatenate(layers).astype(np.int32),
        columns.category.astype(np.uint8),
        _sizes(order, sizes),
        *(column.astype(np.int32) for column in live_ranges(order)),
        names=tuple(numbers.table),
    )


def _sizes(order: RankOrder, sizes: Sizes) -> Int:
    """Bytes of the values of a rank."""
    return np.concatenate([sizes.get(s, value_columns(s).size) for s in order.stages])


# ---- bytes by action -----------------------------------------------------------------------------


def memory_changes(order: RankOrder, sizes: Sizes) -> MemoryChanges:
    """What the copies of a rank's actions allocate and free."""
    short, number = shortened(order)
    changes = _changes(short, _sizes(order, sizes)) if sizes else _known_changes(short)
    return replace(changes, kind=changes.kind[number])


class ShortOrder:
    """A few copies of a rank's actions, some of which stand for all others.

    Two with the same actions are equal, whichever ranks they are of.
    """

    def __init__(self, order: RankOrder, copies: Int, microbatches: Int) -> None:
        """`copies` stand for others of the rank; the rest of the order completes the live ranges of
        their values. `microbatches`: how many of the rank's each one stands for."""
        self.order, self.copies, self.microbatches = order, copies, microbatches
        of = order.schedule
        columns = (
            order.contents, order.action, order.supplier, copies, microbatches,
            of.kind, of.stage, of.microbatch, of.step,
        )  # fmt: skip
        self._key = order.table, order.after, *(column.tobytes() for column in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShortOrder) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def shortened(order: RankOrder) -> tuple[ShortOrder, Int]:
    """A short order of a rank, and by copy the number of that one of its copies which equals it.

    Copies of an action are equal if their microbatches are of equal classes. Where actions use
    weights that others have gathered, every microbatch is a class of its own.
    """
    schedule, count = order.schedule, len(order.action)
    waits = bool(rank_columns(order.stages).touches.next.any())
    classes = _classes(schedule, waits=waits)
    if order.borrows:
        classes = np.arange(schedule.microbatches)
    place, of_class = np.zeros((2, 2, count), dtype=np.int64)
    place[schedule.part, schedule.step] = schedule.place + 1
    of_class[schedule.part, schedule.step] = classes[schedule.microbatch]
    # The last copy with rows frees what is live until the step is over.
    ends = np.zeros(count, dtype=bool)
    ends[np.flatnonzero(np.diff(order.begin))[-1:]] = True
    examples, number = distinct_numbers([order.action, *place, *of_class, ends], count)
    # Examples need all actions of their microbatches, and of those that values wait for.
    of_examples = schedule.microbatch[np.isin(schedule.step, examples)]
    complete = sorted_values(np.append(of_examples, schedule.microbatches - 1))
    near = np.concatenate([complete - 1, complete, complete + 1]) if waits else complete
    chosen = np.arange(count) >= schedule.steps
    chosen[schedule.step[np.isin(schedule.microbatch, near)]] = True
    copies = np.flatnonzero(chosen)
    if not order.borrows and len(schedule) == schedule.steps:
        # Ranks differ in how forwards and backwards alternate, on which no live range depends.
        forward = np.append(schedule.kind == FORWARD, [False] * (count - schedule.steps))
        copies = np.concatenate([copies[forward[copies]], copies[~forward[copies]]])
    short, microbatches = order.take(copies)
    place_of = np.empty(count, dtype=np.int64)
    place_of[copies] = np.arange(len(copies))
    present, first = np.unique(classes[complete], return_index=True)
    stands_for = np.zeros(len(microbatches), dtype=np.int64)
    stands_for[np.searchsorted(microbatches, complete[first])] = np.bincount(classes)[present]
    return ShortOrder(short, place_of[examples], stands_for), number


@lru_cache(maxsize=256)
def _classes(schedule: RankSchedule, *, waits: bool) -> Int:
    """The class of each microbatch: those of one class have actions of the same kinds, which are or
    are not the first and the last of their stage, in the same order.

    `waits`: values wait for actions of the next microbatch.
    """
    of = schedule.by_microbatch
    codes = schedule.ends * len(KINDS) + schedule.kind
    code = np.stack([codes[half][of[half]] for half in range(HALVES)])
    # A forward comes before each backward of its microbatch, whatever is between them.
    turn = np.where(schedule.kind == FORWARD, 0, len(schedule)) + np.arange(len(schedule))
    columns = np.where(of < 0, -1, np.stack([code, turn[of]]))
    columns = columns.reshape(2, -1, schedule.microbatches)
    if waits:
        none = np.full_like(columns[:, :, :1], -1)
        before = np.concatenate([none, columns[:, :, :-1]], axis=2)
        after = np.concatenate([columns[:, :, 1:], none], axis=2)
        columns = np.concatenate([before, columns, after], axis=1)
    columns[1] = columns[1].argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    rows = np.ascontiguousarray(columns.reshape(-1, schedule.microbatches).T)
    return np.array(Numbers[bytes]().each(row.tobytes() for row in rows), dtype=np.int64)


@lru_cache(maxsize=64)  # ranks and runs have equal short orders
def _known_changes(short: ShortOrder) -> MemoryChanges:
    return _changes(short, rank_columns(short.order.stages).size)


def _changes(short: ShortOrder, size: Int) -> MemoryChanges:
    """What the copies of `short` allocate and free; those that do the same share a profile."""
    order, ranges = short.order, live_ranges(short.order)
    values = replace(
        NO_VALUES, category=rank_columns(order.stages).category, size=size,
        value=ranges.value, first=ranges.first, last=ranges.last,
    )  # fmt: skip
    # The last copy frees what is live until the step is over: of all microbatches.
    number = np.where(ranges.microbatch < 0, 1, short.microbatches[ranges.microbatch])
    last_copy = order.begin[np.flatnonzero(np.diff(order.begin))].max(initial=0)
    number[ranges.last < last_copy] = 1
    start, up, down = changed_bytes(values, order.total, number)
    rows = [slice(a, b) for a, b in itertools.pairwise(order.begin.tolist())]
    profiles = Numbers[tuple[int, bytes, bytes]]()
    kinds = profiles.each(
        (int(order.action[copy]), up[:, rows[copy]].tobytes(), down[:, rows[copy]].tobytes())
        for copy in short.copies.tolist()
    )
    kind = np.array(kinds, dtype=np.int64)
    _, first = np.unique(kind, return_index=True)
    copies = short.copies[first]
    up, down = (
        np.concatenate([of[:, :0], *(of[:, rows[copy]] for copy in copies.tolist())], axis=1)
        for of in (up, down)
    )
    begin = np.concatenate([[0], np.cumsum(np.diff(order.begin)[copies])]).astype(np.int64)
    return MemoryChanges(start, kind, Profiles.of(up, down, begin))
