"""Classes of microbatches whose values have equal live ranges on some stages of a rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.rank_schedule import HALVES, UNSHARD, RankSchedule

AHEAD, NEXT, SLOTS = 3, 3, 6
"""Actions of a microbatch on a stage by slot: its forward (0), each half of its backward (1, 2), the
action that has gathered the weights of its forward ahead (3), and each half of the backward of the
next microbatch (1 + 3, 2 + 3)."""


class Acting(NamedTuple):
    """An action of a microbatch of some class on a stage."""

    kind: int
    complete: bool
    gathers: bool
    position: int
    """Among the actions of all classes, in the order of the rank."""


class Classes(NamedTuple):
    """Classes of microbatches on stages that hand values to each other in memory. Hashable."""

    acting: tuple[tuple[tuple[Acting | None, ...], ...], ...]
    """By stage, slot and class."""
    once: tuple[tuple[Acting | None, ...], ...]
    """By stage and half, the action that does what happens once per step."""
    first: int
    """The class of the first microbatch, -1 if these stages do nothing for it."""
    last: int
    """The class of the last one, -1 likewise."""
    positions: int

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self.acting[0][0])


@dataclass(frozen=True, slots=True, eq=False)
class StageGroup:
    """Stages of a rank that hand values to each other in memory, or one alone; and their classes of
    microbatches."""

    places: tuple[int, ...]
    """Among the stages of the rank."""
    classes: Classes
    class_of: Int
    """By microbatch, -1 where these stages do nothing: [microbatches]."""
    example: Int
    """A microbatch of each class: [classes]."""
    slots: Int
    """Stage (among `places`), slot and class of each position: [positions, 3]."""
    actions: Int
    """The action of the schedule at each position: [positions]."""


def groups(
    schedule: RankSchedule, supplier: Int, alone: Sequence[bool], waits: Sequence[bool]
) -> list[StageGroup]:
    """The groups of the stages of a rank, with their classes.

    By stage: whether it hands values on as messages only (`alone`), and whether values wait for the
    next microbatch.
    """
    found: list[StageGroup] = []
    run: list[int] = []
    stages: list[int] = schedule.stages.tolist()
    for place, stage in enumerate(stages):
        if run and (alone[place] or stage != stages[run[-1]] + 1):
            found.append(_group(schedule, supplier, run, waits))
            run = []
        run.append(place)
        if alone[place]:
            found.append(_group(schedule, supplier, run, waits))
            run = []
    return [*found, *([_group(schedule, supplier, run, waits)] if run else [])]


def _group(
    schedule: RankSchedule, supplier: Int, places: Sequence[int], waits: Sequence[bool]
) -> StageGroup:
    by = schedule.by_microbatch[:, list(places)]  # [halves, stages, microbatches]
    next_waits = any(waits[place] for place in places)
    actions = np.full((SLOTS, *by.shape[1:]), -1, dtype=np.int64)
    actions[:HALVES] = by
    ahead = supplier[by[0]]
    gathered = (by[0] >= 0) & (schedule.kind[ahead] == UNSHARD)
    actions[AHEAD] = np.where(gathered, ahead, -1)
    if next_waits:
        actions[NEXT + 1 :, :, :-1] = by[1:, :, 1:]
    gathers = supplier == np.arange(len(supplier))
    number = (schedule.kind * 2 + schedule.complete) * 2 + gathers + 1
    there = actions >= 0
    attributes = np.where(there, number[actions], 0)
    ends = np.where(there[:HALVES], np.stack([
        schedule.ends[half][by[half]] for half in range(HALVES)
    ]), 0)  # fmt: skip
    columns = [*attributes.reshape(-1, by.shape[2]), *ends.reshape(-1, by.shape[2])]
    if next_waits or len(places) > 1:
        flat = actions.reshape(-1, by.shape[2])
        columns += [*np.argsort(np.argsort(flat, axis=0, kind="stable"), axis=0)]
    active = np.flatnonzero(there[:HALVES].any(axis=(0, 1)))
    _, example, of = np.unique(
        np.stack(columns)[:, active], axis=1, return_index=True, return_inverse=True
    )
    class_of = np.full(by.shape[2], -1, dtype=np.int64)
    class_of[active] = of.ravel()
    return _of_classes(schedule, tuple(places), actions, gathers, class_of, active[example])


def _of_classes(
    schedule: RankSchedule,
    places: tuple[int, ...],
    actions: Int,
    gathers: Int,
    class_of: Int,
    example: Int,
) -> StageGroup:
    """The group; `actions` are by slot, stage and microbatch."""
    positions: dict[Hashable, tuple[int, int, int, int, int, int]] = {}
    key_of: dict[tuple[int, int, int], Hashable] = {}
    for q in range(len(places)):
        for k, microbatch in enumerate(example.tolist()):
            for slot in range(SLOTS):
                action = int(actions[slot, q, microbatch])
                if action < 0:
                    continue
                later = slot > NEXT
                key = (k, action, later)
                key_of[q, slot, k] = key
                # Forwards of a stage alone come before its backwards, whatever lies between them.
                turn = 0 if len(places) > 1 or slot == AHEAD else 1 if slot == 0 else 2
                positions.setdefault(key, (turn, action, later, q, slot, k))
    order = sorted(positions, key=lambda key: positions[key])
    position = {key: n for n, key in enumerate(order)}

    def acting(q: int, slot: int, k: int) -> Acting | None:
        key = key_of.get((q, slot, k))
        return None if key is None else of_action(positions[key][1], position[key])

    def of_action(action: int, at: int) -> Acting:
        kind, complete = int(schedule.kind[action]), bool(schedule.complete[action])
        return Acting(kind, complete, bool(gathers[action]), at)

    def once(q: int, half: int) -> Acting | None:
        action = int(schedule.once[half, places[q]])
        if action < 0:
            return None
        k = int(class_of[schedule.microbatch[action]])
        slot = AHEAD if schedule.kind[action] == UNSHARD else half
        return acting(q, slot, k)

    count = range(len(example))
    classes = Classes(
        tuple(
            tuple(tuple(acting(q, slot, k) for k in count) for slot in range(SLOTS))
            for q in range(len(places))
        ),
        tuple(tuple(once(q, half) for half in range(HALVES)) for q in range(len(places))),
        int(class_of[0]),
        int(class_of[-1]),
        len(order),
    )
    columns = np.array([positions[key] for key in order], dtype=np.int64).reshape(-1, 6)
    return StageGroup(places, classes, class_of, example, columns[:, 3:], columns[:, 1])
