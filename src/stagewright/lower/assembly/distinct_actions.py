"""Rows of the distinct actions of a program: rows of segments combined once, for all copies.

A `StagePart` has rows of one stage's segment in one direction. An action is one part, or two that
overlap; the optimizer action is the last action of a rank. Equal actions have parts of equal stage
class, kind, `once_per_step` and `gathers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int, distinct_numbers, entries_of, offsets
from stagewright.graph.node import BYTES
from stagewright.lower.assembly.optimizer_step import ClipNorm, optimizer_step
from stagewright.lower.assembly.segments import (
    FORWARD,
    HAS_PASS_PART,
    INPUT_HALF,
    OPTIMIZER,
    PASS_PARTS,
    UNSHARD,
    WEIGHT_HALF,
    Interner,
    RowRefs,
    Segment,
    StageLabels,
    row_layers,
    row_names,
)
from stagewright.lower.assembly.stages import Stage, shifted
from stagewright.lower.kernels.kernel import TIED, LoweredTask
from stagewright.program.columns import COLLECTIVES, PHASES, Actions, Shape, TaskKind, Tasks
from stagewright.program.communicators import Communicator, Peer

DTYPES = tuple(BYTES)


class StagePart(NamedTuple):
    """Part of an action that belongs to one stage, or the optimizer action."""

    stage_class: int
    """Of `OPTIMIZER`, index of the optimizer action."""
    kind: int
    """Index into `KINDS`, or `OPTIMIZER`."""
    once_per_step: bool
    """Has the rows once per step."""
    gathers: bool
    """Gathers the weights that it uses; else an earlier action has."""

    @property
    def forward(self) -> bool:
        """True if the rows are of the stage's forward segment."""
        return self.kind in (FORWARD, UNSHARD)


def rows_of_half(backward: Segment, kind: int) -> Bool:
    """Mask of the rows of a stage's backward that actions of a kind have."""
    weight = backward.weight_half
    return {INPUT_HALF: ~weight, WEIGHT_HALF: weight}.get(kind, np.ones_like(weight))


def _rows_of_part(segment: Segment, part: StagePart) -> Int:
    """Rows of the segment that a part has."""
    if part.kind == UNSHARD:
        mask = segment.once_per_step | segment.gathers
    else:
        mask = rows_of_half(segment, part.kind)
    mask = mask & (part.once_per_step | ~segment.once_per_step)
    return np.flatnonzero(mask & (part.gathers | ~segment.gathers))


def _interleaved(segments: Sequence[Segment], rows: Sequence[Int]) -> list[Int]:
    """Rows of parts, counted from the begin of their action.

    Overlapping parts alternate at kernels that wait for communication.
    """
    turn = [
        np.cumsum(segment.waits_for_comm[r]) * len(rows) + i
        for i, (segment, r) in enumerate(zip(segments, rows, strict=True))
    ]
    order = np.argsort(np.concatenate(turn), kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(order))
    return np.split(offset, np.cumsum([len(r) for r in rows])[:-1])


class TaskColumns:
    """Columns of a row that its task (kernel, collective or message) decides, and their tables.

    Tables are numbered in the order of the tasks.
    """

    COLUMNS: Mapping[str, type[np.integer[Any]]] = {
        "kind": np.uint8, "op": np.int32, "phase": np.uint8, "flops": np.int64,
        "traffic": np.int64, "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64,
        "slot": np.int16, "shape": np.int32,
    }  # fmt: skip

    def __init__(self, pipeline_ranks: int, tied_ranks: Mapping[str, tuple[int, ...]]) -> None:
        """`tied_ranks`: pipeline ranks that have a copy of each tied table."""
        self._pipeline_ranks, self._tied_ranks = pipeline_ranks, tied_ranks
        self.tasks, self.ops, self.shapes = (
            Interner[LoweredTask](),
            Interner[str](),
            Interner[Shape](),
        )
        self.communicators, self.peers = Interner[Communicator](), Interner[Peer]()

    def of_rows(self, tasks: Int) -> dict[str, NDArray[Any]]:
        """Columns of rows with these tasks, by number."""
        rows = [self._row(t) for t in self.tasks.table]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(self.COLUMNS)).T
        return {
            name: column.astype(dtype)[tasks]
            for (name, dtype), column in zip(self.COLUMNS.items(), table, strict=True)
        }

    def _row(self, t: LoweredTask) -> tuple[int, ...]:
        """Columns of a task, in the order of `COLUMNS`."""
        return (
            t.kind,
            self.ops(t.op),
            PHASES.index(t.phase),
            t.flops,
            t.traffic,
            COLLECTIVES.index(t.op) if t.kind is TaskKind.COLLECTIVE else -1,
            DTYPES.index(t.dtype) if t.dtype else 0,
            t.comm_bytes,
            self._slot(t),
            self.shapes(t.shape) if t.shape else -1,
        )

    def _slot(self, t: LoweredTask) -> int:
        """Communicator or peer of a task, or communicator of a kernel's stream; -1: none."""
        if t.kind == TaskKind.COMPUTE and t.axes:
            return self.communicators(Communicator(t.axes))
        if t.kind == TaskKind.COLLECTIVE:
            # With two pipeline ranks, the replicas of a stage are all the ranks of the pipeline.
            pairs = "pp" if self._pipeline_ranks == 2 else MIRROR
            group = Communicator(tuple(sorted(pairs if a == MIRROR else a for a in t.axes)))
            if t.axes[0] == TIED:
                ranks = self._tied_ranks[t.axes[1]]
                group = Communicator(("pp",), ranks if len(ranks) < self._pipeline_ranks else None)
            return self.communicators(group)
        if t.kind in (TaskKind.SEND, TaskKind.RECV):
            return self.peers(Peer(t.axes[0], t.shift))
        return -1


class ActionTable:
    """Distinct actions of a program, and the segment rows that their rows are copies of.

    `segments` are, by stage class, those of forward and of backward, then those of the optimizer
    actions. Row `i` of their tasks is row `segment_row[i]` of segment `segment[i]`. Each part
    of an action has a number, and has each row of its segment once or not at all.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        labels: Sequence[StageLabels],
        rank_classes: Sequence[tuple[int, ...]],
        actions: Sequence[tuple[StagePart, ...]],
        optimizers: Sequence[tuple[int, ...]],
        clip: ClipNorm | None,
        columns: TaskColumns,
    ) -> None:
        """`stages` and `labels`: by stage class; `rank_classes`: those of the ranks' stages.

        `optimizers`: classes of the stages of each optimizer action.
        """
        self.stages = stages
        self.labels = labels
        """By stage class, the stage whose columns `actions` has."""
        steps = {classes: optimizer_step([stages[c] for c in classes], clip)
                 for classes in dict.fromkeys(optimizers)}  # fmt: skip
        self.segments = [x for stage in stages for x in (stage.forward, stage.backward)]
        self.segments += [steps[classes] for classes in optimizers]
        self._classes = [(c,) for c in range(len(stages)) for _ in range(2)] + [*optimizers]
        """By segment, the classes of its stages."""
        self.first_optimizer = len(actions)
        """First of the optimizer actions."""
        optimizer_parts = (StagePart(i, OPTIMIZER, True, True) for i in range(len(optimizers)))
        self._lay_out([*actions, *((part,) for part in optimizer_parts)])
        self._build(self._task_numbers(rank_classes, columns), columns)
        self.communicators = tuple(columns.communicators.table)
        self.peers = tuple(columns.peers.table)
        self.pipeline_peers = [slot for slot, peer in enumerate(self.peers) if peer.axis == "pp"]
        """Slots of peers along the pipeline."""
        self.max_messages = max(stage.num_messages for stage in stages)
        """Largest number of messages of one action along one axis."""

    def optimizer_step(self, index: int) -> Segment:
        """Rows of an optimizer action."""
        return self.segments[2 * len(self.stages) + index]

    def _segment_of(self, part: StagePart) -> int:
        """Index of the segment that a part has rows of."""
        if part.kind == OPTIMIZER:
            return 2 * len(self.stages) + part.stage_class
        return 2 * part.stage_class + (not part.forward)

    def row_in_action(self, part: Int, segment_row: Int) -> Int:
        """Rows, counted from the begin of the action, of segment rows of parts; -1: absent."""
        return self._row_in_action[self._first[part] + segment_row]

    # ---- rows ------------------------------------------------------------------------------------

    def _lay_out(self, actions: Sequence[tuple[StagePart, ...]]) -> None:
        """Lay out the rows of all actions."""
        self._parts = [part for parts in actions for part in parts]
        part_segment = [self._segment_of(part) for part in self._parts]
        num_parts = np.array([len(parts) for parts in actions], dtype=np.int64)
        self._action_of_part = np.repeat(np.arange(len(actions)), num_parts)
        first = offsets(num_parts)
        self.part_number = np.full((len(actions), 2), -1, dtype=np.int64)
        """Number of each part of an action: [actions, 2]."""
        self.part_number[:, 0] = first[:-1]
        self.part_number[num_parts == 2, 1] = first[1:][num_parts == 2] - 1
        rows: list[Int] = []
        within: list[Int] = []
        sizes: list[int] = []
        for action, parts in enumerate(actions):
            of_action = slice(first[action], first[action + 1])
            segments = [self.segments[s] for s in part_segment[of_action]]
            rows += [_rows_of_part(s, p) for s, p in zip(segments, parts, strict=True)]
            within += _interleaved(segments, rows[of_action])
            sizes.append(sum(map(len, rows[of_action])))
        begin = offsets(sizes)
        self._first = offsets([len(self.segments[s]) for s in part_segment])
        self._row_in_action = np.full(int(self._first[-1]), -1, dtype=np.int64)
        segment, segment_row, self._part, part_index = np.zeros((4, begin[-1]), dtype=np.int64)
        for i, (part_rows, row_in_action) in enumerate(zip(rows, within, strict=True)):
            action = int(self._action_of_part[i])
            row = begin[action] + row_in_action
            segment[row], segment_row[row], self._part[row] = part_segment[i], part_rows, i
            part_index[row] = i - first[action]
            self._row_in_action[self._first[i] + part_rows] = row_in_action
        self.begin, self.segment, self.segment_row = begin, segment, segment_row
        self._part_index = part_index
        self._source = offsets([*map(len, self.segments)])[segment] + segment_row
        """By row, the row of the concatenated segments."""

    def _task_numbers(
        self, rank_classes: Sequence[tuple[int, ...]], columns: TaskColumns
    ) -> Sequence[Int]:
        """Numbers of the tasks of each segment, in the order that traces have.

        Rank by rank: forwards from the first stage on, backwards from the last one on; then the
        optimizer actions.
        """
        order: dict[int, None] = {}
        for classes in rank_classes:
            order |= dict.fromkeys(2 * c for c in classes)
            order |= dict.fromkeys(2 * c + 1 for c in reversed(classes))
        order |= dict.fromkeys(range(2 * len(self.stages), len(self.segments)))
        numbers: dict[int, Int] = {}
        for s in order:
            tasks = self.segments[s].tasks
            if s < 2 * len(self.stages):
                tasks = shifted(self.segments[s], self.labels[s // 2].shifts)
            numbers[s] = columns.tasks.ids(tasks)
        return [numbers[s] for s in range(len(self.segments))]

    def _build(self, task_numbers: Sequence[Int], columns: TaskColumns) -> None:
        """Build the columns of all rows."""
        counts = [np.bincount(s.deps.reader, minlength=len(s)) for s in self.segments]
        num_deps = np.concatenate(counts)
        reader, entry = entries_of(offsets(num_deps), self._source)
        self.deps = RowRefs.concatenate([s.deps for s in self.segments]).take(entry)
        """[dependencies]: the rows that are read, as segments refer to them."""
        data, carried = self._dep_rows(reader)
        self.dep_part = self._part_index[reader]
        """[dependencies]: part of the row that depends, 0 or 1."""
        task_columns = columns.of_rows(np.concatenate(task_numbers)[self._source])
        placeholder = 2 * self._action_of_part[self._part] + self._part_index
        unshard = np.array([part.kind == UNSHARD for part in self._parts])[self._part]
        once = unshard | self._column([s.once_per_step for s in self.segments])
        tasks = Tasks(
            **task_columns,
            **self._label_columns(),
            microbatch=np.where(once, -1, placeholder).astype(np.int32),
            tag=self._column([s.tag for s in self.segments]).astype(np.int32),
            data_ptr=offsets(num_deps[self._source]),
            data=data.astype(np.int32),
            order_ptr=np.zeros(len(self.segment) + 1, dtype=np.int64),
            order=np.zeros(0, dtype=np.int32),
            ops=tuple(columns.ops.table),
            dtypes=DTYPES,
            shapes=tuple(columns.shapes.table),
        )
        self.actions = Actions(tasks, self.begin, self._part_index, carried)

    def _column(self, of_segments: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Column by row, from those of the segments."""
        return np.concatenate(of_segments)[self._source]

    def _label_columns(self) -> dict[str, Any]:
        """Names, stages and layers."""
        interner = Interner[str]()
        names: list[Int] = []
        stages: list[Int] = []
        layers: list[Int] = []
        next_stage = 1 + max((label.stage for label in self.labels), default=0)
        for segment, classes in zip(self.segments, self._classes, strict=True):
            labels = [self.labels[c] for c in classes]
            # Give repeated stage classes distinct stage numbers.
            numbers = [next_stage + i if c in classes[:i] else self.labels[c].stage
                       for i, c in enumerate(classes)]  # fmt: skip
            names.append(interner.ids(row_names(segment, labels)))
            stages.append(np.array([*numbers, -1])[segment.stage])
            layers.append(row_layers(segment, labels))
        name, stage, layer = (self._column(c).astype(np.int32) for c in (names, stages, layers))
        return {"name": name, "stage": stage, "layer": layer, "names": tuple(interner.table)}

    # ---- dependencies ----------------------------------------------------------------------------

    def _dep_rows(self, reader: Int) -> tuple[Int, Bool]:
        """Source row of each dependency, and True if it is in another copy."""
        part = self._part[reader]
        inside = self._in_same_action(part)
        row = np.empty(len(reader), dtype=np.int64)
        at = np.flatnonzero(inside)
        begin = self.begin[self._action_of_part[part[at]]]
        row[at] = begin + self.row_in_action(part[at], self.deps.segment_row[at])
        at = np.flatnonzero(~inside)
        row[at] = self._example_rows(part[at], self.deps.take(at))
        return row, ~inside

    def _in_same_action(self, part: Int) -> Bool:
        """Mask of dependencies whose source is in the same part of the same copy."""
        deps = self.deps
        kind, once, gathers = (
            np.array([getattr(p, name) for p in self._parts])[part]
            for name in ("kind", "once_per_step", "gathers")
        )
        inside = HAS_PASS_PART[kind, deps.pass_part] & (~deps.once_per_step | once)
        inside &= (deps.stage == 0) | (kind == OPTIMIZER)
        at = np.flatnonzero(inside & ~gathers)
        inside[at] = self.row_in_action(part[at], deps.segment_row[at]) >= 0
        return inside

    def _source_class(self, part: int, stage: int) -> int:
        """Class of the stage that a part refers to."""
        segment = self._segment_of(self._parts[part])
        if self._parts[part].kind == OPTIMIZER:
            return self._classes[segment][stage]
        if stage == 0:
            return segment // 2
        own = self.stages[segment // 2]
        return self.stages.index(own.on_rank[own.stage + stage])

    def _example_rows(self, part: Int, deps: RowRefs) -> Int:
        """Example of each source row that is in another copy, in some action."""
        first, pair = distinct_numbers([part, deps.stage - deps.stage.min(initial=0)], len(part))
        pairs = zip(part[first].tolist(), deps.stage[first].tolist(), strict=True)
        stage_class = np.array([self._source_class(*x) for x in pairs], dtype=np.int64)[pair]
        # By stage class and part of the pass: an action without the rows once per step, one with.
        example = np.full((len(self.stages), PASS_PARTS, 2), -1, dtype=np.int64)
        of_stages = [(i, p) for i, p in enumerate(self._parts) if p.kind != OPTIMIZER]
        for i, p in sorted(of_stages, key=lambda x: x[1].gathers):  # the last one counts
            example[p.stage_class, HAS_PASS_PART[p.kind, :PASS_PARTS], int(p.once_per_step)] = i
        row = np.full(len(part), -1, dtype=np.int64)
        once = deps.once_per_step.astype(np.int64)
        for column in (once, 1 - once):
            examples = example[stage_class, deps.pass_part, column]
            at = np.flatnonzero((row < 0) & (examples >= 0))
            found = self.row_in_action(examples[at], deps.segment_row[at])
            begin = self.begin[self._action_of_part[examples[at]]]
            row[at] = np.where(found < 0, -1, begin + found)
        for i in np.flatnonzero(row < 0).tolist():
            forward = int(deps.pass_part[i]) == 0
            row[i] = self._find_row(int(stage_class[i]), int(deps.segment_row[i]), forward=forward)
        return row

    def _find_row(self, stage_class: int, segment_row: int, *, forward: bool) -> int:
        """Any action's copy of a segment row, or its matching gather."""
        matching = self.stages[stage_class].matching_gather(segment_row, forward=forward)
        for direction, source in ((forward, segment_row), (not forward, matching)):
            segment = 2 * stage_class + (not direction)
            rows = np.flatnonzero((self.segment == segment) & (self.segment_row == source))
            if len(rows):
                return int(rows[0])
        raise LookupError("no action has a row that another one needs")
