"""A pipeline stage as rows: what it does in a forward and in a backward action, written down once.

Dependencies are places in an action, of this stage or of another one on the same rank; `lower`
turns them into row numbers by adding where the actions begin, for all microbatches at once.

Backward may be split (arXiv 2401.10241): its first half makes the gradient of the stage's input,
which other ranks wait for, the second half the gradients of its weights. Which row belongs to which
follows from the graph: the first half is all that the gradient of a block's input needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright import units
from stagewright.actions import Place
from stagewright.ir import BYTES, Graph, Node
from stagewright.kernels import EMBEDDING_AXIS, INTERFACE, Task
from stagewright.layout import MIRROR
from stagewright.lifetimes import Touch, Use, Value, moves_gradients, root, stays
from stagewright.program import COLLECTIVES, PHASES, Communicator, Int, Kind, Peer, Shape

DTYPES = tuple(BYTES)
COLUMNS = {
    "kind": np.uint8, "name": np.int32, "op": np.int32, "phase": np.uint8, "stage": np.int32,
    "layer": np.int32, "microbatch": np.int32, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "tag": np.int32, "shape": np.int32,
}  # fmt: skip

# Whose rows a dependency counts from: a stage's forward or backward action of the same microbatch,
# its first forward and its last backward action of all, or the rows after all actions.
BACKWARD, FORWARD, FIRST, LAST, STEP = range(5)
Dependency = tuple[int, int, int, int]  # row, whose, stage, place there

_FORWARD_PARTS = ("gather_once", "gather", "forward")
_BACKWARD_PARTS = ("gather_again", "backward", "reduce_once")


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[Task]
    y: Task | str | None  # who makes the block's output, and the gradient of its input
    dx: Task | str | None
    tied: Task | str | None  # who makes the gradient of a table shared with the embedding
    boundary: tuple[int, str]  # bytes and dtype of the residual stream on one rank
    weight: frozenset[Task]  # the second half of a backward that is split
    size: Mapping[Node, int]  # bytes of one rank
    uses: Mapping[Task, Use]
    stays: Mapping[str, int]  # bytes that are there all the time, by category
    offloaded: frozenset[Node] = frozenset()  # on the host between forward and backward
    root: bool = False  # weights are gathered and reduced with those of other such blocks


def weight_half(tasks: Sequence[Task], dx: Task | str | None) -> frozenset[Task]:
    """The tasks of a block's backward that only gradients of weights need; `dx` makes the input's.

    What is computed again for its own sake (a module's forward that is called once more) runs when
    backward first comes by.
    """
    read = {d for t in tasks for d in t.deps}
    stack = [t for t in tasks if t.phase == "recompute" and t not in read]
    stack += [dx] if isinstance(dx, Task) else []
    first: set[Task] = set()
    while stack:
        t = stack.pop()
        if t not in first:
            first.add(t)
            stack += (d for d in t.deps if isinstance(d, Task))
            stack += [t.twin] if t.twin else []  # what another rank waits for in this half
    return frozenset(t for t in tasks if t.part in _BACKWARD_PARTS and t not in first)


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
    ends: tuple[int, int]  # the pipeline ranks of the first and the last stage
    bucket_cap: int = 0  # bytes of a bucket of gradients, across layers
    messages: int = 1  # most messages that one action exchanges along one axis
    names: Numbers[str] = field(default_factory=Numbers[str])
    ops: Numbers[str] = field(default_factory=Numbers[str])
    shapes: Numbers[Shape] = field(default_factory=Numbers[Shape])
    communicators: Numbers[Communicator] = field(default_factory=Numbers[Communicator])
    peers: Numbers[Peer] = field(default_factory=Numbers[Peer])

    def slot(self, t: Task) -> int:
        """Whom a task talks to."""
        if t.kind == Kind.COLLECTIVE:
            # Of two pipeline ranks, the replicas are all.
            pairs = "pp" if self.pipeline_ranks == 2 else MIRROR
            who = Communicator(tuple(sorted(pairs if a == MIRROR else a for a in t.axes)))
            if t.axes == (EMBEDDING_AXIS,):
                # First and last may be all.
                only = tuple(sorted(self.ends)) if self.pipeline_ranks > 2 else None
                who = Communicator(("pp",), only)
            return self.communicators(who)
        if t.kind in (Kind.SEND, Kind.RECV):
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
    once: NDArray[np.bool_]  # in the stage's first forward or last backward action only
    weight: NDArray[np.bool_]  # in the second half of a backward that is split
    waits: NDArray[np.bool_]  # kernels that need what was communicated in the same action

    def __len__(self) -> int:
        return len(self.columns["kind"])


class Builder:
    """Collects rows one by one: the few rows of blocks and stages, never those of microbatches."""

    def __init__(self, tables: Tables) -> None:
        """No rows."""
        self.tables = tables
        self.rows: list[tuple[int, ...]] = []
        self.deps: list[Dependency] = []

    def add(self, t: Task, label: str, layer: int, stage: int, tag: int = -1) -> int:
        """One row; the microbatch is filled in later. `tag` numbers the messages of an action."""
        collective = COLLECTIVES.index(t.op) if t.kind == Kind.COLLECTIVE else -1
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
        arrivals = inside[kind[inside[:, 3]] != Kind.COMPUTE, 0]
        waits = np.isin(place, arrivals) & (kind == Kind.COMPUTE)
        row, whose, stage, at = deps.T
        flags = np.isin(place, once), np.isin(place, weight), waits
        return Rows(columns, row, whose, stage, at, *flags)


class Stage:
    """A virtual pipeline stage on one pipeline rank: its forward and its backward action.

    Both are the longest there are. The first microbatch's forward also gathers weights that stay
    for the step, the last one's backward also reduces gradients; other microbatches leave these
    rows out (`Rows.once`). A half of a backward has the rows of that half.
    """

    def __init__(self, blocks: Sequence[Placed], place: Place, stages: int, tables: Tables) -> None:
        """No rows yet; `stages` is how many the model has."""
        self.blocks, self.place, self.stages, self.tables = blocks, place, stages, tables
        self.stage = place.stage
        unit = frozenset(i for i, p in enumerate(blocks) if p.block.root)
        self.unit = unit if len(unit) > 1 else frozenset[int]()  # blocks that gather together
        # per block: task -> (whose, place)
        self.where: list[dict[Task, tuple[int, int]]] = [{} for _ in blocks]
        self.parts = [_by_part(p.block.tasks) for p in blocks]
        self.here: Mapping[int, Stage] = {stages: self}
        self.values = [
            Value(_name(p, what), p.layer, "", what, size)
            for p in blocks
            for what, size in p.block.stays.items()
        ]
        self.held: list[dict[Node, Value]] = [{} for _ in blocks]  # per block, by their root
        self.messages: dict[int, Value] = {}  # what arrives forward, and backward
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
        message = 0
        numbers: dict[Task, int] = {}
        last_row: dict[int, int] = {}  # of each block
        source, target = (self.place.before, self.place.after)[:: 1 if forward else -1]
        if source is not None and source != self.place.rank:
            t = self._message(Kind.RECV, source, forward)
            b.add(t, "", -1, self.stage, tag=0)
            self.messages[whose] = arrived = Value(
                f"{t.phase}.received", -1, t.phase, "communication", t.comm_bytes
            )
            arrived.touch((whose, self.stage, 0), t.phase)
            self.values.append(arrived)

        for group in self._groups(ahead, main, forward):
            t, (i, _) = units.joined(group), group[0]
            if t.kind == Kind.SEND:
                message += 1
                numbers[t] = message
            together = len(group) > 1
            label, layer = ("", -1) if together else (self.blocks[i].label, self.blocks[i].layer)
            row = b.add(t, label, layer, self.stage, numbers.get(t.twin or t, -1))
            if t.part in ("gather_once", "reduce_once"):
                once.append(row)
            for i, t in group:
                self.where[i][t] = whose, row
                self.touch(i, t, (whose, self.stage, row))
                if t in self.blocks[i].block.weight:
                    weight.append(row)
                for d in t.deps:
                    found = self._resolve(row, i, d, here)
                    # What happens once per step needs the last of all microbatches.
                    last = t.part == "reduce_once" and found is not None and found[1] == BACKWARD
                    if found is not None:
                        b.deps.append((row, LAST, *found[2:]) if last else found)
                last_row[i] = row
        if not forward:
            self._drop(last_row)
        if target is not None and target != self.place.rank:
            row = b.add(self._message(Kind.SEND, target, forward), "", -1, self.stage, tag=0)
            found = self.output(row, here) if forward else self.input_gradient(row, here)
            b.deps += [found] if found is not None else []
            sent = self._passed_on(whose)
            if sent is not None:
                sent.touch((whose, self.stage, row), PHASES[0 if forward else 2])
        self.tables.messages = max(self.tables.messages, message + 1)
        rows = b.finish((whose, self.stage), once, weight)
        if forward:
            self.forward = rows
        else:
            self.backward = rows

    def output(self, row: int, here: Mapping[int, Stage]) -> Dependency | None:
        """A dependency of a row on what the stage passes on."""
        return self._value(row, len(self.blocks) - 1, self.blocks[-1].block.y, here)

    def input_gradient(self, row: int, here: Mapping[int, Stage]) -> Dependency | None:
        """A dependency of a row on the gradient that the stage passes back."""
        return self._value(row, 0, self.blocks[0].block.dx, here)

    def touch(self, i: int, t: Task, at: Touch) -> None:
        """Note what a task of block `i` makes and reads, `at` its row."""
        placed, held = self.blocks[i], self.held[i]
        block, layer, _ = placed
        for nodes, name, category, size in block.uses[t].new:
            if nodes[0] not in held:
                self.values.append(v := Value(_name(placed, name), layer, t.phase, category, size))
                held.update(dict.fromkeys(nodes, v))
        if t.kind == Kind.LOAD and t.part != "update":
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
                elif t.kind == Kind.STORE and v.category == "workspace":
                    v.category = "activations"

    def _groups(
        self, ahead: Sequence[str], main: Sequence[str], forward: bool
    ) -> Sequence[units.Group]:
        """What the blocks do in one direction, in order: parts `ahead` one block ahead."""
        items: list[units.Item] = []
        order = list(range(len(self.blocks)))[:: 1 if forward else -1]
        for n, i in enumerate(order):
            for j in order[:2] if n == 0 else order[n + 1 : n + 2]:
                items += [(j, t) for part in ahead for t in self.parts[j].get(part, ())]
            items += [(i, t) for part in main for t in self.parts[i].get(part, ())]
        if self.unit:
            return units.rooted(items, self.unit)
        if self.tables.bucket_cap and not forward:
            return units.bucketed(items, self.tables.bucket_cap)
        return units.alone(items)

    def _drop(self, last_row: Mapping[int, int]) -> None:
        """Weights that were gathered or cast for the whole step go when their block is done.

        So do those of a root unit, when all of it is.
        """
        for i, row in last_row.items():
            root = self.blocks[i].block.root
            parts = ("gather_once", "gather") if root else ("gather_once",)
            done = max(last_row.get(j, row) for j in self.unit) if i in self.unit else row
            for t in (t for part in parts for t in self.parts[i].get(part, ())):
                for nodes, *_ in self.blocks[i].block.uses[t].new:
                    held = self.held[i][nodes[0]]
                    if t.kind == Kind.COLLECTIVE or not root:
                        held.touches.append((BACKWARD, self.stage, done))

    def value(self, i: int, n: Node) -> Value | None:
        """What holds a value of block `i`: None if it stays, or comes from nowhere."""
        n = root(n)
        if n in self.held[i] or stays(n):
            return self.held[i].get(n)
        name = INTERFACE.get(n.name) if n.op == "input" else None
        if name == "x" and (i > 0 or self.place.before is not None):
            return self._neighbour(i - 1, FORWARD, "y")
        if name == "dy":
            return self._neighbour(i + 1, BACKWARD, "dx")
        if name == "tied":
            head = self.here[self.stages - 1]
            last = len(head.blocks) - 1
            return head.value(last, head.blocks[last].block.graph.outputs["tied_grad"])
        placed = self.blocks[i]
        name, size = _name(placed, n.name), placed.block.size[n]
        v = Value(name, placed.layer, n.phase, "workspace", size)
        self.held[i][n] = v
        self.values.append(v)
        return v

    def _neighbour(self, i: int, whose: int, output: str) -> Value | None:
        if 0 <= i < len(self.blocks):
            return self.value(i, self.blocks[i].block.graph.outputs[output])
        if whose in self.messages:
            return self.messages[whose]
        other = self.here.get(self.stage - 1 if whose == FORWARD else self.stage + 1)
        return other._passed_on(whose) if other else None

    def _passed_on(self, whose: int) -> Value | None:
        """What the stage passes on, or back."""
        i, output = (len(self.blocks) - 1, "y") if whose == FORWARD else (0, "dx")
        return self.value(i, self.blocks[i].block.graph.outputs[output])

    def from_step(self, row: int, i: int, d: Task) -> Dependency:
        """A dependency of row `row` after all actions on a task of block `i`."""
        whose, place = self.where[i][d]
        return row, FIRST if whose == FORWARD else LAST, self.stage, place

    def _message(self, kind: Kind, other: int, forward: bool) -> Task:
        """One end of a message between stages; it carries the residual stream or its gradient."""
        away = (kind == Kind.SEND) == forward  # to or from the stage after this one
        size, dtype = self.blocks[-1 if away else 0].block.boundary
        phase = "forward" if forward else "backward"
        op = "send" if kind == Kind.SEND else "recv"
        ranks = self.tables.pipeline_ranks
        shift = (other - self.place.rank) % ranks
        shift -= ranks if shift > ranks // 2 else 0
        return Task(
            f"{phase}.{op}", op, kind, phase, phase,
            axes=("pp",), shift=shift, comm_bytes=size, dtype=dtype,
        )  # fmt: skip

    def _resolve(
        self, row: int, i: int, d: Task | str, here: Mapping[int, Stage]
    ) -> Dependency | None:
        """A dependency of a row of block `i`."""
        if d == "x":
            return self._arriving(row, i - 1, self.place.before, FORWARD, here)
        if d == "dy":
            return self._arriving(row, i + 1, self.place.after, BACKWARD, here)
        if d == "tied":  # of the head, on this rank
            head = here[self.stages - 1]
            return head._value(row, len(head.blocks) - 1, head.blocks[-1].block.tied, here)
        return self._value(row, i, d, here)

    def _arriving(
        self, row: int, i: int, source: int | None, whose: int, here: Mapping[int, Stage]
    ) -> Dependency | None:
        """What comes from block `i`, which is of another stage where there is no such block."""
        if 0 <= i < len(self.blocks):
            block = self.blocks[i].block
            return self._value(row, i, block.y if whose == FORWARD else block.dx, here)
        if source is None:
            return None
        if source != self.place.rank:
            return row, whose, self.stage, 0  # the message
        if whose == FORWARD:
            return here[self.stage - 1].output(row, here)
        return here[self.stage + 1].input_gradient(row, here)

    def _value(
        self, row: int, i: int, d: Task | str | None, here: Mapping[int, Stage]
    ) -> Dependency | None:
        if isinstance(d, str):  # the value passes through the block
            return self._resolve(row, i, d, here)
        if d is None:
            return None
        whose, place = self.where[i][d]
        return row, FIRST if d.part == "gather_once" else whose, self.stage, place


def _name(placed: Placed, name: str) -> str:
    """What a value is called; layers are told apart by their number."""
    return name if placed.layer >= 0 else f"{placed.label}.{name}"


def _by_part(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    result: dict[str, list[Task]] = {}
    for t in tasks:
        result.setdefault(t.part, []).append(t)
    return result
