"""The values that a pipeline stage holds, and which rows of its actions touch each.

A value belongs to the block that makes it. A value that a block is handed is that of the block of
the stage that makes it, of a message from another rank, or of the neighbouring stage if that is on
the same rank (the turn of a V).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.lifetimes import Touch, Value
from stagewright.lower.assembly.lowered_block import Crossing, Placed, nearest_maker
from stagewright.lower.assembly.segments import FORWARD, Segment, SegmentBuilder
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.program.columns import TaskKind
from stagewright.schedule.places import Place

_LOAD, _STORE, _UPDATE = TaskKind.LOAD, TaskKind.STORE, TaskPart.UPDATE


@dataclass(frozen=True, slots=True, eq=False)
class ActionRows:
    """The rows of a stage's forward or backward action, by block and task, while they are made."""

    whose: int
    """FORWARD or BACKWARD, as in `segments`."""
    stage: int
    segment: SegmentBuilder
    row_of: Sequence[dict[Kernel, int]]
    """The row of each task, per block of the stage."""
    order: list[tuple[int, Kernel]] = field(default_factory=list[tuple[int, Kernel]])
    """Blocks and tasks in the order of their rows."""
    once: list[int] = field(default_factory=list[int])
    """Rows that only one microbatch has."""
    weight: list[int] = field(default_factory=list[int])
    """Rows in the second half of a backward that is split."""
    gathers: list[int] = field(default_factory=list[int])
    """Rows that gather the weights of one microbatch's pass."""
    sent: list[tuple[Value, int]] = field(default_factory=list[tuple[Value, int]])
    """Values sent to other stages, and the rows of the sends."""

    @property
    def forward(self) -> bool:
        """Whether this is the forward action."""
        return self.whose == FORWARD

    def finished(self) -> Segment:
        """The rows as columns."""
        return self.segment.finish((self.whose, self.stage), self.once, self.weight, self.gathers)

    def at(self, row: int) -> Touch:
        """A touch from one of the rows."""
        return self.whose, self.stage, row

    @property
    def of_all_microbatches(self) -> list[int]:
        """The rows that every microbatch has, those of messages so far among them."""
        return sorted({*range(len(self.segment.kernels))} - {*self.once})

    def last_rows(self) -> dict[int, int]:
        """The last row of each block, blocks in the order of the action."""
        return {i: self.row_of[i][t] for i, t in self.order}


class StageValues:
    """The values of one stage."""

    def __init__(
        self,
        blocks: Sequence[Placed],
        place: Place,
        arriving: Sequence[Crossing],
        leaving: Sequence[Crossing],
    ) -> None:
        """What is allocated all the time; rows of actions add the rest as they touch it."""
        self.blocks, self.place = blocks, place
        self.arriving, self.leaving = arriving, leaving
        self.root_blocks = frozenset(i for i, p in enumerate(blocks) if p.block.root)
        self.neighbours: Mapping[int, StageValues] = {}
        """Of all stages of the rank, by stage."""
        self.values = [
            Value(p.name(what), p.layer, "", what, size)
            for p in blocks
            for what, size in p.block.permanent.items()
        ]
        self._of_node: list[dict[Node, Value]] = [{} for _ in blocks]
        self._received: dict[LiveValue, Value] = {}
        self._reloaded: dict[int, Value] = {}  # per block, activations back from the host
        self.first_gradients: list[tuple[Value, Value]] = []
        """Gradients of a microbatch, and the sums that they are added to, where the gradient of the
        first microbatch becomes the sum."""
        self.kept_weights: list[tuple[Value, Value]] = []
        """Weights that forward gathers, and the same weights as backward gathers them, where an
        action may use what the one before it has gathered."""

    # ---- recording -------------------------------------------------------------------------------

    def receive(self, c: LiveValue, name: str, task: Kernel, at: Touch, buffers: int) -> None:
        """Record a message from another rank; `buffers`: how many are allocated all the time."""
        size, fixed = task.comm_bytes * max(1, buffers), buffers > 0
        value = Value(name, -1, task.phase, "communication", size, fixed=fixed)
        value.touch(at, task.phase)
        self._received[c] = value
        self.values.append(value)

    def touch(self, i: int, t: Kernel, at: Touch) -> None:
        """Record what a task of block `i` makes and reads; `at` is its row."""
        placed, of_node = self.blocks[i], self._of_node[i]
        block, layer, _ = placed
        use, phase = block.uses[t], t.phase
        for new in use.new:
            if new.nodes[0] not in of_node:
                name = placed.name(new.name)
                v = Value(name, layer, phase, new.category, new.size, new.whole, new.lasts)
                self.values.append(v)
                of_node.update(dict.fromkeys(new.nodes, v))
        scratch = use.scratch
        if scratch is not None:
            self._transient(placed.name(f"{t.name}.temporary"), layer, t, "workspace", scratch, at)
        if t.kind == _LOAD and t.part is not _UPDATE:
            name = placed.name(t.name)
            self._reloaded[i] = self._transient(name, layer, t, "activations", t.comm_bytes, at)
        on_host = block.offloaded if phase in ("recompute", "backward") else ()
        touched = [  # of owners of bytes: most are known
            self._reloaded[i] if n in on_host else of_node.get(n) or self.value(i, n)
            for n in use.seen
        ]
        becomes = "activations" if t.kind == _STORE else "workspace"
        if use.moves_gradients:
            becomes = "communication"
        for v in dict.fromkeys(touched):
            if v is not None:
                v.touch(at, phase)
                if v.category == "workspace":
                    v.category = becomes

    def _transient(
        self, name: str, layer: int, t: Kernel, category: str, size: int, at: Touch
    ) -> Value:
        value = Value(name, layer, t.phase, category, size)
        value.touch(at, t.phase)
        self.values.append(value)
        return value

    def release_with_block(self, action: ActionRows) -> None:
        """Weights gathered or cast for the whole step are freed when their block's backward is."""
        for i, row in action.last_rows().items():
            self.hold_weights(i, (TaskPart.GATHER_ONCE,), action.at(row))

    def hold_weights(self, i: int, parts: Sequence[TaskPart], at: Touch) -> None:
        """Weights that these parts of block `i` gather or cast are live until this row."""
        block = self.blocks[i].block
        for t in (t for part in parts for t in block.by_part.get(part, ())):
            for new in block.uses[t].new:
                if new.nodes[0].role is not Role.SENT:
                    self._of_node[i][new.nodes[0]].touches.append(at)

    # ---- finding ---------------------------------------------------------------------------------

    def value(self, i: int, n: Node) -> Value | None:
        """The value that a node of block `i` is stored in; None: permanent, or from nowhere."""
        n, permanent = self.blocks[i].block.owner(n)
        found = self._of_node[i].get(n)
        if found is not None or permanent:
            return found
        c = interface(n)
        if c is not None:
            handed = self._handed_to(i, c)
            if handed is not None or c.gradient:
                return handed
        placed = self.blocks[i]
        v = Value(placed.name(n.name), placed.layer, n.phase, "workspace", placed.block.size[n])
        self._of_node[i][n] = v
        self.values.append(v)
        return v

    def handed_on(self, c: LiveValue) -> Value | None:
        """The value that the stage hands on: forward, or a gradient back."""
        return self._handed_to(-1 if c.gradient else len(self.blocks), c)

    def _handed_to(self, i: int, c: LiveValue) -> Value | None:
        """The value that block `i` is handed."""
        maker = nearest_maker(self.blocks, i, c)
        if maker is not None:
            return self.value(maker, self.blocks[maker].block.handed_on[c])
        if c in self._received:
            return self._received[c]
        source = self.neighbours.get(self.place.stage + (1 if c.gradient else -1))
        return source.handed_on(c) if source else None
