"""From stages and a schedule to the work of every rank: distinct actions, and their order.

The rows of a stage are built once per stage class (`stages`), those of an action once for all
copies (`distinct_actions`); a rank is an order of copies (`rank_order`). The rows of a rank, one by
one, are built when they are read (`expand`), and so are its live ranges (`rank_values`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import distinct_numbers
from stagewright.lower.assembly.distinct_actions import (
    ActionTable,
    StageLabels,
    StagePart,
    TableBuilder,
)
from stagewright.lower.assembly.expand import RowNames
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lowered_block import Placed, crossings
from stagewright.lower.assembly.optimizer_step import (
    ClipNorm,
    OptimizerStep,
    StageUpdates,
    optimizer_step,
    stage_updates,
)
from stagewright.lower.assembly.rank_order import RankOrder, gathered_by
from stagewright.lower.assembly.rank_schedule import (
    BACKWARD,
    INPUT_HALF,
    WEIGHT_HALF,
    RankSchedule,
    rank_schedules,
)
from stagewright.lower.assembly.segments import Interner, Tables
from stagewright.lower.assembly.stages import Stage, StageKey
from stagewright.lower.assembly.work import AssembledWork
from stagewright.program.columns import Program, RankClass
from stagewright.schedule.actions import Order
from stagewright.schedule.places import Place, places

_BACKWARD_KINDS = (BACKWARD, INPUT_HALF, WEIGHT_HALF)


def assemble(
    stages: Sequence[Sequence[Placed]],
    order: Order,
    mesh: Mesh,
    *,
    clip: ClipNorm | None = None,
    streams: str = "one",
    habits: Habit = MEGATRON_LM,
    layers: Mapping[int, Hashable] | None = None,
) -> Program:
    """Build the program of every rank class: one class per pipeline rank.

    `stages`: blocks of each stage of the model; `order`: actions of each pipeline rank; `clip`:
    gradients are clipped by their norm; `habits`: those of the run's framework; `layers`: extra key
    per layer; stages match only if keys do.
    """
    pp, weights = len(order), habits.unit_weights()
    schedules = rank_schedules(order, unshards=weights.gathers_first)
    trains = any(np.isin(schedule.kind, _BACKWARD_KINDS).any() for schedule in schedules)
    stage_places, between = places(order), crossings(stages)
    keys = [
        StageKey.of(stages[p.stage], p, between, pp, habits, trains=trains, layers=layers)
        for p in stage_places
    ]
    classes = _StageClasses(keys, pp)
    ranks = [
        _Rank(schedule, rank_classes, classes.stages, keeps_gathered=weights.keeps_gathered)
        for schedule, rank_classes in zip(schedules, classes.of_rank, strict=True)
    ]
    actions = Interner[tuple[StagePart, ...]]()
    actions.ids(parts for rank in ranks for parts in rank.actions)
    optimizers = Interner[_OptimizerKey]()
    optimizer_of_rank = optimizers.ids(rank.optimizer_key() for rank in ranks)
    table, tables = _table(
        _TableKey(
            tuple(classes.stages),
            tuple(classes.updates[c] for c in range(len(classes.stages))),
            tuple(actions.table),
            tuple(optimizers.table),
            clip,
            pp,
            tuple(_tied_ranks(stages, stage_places).items()),
            tuple(classes.labels),
            tuple(classes.naming_order),
            tuple(classes.neighbours.items()),
        )
    )
    orders = [
        rank.order(table, actions.table, optimizer, len(stages))
        for rank, optimizer in zip(ranks, optimizer_of_rank, strict=True)
    ]
    names = RowNames(
        table, classes.of_rank, optimizer_of_rank, classes.labels_of_rank, trains=trains
    )
    members = np.arange(mesh.world_size, dtype=np.int64)
    members = members.reshape(-1, pp, mesh.stride("pp") if pp > 1 else 1)
    rank_classes = [
        RankClass(
            members[:, rank].ravel(),
            rank,
            AssembledWork(table.actions, orders[rank], names, rank, streams),
        )
        for rank in range(pp)
    ]
    partners = tuple(tables.communicators.table), tuple(tables.peers.table)
    return Program(mesh, tuple(rank_classes), *partners)


def _tied_ranks(
    stages: Sequence[Sequence[Placed]], stage_places: Sequence[Place]
) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks that have a copy of each tied table."""
    ranks: dict[str, set[int]] = {}
    for p in stage_places:
        for name in {name for placed in stages[p.stage] for name in placed.block.tied}:
            ranks.setdefault(name, set()).add(p.rank)
    return {name: tuple(sorted(ranks_)) for name, ranks_ in ranks.items()}


# ---- stage classes -------------------------------------------------------------------------------


@lru_cache(maxsize=64)  # the best runs of a search have few stage classes
def _build(key: StageKey) -> tuple[Stage, StageUpdates]:
    """Build the rows of a stage that exchanges values by messages only."""
    if key.unshifted != key:
        stage, updates = _build(key.unshifted)
        return stage.shifted(key.shifts), updates
    stage = Stage(key)
    stage.build(forward=True)
    if key.trains:
        stage.build(forward=False)
    return stage, stage_updates(stage)


class _StageClasses:
    """Classes of equal stages of a pipeline, in the order in which ranks build them."""

    def __init__(self, keys: Sequence[StageKey], ranks: int) -> None:
        """Build the stages of all ranks."""
        self.stages: list[Stage] = []
        self.updates: dict[int, StageUpdates] = {}
        """By stage class."""
        self.labels: list[StageLabels] = []
        """By stage class, those of its first stage."""
        self.naming_order: dict[tuple[int, bool], None] = {}
        """(stage class, backward) in naming order; traces depend on it."""
        self.neighbours: dict[tuple[int, int], int] = {}
        """By stage class and distance, the class of a stage on the same rank that exchanges values
        in memory."""
        self.of_rank: list[list[int]] = []
        """By rank, the classes of its stages."""
        self.labels_of_rank: list[list[StageLabels]] = []
        self._class_of: dict[StageKey, int] = {}
        by_rank: list[list[StageKey]] = [[] for _ in range(ranks)]
        for key in keys:
            by_rank[key.place.rank].append(key)
        for rank_keys in by_rank:
            self._add(rank_keys)

    def _add(self, keys: Sequence[StageKey]) -> None:
        """Add the stages of a rank."""
        classes: list[int] = []
        joined: dict[int, int] = {}  # class by stage, of those that exchange values in memory
        labels = [
            StageLabels(
                key.place.stage,
                tuple(p.layer for p in key.blocks),
                tuple(p.label for p in key.blocks),
            )
            for key in keys
        ]
        for key, stage_labels in zip(keys, labels, strict=True):
            new = len(self.stages)
            stage_class = self._class_of.get(key, new) if key.messages_only else new
            if stage_class == new:
                self.labels.append(stage_labels)
                if key.messages_only:
                    stage, self.updates[new] = _build(key)
                    self._class_of[key] = new
                else:
                    stage, joined[key.place.stage] = Stage(key), new
                self.stages.append(stage)
            classes.append(stage_class)
        on_rank = {stage: self.stages[stage_class] for stage, stage_class in joined.items()}
        for stage in on_rank.values():
            stage.join(on_rank)
        for stage in on_rank.values():
            stage.build(forward=True)
        for stage in [*on_rank.values()][::-1] if keys[0].trains else ():
            stage.build(forward=False)
        for stage_class in joined.values():
            self.updates[stage_class] = stage_updates(self.stages[stage_class])
        self.naming_order |= dict.fromkeys((c, False) for c in classes)
        self.naming_order |= dict.fromkeys((c, True) for c in reversed(classes))
        self.neighbours |= {
            (stage_class, other - stage): joined[other]
            for stage, stage_class in joined.items()
            for other in joined
        }
        self.of_rank.append(classes)
        self.labels_of_rank.append(labels)


# ---- distinct actions ----------------------------------------------------------------------------

_OptimizerKey = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""Classes of a rank's stages; (local stage, pass part, kind) of actions that end backwards."""


class _Rank:
    """Actions of a rank, by stage class."""

    def __init__(
        self,
        schedule: RankSchedule,
        stage_classes: Sequence[int],
        stages: Sequence[Stage],
        *,
        keeps_gathered: bool,
    ) -> None:
        """`stages` by stage class; `keeps_gathered` as in `gathered_by`."""
        self.schedule = schedule
        self.stage_classes = np.array(stage_classes, dtype=np.int64)
        rank_stages = [stages[c] for c in stage_classes]
        self.gathered_by = gathered_by(schedule, rank_stages, keeps_gathered=keeps_gathered)
        gathers = self.gathered_by == np.arange(len(schedule))
        codes = StagePart.codes(
            self.stage_classes[schedule.local_stage], schedule.kind, schedule.once_per_step, gathers
        )
        parts = np.full((2, schedule.steps), -1, dtype=np.int64)
        parts[schedule.part, schedule.step] = codes
        first, distinct = distinct_numbers([*(parts + 1)], schedule.steps)
        order = np.argsort(first)
        self.actions = [
            tuple(StagePart.from_code(code) for code in parts[:, step].tolist() if code >= 0)
            for step in first[order].tolist()
        ]
        """Distinct actions, in the order in which they first occur."""
        new_index = np.empty_like(order)
        new_index[order] = np.arange(len(order))
        self.of_step = new_index[distinct]
        """By step, index into `actions`."""

    def optimizer_key(self) -> _OptimizerKey:
        """Key of the optimizer action."""
        schedule = self.schedule
        actions: list[list[int]] = schedule.once_action[1:].T.tolist()  # [stages, pass parts]
        ends = sorted(
            (action, (local_stage, pass_part, int(schedule.kind[action])))
            for local_stage, halves in enumerate(actions)
            for pass_part, action in enumerate(halves)
            if action >= 0
        )
        return tuple(self.stage_classes.tolist()), tuple(end for _, end in ends)

    def order(
        self,
        table: ActionTable,
        actions: Mapping[tuple[StagePart, ...], int],
        optimizer_index: int,
        num_stages: int,
    ) -> RankOrder:
        """Copies of actions; `optimizer_index`: index into `ActionTable.optimizer_steps`."""
        indices = np.array([actions[parts] for parts in self.actions], dtype=np.int64)
        action = indices[self.of_step]
        if len(table.optimizer_steps[optimizer_index]):
            action = np.append(action, table.first_optimizer + optimizer_index)
        return RankOrder(
            table, self.schedule, self.stage_classes, action, self.gathered_by, optimizer_index,
            num_stages,
        )  # fmt: skip


class _TableKey(NamedTuple):
    """Cache key of the rows of distinct actions."""

    stages: tuple[Stage, ...]
    updates: tuple[StageUpdates, ...]
    actions: tuple[tuple[StagePart, ...], ...]
    optimizers: tuple[_OptimizerKey, ...]
    clip: ClipNorm | None
    pipeline_ranks: int
    tied_ranks: tuple[tuple[str, tuple[int, ...]], ...]
    labels: tuple[StageLabels, ...]
    naming_order: tuple[tuple[int, bool], ...]
    neighbours: tuple[tuple[tuple[int, int], int], ...]


@lru_cache(maxsize=16)  # the same actions in another order, on another machine
def _table(key: _TableKey) -> tuple[ActionTable, Tables]:
    """Build the rows of distinct actions, and the tables that their columns index."""
    tables = Tables(key.pipeline_ranks, dict(key.tied_ranks))
    kernels: list[list[int]] = [[] for _ in range(2 * len(key.stages))]
    for stage_class, backward in key.naming_order:
        stage = key.stages[stage_class]
        segment = stage.backward if backward else stage.forward
        kernels[2 * stage_class + backward] = tables.kernels.ids(segment.kernels)
    by_classes: dict[tuple[int, ...], OptimizerStep] = {}
    steps: list[OptimizerStep] = []
    for classes, _ in key.optimizers:
        if classes not in by_classes:
            stages, updates = [key.stages[c] for c in classes], [key.updates[c] for c in classes]
            by_classes[classes] = optimizer_step(classes, stages, updates, key.clip)
        steps.append(by_classes[classes])
        kernels.append(tables.kernels.ids(steps[-1].kernels))
    builder = TableBuilder(key.stages, key.actions, steps, dict(key.neighbours))
    return builder.table(tables, kernels, key.labels), tables
