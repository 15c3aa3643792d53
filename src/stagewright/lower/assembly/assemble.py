"""From stages and a schedule to the work of every rank: distinct actions, and their order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int, distinct_numbers
from stagewright.lower.assembly.distinct_actions import ActionTable, StagePart, TaskColumns
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lowered_block import WHOLE, MessageParts, StageBlock, crossings
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.assembly.rank_order import (
    RankOrder,
    RankSchedule,
    gathered_by,
    rank_schedules,
)
from stagewright.lower.assembly.segments import FORWARD, UNSHARD, Interner, Shifts, StageLabels
from stagewright.lower.assembly.stages import Stage, StageKey
from stagewright.lower.assembly.work import AssembledWork, RowNames
from stagewright.program.columns import Program, RankClass
from stagewright.schedule.actions import Order
from stagewright.schedule.places import Place, places


def assemble(
    stages: Sequence[Sequence[StageBlock]],
    order: Order,
    mesh: Mesh,
    *,
    clip: ClipNorm | None = None,
    streams: str = "one",
    habits: Habit = MEGATRON_LM,
    layers: Mapping[int, Hashable] | None = None,
    message_parts: MessageParts = WHOLE,
) -> Program:
    """Build the program of every rank class: one class per pipeline rank.

    `stages`: blocks of each stage of the model; `order`: actions of each pipeline rank; `clip`:
    gradients are clipped by their norm; `habits`: those of the run's framework; `layers`: extra key
    per layer; stages match only if keys do; `message_parts`: how messages between stages are cut.
    """
    pp, weights = len(order), habits.unit_weights()
    schedules = rank_schedules(order, unshards=weights.gathers_ahead)
    stage_places, between = places(order), crossings(stages, message_parts)
    keys = [
        StageKey.of(stages[p.stage], p, between, pp, habits, layers=layers) for p in stage_places
    ]
    rank_keys = [[key for key in keys if key.place.rank == rank] for rank in range(pp)]
    rank_labels = [[key.labels for key in keys] for keys in rank_keys]
    trains = any((~np.isin(s.kind, (FORWARD, UNSHARD))).any() for s in schedules)
    by_class, rank_classes = _build_stages(rank_keys, trains=trains)
    labels: dict[int, StageLabels] = {}  # those of the first stage of each class
    for classes, of_rank in zip(rank_classes, rank_labels, strict=True):
        for stage_class, stage_labels in zip(classes, of_rank, strict=True):
            labels.setdefault(stage_class, stage_labels)
    gathers = [
        gathered_by(s, [by_class[c] for c in classes], keeps_gathered=weights.keeps_gathered)
        for s, classes in zip(schedules, rank_classes, strict=True)
    ]
    distinct = Interner[tuple[StagePart, ...]]()
    actions = [
        _actions(*rank, distinct) for rank in zip(schedules, rank_classes, gathers, strict=True)
    ]
    optimizers = Interner[_OptimizerKey]()
    optimizer = [optimizers((classes, _last_actions(schedule)))
                 for classes, schedule in zip(rank_classes, schedules, strict=True)]  # fmt: skip
    table = ActionTable(
        by_class, [*labels.values()], [*dict.fromkeys(rank_classes)],
        [*distinct.table], [classes for classes, _ in optimizers.table], clip,
        TaskColumns(pp, _tied_ranks(stages, stage_places)),
    )  # fmt: skip
    for rank, index in enumerate(optimizer):
        if len(table.optimizer_step(index)):
            actions[rank] = np.append(actions[rank], table.first_optimizer + index)
    orders = [
        RankOrder(table, schedules[rank], np.array(rank_classes[rank]), actions[rank],
                  gathers[rank], optimizer[rank], len(stages))
        for rank in range(pp)
    ]  # fmt: skip
    names = RowNames(orders, rank_labels)
    members = np.arange(mesh.world_size, dtype=np.int64)
    members = members.reshape(-1, pp, mesh.stride("pp") if pp > 1 else 1)
    rank_class = [
        RankClass(
            members[:, rank].ravel(),
            rank,
            AssembledWork(table.actions, orders[rank], names, rank, streams),
        )
        for rank in range(pp)
    ]
    return Program(mesh, tuple(rank_class), table.communicators, table.peers)


def _tied_ranks(
    stages: Sequence[Sequence[StageBlock]], stage_places: Sequence[Place]
) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks that have a copy of each tied table."""
    ranks: dict[str, set[int]] = {}
    for p in stage_places:
        for name in {name for placed in stages[p.stage] for name in placed.block.tied}:
            ranks.setdefault(name, set()).add(p.rank)
    return {name: tuple(sorted(ranks_)) for name, ranks_ in ranks.items()}


# ---- stages --------------------------------------------------------------------------------------


def _build_rows(stages: Sequence[Stage], *, trains: bool) -> None:
    """Build the rows of stages that exchange values in memory."""
    for stage in stages:
        stage.build(forward=True)
    for stage in reversed(stages) if trains else ():
        stage.build(forward=False)
    for stage in stages:
        stage.build_updates()
    for stage in stages:
        stage.finish()


def _build_stages(
    rank_keys: Sequence[Sequence[StageKey]], *, trains: bool
) -> tuple[list[Stage], list[tuple[int, ...]]]:
    """Build the stages of all ranks: by stage class, and the classes of each rank's stages.

    Stages with equal keys are of one class, but for those that exchange values in memory.
    """
    stages: list[Stage] = []
    rank_classes: list[tuple[int, ...]] = []
    class_of: dict[tuple[StageKey, Shifts], int] = {}
    for keys in rank_keys:
        classes: list[int] = []
        joined: list[Stage] = []
        for key in keys:
            if key.messages_only:
                stage_class = class_of.setdefault((key, key.shifts), len(stages))
                if stage_class == len(stages):
                    stages.append(Stage(key))
                    _build_rows(stages[-1:], trains=trains)
            else:
                stage_class = len(stages)
                joined.append(Stage(key))
                stages.append(joined[-1])
            classes.append(stage_class)
        for stage in joined:
            stage.join({other.stage: other for other in joined})
        _build_rows(joined, trains=trains)
        rank_classes.append(tuple(classes))
    return stages, rank_classes


# ---- distinct actions ----------------------------------------------------------------------------

_OptimizerKey = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""Classes of a rank's stages; (local stage, pass part, kind) of actions that end backwards."""


def _actions(
    schedule: RankSchedule,
    stage_classes: Sequence[int],
    gathered_by: Int,
    distinct: Interner[tuple[StagePart, ...]],
) -> Int:
    """Number among `distinct` of the action of each step of a rank."""
    gathers = gathered_by == np.arange(len(schedule))
    stage_class = np.array(stage_classes, dtype=np.int64)[schedule.local_stage]
    columns = [stage_class, schedule.kind, schedule.once_per_step, gathers]
    first, part = distinct_numbers(columns, len(schedule))
    parts = [StagePart(*x) for x in zip(*(c[first].tolist() for c in columns), strict=True)]
    part_of_step = np.full((2, schedule.steps), -1, dtype=np.int64)
    part_of_step[schedule.part, schedule.step] = part
    first, action = distinct_numbers([*(part_of_step + 1)], schedule.steps)
    number = np.empty(len(first), dtype=np.int64)
    for i in np.argsort(first).tolist():  # in the order in which they first occur
        step: list[int] = part_of_step[:, first[i]].tolist()
        number[i] = distinct(tuple(parts[p] for p in step if p >= 0))
    return number[action]


def _last_actions(schedule: RankSchedule) -> tuple[tuple[int, int, int], ...]:
    """(Local stage, pass part, kind) of the last backward of each stage, in order."""
    actions: list[list[int]] = schedule.once_action[1:].T.tolist()  # [stages, pass parts]
    ends = sorted(
        (action, (local_stage, pass_part, int(schedule.kind[action])))
        for local_stage, halves in enumerate(actions)
        for pass_part, action in enumerate(halves)
        if action >= 0
    )
    return tuple(end for _, end in ends)
