"""Values of a pipeline stage, and the rows of its actions that touch each.

A value belongs to the block that makes it. An input value of a block belongs to the block of the
stage that makes it, to a message from another rank, or to the neighbouring stage if that is on the
same rank (the turn of a V).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.lowered_block import (
    Crossing,
    RowRef,
    StageBlock,
    Value,
    nearest_maker,
)
from stagewright.lower.assembly.segments import ActionRows
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.program.columns import TaskKind
from stagewright.schedule.places import Place

_LOAD, _STORE, _UPDATE = TaskKind.LOAD, TaskKind.STORE, TaskPart.UPDATE


class StageValues:
    """Values of one stage."""

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

    def receive(self, c: LiveValue, name: str, task: Kernel, touch: RowRef, buffers: int) -> None:
        """Record a message from another rank; `buffers`: number of permanent buffers."""
        size, permanent = task.comm_bytes * max(1, buffers), buffers > 0
        value = Value(name, -1, task.phase, "communication", size, permanent=permanent)
        value.touch(touch, task.phase)
        self._received[c] = value
        self.values.append(value)

    def touch(self, i: int, t: Kernel, touch: RowRef) -> None:
        """Record what a task of block `i` makes and reads; `touch`: its row."""
        placed, of_node = self.blocks[i], self._of_node[i]
        block, layer, _ = placed
        use, phase = block.uses[t], t.phase
        for new in use.new:
            if new.nodes[0] not in of_node:
                name = placed.name(new.name)
                flags = new.per_step, new.until_step_end
                v = Value(name, layer, phase, new.category, new.size, *flags)
                self.values.append(v)
                of_node.update(dict.fromkeys(new.nodes, v))
        if use.scratch is not None:
            name = placed.name(f"{t.name}.temporary")
            self._transient(name, layer, t, "workspace", use.scratch, touch)
        if t.kind == _LOAD and t.part is not _UPDATE:
            name = placed.name(t.name)
            self._reloaded[i] = self._transient(name, layer, t, "activations", t.comm_bytes, touch)
        on_host = block.offloaded if phase in ("recompute", "backward") else ()
        touched = [  # owners of bytes: most have a value
            self._reloaded[i] if n in on_host else of_node.get(n) or self.value(i, n)
            for n in use.touched
        ]
        category = "activations" if t.kind == _STORE else "workspace"
        if use.moves_gradients:
            category = "communication"
        for v in dict.fromkeys(touched):
            if v is not None:
                v.touch(touch, phase)
                if v.category == "workspace":
                    v.category = category

    def _transient(
        self, name: str, layer: int, t: Kernel, category: str, size: int, touch: RowRef
    ) -> Value:
        value = Value(name, layer, t.phase, category, size)
        value.touch(touch, t.phase)
        self.values.append(value)
        return value

    def release_with_block(self, action: ActionRows) -> None:
        """Free weights gathered or cast for the step after the backward of their block."""
        for i, row in action.last_rows().items():
            self.extend_weights(i, (TaskPart.GATHER_ONCE,), action.touch_by(row))

    def extend_weights(self, i: int, parts: Sequence[TaskPart], touch: RowRef) -> None:
        """Extend weights that these parts of block `i` gather or cast to a row."""
        block = self.blocks[i].block
        for t in (t for part in parts for t in block.by_part.get(part, ())):
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
        placed = self.blocks[i]
        value = Value(placed.name(n.name), placed.layer, n.phase, "workspace", block.size[n])
        self._of_node[i][n] = value
        self.values.append(value)
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
