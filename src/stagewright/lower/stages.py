"""A pipeline stage as rows: what it does in a forward and in a backward action, written down once.

Dependencies are places in an action, of this stage or of another one on the same rank; `lower`
turns them into row numbers by adding where the actions begin, for all microbatches at once.

Backward may be split (arXiv 2401.10241): its first half makes the gradient of the stage's input,
which other ranks wait for, the second half the gradients of its weights. Which row belongs to which
follows from the graph: the first half is all that the gradient of a block's input needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.graph.node import BYTES, Graph, Node
from stagewright.graph.roles import STREAM, Role
from stagewright.lower import buckets as units
from stagewright.lower.kernels import TIED, Kernel, LiveValue, TaskPart, interface
from stagewright.lower.kernels import Dependency as Need
from stagewright.lower.lifetimes import (
    BUFFERS,
    Gradients,
    Touch,
    Use,
    Value,
    moves_gradients,
    root,
    stays,
)
from stagewright.program.columns import COLLECTIVES, PHASES, Shape, TaskKind
from stagewright.program.communicators import Communicator, Peer
from stagewright.schedule.places import Place

DTYPES = tuple(BYTES)
COLUMNS = {
    "kind": np.uint8, "name": np.int32, "op": np.int32, "phase": np.uint8, "stage": np.int32,
    "layer": np.int32, "microbatch": np.int32, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "tag": np.int32, "shape": np.int32,
}  # fmt: skip

# Whose rows a dependency counts from: a stage's forward or backward action of the same microbatch,
# its first forward and its last backward action of all, or the rows after all actions; and a touch
# from the backward action of the next microbatch.
BACKWARD, FORWARD, FIRST, LAST, STEP, NEXT = range(6)
Dependency = tuple[int, int, int, int]  # row, whose, stage, place there

_GATHERS = {FORWARD: TaskPart.GATHER, BACKWARD: TaskPart.GATHER_AGAIN}
_OWN = (TaskPart.FORWARD, TaskPart.BACKWARD)  # of a block's parts: what it computes
_FORWARD_PARTS = (TaskPart.GATHER_ONCE, TaskPart.GATHER, TaskPart.FORWARD)
_BACKWARD_PARTS = (TaskPart.GATHER_AGAIN, TaskPart.BACKWARD, TaskPart.REDUCE_ONCE)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[Kernel]
    makes: Mapping[LiveValue, Need | None]  # who makes what the block hands on
    made: Mapping[LiveValue, Node]  # and which values these are
    wants: Mapping[str, tuple[int, str]]  # of values handed to it, bytes and dtype on one rank
    weight: frozenset[Kernel]  # the second half of a backward that is split
    size: Mapping[Node, int]  # bytes of one rank
    uses: Mapping[Kernel, Use]
    stays: Mapping[str, int]  # bytes that are there all the time, by category
    offloaded: frozenset[Node] = frozenset()  # on the host between forward and backward
    gradients: Gradients = BUFFERS
    root: bool = False  # weights are gathered and reduced with those of other such blocks

    @property
    def tied(self) -> frozenset[str]:
        """The tables that other blocks have a copy of, too."""
        copies = (n for n in self.graph if n.op == "param" and n.binding.tied)
        return frozenset(n.binding.tied for n in copies)


def weight_half(tasks: Sequence[Kernel], handed: Sequence[Need | None]) -> frozenset[Kernel]:
    """The tasks of a block's backward that only gradients of weights need.

    `handed` make the gradients that the block hands on.

    What is computed again for its own sake (a module's forward that is called once more) runs when
    backward first comes by.
    """
    read = {d for t in tasks for d in t.deps}
    stack = [t for t in tasks if t.phase == "recompute" and t not in read]
    stack += [t for t in handed if isinstance(t, Kernel)]
    first: set[Kernel] = set()
    while stack:
        t = stack.pop()
        if t not in first:
            first.add(t)
            stack += (d for d in t.deps if isinstance(d, Kernel))
            stack += [t.twin] if t.twin else []  # what another rank waits for in this half
    return frozenset(t for t in tasks if t.part in _BACKWARD_PARTS and t not in first)


class Crossing(NamedTuple):
    """A value that one stage hands to the next, and its bytes and dtype on one rank."""

    name: str
    size: int
    dtype: str


def crossings(stages: Sequence[Sequence[Placed]]) -> list[tuple[Crossing, ...]]:
    """What goes from each stage to the one after: what was made and is read behind that point.

    A message each, as Megatron-LM sends the decoder's and the encoder's hidden states
    (`get_tensor_shapes` of its pipeline schedules).
    """
    live: dict[str, tuple[int, str]] = {}
    behind: list[dict[str, tuple[int, str]]] = []
    for stage in reversed(stages):
        for block, _, _ in reversed(stage):
            gone = {c.name for c in block.makes if not c.gradient}
            live = {**block.wants, **{n: x for n, x in live.items() if n not in gone}}
        behind.append(live)
    found: list[tuple[Crossing, ...]] = []
    made: set[str] = set()
    for stage, later in zip(stages, behind[-2::-1], strict=False):
        made |= {c.name for block, _, _ in stage for c in block.makes if not c.gradient}
        names = sorted(made & later.keys(), key=lambda n: (n != STREAM, n))
        found.append(tuple(Crossing(n, *later[n]) for n in names))
    return found


class Placed(NamedTuple):
    """A block in its place in the model: `layer` is -1 for what is not a layer."""

    block: LoweredBlock
    layer: int
    label: str


_Named = TypeVar("_Named", bound=Hashable)


class Numbers(Generic[_Named]):
    """Things to small numbers, as they are met."""

    def __init__(self) -> None:
        """Nothing is met."""
        self.table: dict[_Named, int] = {}

    def __call__(self, thing: _Named) -> int:
        """The number of a thing."""
        return self.table.setdefault(thing, len(self.table))


@dataclass(slots=True, eq=False)
class Tables:
    """What columns point into, numbered as it is met."""

    pipeline_ranks: int
    holders: Mapping[str, tuple[int, ...]]  # of tables with copies, the pipeline ranks
    bucket_cap: int = 0  # bytes of a bucket of gradients, across layers
    units: bool = False  # blocks are units of FSDP2, see `lower.buckets.sharded`
    caches: int = 0  # microbatches whose messages have buffers all the time
    retains: bool = False  # a backward in halves keeps all that it has read
    keeps_sent: bool = False  # a gradient that was sent is there until the next is
    messages: int = 1  # most messages that one action exchanges along one axis
    names: Numbers[str] = field(default_factory=Numbers[str])
    ops: Numbers[str] = field(default_factory=Numbers[str])
    shapes: Numbers[Shape] = field(default_factory=Numbers[Shape])
    communicators: Numbers[Communicator] = field(default_factory=Numbers[Communicator])
    peers: Numbers[Peer] = field(default_factory=Numbers[Peer])

    def slot(self, t: Kernel) -> int:
        """Whom a task talks to."""
        if t.kind == TaskKind.COLLECTIVE:
            # Of two pipeline ranks, the replicas are all.
            pairs = "pp" if self.pipeline_ranks == 2 else MIRROR
            who = Communicator(tuple(sorted(pairs if a == MIRROR else a for a in t.axes)))
            if t.axes[0] == TIED:
                only = self.holders[t.axes[1]]  # which may be all
                only = only if len(only) < self.pipeline_ranks else None
                who = Communicator(("pp",), only)
            return self.communicators(who)
        if t.kind in (TaskKind.SEND, TaskKind.RECV):
            return self.peers(Peer(t.axes[0], t.shift))
        return -1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that repeat, and their dependencies: `dep_row` needs place `dep_at` of whose rows."""

    columns: Mapping[str, Int]
    dep_row: Int
    dep_whose: Int
    dep_stage: Int
    dep_at: Int
    once: Bool  # in the stage's first forward or last backward action only
    weight: Bool  # in the second half of a backward that is split
    waits: Bool  # kernels that need what was communicated in the same action

    def __len__(self) -> int:
        return len(self.columns["kind"])


class Builder:
    """Collects rows one by one: the few rows of blocks and stages, never those of microbatches."""

    def __init__(self, tables: Tables) -> None:
        """No rows."""
        self.tables = tables
        self.rows: list[tuple[int, ...]] = []
        self.deps: list[Dependency] = []

    def add(self, t: Kernel, label: str, layer: int, stage: int, tag: int = -1) -> int:
        """One row; the microbatch is filled in later. `tag` numbers the messages of an action."""
        collective = COLLECTIVES.index(t.op) if t.kind == TaskKind.COLLECTIVE else -1
        name = f"{label}.{t.name}" if label else t.name
        self.rows.append(
            (t.kind, self.tables.names(name), self.tables.ops(t.op), PHASES.index(t.phase), stage,
             layer, -1, t.flops, t.traffic, collective, DTYPES.index(t.dtype) if t.dtype else 0,
             t.comm_bytes, self.tables.slot(t), tag, self.tables.shapes(t.shape) if t.shape else -1)
        )  # fmt: skip
        return len(self.rows) - 1

    def finish(
        self, here: tuple[int, int], once: Sequence[int] = (), weight: Sequence[int] = ()
    ) -> Rows:
        """The rows; `here` is whose they are and the stage, for what `waits` within."""
        table = np.array(self.rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        deps = np.array(sorted(set(self.deps)), dtype=np.int64).reshape(-1, 4)
        columns = {c: table[:, i] for i, c in enumerate(COLUMNS)}
        place = np.arange(len(table))
        kind = columns["kind"]
        inside = deps[(deps[:, 1] == here[0]) & (deps[:, 2] == here[1])]
        arrivals = inside[kind[inside[:, 3]] != TaskKind.COMPUTE, 0]
        waits = np.isin(place, arrivals) & (kind == TaskKind.COMPUTE)
        row, whose, stage, at = deps.T
        flags = np.isin(place, once), np.isin(place, weight), waits
        return Rows(columns, row, whose, stage, at, *flags)


class Stage:
    """A virtual pipeline stage on one pipeline rank: its forward and its backward action.

    Both are the longest there are. The first microbatch's forward also gathers weights that stay
    for the step, the last one's backward also reduces gradients; other microbatches leave these
    rows out (`Rows.once`). A half of a backward has the rows of that half.
    """

    def __init__(
        self,
        blocks: Sequence[Placed],
        place: Place,
        between: Sequence[tuple[Crossing, ...]],
        tables: Tables,
    ) -> None:
        """No rows yet; `between` is what goes from each stage of the model to the one after."""
        self.blocks, self.place, self.tables = blocks, place, tables
        self.stage, self.stages = place.stage, len(between) + 1
        self.arriving = between[self.stage - 1] if self.stage else ()
        self.leaving = between[self.stage] if self.stage < len(between) else ()
        unit = frozenset(i for i, p in enumerate(blocks) if p.block.root)
        self.unit = unit if len(unit) > 1 else frozenset[int]()  # blocks that gather together
        # per block: task -> (whose, place)
        self.where: list[dict[Kernel, tuple[int, int]]] = [{} for _ in blocks]
        self.parts = [_by_part(p.block.tasks) for p in blocks]
        self.here: Mapping[int, Stage] = {self.stage: self}
        self.values = [
            Value(_name(p, what), p.layer, "", what, size)
            for p in blocks
            for what, size in p.block.stays.items()
        ]
        self.held: list[dict[Node, Value]] = [{} for _ in blocks]  # per block, by their root
        self.messages: dict[LiveValue, Value] = {}  # what arrives from other ranks
        self.sent: list[Value] = []  # gradients that unit `sender` has reduced
        self.sender = -1
        self.reloads: dict[int, Value] = {}  # per block, what comes back from the host
        self.forward = self.backward = Builder(tables).finish((FORWARD, self.stage))

    def build(self, here: Mapping[int, Stage], *, forward: bool) -> None:
        """Make the rows of one direction; `here` are the stages of the rank.

        Of neighbours on one rank, the one that the other depends on must have its rows before.
        """
        b = Builder(self.tables)
        self.here = here
        whose = FORWARD if forward else BACKWARD
        first, second, third = _FORWARD_PARTS if forward else _BACKWARD_PARTS
        ahead, main = ((first, second), (third,)) if forward else ((first,), (second, third))
        once: list[int] = []
        weight: list[int] = []
        # The messages of an action have numbers: first what stages hand on.
        message = max(0, len(self.arriving) - 1, len(self.leaving) - 1)
        numbers: dict[tuple[int, Kernel], int] = {}
        last_row: dict[int, int] = {}  # of each block
        source, target = (self.place.before, self.place.after)[:: 1 if forward else -1]
        incoming, outgoing = (self.arriving, self.leaving)[:: 1 if forward else -1]
        if source is not None and source != self.place.rank:
            for nth, value in enumerate(incoming):
                t = self._message(TaskKind.RECV, source, forward, value)
                row = b.add(t, "", -1, self.stage, tag=nth)
                name = f"{_message_name(forward, value)}received"
                size = t.comm_bytes * max(1, self.tables.caches)
                fixed = bool(self.tables.caches)
                arrived = Value(name, -1, t.phase, "communication", size, fixed=fixed)
                arrived.touch((whose, self.stage, row), t.phase)
                self.messages[LiveValue(value.name, not forward)] = arrived
                self.values.append(arrived)

        for group in self._groups(ahead, main, forward):
            t, (i, _) = units.joined(group), group[0]
            pair = i, t.twin or t
            if t.kind in (TaskKind.SEND, TaskKind.RECV) and pair not in numbers:
                message += 1  # of either end, the one that stands first
                numbers[pair] = message
            together = len(group) > 1
            label, layer = ("", -1) if together else (self.blocks[i].label, self.blocks[i].layer)
            row = b.add(t, label, layer, self.stage, numbers.get(pair, -1))
            if t.part in (TaskPart.GATHER_ONCE, TaskPart.REDUCE_ONCE):
                once.append(row)
            for i, t in group:
                self.where[i][t] = whose, row
                self.touch(i, t, (whose, self.stage, row))
                if t in self.blocks[i].block.weight:
                    weight.append(row)
                for d in t.deps:
                    found = self._resolve(row, i, d, here)
                    # What happens once per step needs the last of all microbatches.
                    last = (
                        t.part is TaskPart.REDUCE_ONCE
                        and found is not None
                        and found[1] == BACKWARD
                    )
                    if found is not None:
                        b.deps.append((row, LAST, *found[2:]) if last else found)
                last_row[i] = row
                if self.tables.units and moves_gradients(t) and t.op == "reduce_scatter":
                    self._hold(i, t, whose)
        if not forward:
            self._drop(last_row)
        if target is not None and target != self.place.rank:
            for nth, value in enumerate(outgoing):
                handed = LiveValue(value.name, not forward)
                t = self._message(TaskKind.SEND, target, forward, value)
                row = b.add(t, "", -1, self.stage, tag=nth)
                found = self.handed(row, handed, here)
                b.deps += [found] if found is not None else []
                sent = self._handed_value(handed)
                if sent is not None:
                    sent.touch((whose, self.stage, row), PHASES[0 if forward else 2])
                    if self.tables.keeps_sent and not forward:
                        sent.touches.append((NEXT, self.stage, row))
        every = sorted({*range(len(b.rows))} - {*once})
        if self.tables.caches and not forward and every:
            for kept in self._outputs():
                kept.touch((whose, self.stage, every[-1]), "backward")
        if self.tables.units and every:
            self._copy_out(whose, every)
        if self.tables.units and not forward and every:
            self._hold_made((whose, self.stage, every[-1]))
        if self.tables.retains and not forward:
            self._retain((whose, self.stage, max(weight, default=-1)))
        self.tables.messages = max(self.tables.messages, message + 1)
        rows = b.finish((whose, self.stage), once, weight)
        if forward:
            self.forward = rows
        else:
            self.backward = rows

    def handed(self, row: int, c: LiveValue, here: Mapping[int, Stage]) -> Dependency | None:
        """A dependency of a row on what the stage hands on: forward, or a gradient back."""
        return self._arriving(row, -1 if c.gradient else len(self.blocks), c, here)

    def touch(self, i: int, t: Kernel, at: Touch) -> None:
        """Note what a task of block `i` makes and reads, `at` its row."""
        placed, held = self.blocks[i], self.held[i]
        block, layer, _ = placed
        for new in block.uses[t].new:
            if new.nodes[0] not in held:
                v = Value(
                    _name(placed, new.name), layer, t.phase, new.category, new.size, new.whole,
                    new.lasts,
                )  # fmt: skip
                self.values.append(v)
                held.update(dict.fromkeys(new.nodes, v))
        scratch = block.uses[t].scratch
        if scratch is not None:
            v = Value(_name(placed, f"{t.name}.temporary"), layer, t.phase, "workspace", scratch)
            v.touch(at, t.phase)
            self.values.append(v)
        if t.kind == TaskKind.LOAD and t.part is not TaskPart.UPDATE:
            v = Value(_name(placed, t.name), layer, t.phase, "activations", t.comm_bytes)
            v.touch(at, t.phase)
            self.values.append(v)
            self.reloads[i] = v
        later = block.offloaded if t.phase in ("recompute", "backward") else frozenset[Node]()
        seen = block.uses[t].seen
        found = dict.fromkeys(self.reloads[i] if n in later else self.value(i, n) for n in seen)
        gradients = moves_gradients(t)
        for v in found:
            if v is not None:
                v.touch(at, t.phase)
                if gradients and v.category == "workspace":
                    v.category = "communication"
                elif t.kind == TaskKind.STORE and v.category == "workspace":
                    v.category = "activations"

    def _hold(self, i: int, t: Kernel, whose: int) -> None:
        """What one unit of FSDP2 has reduced stays until the next unit reduces."""
        mine = [self.where[i][d][1] for d in t.deps if isinstance(d, Kernel) and d.op == "cast"]
        before = whose, self.stage, min([*mine, self.where[i][t][1]]) - 1
        for v in self.sent if self.sender != i else ():
            v.touches.append(before)
        found = [self.value(i, n) for n in t.reads]
        self.sent = [v for v in found if v is not None] + (self.sent if self.sender == i else [])
        self.sender = i

    def _copy_out(self, whose: int, every: Sequence[int]) -> None:
        """FSDP2 gathers a unit into a buffer, and copies its weights out of that before they run.

        In forward the buffer stays until the next unit's is copied, of the last until the module
        returns; in backward it goes at once. `every`: rows that all microbatches have.
        """
        begins: dict[int, int] = {}  # per block, its first row
        ahead = set[int]()
        moved: dict[int, int] = {}  # bytes that it gathers
        for i, at in enumerate(self.where):
            for t, (of, row) in at.items():
                if of == whose and t.part in _OWN:
                    begins[i] = min(row, begins.get(i, row))
                elif of == whose and t.part == _GATHERS[whose]:
                    ahead.add(row)
                    if t.kind == TaskKind.COLLECTIVE:
                        new = self.blocks[i].block.uses[t].new
                        moved[i] = moved.get(i, 0) + sum(value.size for value in new)
        quiet = [row for row in every if row not in ahead]
        units = sorted(first for i, first in begins.items() if i not in self.unit)
        for i, size in moved.items():
            first = begins[i]
            if whose == BACKWARD:
                rows = [quiet[max(0, bisect_left(quiet, first) - 1)]]
            elif i in self.unit:
                rows = [every[0], units[0] if units else every[-1]]
            else:
                after = units[bisect_right(units, first) :][:1]
                rows = [first, *(after or [self._returns(every[-1])])]
            name, layer = _name(self.blocks[i], "gathered.buffer"), self.blocks[i].layer
            buffer = Value(name, layer, PHASES[0], "gathered_parameters", size)
            buffer.touches += [(whose, self.stage, row) for row in rows]
            self.values.append(buffer)

    def _returns(self, end: int) -> int:
        """The row with which the stage's model returns: what comes after is the loss."""
        logits = [n for n in self.blocks[-1].block.graph if n.role is Role.LOGITS]
        rows = [row for t, (_, row) in self.where[-1].items() if set(logits) & {*t.made}]
        return min(rows, default=end)

    def _hold_made(self, at: Touch) -> None:
        """FSDP2 adds the gradients of a unit as its backward ends: of the root unit, at last."""
        for i in self.unit:
            for t in self.parts[i].get(TaskPart.BACKWARD, ()):
                for n in t.reads if any(m.op == "accumulate" for m in t.made) else ():
                    made = self.value(i, n)
                    if made is not None:
                        made.touches.append(at)

    def _retain(self, at: Touch) -> None:
        """Autograd keeps what backward has read until its second half is done (`retain_graph`).

        The gradient of what the stage was given stays with that (`Tensor.grad`), which a backward
        in one piece would clear: a buffer, which is cleared when the step is over.
        """
        for v in self.values:
            if v.category == "activations" and at[2] >= 0:
                v.touches.append(at)
        for value in self.arriving:
            given = self._handed_value(LiveValue(value.name, True))
            if given is not None:
                given.lasts_halved = True

    def _groups(
        self, ahead: Sequence[TaskPart], main: Sequence[TaskPart], forward: bool
    ) -> Sequence[units.Group]:
        """What the blocks do in one direction, in order: parts `ahead` one block ahead."""
        items: list[units.Item] = []
        order = list(range(len(self.blocks)))[:: 1 if forward else -1]
        for n, i in enumerate(order):
            for j in order[:2] if n == 0 else order[n + 1 : n + 2]:
                items += [(j, t) for part in ahead for t in self.parts[j].get(part, ())]
            items += [(i, t) for part in main for t in self.parts[i].get(part, ())]
        if self.tables.units:
            return units.sharded(items, self.unit)
        if self.tables.bucket_cap and not forward:
            return units.bucketed(items, self.tables.bucket_cap)
        return units.alone(items)

    def _drop(self, last_row: Mapping[int, int]) -> None:
        """Weights that were gathered or cast for the whole step go when their block is done.

        So do those of a root unit, when all of it is.
        """
        for i, row in last_row.items():
            root = self.blocks[i].block.root
            parts = (TaskPart.GATHER_ONCE, TaskPart.GATHER) if root else (TaskPart.GATHER_ONCE,)
            done = max(last_row.get(j, row) for j in self.unit) if i in self.unit else row
            for t in (t for part in parts for t in self.parts[i].get(part, ())):
                for nodes, *_ in self.blocks[i].block.uses[t].new:
                    held = self.held[i][nodes[0]]
                    if nodes[0].role is not Role.SENT:
                        held.touches.append((BACKWARD, self.stage, done))

    def value(self, i: int, n: Node) -> Value | None:
        """What holds a value of block `i`: None if it stays, or comes from nowhere."""
        gradients = self.blocks[i].block.gradients
        n = root(n, gradients)
        if n in self.held[i] or stays(n, gradients):
            return self.held[i].get(n)
        c = interface(n)
        if c is not None:
            found = self._carried(i, c)
            if found is not None or c.gradient:
                return found
        placed = self.blocks[i]
        name, size = _name(placed, n.name), placed.block.size[n]
        v = Value(name, placed.layer, n.phase, "workspace", size)
        self.held[i][n] = v
        self.values.append(v)
        return v

    def _maker(self, i: int, c: LiveValue) -> int | None:
        """The block of this stage that makes what block `i` is handed: the nearest that does."""
        ahead = range(i + 1, len(self.blocks)) if c.gradient else range(i - 1, -1, -1)
        return next((j for j in ahead if c in self.blocks[j].block.makes), None)

    def _carried(self, i: int, c: LiveValue) -> Value | None:
        """What holds a value that block `i` is handed."""
        maker = self._maker(i, c)
        if maker is not None:
            return self.value(maker, self.blocks[maker].block.made[c])
        if c in self.messages:
            return self.messages[c]
        other = self._beside(c)
        return other._handed_value(c) if other else None

    def _handed_value(self, c: LiveValue) -> Value | None:
        """What holds a value that the stage hands on."""
        return self._carried(-1 if c.gradient else len(self.blocks), c)

    def _beside(self, c: LiveValue) -> Stage | None:
        """The stage on this rank that a value comes from."""
        return self.here.get(self.stage + (1 if c.gradient else -1))

    def _outputs(self) -> list[Value]:
        """What the stage's model returns: what it sends on, or of the last, not yet the loss."""
        if self.place.after is not None:
            found = [self._handed_value(LiveValue(value.name)) for value in self.leaving]
            return [v for v in found if v is not None]
        last = len(self.blocks) - 1
        graph = self.blocks[last].block.graph
        logits = [n for n in graph if n.role is Role.LOGITS]
        return [v for n in logits if (v := self.value(last, n)) is not None]

    def from_step(self, row: int, i: int, d: Kernel) -> Dependency:
        """A dependency of row `row` after all actions on a task of block `i`."""
        whose, place = self.where[i][d]
        return row, FIRST if whose == FORWARD else LAST, self.stage, place

    def _message(self, kind: TaskKind, other: int, forward: bool, value: Crossing) -> Kernel:
        """One end of a message between stages: a value, or its gradient."""
        phase = "forward" if forward else "backward"
        op = "send" if kind == TaskKind.SEND else "recv"
        ranks = self.tables.pipeline_ranks
        shift = (other - self.place.rank) % ranks
        shift -= ranks if shift > ranks // 2 else 0
        part = TaskPart.FORWARD if forward else TaskPart.BACKWARD
        return Kernel(
            f"{_message_name(forward, value)}{op}", op, kind, phase, part,
            axes=("pp",), shift=shift, comm_bytes=value.size, dtype=value.dtype,
        )  # fmt: skip

    def _resolve(self, row: int, i: int, d: Need, here: Mapping[int, Stage]) -> Dependency | None:
        """A dependency of a row of block `i`."""
        if isinstance(d, LiveValue):
            return self._arriving(row, i, d, here)
        return self._value(row, i, d, here)

    def _arriving(
        self, row: int, i: int, c: LiveValue, here: Mapping[int, Stage]
    ) -> Dependency | None:
        """What block `i` is handed: of this stage, from another rank or a stage beside it."""
        maker = self._maker(i, c)
        if maker is not None:
            return self._value(row, maker, self.blocks[maker].block.makes[c], here)
        crossing = self.leaving if c.gradient else self.arriving
        nth = next((n for n, x in enumerate(crossing) if x.name == c.name), None)
        if nth is None:
            return None
        source = self.place.after if c.gradient else self.place.before
        if source != self.place.rank:
            return row, BACKWARD if c.gradient else FORWARD, self.stage, nth  # the message
        return here[self.stage + (1 if c.gradient else -1)].handed(row, c, here)

    def _value(
        self, row: int, i: int, d: Need | None, here: Mapping[int, Stage]
    ) -> Dependency | None:
        if isinstance(d, LiveValue):  # the value passes through the block
            return self._resolve(row, i, d, here)
        if d is None:
            return None
        whose, place = self.where[i][d]
        return row, FIRST if d.part is TaskPart.GATHER_ONCE else whose, self.stage, place


def _name(placed: Placed, name: str) -> str:
    """What a value is called; layers are told apart by their number."""
    return name if placed.layer >= 0 else f"{placed.label}.{name}"


def _message_name(forward: bool, value: Crossing) -> str:
    """How names begin of what has to do with a message between stages."""
    which = "" if value.name == STREAM else f"{value.name}."
    return f"{'forward' if forward else 'backward'}.{which}"


def _by_part(tasks: Sequence[Kernel]) -> dict[TaskPart, list[Kernel]]:
    result: dict[TaskPart, list[Kernel]] = {}
    for t in tasks:
        result.setdefault(t.part, []).append(t)
    return result
