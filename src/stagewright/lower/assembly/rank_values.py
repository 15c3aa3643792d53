"""Values of a pipeline rank: all of them with their live ranges, or their bytes by action.

Inner copies of an action allocate alike; first and last differ. So the bytes follow from a
*representative order*: the same actions for a few microbatches, one of each class of equal copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from stagewright.arrays import Int, distinct_numbers, sorted_values
from stagewright.lower.assembly.distinct_actions import StageLabels
from stagewright.lower.assembly.live_ranges import live_ranges, rank_columns, value_columns
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.rank_schedule import FORWARD, PASS_PARTS, RankSchedule
from stagewright.lower.assembly.segments import Interner
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import NO_VALUES, Values
from stagewright.program.memory_changes import MemoryChanges, Profiles, changed_bytes
from stagewright.program.rank_work import KINDS

ValueSizes = Mapping[Stage, Int]
"""Bytes of values by stage, where they differ from those of the stage."""


def relabel_layers(layer: Int, stage: Stage, labels: StageLabels) -> Int:
    """Layers of a stage's values in another stage of the same class."""
    result = layer.copy()
    for placed, new_layer in zip(stage.blocks, labels.layers, strict=True):
        result[layer == placed.layer] = new_layer
    return result


def rank_values(order: RankOrder, labels: Sequence[StageLabels], sizes: ValueSizes) -> Values:
    """Values of a rank with their first and last rows; `labels` by stage of the rank."""
    columns, interner = rank_columns(order.stages), Interner[str]()
    layers = [
        relabel_layers(value_columns(stage).layer, stage, stage_labels)
        for stage, stage_labels in zip(order.stages, labels, strict=True)
    ]
    return Values(
        np.array(interner.ids(columns.names), dtype=np.int32),
        np.array([stage_labels.stage for stage_labels in labels], np.int32)[columns.stage],
        np.concatenate(layers).astype(np.int32),
        columns.category.astype(np.uint8),
        _value_sizes(order, sizes),
        *(column.astype(np.int32) for column in live_ranges(order)),
        names=tuple(interner.table),
    )


def _value_sizes(order: RankOrder, sizes: ValueSizes) -> Int:
    """Bytes of the values of a rank."""
    return np.concatenate([sizes.get(s, value_columns(s).size) for s in order.stages])


# ---- bytes by action -----------------------------------------------------------------------------


def memory_changes(order: RankOrder, sizes: ValueSizes) -> MemoryChanges:
    """Bytes that the copies of a rank's actions allocate and free."""
    short, equal_copy = representative_order(order)
    changes = _changes(short, _value_sizes(order, sizes)) if sizes else _default_changes(short)
    return replace(changes, profile=changes.profile[equal_copy])


class RepresentativeOrder:
    """Copies that represent all of a rank's actions, and those that complete live ranges.

    Two with the same actions are equal, whichever ranks they are of.
    """

    def __init__(self, order: RankOrder, copies: Int, microbatches: Int) -> None:
        """`copies` represent the others; `microbatches`: number that each microbatch represents."""
        self.order, self.copies, self.microbatches = order, copies, microbatches
        schedule = order.schedule
        columns = (
            order.stage_classes, order.action, order.gathered_by, copies, microbatches,
            schedule.kind, schedule.stage, schedule.microbatch, schedule.step,
        )  # fmt: skip
        self._key = order.table, order.optimizer_index, *(column.tobytes() for column in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RepresentativeOrder) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def representative_order(order: RankOrder) -> tuple[RepresentativeOrder, Int]:
    """Representative order of a rank, and by copy the index of its equal among `copies`.

    Copies of an action are equal if their microbatches are of equal classes. Where actions use
    weights that others have gathered, every microbatch is a class.
    """
    schedule, count = order.schedule, len(order.action)
    next_touches = bool(rank_columns(order.stages).touches.next_microbatch.any())
    if order.reuses_gathered:
        classes = np.arange(schedule.microbatches)
    else:
        classes = _microbatch_classes(schedule, next_touches=next_touches)
    stage, microbatch_class = np.zeros((2, 2, count), dtype=np.int64)
    stage[schedule.part, schedule.step] = schedule.local_stage + 1
    microbatch_class[schedule.part, schedule.step] = classes[schedule.microbatch]
    # The last copy with rows frees the values that are live until the end of the step.
    last = np.zeros(count, dtype=bool)
    last[np.flatnonzero(np.diff(order.begin))[-1:]] = True
    examples, equal_copy = distinct_numbers([order.action, *stage, *microbatch_class, last], count)
    # Examples depend on all actions of their microbatches, and of the next ones if touched there.
    of_examples = schedule.microbatch[np.isin(schedule.step, examples)]
    complete = sorted_values(np.append(of_examples, schedule.microbatches - 1))
    near = np.concatenate([complete - 1, complete, complete + 1]) if next_touches else complete
    selected = np.arange(count) >= schedule.steps
    selected[schedule.step[np.isin(schedule.microbatch, near)]] = True
    copies = np.flatnonzero(selected)
    if not order.reuses_gathered and len(schedule) == schedule.steps:
        # Ranks differ in how forwards and backwards alternate, on which no live range depends.
        forward = np.append(schedule.kind == FORWARD, np.zeros(count - schedule.steps, dtype=bool))
        copies = np.concatenate([copies[forward[copies]], copies[~forward[copies]]])
    short, microbatches = order.take(copies)
    new_copy = np.empty(count, dtype=np.int64)
    new_copy[copies] = np.arange(len(copies))
    present, first = np.unique(classes[complete], return_index=True)
    represented = np.zeros(len(microbatches), dtype=np.int64)
    represented[np.searchsorted(microbatches, complete[first])] = np.bincount(classes)[present]
    return RepresentativeOrder(short, new_copy[examples], represented), equal_copy


@lru_cache(maxsize=256)
def _microbatch_classes(schedule: RankSchedule, *, next_touches: bool) -> Int:
    """Class id of each microbatch: same kinds, first/last flags, order.

    `next_touches`: actions of the next microbatch touch values.
    """
    action = schedule.action_of
    codes = schedule.end_flags * len(KINDS) + schedule.kind
    code = np.stack([codes[pass_part][action[pass_part]] for pass_part in range(PASS_PARTS)])
    # A forward comes before each backward of its microbatch, whatever is between them.
    turn = np.where(schedule.kind == FORWARD, 0, len(schedule)) + np.arange(len(schedule))
    columns = np.where(action < 0, -1, np.stack([code, turn[action]]))
    columns = columns.reshape(2, -1, schedule.microbatches)
    if next_touches:
        none = np.full_like(columns[:, :, :1], -1)
        before = np.concatenate([none, columns[:, :, :-1]], axis=2)
        after = np.concatenate([columns[:, :, 1:], none], axis=2)
        columns = np.concatenate([before, columns, after], axis=1)
    columns[1] = columns[1].argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    rows = np.ascontiguousarray(columns.reshape(-1, schedule.microbatches).T)
    return np.array(Interner[bytes]().ids(row.tobytes() for row in rows), dtype=np.int64)


@lru_cache(maxsize=64)  # ranks and runs have equal representative orders
def _default_changes(short: RepresentativeOrder) -> MemoryChanges:
    return _changes(short, rank_columns(short.order.stages).size)


def _changes(short: RepresentativeOrder, size: Int) -> MemoryChanges:
    """Bytes that the copies of `short` allocate and free; equal copies share a profile."""
    order, ranges = short.order, live_ranges(short.order)
    values = replace(
        NO_VALUES, category=rank_columns(order.stages).category, size=size,
        value=ranges.value, first=ranges.first, last=ranges.last,
    )  # fmt: skip
    # The last copy frees the values of all microbatches that are live until the end of the step.
    freed_values = np.where(ranges.microbatch < 0, 1, short.microbatches[ranges.microbatch])
    last_copy = order.begin[np.flatnonzero(np.diff(order.begin))].max(initial=0)
    freed_values[ranges.last < last_copy] = 1
    start, allocated, freed = changed_bytes(values, order.total, freed_values)
    rows = [slice(a, b) for a, b in itertools.pairwise(order.begin.tolist())]
    profile_ids = Interner[tuple[int, bytes, bytes]]().ids(
        (int(order.action[c]), allocated[:, rows[c]].tobytes(), freed[:, rows[c]].tobytes())
        for c in short.copies.tolist()
    )
    profile = np.array(profile_ids, dtype=np.int64)
    _, first = np.unique(profile, return_index=True)
    copies = short.copies[first]
    allocated, freed = (
        np.concatenate([table[:, :0], *(table[:, rows[c]] for c in copies.tolist())], axis=1)
        for table in (allocated, freed)
    )
    begin = np.concatenate([[0], np.cumsum(np.diff(order.begin)[copies])]).astype(np.int64)
    return MemoryChanges(start, profile, Profiles(allocated, freed, begin))
