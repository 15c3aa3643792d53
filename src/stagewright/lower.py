"""From blocks, stages and a schedule to columns: array work, however many microbatches.

The rows of a block are made once. A stage is its blocks' rows behind each other, an action is a
stage's rows with a microbatch, a rank is its actions in the schedule's order and then the
optimizer. Dependencies are written down once per stage, as places in an action, and become row
numbers by adding where actions begin.

What waits for what besides data, so that any simulator that runs whatever is ready keeps the
schedule: kernels of a rank form one chain (one compute stream), collectives and sends another one
or one per kind of group (communication streams), and what needs no data (a receive, a gather of
weights) waits for the kernel before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UserError
from stagewright.ir import BYTES, Graph
from stagewright.kernels import EMBEDDING_AXIS, Task
from stagewright.layout import Mesh
from stagewright.pipeline import Action, Order
from stagewright.program import (
    COLLECTIVES,
    PHASES,
    Communicator,
    Int,
    Kind,
    Peer,
    Program,
    RankClass,
    Shape,
    Tasks,
)

DTYPES = tuple(BYTES)
COLUMNS = {
    "kind": np.uint8, "name": np.int32, "op": np.int32, "phase": np.uint8, "stage": np.int32,
    "layer": np.int32, "microbatch": np.int32, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "tag": np.int32, "shape": np.int32,
}  # fmt: skip
SELF, FORWARD, FIRST, LAST, STEP = range(5)  # whose rows a dependency counts from; see `_Stage`
FORWARD_PARTS = ("gather_once", "gather", "forward")
BACKWARD_PARTS = ("gather_again", "backward", "reduce_once")
MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[Task]
    y: Task | str | None  # who makes the block's output, and the gradient of its input
    dx: Task | str | None
    tied: Task | str | None  # who makes the gradient of a table shared with the embedding
    boundary: tuple[int, str]  # bytes and dtype of the residual stream on one rank


class Placed(NamedTuple):
    """A block in its place in the model: `layer` is -1 for what is not a layer."""

    block: LoweredBlock
    layer: int
    label: str


_Named = TypeVar("_Named", bound=Hashable)


class _Numbers(Generic[_Named]):
    """Things to small numbers, as they are met."""

    def __init__(self) -> None:
        self.table: dict[_Named, int] = {}

    def __call__(self, thing: _Named) -> int:
        return self.table.setdefault(thing, len(self.table))


class _Tables(NamedTuple):
    """What columns point into."""

    names: _Numbers[str]
    ops: _Numbers[str]
    shapes: _Numbers[Shape]


@dataclass(slots=True, eq=False)
class _Slots:
    """Who tasks talk to, numbered as they are met; the order of ranks is the mesh's."""

    pipeline_ranks: int
    messages: int = 1  # most messages that one action exchanges along one axis
    communicators: dict[Communicator, int] = field(default_factory=dict[Communicator, int])
    peers: dict[Peer, int] = field(default_factory=dict[Peer, int])

    def of(self, t: Task) -> int:
        if t.kind == Kind.COLLECTIVE:
            who = Communicator(tuple(sorted(t.axes)))
            if t.axes == (EMBEDDING_AXIS,):
                who = Communicator(("pp",), (0, self.pipeline_ranks - 1))
            if who.only and self.pipeline_ranks == 2:
                who = Communicator(("pp",))  # first and last are all
            return self.communicators.setdefault(who, len(self.communicators))
        if t.kind in (Kind.SEND, Kind.RECV):
            return self.peers.setdefault(Peer(t.axes[0], t.shift), len(self.peers))
        return -1


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows under construction, and their dependencies.

    A dependency goes from a row to a place in the rows that `dep_kind` and `dep_stage` name.
    """

    columns: dict[str, Int]
    dep_row: Int
    dep_kind: Int
    dep_stage: Int
    dep_at: Int
    optional: NDArray[np.bool_]  # in the longest variant of an action only

    def __len__(self) -> int:
        return len(self.columns["kind"])


class _Builder:
    """Collects rows one by one: the few rows of blocks and stages, never those of microbatches."""

    def __init__(self, tables: _Tables, slots: _Slots) -> None:
        self.tables, self.slots = tables, slots
        self.rows: list[tuple[int, ...]] = []
        self.deps: list[tuple[int, int, int, int]] = []  # as in _Rows

    def add(self, t: Task, label: str, layer: int, stage: int, tag: int = -1) -> int:
        """One row; the microbatch is filled in later. `tag` numbers the messages of an action."""
        collective = COLLECTIVES.index(t.op) if t.kind == Kind.COLLECTIVE else -1
        name = f"{label}.{t.name}" if label else t.name
        self.rows.append(
            (t.kind, self.tables.names(name), self.tables.ops(t.op), PHASES.index(t.phase), stage,
             layer, -1, t.flops, t.traffic, collective, DTYPES.index(t.dtype) if t.dtype else 0,
             t.comm_bytes, self.slots.of(t), tag, self.tables.shapes(t.shape) if t.shape else -1)
        )  # fmt: skip
        return len(self.rows) - 1

    def finish(self) -> _Rows:
        table = np.array(self.rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        deps = np.array(sorted(set(self.deps)), dtype=np.int64).reshape(-1, 4)
        columns = {c: table[:, i] for i, c in enumerate(COLUMNS)}
        return _Rows(columns, *deps.T, optional=np.zeros(len(table), dtype=bool))


class _Stage:
    """A virtual pipeline stage: its forward and backward actions, each in two variants.

    The first microbatch's forward also gathers weights that stay for the step, the last one's
    backward also reduces gradients; the others leave these rows out. Places in an action are
    counted in these longest variants: SELF is the action itself, FORWARD the forward action of the
    same microbatch, FIRST the first forward and LAST the last backward action of the stage, STEP
    the rows after all actions.
    """

    def __init__(
        self,
        blocks: Sequence[Placed],
        stage: int,
        stages: int,
        slots: _Slots,
        tables: _Tables,
        shifts: tuple[int, int],
    ) -> None:
        self.blocks, self.stage, self.stages = blocks, stage, stages
        self.slots, self.tables = slots, tables
        self.before, self.after = shifts  # distance in pipeline ranks to the stages around
        # per block: task -> (is forward, place)
        self.where: list[dict[Task, tuple[bool, int]]] = [{} for _ in blocks]
        self.parts = [_by_part(p.block.tasks) for p in blocks]
        self.forward = self._action(FORWARD_PARTS, range(len(blocks)), forward=True)
        self.backward = self._action(BACKWARD_PARTS, range(len(blocks) - 1, -1, -1), forward=False)

    def _action(self, parts: tuple[str, ...], order: Sequence[int], *, forward: bool) -> _Rows:
        b = _Builder(self.tables, self.slots)
        inner = self.stage > 0 if forward else self.stage < self.stages - 1
        if inner:
            b.add(self._message(Kind.RECV, forward), "", -1, self.stage, tag=0)
        first, second, third = parts
        ahead = (first, second) if forward else (first,)
        main = (third,) if forward else (second, third)
        only_once: list[int] = []
        message = 0
        numbers: dict[Task, int] = {}

        def emit(i: int, part: str) -> None:
            nonlocal message
            placed = self.blocks[i]
            for t in self.parts[i].get(part, ()):
                if t.kind == Kind.SEND:
                    message += 1
                    numbers[t] = message
                tag = numbers.get(t.twin or t, -1)
                row = b.add(t, placed.label, placed.layer, self.stage, tag)
                self.where[i][t] = (forward, row)
                if part in ("gather_once", "reduce_once"):
                    only_once.append(row)
                for d in t.deps:
                    b.deps += self._resolve(row, i, d, forward)

        order = list(order)
        for n, i in enumerate(order):
            # Weights are gathered one block ahead.
            for j in order[:2] if n == 0 else order[n + 1 : n + 2]:
                for part in ahead:
                    emit(j, part)
            for part in main:
                emit(i, part)
        outer = self.stage < self.stages - 1 if forward else self.stage > 0
        if outer:
            row = b.add(self._message(Kind.SEND, forward), "", -1, self.stage, tag=0)
            last = self.blocks[order[-1]].block
            b.deps += self._resolve_value(row, order[-1], last.y if forward else last.dx, forward)
        self.slots.messages = max(self.slots.messages, message + 1)
        rows = b.finish()
        rows.optional[only_once] = True
        return rows

    def _message(self, kind: Kind, forward: bool) -> Task:
        """One end of a message between stages; it carries the residual stream or its gradient."""
        away = (kind == Kind.SEND) == forward  # to or from the stage after this one
        size, dtype = self.blocks[-1].block.boundary if away else self.blocks[0].block.boundary
        what = ("forward" if forward else "backward") + (".send" if kind == Kind.SEND else ".recv")
        phase = "forward" if forward else "backward"
        op = "send" if kind == Kind.SEND else "recv"
        shift = self.after if away else self.before
        return Task(
            what, op, kind, phase, phase, axes=("pp",), shift=shift, comm_bytes=size, dtype=dtype
        )

    def _resolve(
        self, row: int, i: int, d: Task | str, forward: bool
    ) -> list[tuple[int, int, int, int]]:
        """A dependency of a row of block `i`, as in `_Rows`."""
        if d == "x":
            if i > 0:
                return self._resolve_value(row, i - 1, self.blocks[i - 1].block.y, forward)
            return [(row, SELF if forward else FORWARD, self.stage, 0)] if self.stage > 0 else []
        if d == "dy":
            if i < len(self.blocks) - 1:
                return self._resolve_value(row, i + 1, self.blocks[i + 1].block.dx, forward)
            return [(row, SELF, self.stage, 0)] if self.stage < self.stages - 1 else []
        if d == "tied":
            return self._resolve_value(
                row, len(self.blocks) - 1, self.blocks[-1].block.tied, forward
            )
        return self._resolve_value(row, i, d, forward)

    def _resolve_value(
        self, row: int, i: int, d: Task | str | None, forward: bool
    ) -> list[tuple[int, int, int, int]]:
        if isinstance(d, str):  # the value passes through the block
            return self._resolve(row, i, d, forward)
        if d is None:
            return []
        was_forward, place = self.where[i][d]
        if d.part == "gather_once":
            return [(row, FIRST, self.stage, place)]
        return [(row, SELF if was_forward == forward else FORWARD, self.stage, place)]

    def from_step(self, row: int, i: int, d: Task) -> tuple[int, int, int, int]:
        """A dependency of row `row` after all actions on a task of block `i`."""
        was_forward, place = self.where[i][d]
        return row, FIRST if was_forward else LAST, self.stage, place


def _by_part(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    result: dict[str, list[Task]] = {}
    for t in tasks:
        result.setdefault(t.part, []).append(t)
    return result


class _Copies(NamedTuple):
    """Some rows, repeated: which of them, where each copy begins, and its microbatch."""

    rows: _Rows
    keep: Int
    base: Int
    microbatch: Int | None


class _Rank:
    """All rows of one pipeline rank."""

    def __init__(
        self, stages: Sequence[_Stage], actions: Sequence[Action], step: _Rows, streams: str
    ) -> None:
        self.stages = {s.stage: s for s in stages}
        self.actions = actions
        self.step = step
        self.streams = streams
        self.at = {a: i for i, a in enumerate(actions)}
        # The one action per stage and direction that has the rows of the once-per-step work.
        self.origin: dict[tuple[int, str], int] = {}
        for i, a in enumerate(actions):
            if a.kind == "B" or (a.stage, a.kind) not in self.origin:
                self.origin[a.stage, a.kind] = i
        self.whole = set(self.origin.values())
        self.sizes: dict[tuple[int, str, bool], int] = {}
        for s in stages:
            for kind, rows in (("F", s.forward), ("B", s.backward)):
                self.sizes[s.stage, kind, True] = len(rows)
                self.sizes[s.stage, kind, False] = len(rows) - int(rows.optional.sum())
        lengths = [self.sizes[a.stage, a.kind, i in self.whole] for i, a in enumerate(actions)]
        self.base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.total = int(self.base[-1]) + len(step)

    def tasks(self, tables: _Tables) -> Tasks:
        columns: dict[str, NDArray[Any]] = {
            c: np.empty(self.total, dtype=t) for c, t in COLUMNS.items()
        }
        counts = np.zeros(self.total, dtype=np.int64)
        plans = [*self._plans()]
        for rows, keep, base, microbatch in plans:
            place = (base[:, None] + np.arange(len(keep))).ravel()
            for c, column in columns.items():
                column[place] = np.tile(rows.columns[c][keep], len(base))
            if microbatch is not None:
                here = np.repeat(microbatch, len(keep))
                columns["microbatch"][place] = np.where(
                    np.tile(rows.optional[keep], len(base)), -1, here
                )
                columns["tag"][place] = self._tags(rows, keep, microbatch)
            counts[place] = np.tile(np.bincount(rows.dep_row, minlength=len(rows))[keep], len(base))
        pointer = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        data = np.empty(int(pointer[-1]), dtype=np.int32)
        for copies in plans:
            self._dependencies(copies, pointer, data)
        order_pointer, order = _streams(columns, counts, self.streams)
        return Tasks(
            **columns, data_ptr=pointer, data=data, order_ptr=order_pointer, order=order,
            names=tuple(tables.names.table), ops=tuple(tables.ops.table), dtypes=DTYPES,
            shapes=tuple(tables.shapes.table),
        )  # fmt: skip

    def _plans(self) -> Iterator[_Copies]:
        """Everything the rank runs."""
        for s in self.stages.values():
            for kind, rows in (("F", s.forward), ("B", s.backward)):
                for whole in (True, False):
                    at = [
                        i
                        for i, a in enumerate(self.actions)
                        if (a.stage, a.kind) == (s.stage, kind) and (i in self.whole) == whole
                    ]
                    if at:
                        keep = np.arange(len(rows)) if whole else np.flatnonzero(~rows.optional)
                        microbatch = np.array([self.actions[i].microbatch for i in at])
                        yield _Copies(rows, keep, self.base[at], microbatch)
        yield _Copies(self.step, np.arange(len(self.step)), self.base[-1:], None)

    def _tags(self, rows: _Rows, keep: Int, microbatch: Int) -> Int:
        """Equal on both ends, and different for all messages between two ranks in a step."""
        local = rows.columns["tag"][keep]
        stage, slot = rows.columns["stage"][keep], rows.columns["slot"][keep]
        some = next(iter(self.stages.values()))
        most = some.slots.messages
        forward = rows.columns["phase"][keep] == PHASES.index("forward")
        pipeline_slots = [i for p, i in some.slots.peers.items() if p.axis == "pp"]
        pipeline = np.isin(slot, pipeline_slots) & (local >= 0)
        receives = rows.columns["kind"][keep] == Kind.RECV
        # A message between stages is numbered by the earlier one.
        boundary = stage - (pipeline & (receives == forward))
        one = (boundary * 2 + ~forward) * most + local
        tags = (one[None, :] + microbatch[:, None] * (some.stages * 2 * most)) % MAX_TAG
        return np.where(local >= 0, tags, -1).ravel()

    def _dependencies(self, copies: _Copies, pointer: Int, data: NDArray[np.int32]) -> None:
        """Write the row numbers that all copies of some rows depend on."""
        rows, keep, base, microbatch = copies
        new = np.full(len(rows), -1, dtype=np.int64)  # place in the longest variant -> in this one
        new[keep] = np.arange(len(keep))
        kept = new[rows.dep_row] >= 0
        row, kind, at = new[rows.dep_row[kept]], rows.dep_kind[kept], rows.dep_at[kept]
        stage = rows.dep_stage[kept]
        place = pointer[base[:, None] + row] + (np.arange(len(row)) - np.searchsorted(row, row))
        value = np.empty((len(base), len(row)), dtype=np.int64)
        value[:, kind == SELF] = base[:, None] + new[at[kind == SELF]]
        value[:, kind == STEP] = self.base[-1] + at[kind == STEP]
        for s in self.stages:
            for whose, action in ((FIRST, "F"), (LAST, "B")):
                mine = (kind == whose) & (stage == s)
                value[:, mine] = self.base[self.origin[s, action]] + at[mine]
        if microbatch is not None and (back := kind == FORWARD).any():
            value[:, back] = self._forward_rows(int(stage[back][0]), microbatch, at[back])
        data[place.ravel()] = value.ravel()

    def _forward_rows(self, stage: int, microbatch: Int, at: Int) -> Int:
        """Rows of the forward actions of some microbatches, at some places."""
        optional = self.stages[stage].forward.optional
        short = np.full(len(optional), -1, dtype=np.int64)
        short[~optional] = np.arange(int((~optional).sum()))
        action = np.array([self.at[Action(stage, "F", int(m))] for m in microbatch])
        whole = action == self.origin[stage, "F"]
        return self.base[action][:, None] + np.where(whole[:, None], at, short[at])


def _streams(
    columns: Mapping[str, NDArray[np.generic]], counts: Int, streams: str
) -> tuple[Int, NDArray[np.int32]]:
    """Ordering dependencies: the chains of the streams, as CSR."""
    kind = columns["kind"]
    n = len(kind)
    rows = np.arange(n)
    compute = kind == Kind.COMPUTE
    before = np.maximum.accumulate(np.where(compute, rows, -1)) if n else rows
    previous = np.concatenate([[-1], before[:-1]])  # the kernel before each row
    moves = (kind == Kind.COLLECTIVE) | (kind == Kind.SEND)
    slot = np.asarray(columns["slot"], dtype=np.int64)
    key = (
        np.where(kind == Kind.SEND, -1, slot)
        if streams == "separate"
        else np.zeros(n, dtype=np.int64)
    )
    chain = np.full(n, -1, dtype=np.int64)
    for k in np.unique(key[moves]):
        mine = np.flatnonzero(moves & (key == k))
        chain[mine[1:]] = mine[:-1]
    waits = np.where(compute | (counts == 0), previous, -1)
    pairs = np.stack([waits, chain], axis=1)
    there = pairs >= 0
    pointer = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
    return pointer, pairs[there].astype(np.int32)


def _optimizer(stages: Sequence[_Stage], norm_axes: tuple[str, ...], clip: bool) -> _Rows:
    """Rows after all actions: tied embeddings, the global norm, then the updates."""
    some = stages[0]
    b = _Builder(some.tables, some.slots)
    place: dict[tuple[int, int, Task | str], int] = {}
    norms: list[int] = []
    clip_row = -1
    for part in ("tie", "norm", "update"):
        if part == "update" and clip and norms:
            clip_row = _clip(b, norms, norm_axes)
        for c, s in enumerate(stages):
            for i, placed in enumerate(s.blocks):
                tasks = s.parts[i].get(part, ())
                for t in tasks:
                    row = b.add(t, placed.label, placed.layer, s.stage)
                    place[c, i, t] = row
                    for d in t.deps:
                        if d == "clip":
                            b.deps += [(row, STEP, -1, clip_row)] if clip_row >= 0 else []
                        elif (c, i, d) in place:
                            b.deps.append((row, STEP, -1, place[c, i, d]))
                        elif isinstance(d, Task):
                            b.deps.append(s.from_step(row, i, d))
                if part == "norm" and tasks:
                    norms.append(len(b.rows) - 1)
    return b.finish()


def _clip(b: _Builder, norms: list[int], axes: tuple[str, ...]) -> int:
    """Gradient clipping by the global norm: add up, all-reduce one number, scale."""
    size = len(norms)
    add = Task("grad_norm", "add", Kind.COMPUTE, "optimizer", "norm",
               flops=size, traffic=4 * (size + 1), dtype="fp32")  # fmt: skip
    row = b.add(add, "", -1, -1)
    b.deps += [(row, STEP, -1, n) for n in norms]
    if axes:
        t = Task("grad_norm.all_reduce", "all_reduce", Kind.COLLECTIVE, "optimizer", "norm",
                 axes=axes, comm_bytes=4, dtype="fp32")  # fmt: skip
        reduced = b.add(t, "", -1, -1)
        b.deps.append((reduced, STEP, -1, row))
        row = reduced
    scale = Task("clip_scale", "divide", Kind.COMPUTE, "optimizer", "norm",
                 flops=3, traffic=8, dtype="fp32")  # fmt: skip
    last = b.add(scale, "", -1, -1)
    b.deps.append((last, STEP, -1, row))
    return last


def stage_ranks(order: Order) -> dict[int, int]:
    """Virtual stage -> pipeline rank."""
    return {a.stage: r for r, actions in enumerate(order) for a in actions}


def lower(
    stages: Sequence[Sequence[Placed]],
    order: Order,
    mesh: Mesh,
    *,
    norm_axes: tuple[str, ...] = (),
    clip_grad: bool = True,
    streams: str = "one",
    memory: Mapping[int, Mapping[str, int]] | None = None,
) -> Program:
    """The program of every rank class: one class per pipeline rank.

    `norm_axes` are the axes over which the gradients' norm is a sum, `memory` bytes by pipeline
    rank and category.
    """
    pp = len(order)
    rank_of = stage_ranks(order)
    if any(a.kind not in "FB" for actions in order for a in actions):
        raise UserError(
            "the schedule splits backward into I and W; only F and B can be lowered so far"
        )
    slots, tables = _Slots(pp), _Tables(_Numbers(), _Numbers(), _Numbers())
    made: list[_Stage] = []
    for s, blocks in enumerate(stages):
        shifts = (rank_of[s] - rank_of.get(s - 1, 0)), (rank_of.get(s + 1, 0) - rank_of[s])
        before, after = -shifts[0] % pp, shifts[1] % pp
        if (s > 0 and before == 0) or (s < len(stages) - 1 and after == 0):
            raise UserError(
                f"stages {s} and its neighbour share pipeline rank {rank_of[s]}; "
                "place them on two ranks"
            )
        wrapped = tuple(x - pp if x > pp // 2 else x for x in (before, after))
        made.append(_Stage(blocks, s, len(stages), slots, tables, (wrapped[0], wrapped[1])))
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    at = ranks // mesh.stride("pp") % pp if pp > 1 else np.zeros_like(ranks)
    rest: list[tuple[int, list[_Stage], _Rows]] = []
    for p in range(pp):
        mine = [s for s in made if rank_of[s.stage] == p]
        rest.append((p, mine, _optimizer(mine, norm_axes, clip_grad)))
    classes: list[RankClass] = []
    for p, mine, step in rest:
        tasks = _Rank(mine, order[p], step, streams).tasks(tables)
        classes.append(RankClass(ranks[at == p], p, tasks, (memory or {}).get(p, {})))
    return Program(mesh, tuple(classes), tuple(slots.communicators), tuple(slots.peers))
