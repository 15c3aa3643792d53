"""From stages and a schedule to the work of every rank: distinct actions, and their order.

The rows of a stage are made once for all stages with equal content (`stages`), those of an action
once for all copies (`distinct_actions`); a rank is an order of copies (`rank_order`). The rows of a
rank, one by one, are made when they are asked for (`expand`), and so is what is in memory when
(`rank_values`).
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
    After,
    Naming,
    StagePart,
    TableBuilder,
)
from stagewright.lower.assembly.expand import Names
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lowered_block import Placed, crossings
from stagewright.lower.assembly.optimizer_step import (
    ClipNorm,
    OptimizerStep,
    StageUpdates,
    optimizer_step,
    stage_updates,
)
from stagewright.lower.assembly.rank_order import RankOrder, suppliers
from stagewright.lower.assembly.rank_schedule import RankSchedule, rank_schedules
from stagewright.lower.assembly.segments import Numbers, Tables
from stagewright.lower.assembly.stages import Stage, StageAt
from stagewright.lower.assembly.work import AssembledWork
from stagewright.program.columns import Program, RankClass
from stagewright.schedule.actions import Order
from stagewright.schedule.places import Place, places

_TRAINS = (1, 2, 3)


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
    """The program of every rank class: one class per pipeline rank.

    `stages` are the blocks of each stage of the model, `order` the actions of each pipeline rank.
    `clip`: gradients are clipped by their norm. `habits`: those of the run's framework. `layers`
    with other entries are not alike though their blocks are equal.
    """
    pp, weights = len(order), habits.unit_weights()
    schedules = rank_schedules(order, unshards=weights.before)
    trains = any(np.isin(schedule.kind, _TRAINS).any() for schedule in schedules)
    held_by, between = places(order), crossings(stages)
    at = [
        StageAt.of(stages[p.stage], p, between, pp, habits, trains=trains, layers=layers)
        for p in held_by
    ]
    contents = _DistinctStages(at, pp)
    ranks = [
        _Rank(schedule, of_rank, contents.stages, kept=weights.kept)
        for schedule, of_rank in zip(schedules, contents.of_rank, strict=True)
    ]
    actions = Numbers[tuple[StagePart, ...]]()
    actions.each(parts for rank in ranks for parts in rank.actions)
    afters = Numbers[_AfterKey]()
    after_of_rank = afters.each(rank.after() for rank in ranks)
    table, tables = _table(
        _TableKey(
            tuple(contents.stages),
            tuple(contents.updates[c] for c in range(len(contents.stages))),
            tuple(actions.table),
            tuple(afters.table),
            clip,
            pp,
            tuple(_holders(stages, held_by).items()),
            tuple(contents.naming),
            tuple(contents.met),
            tuple(contents.neighbours.items()),
        )
    )
    orders = [
        rank.order(table, actions.table, after, len(stages))
        for rank, after in zip(ranks, after_of_rank, strict=True)
    ]
    names = Names(
        table, contents.of_rank, [o.after for o in orders], contents.names_of_rank, trains=trains
    )
    numbers = np.arange(mesh.world_size, dtype=np.int64)
    members = numbers.reshape(-1, pp, mesh.stride("pp") if pp > 1 else 1)
    classes = [
        RankClass(
            members[:, rank].ravel(),
            rank,
            AssembledWork(table.actions, orders[rank], names, rank, streams),
        )
        for rank in range(pp)
    ]
    partners = tuple(tables.communicators.table), tuple(tables.peers.table)
    return Program(mesh, tuple(classes), *partners)


def _holders(
    stages: Sequence[Sequence[Placed]], held_by: Sequence[Place]
) -> dict[str, tuple[int, ...]]:
    """Of each table with copies, the pipeline ranks that hold one."""
    holders: dict[str, set[int]] = {}
    for p in held_by:
        for name in {name for placed in stages[p.stage] for name in placed.block.tied}:
            holders.setdefault(name, set()).add(p.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}


# ---- distinct stages -----------------------------------------------------------------------------


@lru_cache(maxsize=64)  # the best runs of a search have few distinct stages
def _built(at: StageAt) -> tuple[Stage, StageUpdates]:
    """The rows of a stage that hands values on as messages only."""
    same = at.unshifted
    if same != at:
        stage, updates = _built(same)
        return stage.shifted(at.shifts), updates
    stage = Stage(at)
    stage.build(forward=True)
    if at.trains:
        stage.build(forward=False)
    return stage, stage_updates(stage)


class _DistinctStages:
    """The stages with distinct content of a pipeline, in the order in which ranks build them."""

    def __init__(self, at: Sequence[StageAt], ranks: int) -> None:
        """The stages of all ranks."""
        self.stages: list[Stage] = []
        self.updates: dict[int, StageUpdates] = {}
        """By content."""
        self.naming: list[Naming] = []
        """Of the first stage of each content."""
        self.met: dict[tuple[int, bool], None] = {}
        """Contents and whether of backward, in the order in which segments are first met: rank by
        rank, those of forward from the first stage on, those of backward from the last one on."""
        self.neighbours: dict[tuple[int, int], int] = {}
        """By content and distance, the content of another stage on the rank that values are handed
        to in memory, or come from."""
        self.of_rank: list[list[int]] = []
        """By rank, the contents of its stages."""
        self.names_of_rank: list[list[Naming]] = []
        self._number: dict[StageAt, int] = {}
        of_rank: list[list[StageAt]] = [[] for _ in range(ranks)]
        for stage in at:
            of_rank[stage.place.rank].append(stage)
        for some in of_rank:
            self._add(some)

    def _add(self, at: Sequence[StageAt]) -> None:
        """Add the stages of a rank."""
        numbers: list[int] = []
        joined: dict[int, int] = {}  # content by stage, of those that hand values on in memory
        naming = [
            Naming(
                a.place.stage, tuple(p.layer for p in a.blocks), tuple(p.label for p in a.blocks)
            )
            for a in at
        ]
        for a, named in zip(at, naming, strict=True):
            number = self._number.get(a, len(self.stages)) if a.alone else len(self.stages)
            if number == len(self.stages):
                self.naming.append(named)
                if a.alone:
                    stage, self.updates[number] = _built(a)
                    self._number[a] = number
                else:
                    stage, joined[a.place.stage] = Stage(a), number
                self.stages.append(stage)
            numbers.append(number)
        on_rank = {stage: self.stages[number] for stage, number in joined.items()}
        for stage in on_rank.values():
            stage.join(on_rank)
        for stage in on_rank.values():
            stage.build(forward=True)
        for stage in [*on_rank.values()][::-1] if at[0].trains else ():
            stage.build(forward=False)
        for number in joined.values():
            self.updates[number] = stage_updates(self.stages[number])
        self.met |= dict.fromkeys((number, False) for number in numbers)
        self.met |= dict.fromkeys((number, True) for number in reversed(numbers))
        self.neighbours |= {
            (content, other - stage): joined[other]
            for stage, content in joined.items()
            for other in joined
        }
        self.of_rank.append(numbers)
        self.names_of_rank.append(naming)


# ---- distinct actions ----------------------------------------------------------------------------

_AfterKey = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""Contents of a rank's stages; and the actions that end the backwards of these, in their order: the
place of the stage, the half, the kind."""


class _Rank:
    """The actions of a rank, by what they do of stages with distinct content."""

    def __init__(
        self,
        schedule: RankSchedule,
        contents: Sequence[int],
        stages: Sequence[Stage],
        *,
        kept: bool,
    ) -> None:
        """`stages`: those with distinct content; `kept` as in `suppliers`."""
        self.schedule, self.contents = schedule, np.array(contents, dtype=np.int64)
        self.supplier = suppliers(schedule, [stages[c] for c in contents], kept=kept)
        gathers = self.supplier == np.arange(len(schedule))
        codes = StagePart.codes(
            self.contents[schedule.place], schedule.kind, schedule.complete, gathers
        )
        parts = np.full((2, schedule.steps), -1, dtype=np.int64)
        parts[schedule.part, schedule.step] = codes
        first, of = distinct_numbers([*(parts + 1)], schedule.steps)
        order = np.argsort(first)
        self.actions = [
            tuple(StagePart.from_code(code) for code in parts[:, step].tolist() if code >= 0)
            for step in first[order].tolist()
        ]
        """Distinct actions, in the order in which they are first met."""
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self.of_step = place[of]
        """By step, one of these."""

    def after(self) -> _AfterKey:
        """What the rows after all actions depend on, apart from the program."""
        schedule = self.schedule
        done: list[list[int]] = schedule.once[1:].T.tolist()  # [stages, halves]
        ends = sorted(
            (action, (place, half, int(schedule.kind[action])))
            for place, of_stage in enumerate(done)
            for half, action in enumerate(of_stage)
            if action >= 0
        )
        return tuple(self.contents.tolist()), tuple(end for _, end in ends)

    def order(
        self,
        table: ActionTable,
        actions: Mapping[tuple[StagePart, ...], int],
        after: int,
        num_stages: int,
    ) -> RankOrder:
        """The copies; rows after all actions are those of `ActionTable.afters[after]`."""
        numbers = np.array([actions[parts] for parts in self.actions], dtype=np.int64)
        action = numbers[self.of_step]
        if len(table.afters[after].rows):
            action = np.append(action, table.first_after + after)
        return RankOrder(
            table, self.schedule, self.contents, action, self.supplier, after, num_stages
        )


class _TableKey(NamedTuple):
    """All that the rows of distinct actions depend on."""

    stages: tuple[Stage, ...]
    updates: tuple[StageUpdates, ...]
    actions: tuple[tuple[StagePart, ...], ...]
    afters: tuple[_AfterKey, ...]
    clip: ClipNorm | None
    pipeline_ranks: int
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    naming: tuple[Naming, ...]
    met: tuple[tuple[int, bool], ...]
    neighbours: tuple[tuple[tuple[int, int], int], ...]


@lru_cache(maxsize=16)  # the same actions in another order, on another machine
def _table(key: _TableKey) -> tuple[ActionTable, Tables]:
    """The rows of distinct actions, and what their columns point into."""
    tables = Tables(key.pipeline_ranks, dict(key.holders))
    kernels: list[list[int]] = [[] for _ in range(2 * len(key.stages))]
    for content, backward in key.met:
        stage = key.stages[content]
        segment = stage.backward if backward else stage.forward
        kernels[2 * content + backward] = tables.kernels.each(segment.kernels)
    rows: dict[tuple[int, ...], OptimizerStep] = {}
    afters: list[After] = []
    for contents, _ in key.afters:
        if contents not in rows:
            rows[contents] = optimizer_step(
                [key.stages[c] for c in contents], [key.updates[c] for c in contents], key.clip
            )
        afters.append(After(contents, rows[contents]))
        kernels.append(tables.kernels.each(rows[contents].kernels))
    builder = TableBuilder(key.stages, key.actions, afters, dict(key.neighbours))
    return builder.table(tables, kernels, key.naming), tables
