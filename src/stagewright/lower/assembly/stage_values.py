"""Values of a pipeline stage, and the rows of its actions that touch each.

A value belongs to the block that makes it. An input value of a block belongs to the block of the
stage that makes it, to a message from another rank, or to the neighbouring stage if that is on the
same rank (the turn of a V).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.lowered_block import (
    Crossing,
    RowRef,
    StageBlock,
    Value,
    nearest_maker,
)
from stagewright.lower.assembly.segments import (
    OPTIMIZER,
    ActionRows,
    Interner,
    RowRefs,
    Segment,
)
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.program.columns import CATEGORIES, TaskKind
from stagewright.schedule.places import Place

_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_LOAD, _STORE, _UPDATE = TaskKind.LOAD, TaskKind.STORE, BlockSection.UPDATE


@dataclass(frozen=True, eq=False)
class ValueColumns:
    """Values (`lowered_block.Value`) of one stage, or of the stages of a rank, as columns."""

    names: Sequence[str]
    stage: Int
    """Index of the stage on the rank."""
    layer: Int
    category: Int
    size: Int
    per_step: Bool
    until_step_end: Bool
    until_step_end_if_split: Bool
    touches: RowRefs
    requires: RowRefs
    """Rows that must exist for values to exist."""
    first_gradients: Int
    """(gradient, sum) pairs that share the first microbatch's buffer: [2, pairs]."""
    gathered_pairs: Int
    """(weight as forward gathers it, as backward gathers it): [2, pairs]."""

    @cached_property
    def touched(self) -> Bool:
        """Mask of values that rows touch; others are permanent."""
        return np.bincount(self.touches.reader, minlength=len(self.names)) > 0

    @cached_property
    def first_touch(self) -> Int:
        """First touch of each touched value."""
        return np.flatnonzero(np.diff(self.touches.reader, prepend=-1))

    @cached_property
    def maker(self) -> tuple[Int, Int]:
        """Stage and part of the pass of the first touch of each value; -1: permanent."""
        stage, pass_part = np.full((2, len(self.names)), -1, dtype=np.int64)
        stage[self.touched] = self.touches.stage[self.first_touch]
        pass_part[self.touched] = self.touches.pass_part[self.first_touch]
        return stage, pass_part

    @cached_property
    def once_per_step(self) -> Bool:
        """Mask of values that all microbatches share."""
        once = self.per_step | ~self.touched
        once[self.touched] |= self.touches.once_per_step[self.first_touch]
        return once

    @cached_property
    def group(self) -> Int:
        """Group of values of a stage with the same makers and the same end; 0: permanent."""
        flags = *self.maker, self.once_per_step, self.until_step_end, self.until_step_end_if_split
        keys = zip(self.stage.tolist(), *(flag.tolist() for flag in flags), strict=True)
        return np.where(self.touched, Interner[object]().ids(keys) + 1, 0)


COLUMNS: Mapping[str, type[np.generic]] = {
    "layer": np.int64, "size": np.int64, "per_step": np.bool_, "until_step_end": np.bool_,
    "until_step_end_if_split": np.bool_,
}  # fmt: skip
"""Columns of `ValueColumns` that are attributes of `Value`."""


class StageValues:
    """Values of one stage while its rows are built."""

    def __init__(
        self,
        blocks: Sequence[StageBlock],
        place: Place,
        arriving: Sequence[Crossing],
        leaving: Sequence[Crossing],
    ) -> None:
        """Start with permanent values; rows of actions add others as they touch them."""
        self.blocks, self.place = blocks, place
        self.arriving, self.leaving = arriving, leaving
        self.root_blocks = frozenset(i for i, p in enumerate(blocks) if p.block.root)
        self.neighbours: Mapping[int, StageValues] = {}
        """Values of all stages of the rank, by stage."""
        self.values = [
            Value(p.name(category), p.layer, "", category, size)
            for p in blocks
            for category, size in p.block.permanent.items()
        ]
        self._of_node: list[dict[Node, Value]] = [{} for _ in blocks]
        self._received: dict[LiveValue, Value] = {}
        self._reloaded: dict[int, Value] = {}  # per block, activations back from the host
        self.first_gradients: list[tuple[Value, Value]] = []
        """(gradient, sum) pairs that share the first microbatch's buffer."""
        self.gathered_pairs: list[tuple[Value, Value]] = []
        """(weight as forward gathers it, as backward gathers it), if actions reuse weights."""

    # ---- recording -------------------------------------------------------------------------------

    def receive(
        self, c: LiveValue, name: str, size: int, touch: RowRef, phase: str, buffers: int
    ) -> None:
        """Record a message from another rank; `buffers`: number of permanent buffers."""
        size, permanent = size * max(1, buffers), buffers > 0
        value = Value(name, -1, phase, "communication", size, permanent=permanent)
        value.touch(touch, phase)
        self._received[c] = value
        self.values.append(value)

    def touch(self, i: int, t: LoweredTask, row: RowRef) -> None:
        """Record what a task of block `i` makes and reads; `row`: the task's."""
        placed, of_node, phase = self.blocks[i], self._of_node[i], t.phase
        use = placed.block.uses[t]
        for new in use.new:
            if new.nodes[0] not in of_node:
                v = self._add(i, new.name, phase, new.category, new.size)
                v.per_step, v.until_step_end = new.per_step, new.until_step_end
                of_node.update(dict.fromkeys(new.nodes, v))
        if use.scratch is not None:
            scratch = self._add(i, f"{t.name}.temporary", phase, "workspace", use.scratch)
            scratch.touch(row, phase)
        if t.kind is _LOAD and t.section is not _UPDATE:
            self._reloaded[i] = self._add(i, t.name, phase, "activations", t.comm_bytes)
            self._reloaded[i].touch(row, phase)
        on_host = placed.block.offloaded if phase in ("recompute", "backward") else ()
        touched = [
            self._reloaded[i] if n in on_host else of_node.get(n) or self.value(i, n)
            for n in use.touched
        ]
        category = "activations" if t.kind is _STORE else "workspace"
        if use.moves_gradients:
            category = "communication"
        for v in dict.fromkeys(touched):
            if v is not None:
                v.touch(row, phase)
                if v.category == "workspace":
                    v.category = category

    def _add(self, i: int, name: str, phase: str, category: str, size: int) -> Value:
        """Add a value of block `i`."""
        placed = self.blocks[i]
        value = Value(placed.name(name), placed.layer, phase, category, size)
        self.values.append(value)
        return value

    def release_with_block(self, action: ActionRows, ends: Mapping[int, int]) -> None:
        """Free weights gathered or cast for the step after these rows of backward, by block."""
        for i, row in ends.items():
            self.extend_weights(i, (BlockSection.GATHER_ONCE,), action.touch_by(row))

    def extend_weights(self, i: int, sections: Sequence[BlockSection], touch: RowRef) -> None:
        """Extend weights that these sections of block `i` gather or cast to a row."""
        block = self.blocks[i].block
        for t in (t for section in sections for t in block.by_section.get(section, ())):
            for new in block.uses[t].new:
                if new.nodes[0].role is not Role.SENT:
                    self._of_node[i][new.nodes[0]].touches.append(touch)

    # ---- lookup ----------------------------------------------------------------------------------

    def value(self, i: int, n: Node) -> Value | None:
        """Value with the bytes of a node of block `i`; None: permanent, or from nowhere."""
        block = self.blocks[i].block
        n = block.owner(n)
        value = self._of_node[i].get(n)
        if value is not None or block.allocation.permanent(n):
            return value
        c = interface(n)
        if c is not None:
            value = self._input(i, c)
            if value is not None or c.gradient:
                return value
        value = self._of_node[i][n] = self._add(i, n.name, n.phase, "workspace", block.size[n])
        return value

    def output(self, c: LiveValue) -> Value | None:
        """Value that the stage hands on: forward, or a gradient back."""
        return self._input(-1 if c.gradient else len(self.blocks), c)

    def _input(self, i: int, c: LiveValue) -> Value | None:
        """Input value of block `i`."""
        maker = nearest_maker(self.blocks, i, c)
        if maker is not None:
            return self.value(maker, self.blocks[maker].block.outputs[c])
        if c in self._received:
            return self._received[c]
        source = self.neighbours.get(self.place.stage + (1 if c.gradient else -1))
        return source.output(c) if source else None

    # ---- columns ---------------------------------------------------------------------------------

    def columns(self, on_rank: Mapping[int, tuple[Segment, Segment]]) -> ValueColumns:
        """Convert to columns; `on_rank`: forward and backward of the rank's stages, by stage."""
        values, stage = self.values, self.place.stage
        index = {id(v): i for i, v in enumerate(values)}
        get = attrgetter(*COLUMNS)
        table = np.array([get(v) for v in values], dtype=np.int64).reshape(-1, len(COLUMNS)).T
        columns: dict[str, Any] = {
            name: column.astype(dtype)
            for (name, dtype), column in zip(COLUMNS.items(), table, strict=True)
        }
        refs = itertools.chain.from_iterable(v.touches for v in values)
        touched = np.repeat(np.arange(len(values)), [len(v.touches) for v in values])
        required = {i: v.requires for i, v in enumerate(values) if v.requires is not None}
        requires = _touches(np.array([*required], np.int64), required.values(), stage, on_rank)
        first_gradients, gathered_pairs = (
            np.array([(index[id(a)], index[id(b)]) for a, b in pairs], np.int64).reshape(-1, 2).T
            for pairs in (self.first_gradients, self.gathered_pairs)
        )
        return ValueColumns(
            names=[v.name for v in values],
            stage=np.zeros(len(values), dtype=np.int64),
            category=np.array([_CATEGORY[v.category] for v in values], dtype=np.int64),
            **columns,
            touches=_touches(touched, refs, stage, on_rank),
            requires=requires.take(~requires.once_per_step),
            first_gradients=first_gradients,
            gathered_pairs=gathered_pairs,
        )


def _touches(
    values: Int, refs: Iterable[RowRef], stage: int, on_rank: Mapping[int, tuple[Segment, Segment]]
) -> RowRefs:
    """Touches of `values` of a stage; `on_rank`: forward and backward of the rank's stages."""
    columns = np.fromiter(itertools.chain.from_iterable(refs), dtype=np.int64)
    halves = {number: backward.weight_half for number, (_, backward) in on_rank.items()}
    touches = RowRefs.of_stage(values, columns.reshape(-1, 3).T, stage, halves)
    for number, (forward, backward) in on_rank.items():
        of_stage = (touches.stage == number - stage) & (touches.pass_part != OPTIMIZER)
        for segment, rows in (
            (forward, of_stage & (touches.pass_part == 0)),
            (backward, of_stage & (touches.pass_part > 0)),
        ):
            touches.once_per_step[rows] |= segment.once_per_step[touches.segment_row[rows]]
    return touches
