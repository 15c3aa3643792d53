"""Classes of microbatches whose values have equal live ranges on some stages of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.rank_schedule import (
    HALVES,
    UNSHARD,
    RankSchedule,
)

AHEAD, NEXT, SLOTS = 3, 3, 6
"""Actions of a microbatch on a stage by slot: its forward (0), each half of its backward (1, 2),
the action that has gathered the weights of its forward ahead (3), and each half of the backward of
the next microbatch (1 + 3, 2 + 3)."""
_TURN: Int = np.array([1, 2, 2, 0, 2, 2])
_ATTRIBUTE_BITS, _ENDS_BITS = 5, 2


class Acting(NamedTuple):
    """An action of a microbatch of some class on a stage."""

    kind: int
    complete: bool
    gathers: bool
    position: int
    """Among the actions of all classes, in the order of the rank."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of microbatches on stages that hand values to each other in memory."""

    acting: tuple[tuple[tuple[Acting | None, ...], ...], ...]
    """By stage, slot and class."""
    once: tuple[tuple[Acting | None, ...], ...]
    """By stage and half, the action that does what happens once per step."""
    first: int
    """The class of the first microbatch, -1 if these stages do nothing for it."""
    last: int
    """The class of the last one, -1 likewise."""
    slots: tuple[tuple[int, int, int], ...]
    """Stage, slot and class of each position."""

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self.acting[0][0])

    @property
    def positions(self) -> int:
        """Number of actions of all classes."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class StageGroup:
    """Stages of a rank that hand values to each other in memory, or one alone; and their classes of
    microbatches."""

    places: tuple[int, ...]
    """Among the stages of the rank."""
    classes: Classes
    class_of: Int
    """By microbatch, -1 where these stages do nothing: [microbatches]."""
    actions: Int
    """An action of the schedule at each position: [positions]."""


def groups(
    schedule: RankSchedule, supplier: Int, alone: tuple[bool, ...], waits: tuple[bool, ...]
) -> tuple[StageGroup, ...]:
    """The groups of the stages of a rank, with their classes.

    By stage: whether it hands values on as messages only (`alone`), and whether values wait for the
    next microbatch.
    """
    if (supplier == np.arange(len(supplier))).all():
        return _known_groups(schedule, alone, waits)
    return _groups(schedule, supplier, alone, waits)


@lru_cache(maxsize=256)
def _known_groups(
    schedule: RankSchedule, alone: tuple[bool, ...], waits: tuple[bool, ...]
) -> tuple[StageGroup, ...]:
    return _groups(schedule, np.arange(len(schedule)), alone, waits)


def _groups(
    schedule: RankSchedule, supplier: Int, alone: tuple[bool, ...], waits: tuple[bool, ...]
) -> tuple[StageGroup, ...]:
    actions = _Actions.of(schedule, supplier)
    key, classes = actions.classes()
    return tuple(
        _alone(actions, places[0], key[places[0]], classes)
        if len(places) == 1 and not waits[places[0]]
        else _together(actions, places, waits=any(waits[place] for place in places))
        for places in _connected(schedule.stages.tolist(), alone)
    )


def _connected(stages: Sequence[int], alone: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """The places of consecutive stages that hand values on in memory; others by themselves."""
    run: list[int] = []
    for place, stage in enumerate(stages):
        if run and (alone[place] or alone[run[-1]] or stage != stages[run[-1]] + 1):
            yield tuple(run)
            run = []
        run.append(place)
    if run:
        yield tuple(run)


@dataclass(frozen=True, slots=True, eq=False)
class _Actions:
    """The actions of all microbatches on the stages of a rank."""

    schedule: RankSchedule
    action: Int
    """-1: there is none: [slots before `NEXT` and `AHEAD`, stages, microbatches]."""
    attributes: Int
    """Of these: kind, complete or not, gathers or not, as one number; 0: there is none."""
    ends: Int
    """The first or the last of its half: [halves, stages, microbatches]."""

    @classmethod
    def of(cls, schedule: RankSchedule, supplier: Int) -> _Actions:
        """Those of a rank."""
        by = schedule.by_microbatch
        ahead = supplier[by[0]]
        gathered = (by[0] >= 0) & (schedule.kind[ahead] == UNSHARD)
        action = np.concatenate([by, np.where(gathered, ahead, -1)[None]])
        gathers = supplier == np.arange(len(supplier))
        number = (schedule.kind * 2 + schedule.complete) * 2 + gathers + 1
        attributes = np.where(action >= 0, number[action], 0)
        ends = np.stack([schedule.ends[half][by[half]] for half in range(HALVES)])
        return cls(schedule, action, attributes, np.where(by >= 0, ends, 0))

    def classes(self) -> tuple[Int, Int]:
        """Keys of microbatches by stage, if it is alone; 0: it does nothing for them. And all keys
        that occur, ascending."""
        key = np.zeros(self.action.shape[1:], dtype=np.int64)
        for columns, bits in ((self.attributes, _ATTRIBUTE_BITS), (self.ends, _ENDS_BITS)):
            for column in columns:
                key = key << bits | column
        return key, np.unique(key)


def _alone(actions: _Actions, place: int, key: Int, keys: Int) -> StageGroup:
    """The group of a stage that is alone; `key` is by microbatch."""
    number = np.searchsorted(keys, key)
    example = np.full(len(keys), -1, dtype=np.int64)
    example[number[::-1]] = np.arange(len(key) - 1, -1, -1)  # the first one of each
    example[keys == 0] = -1
    there = np.flatnonzero(example >= 0)
    class_of = np.full(len(keys), -1, dtype=np.int64)
    class_of[there] = np.arange(len(there))
    columns = np.full((2, SLOTS, 1, len(there)), -1, dtype=np.int64)
    columns[0, : AHEAD + 1, 0] = actions.action[:, place, example[there]]
    columns[1, : AHEAD + 1, 0] = actions.attributes[:, place, example[there]]
    return _of_classes(actions.schedule, (place,), columns[0], columns[1], class_of[number])


def _together(actions: _Actions, places: tuple[int, ...], *, waits: bool) -> StageGroup:
    """The group of stages that hand values to each other, or whose values wait for the next
    microbatch."""
    at = list(places)
    microbatches = actions.action.shape[2]
    columns = np.full((2, SLOTS, len(places), microbatches), -1, dtype=np.int64)
    columns[0, : AHEAD + 1] = actions.action[:, at]
    columns[1, : AHEAD + 1] = actions.attributes[:, at]
    if waits:
        columns[:, NEXT + 1 :, :, :-1] = columns[:, 1:HALVES, :, 1:]
    action, attributes = columns.reshape(2, -1, microbatches)
    order = np.argsort(np.argsort(action, axis=0, kind="stable"), axis=0)
    ends = actions.ends[:, at].reshape(-1, microbatches)
    active = np.flatnonzero((columns[0, :HALVES] >= 0).any(axis=(0, 1)))
    _, example, number = np.unique(
        np.concatenate([attributes, ends, order])[:, active],
        axis=1, return_index=True, return_inverse=True,
    )  # fmt: skip
    class_of = np.full(microbatches, -1, dtype=np.int64)
    class_of[active] = number.ravel()
    action, attributes = columns[..., active[example]]
    return _of_classes(actions.schedule, places, action, attributes, class_of)


def _of_classes(
    schedule: RankSchedule, places: tuple[int, ...], action: Int, attributes: Int, class_of: Int
) -> StageGroup:
    """The group, given an action of each class and its attributes: [slots, stages, classes]."""
    _, stages, count = action.shape
    cells = np.flatnonzero(action.ravel() >= 0)
    found, slot = action.ravel()[cells], cells // (stages * count)
    # Forwards of a stage alone come before its backwards, whatever lies between them.
    turn = _TURN[slot] * (stages == 1)
    key = ((turn * len(schedule) + found) * 2 + (slot > NEXT)) * count + cells % count
    _, first, position = np.unique(key, return_index=True, return_inverse=True)
    once: list[tuple[int, int]] = []  # slot and class, by stage and half
    for place in places:
        for half, of in enumerate(schedule.once[:, place].tolist()):
            ahead = of >= 0 and schedule.kind[of] == UNSHARD
            k = int(class_of[schedule.microbatch[of]]) if of >= 0 else -1
            once.append((AHEAD if ahead else half, k))
    classes = _classes(
        stages,
        count,
        tuple(cells.tolist()),
        tuple(attributes.ravel()[cells].tolist()),
        tuple(position.ravel().tolist()),
        tuple(once),
        (int(class_of[0]), int(class_of[-1])),
    )
    return StageGroup(places, classes, class_of, found[first])


@lru_cache(maxsize=256)  # most stages have equal ones
def _classes(
    stages: int,
    count: int,
    cells: tuple[int, ...],
    attributes: tuple[int, ...],
    position: tuple[int, ...],
    once: tuple[tuple[int, int], ...],
    ends: tuple[int, int],
) -> Classes:
    """The classes, given their actions: where each is among slots, stages and classes."""
    acting: dict[int, Acting] = {}
    slots: dict[int, tuple[int, int, int]] = {}
    for cell, number, turn in zip(cells, attributes, position, strict=True):
        rest, gathers = divmod(number - 1, 2)
        kind, complete = divmod(rest, 2)
        acting[cell] = Acting(kind, bool(complete), bool(gathers), turn)
        slot, stage = divmod(cell // count, stages)
        slots.setdefault(turn, (stage, slot, cell % count))

    def at(slot: int, stage: int, cls: int) -> Acting | None:
        return acting.get((slot * stages + stage) * count + cls) if cls >= 0 else None

    return Classes(
        tuple(
            tuple(tuple(at(slot, stage, cls) for cls in range(count)) for slot in range(SLOTS))
            for stage in range(stages)
        ),
        tuple(
            tuple(at(slot, stage, k) for slot, k in once[stage * HALVES : (stage + 1) * HALVES])
            for stage in range(stages)
        ),
        *ends,
        tuple(slots[position] for position in range(len(slots))),
    )
