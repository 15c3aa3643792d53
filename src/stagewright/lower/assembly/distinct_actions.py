"""Distinct actions of a program: rows of stages combined once, for all ranks and stages.

A `StagePart` has rows of one stage's segment in one direction. An action is one part, or two that
overlap; the optimizer action is the last action of a rank. Equal actions have parts of equal stage
class, kind, `once_per_step` and `gathers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.optimizer_step import OptimizerStep
from stagewright.lower.assembly.rank_schedule import (
    FORWARD,
    HAS_PASS_PART,
    INPUT_HALF,
    PASS_PARTS,
    UNSHARD,
    WEIGHT_HALF,
)
from stagewright.lower.assembly.segments import DTYPES, Interner, Owner, Segment, Tables
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import Tasks
from stagewright.program.rank_work import KINDS, Actions


class StagePart(NamedTuple):
    """Part of an action that belongs to one stage."""

    stage_class: int
    kind: int
    """Index into `KINDS`."""
    once_per_step: bool
    """Has the rows once per step."""
    gathers: bool
    """Gathers the weights that it uses; else an earlier action has."""

    @staticmethod
    def codes(stage_class: Int, kind: Int, once_per_step: Bool, gathers: Bool) -> Int:
        """Encode parts as numbers."""
        return ((stage_class * len(KINDS) + kind) * 2 + once_per_step) * 2 + gathers

    @classmethod
    def from_code(cls, code: int) -> StagePart:
        """Decode a number of `codes`."""
        code, gathers = divmod(code, 2)
        code, once_per_step = divmod(code, 2)
        return cls(*divmod(code, len(KINDS)), bool(once_per_step), bool(gathers))

    @property
    def forward(self) -> bool:
        """True if the rows are of the stage's forward segment."""
        return self.kind in (FORWARD, UNSHARD)


def rows_of_half(stage: Stage, kind: int) -> Bool:
    """Mask of the rows of a stage's backward that actions of a kind have."""
    weight = stage.backward.weight_half
    return {INPUT_HALF: ~weight, WEIGHT_HALF: weight}.get(kind, np.ones_like(weight))


def _rows_of_part(stage: Stage, part: StagePart) -> Bool:
    """Mask of the rows of the segment that a part has."""
    segment = stage.forward if part.forward else stage.backward
    if part.kind == UNSHARD:
        mask = segment.once_per_step | segment.gathers
    elif part.kind == FORWARD:
        mask = np.ones(len(segment), dtype=bool)
    else:
        mask = rows_of_half(stage, part.kind)
    return mask & (part.once_per_step | ~segment.once_per_step) & (part.gathers | ~segment.gathers)


class PartRows(NamedTuple):
    """Rows of a part in an action."""

    part: StagePart
    part_index: int
    """1: the second of two that overlap."""
    segment_row: Int
    """Rows of the segment that the part has."""
    offset: Int
    """By these rows, the distance from the begin of the action."""


def _part_rows(stages: Sequence[Stage], parts: Sequence[StagePart]) -> list[PartRows]:
    """Rows of the parts of an action.

    Overlapping parts alternate at kernels that wait for communication.
    """
    rows = [np.flatnonzero(_rows_of_part(stages[part.stage_class], part)) for part in parts]
    segments = [_segment(stages, part) for part in parts]
    turn = [
        np.cumsum(segment.waits_for_comm[r]) * len(parts) + i
        for i, (segment, r) in enumerate(zip(segments, rows, strict=True))
    ]
    order = np.argsort(np.concatenate(turn), kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(order))
    offsets = np.split(offset, np.cumsum([len(r) for r in rows])[:-1])
    return [
        PartRows(part, i, r, part_offset)
        for i, (part, r, part_offset) in enumerate(zip(parts, rows, offsets, strict=True))
    ]


def _segment(stages: Sequence[Stage], part: StagePart) -> Segment:
    """Segment of a part."""
    stage = stages[part.stage_class]
    return stage.forward if part.forward else stage.backward


# ---- the table -----------------------------------------------------------------------------------


class RowDeps(NamedTuple):
    """Dependencies of rows as columns: [dependencies]."""

    pass_part: Int
    """Half of the source: 0 forward, 1 input, 2 weight; -1: optimizer."""
    once_per_step: Bool
    """True if the source is in the action with the rows once per step."""
    stage: Int
    """Distance to the stage of the source; of the optimizer action, index of the rank's stage."""
    segment_row: Int

    def take(self, entries: Int) -> RowDeps:
        """Select some dependencies."""
        pass_part, once, stage, row = self
        return RowDeps(pass_part[entries], once[entries], stage[entries], row[entries])


class StageLabels(NamedTuple):
    """Number of a stage, and layers and labels of its blocks."""

    stage: int
    layers: tuple[int, ...]
    labels: tuple[str, ...]

    def row_names(self, segment: Segment) -> Iterator[str]:
        """Names of the rows of a segment."""
        blocks: list[int] = segment.block.tolist()
        for block, t in zip(blocks, segment.kernels, strict=True):
            yield t.name if block < 0 else f"{self.labels[block]}.{t.name}"

    def layers_of_blocks(self, block: Int) -> Int:
        """Layers of blocks; -1 of block -1."""
        return np.array([*self.layers, -1], dtype=np.int64)[block]


@dataclass(frozen=True, slots=True, eq=False)
class ActionTable:
    """Distinct actions of a program, and the segment rows that their rows are copies of."""

    actions: Actions
    stages: Sequence[Stage]
    """By stage class."""
    optimizer_steps: Sequence[OptimizerStep]
    """Rows of the optimizer actions, `first_optimizer` and later ones."""
    first_optimizer: int
    part_rows: Sequence[PartRows]
    part_rows_of: Int
    """Index into `part_rows` of each part of an action: [actions before `first_optimizer`, 2]."""
    offsets: Int
    """Offset in the action, by segment row of each of `part_rows`; -1: absent."""
    first_offset: Int
    """First of the offsets of each of `part_rows`."""
    backward: Bool
    """[rows]: True in a stage's backward."""
    segment_row: Int
    """[rows]: row in the segment, or in the optimizer action."""
    deps: RowDeps
    dep_part: Int
    """[dependencies]: part of the row that depends."""
    pipeline_peers: Sequence[int]
    """Slots of peers along the pipeline."""
    labels: Sequence[StageLabels]
    """By stage class, the stage whose columns `actions` has."""

    def offset(self, part_rows: Int, segment_row: Int) -> Int:
        """Offset in the action; -1: absent."""
        return self.offsets[self.first_offset[part_rows] + segment_row]

    @property
    def max_messages(self) -> int:
        """Largest number of messages of one action along one axis."""
        return max(stage.num_messages for stage in self.stages)


class TableBuilder:
    """Builds the rows of distinct actions.

    Rows are gathered from the concatenated segments: by stage class those of forward and of
    backward, then those of optimizer actions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        actions: Sequence[tuple[StagePart, ...]],
        optimizer_steps: Sequence[OptimizerStep],
        neighbours: Mapping[tuple[int, int], int],
    ) -> None:
        """Lay out the rows of all actions.

        `neighbours`: by stage class and distance, the class of a stage on the same rank that
        exchanges values in memory.
        """
        self.stages, self.actions, self.optimizer_steps = stages, actions, optimizer_steps
        self._neighbours = neighbours
        self.segments = [s for stage in stages for s in (stage.forward, stage.backward)]
        self._segment_begin = _begins([*map(len, self.segments), *map(len, optimizer_steps)])
        self.part_rows: list[PartRows] = []
        self.part_rows_of = np.full((len(self.actions), 2), -1, dtype=np.int64)
        sizes: list[int] = []
        for action, parts in enumerate(self.actions):
            rows = _part_rows(self.stages, parts)
            first = len(self.part_rows)
            self.part_rows_of[action, : len(rows)] = np.arange(first, first + len(rows))
            self.part_rows += rows
            sizes.append(sum(len(p.segment_row) for p in rows))
        self.begin = _begins([*sizes, *map(len, self.optimizer_steps)])
        self.total = int(self.begin[-1])
        self.optimizer_begin = int(self.begin[len(self.actions)])
        codes = [2 * p.part.stage_class + (not p.part.forward) for p in self.part_rows]
        self._segment = np.array(codes, dtype=np.int64)
        self.first_offset = _begins([len(self.segments[s]) for s in codes])
        self.offsets = np.full(int(self.first_offset[-1]), -1, dtype=np.int64)
        self._action = np.repeat(np.arange(len(sizes)), [len(parts) for parts in self.actions])
        source, part_rows, part = (np.zeros(self.total, dtype=np.int64) for _ in range(3))
        for i, p in enumerate(self.part_rows):
            row = self.begin[self._action[i]] + p.offset
            source[row] = self._segment_begin[self._segment[i]] + p.segment_row
            part_rows[row], part[row] = i, p.part_index
            self.offsets[self.first_offset[i] + p.segment_row] = p.offset
        optimizer_rows = self._segment_begin[[len(self.segments), -1]].tolist()
        source[self.optimizer_begin :] = np.arange(*optimizer_rows)
        self._source, self._part_rows, self._part = source, part_rows, part

    def table(
        self, tables: Tables, kernels: Sequence[Sequence[int]], labels: Sequence[StageLabels]
    ) -> ActionTable:
        """Build the table.

        `kernels`: numbers of the kernels of each segment and optimizer step; `labels` by stage
        class.
        """
        data_ptr, entry = self._entries()
        reader = np.repeat(np.arange(self.total), np.diff(data_ptr))
        deps = self._segment_deps().take(entry)
        data, carried = self._dep_rows(reader, deps)
        kernel = np.concatenate([np.asarray(k, dtype=np.int64) for k in kernels])[self._source]
        columns: dict[str, NDArray[Any]] = {
            name: column[kernel] for name, column in tables.kernel_columns().items()
        }
        tasks = Tasks(
            **columns,
            **self._label_columns(labels),
            microbatch=self._microbatch().astype(np.int32),
            tag=self._column("tag", -1).astype(np.int32),
            data_ptr=data_ptr,
            data=data.astype(np.int32),
            order_ptr=np.zeros(self.total + 1, dtype=np.int64),
            order=np.zeros(0, dtype=np.int32),
            ops=tuple(tables.ops.table),
            dtypes=DTYPES,
            shapes=tuple(tables.shapes.table),
        )
        backward, end = np.zeros(self.total, dtype=bool), self.optimizer_begin
        backward[:end] = (self._segment % 2 == 1)[self._part_rows[:end]]
        segment = np.searchsorted(self._segment_begin, self._source, side="right") - 1
        return ActionTable(
            actions=Actions(tasks, self.begin, self._part, carried),
            stages=self.stages,
            optimizer_steps=self.optimizer_steps,
            first_optimizer=len(self.actions),
            part_rows=self.part_rows,
            part_rows_of=self.part_rows_of,
            offsets=self.offsets,
            first_offset=self.first_offset,
            backward=backward,
            segment_row=self._source - self._segment_begin[segment],
            deps=deps,
            dep_part=self._part[reader],
            pipeline_peers=[slot for peer, slot in tables.peers.table.items() if peer.axis == "pp"],
            labels=labels,
        )

    # ---- columns ---------------------------------------------------------------------------------

    def _column(self, name: str, optimizer: int) -> NDArray[Any]:
        """Column of the segments, by row; `optimizer`: value of rows of optimizer actions."""
        columns = [getattr(segment, name) for segment in self.segments]
        columns.append(np.full(self.total - self.optimizer_begin, optimizer))
        return np.concatenate(columns)[self._source]

    def _microbatch(self) -> Int:
        """Distinct placeholder per part; -1: once per step."""
        kinds = np.array([p.part.kind for p in self.part_rows], dtype=np.int64)
        part_index = np.array([p.part_index for p in self.part_rows], dtype=np.int64)
        placeholder = np.where(kinds == UNSHARD, -1, 2 * self._action + part_index)
        microbatch, end = np.full(self.total, -1, dtype=np.int64), self.optimizer_begin
        microbatch[:end] = placeholder[self._part_rows[:end]]
        return np.where(self._column("once_per_step", 1).astype(bool), -1, microbatch)

    def _label_columns(self, labels: Sequence[StageLabels]) -> dict[str, Any]:
        """Names, stages and layers."""
        interner = Interner[str]()
        name: list[int] = []
        stage: list[Int] = []
        layer: list[Int] = []
        for s, segment in enumerate(self.segments):
            stage_labels = labels[s // 2]
            name += interner.ids(stage_labels.row_names(segment))
            stage.append(np.full(len(segment), stage_labels.stage))
            layer.append(stage_labels.layers_of_blocks(segment.block))
        next_stage = 1 + max((label.stage for label in labels), default=0)
        for rows in self.optimizer_steps:
            classes = rows.stage_classes
            rank_labels = [labels[c] for c in classes]
            name += interner.ids(optimizer_names(rank_labels, rows))
            # Give repeated stage classes distinct stage numbers.
            numbers = [
                next_stage + i if c in classes[:i] else labels[c].stage
                for i, c in enumerate(classes)
            ]
            stage.append(np.array([*numbers, -1])[rows.stage])
            layer.append(optimizer_layers(rank_labels, rows))
        columns = {
            "name": np.array(name), "stage": np.concatenate(stage), "layer": np.concatenate(layer)
        }  # fmt: skip
        by_row = {c: column[self._source].astype(np.int32) for c, column in columns.items()}
        return {**by_row, "names": tuple(interner.table)}

    # ---- dependencies ----------------------------------------------------------------------------

    def _entries(self) -> tuple[Int, Int]:
        """Pointers to the dependencies of each row, and their indices in `_segment_deps`."""
        counts = [np.bincount(s.dep_row, minlength=len(s)) for s in self.segments]
        counts += [np.bincount(s.dep_row, minlength=len(s)) for s in self.optimizer_steps]
        pointer = _begins(np.concatenate([np.zeros(0, dtype=np.int64), *counts]))
        row_counts = np.diff(pointer)[self._source]
        data_ptr = _begins(row_counts)
        first = np.repeat(pointer[self._source] - data_ptr[:-1], row_counts)
        return data_ptr, first + np.arange(int(data_ptr[-1]))

    def _segment_deps(self) -> RowDeps:
        """Dependencies of the rows of all segments and optimizer steps."""
        pass_part: list[Int] = []
        for i, s in enumerate(self.segments):
            backward = (s.dep_owner != Owner.FORWARD) & (s.dep_owner != Owner.FIRST_FORWARD)
            column = backward.astype(np.int64)
            for distance in np.unique(s.dep_stage[backward]).tolist():
                mask = (s.dep_stage == distance) & backward
                weight = self.stages[self._neighbour(i // 2, distance)].backward.weight_half
                column[mask] += weight[s.dep_segment_row[mask]]
            pass_part.append(column)
        for s in self.optimizer_steps:
            backward = s.dep_owner == Owner.LAST_BACKWARD
            column = np.where(s.dep_owner == Owner.OPTIMIZER, -1, backward).astype(np.int64)
            for i, stage_class in enumerate(s.stage_classes):
                mask = (s.dep_stage == i) & backward
                weight = self.stages[stage_class].backward.weight_half
                column[mask] += weight[s.dep_segment_row[mask]]
            pass_part.append(column)
        owner, stage, segment_row = (
            np.concatenate([getattr(s, name) for s in (*self.segments, *self.optimizer_steps)])
            for name in ("dep_owner", "dep_stage", "dep_segment_row")
        )
        once = (owner == Owner.FIRST_FORWARD) | (owner == Owner.LAST_BACKWARD)
        return RowDeps(np.concatenate(pass_part), once, stage, segment_row)

    def _neighbour(self, stage_class: int, distance: int) -> int:
        return self._neighbours[stage_class, distance] if distance else stage_class

    def _dep_rows(self, reader: Int, deps: RowDeps) -> tuple[Int, Bool]:
        """Source row of each dependency, and True if it is in another copy."""
        in_stage = reader < self.optimizer_begin
        part_rows = self._part_rows[reader]
        num_actions = len(self.actions)
        action = np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))
        optimizer = action[reader] - num_actions
        classes = [p.part.stage_class for p in self.part_rows]
        stage_class = np.array(classes, dtype=np.int64)[part_rows]
        for distance in np.unique(deps.stage[in_stage]).tolist():
            if distance:
                rows = np.flatnonzero(in_stage & (deps.stage == distance))
                neighbours = [self._neighbour(c, distance) for c in stage_class[rows].tolist()]
                stage_class[rows] = neighbours
        for i, step in enumerate(self.optimizer_steps):
            rows = np.flatnonzero(~in_stage & (deps.pass_part >= 0) & (optimizer == i))
            stage_class[rows] = np.array(step.stage_classes, dtype=np.int64)[deps.stage[rows]]
        in_optimizer = deps.pass_part < 0
        data = self.begin[num_actions + np.where(in_optimizer, optimizer, 0)] + deps.segment_row
        inside = in_stage & self._in_same_action(part_rows, deps)
        rows = np.flatnonzero(inside)
        offset = self.offsets[self.first_offset[part_rows[rows]] + deps.segment_row[rows]]
        data[rows] = self.begin[self._action[part_rows[rows]]] + offset
        carried = ~inside & ~in_optimizer
        rows = np.flatnonzero(carried)
        data[rows] = self._example_rows(stage_class[rows], deps.take(rows))
        return data, carried

    def _in_same_action(self, part_rows: Int, deps: RowDeps) -> Bool:
        """Mask of dependencies whose source is in the same part of the same copy."""
        if not self.part_rows:
            return np.zeros(len(part_rows), dtype=bool)
        kind, once, gathers = (
            np.array([getattr(p.part, name) for p in self.part_rows])[part_rows]
            for name in ("kind", "once_per_step", "gathers")
        )
        inside = (
            (deps.stage == 0) & HAS_PASS_PART[kind, deps.pass_part] & (~deps.once_per_step | once)
        )
        check = np.flatnonzero(inside & ~gathers)
        for i in np.unique(part_rows[check]).tolist():
            rows = check[part_rows[check] == i]
            inside[rows] = ~self.segments[self._segment[i]].gathers[deps.segment_row[rows]]
        return inside

    def _example_rows(self, stage_class: Int, deps: RowDeps) -> Int:
        """Example of each source row, of stages of these classes, in some action."""
        # By stage class and part of the pass: an action without the rows once per step, one with.
        example = np.full((len(self.stages), PASS_PARTS, 2), -1, dtype=np.int64)
        order = sorted(range(len(self.part_rows)), key=lambda i: self.part_rows[i].part.gathers)
        for i in order:  # the last one counts
            part = self.part_rows[i].part
            for pass_part in np.flatnonzero(HAS_PASS_PART[part.kind]).tolist():
                example[part.stage_class, pass_part, int(part.once_per_step)] = i
        once = deps.once_per_step.astype(np.int64)
        row = np.full(len(stage_class), -1, dtype=np.int64)
        for column in (once, 1 - once):
            part_rows = example[stage_class, deps.pass_part, column]
            at = np.flatnonzero((row < 0) & (part_rows >= 0))
            offset = self.offsets[self.first_offset[part_rows[at]] + deps.segment_row[at]]
            row[at] = np.where(offset < 0, -1, self.begin[self._action[part_rows[at]]] + offset)
        for i in np.flatnonzero(row < 0).tolist():
            forward = int(deps.pass_part[i]) == 0
            row[i] = self._find_row(int(stage_class[i]), int(deps.segment_row[i]), forward=forward)
        return row

    def _find_row(self, stage_class: int, segment_row: int, *, forward: bool) -> int:
        """Any action's copy of a segment row, or its matching gather."""
        matching = self.stages[stage_class].matching_gather(segment_row, forward=forward)
        for direction, source in ((forward, segment_row), (not forward, matching)):
            for i, p in enumerate(self.part_rows):
                same_class = p.part.stage_class == stage_class and source >= 0
                if same_class and p.part.forward == direction:
                    offset = int(self.offsets[self.first_offset[i] + source])
                    if offset >= 0:
                        return int(self.begin[self._action[i]]) + offset
        raise LookupError("no action has a row that another one needs")


def optimizer_names(labels: Sequence[StageLabels], rows: OptimizerStep) -> Iterator[str]:
    """Names of the rows of an optimizer action; `labels` by stage of the rank."""
    stages: list[int] = rows.stage.tolist()
    blocks: list[int] = rows.block.tolist()
    for stage, block, t in zip(stages, blocks, rows.kernels, strict=True):
        yield t.name if block < 0 else f"{labels[stage].labels[block]}.{t.name}"


def optimizer_layers(labels: Sequence[StageLabels], rows: OptimizerStep) -> Int:
    """Layers of the rows of an optimizer action; `labels` by stage of the rank."""
    layer = np.full(len(rows), -1, dtype=np.int64)
    for i, stage_labels in enumerate(labels):
        on_stage = rows.stage == i
        layer[on_stage] = stage_labels.layers_of_blocks(rows.block[on_stage])
    return layer


def _begins(sizes: Sequence[int] | Int) -> Int:
    """Begins of consecutive ranges of these sizes, and the end."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)
