"""From stages and a schedule to columns: array work, however many microbatches.

The rows of a block are made once. A stage is its blocks' rows behind each other (`stages`), an
action is a stage's rows with a microbatch, a rank is its actions in the schedule's order and then
the optimizer. Actions of one *form* differ in their microbatch only: their rows are copied, and
their dependencies become row numbers, for all of them at once.

What waits for what besides data, so that any simulator that runs whatever is ready keeps the
schedule: kernels of a rank form one chain (one compute stream), collectives and sends another one
or one per kind of group (communication streams), and what needs no data (a receive, a gather of
weights) waits for the kernel before it. Of a forward and a backward that overlap, kernels take
turns in the chain: where one would wait for what it communicates, the other goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.graph.roles import CLIP
from stagewright.lower.kernels import Dependency, Kernel, LiveValue, TaskPart
from stagewright.lower.lifetimes import Touch, Where, collect
from stagewright.lower.stages import (
    BACKWARD,
    COLUMNS,
    DTYPES,
    FIRST,
    FORWARD,
    LAST,
    NEXT,
    STEP,
    Builder,
    Placed,
    Rows,
    Stage,
    Tables,
    crossings,
)
from stagewright.program.columns import PHASES, Program, RankClass, TaskKind, Tasks, Values
from stagewright.program.memory import at_peak
from stagewright.schedule.actions import Order, Step, flat, parts
from stagewright.schedule.places import Place, places

MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this
HALVES = ("F", "BI", "BW")  # the kinds of action that hold a forward, and each half of a backward


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """What actions of one stage and kind have in common."""

    rows: Rows
    keep: Int  # the rows that they have, as places in the longest variant
    offset: Int  # of each kept row, from where the step begins

    def place(self) -> Int:
        """Place in the longest variant -> offset, -1 where left out."""
        result = np.full(len(self.rows), -1, dtype=np.int64)
        result[self.keep] = self.offset
        return result


class _Copies(NamedTuple):
    """A form, repeated: where each copy begins, and its microbatch."""

    form: _Form
    base: Int
    microbatch: Int | None


class _Rank:
    """All rows of one pipeline rank."""

    def __init__(
        self, stages: Sequence[Stage], steps: Sequence[Step], step: Rows, streams: str
    ) -> None:
        self.stages = {s.stage: s for s in stages}
        self.step = step
        self.streams = streams
        self.actions = [a for step in steps for a in parts(step)]
        # By stage and half: the first forward, the last backward.
        self.once: dict[tuple[int, int], int] = {}
        for i, a in enumerate(self.actions):
            for half, kinds in enumerate(HALVES):
                if a.kind in kinds and (half or (a.stage, half) not in self.once):
                    self.once[a.stage, half] = i
        # These also do what happens once per step.
        self.whole = {i for (_, half), i in self.once.items() if half != 1}
        self.forms: list[_Form] = []
        # Per action, where it begins and its form; and where all have ended.
        self.base, self.form_of, self.end = self._lay_out(steps)
        self.total = self.end + len(step)
        self.table = [form.place() for form in self.forms]
        self.at = self._by_microbatch()

    def _lay_out(self, steps: Sequence[Step]) -> tuple[Int, Int, int]:
        known: dict[tuple[tuple[int, str, bool], ...], list[int]] = {}
        base: list[int] = []
        form_of: list[int] = []
        now = 0
        for step in steps:
            first = len(base)
            key = tuple(
                (a.stage, a.kind, first + n in self.whole) for n, a in enumerate(parts(step))
            )
            if key not in known:
                made = _in_turn([self._rows_of(*one) for one in key])
                known[key] = list(range(len(self.forms), len(self.forms) + len(made)))
                self.forms += made
            form_of += known[key]
            base += [now] * len(key)
            now += sum(len(self.forms[f].keep) for f in known[key])
        return np.array(base, dtype=np.int64), np.array(form_of, dtype=np.int64), now

    def _rows_of(self, stage: int, kind: str, whole: bool) -> tuple[Rows, Int]:
        """The rows of an action, and which of them it has."""
        rows = self.stages[stage].forward if kind == "F" else self.stages[stage].backward
        there = {"I": ~rows.weight, "W": rows.weight}.get(kind, np.ones(len(rows), dtype=bool))
        return rows, np.flatnonzero(there & (whole | ~rows.once))

    def _by_microbatch(self) -> dict[tuple[int, int], Int]:
        """Stage and half -> the action of each microbatch, -1 for none."""
        many = 1 + max((a.microbatch for a in self.actions), default=0)
        found = {(s, half): np.full(many, -1) for s in self.stages for half in range(len(HALVES))}
        for i, a in enumerate(self.actions):
            for half, kinds in enumerate(HALVES):
                if a.kind in kinds:
                    found[a.stage, half][a.microbatch] = i
        return found

    def values(self) -> Values:
        """What the rank holds, and when."""

        def half(touch: Touch) -> int:
            whose, stage, place = touch
            backward = whose in (BACKWARD, LAST, NEXT)
            return 1 + int(self.stages[stage].backward.weight[place]) if backward else 0

        def once(touch: Touch) -> bool:
            whose, stage, place = touch
            if whose == STEP:
                return True
            owner = self.stages[stage]
            return bool((owner.forward if whose == FORWARD else owner.backward).once[place])

        def rows(actions: Int, at: Int) -> Int:
            return self._rows(actions, at, absent=-1)

        where = Where(half, once, self.at, self.once, rows, self.end, STEP, NEXT)
        return collect({s: stage.values for s, stage in self.stages.items()}, where, self.total)

    def tasks(self, tables: Tables) -> Tasks:
        columns: dict[str, NDArray[Any]] = {
            c: np.empty(self.total, dtype=t) for c, t in COLUMNS.items()
        }
        counts = np.zeros(self.total, dtype=np.int64)
        copies = self._copies()
        for form, base, microbatch in copies:
            rows, keep = form.rows, form.keep
            place = (base[:, None] + form.offset).ravel()
            for c, column in columns.items():
                column[place] = np.tile(rows.columns[c][keep], len(base))
            if microbatch is not None:
                here = np.repeat(microbatch, len(keep))
                columns["microbatch"][place] = np.where(
                    np.tile(rows.once[keep], len(base)), -1, here
                )
                columns["tag"][place] = self._tags(rows, keep, microbatch, tables)
            counts[place] = np.tile(np.bincount(rows.dep_row, minlength=len(rows))[keep], len(base))
        pointer = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        data = np.empty(int(pointer[-1]), dtype=np.int32)
        for some in copies:
            self._dependencies(some, pointer, data)
        order_pointer, order = _streams(columns, counts, self.streams)
        return Tasks(
            **columns, data_ptr=pointer, data=data, order_ptr=order_pointer, order=order,
            names=tuple(tables.names.table), ops=tuple(tables.ops.table), dtypes=DTYPES,
            shapes=tuple(tables.shapes.table),
        )  # fmt: skip

    def _copies(self) -> list[_Copies]:
        """Everything the rank runs."""
        microbatch = np.array([a.microbatch for a in self.actions], dtype=np.int64)
        found: list[_Copies] = []
        for f, form in enumerate(self.forms):
            mine = np.flatnonzero(self.form_of == f)
            found.append(_Copies(form, self.base[mine], microbatch[mine]))
        everything = np.arange(len(self.step))
        last = _Form(self.step, everything, everything)
        return [*found, _Copies(last, np.array([self.end]), None)]

    def _tags(self, rows: Rows, keep: Int, microbatch: Int, tables: Tables) -> Int:
        """Equal on both ends, and different for all messages between two ranks in a step."""
        local = rows.columns["tag"][keep]
        stage, slot = rows.columns["stage"][keep], rows.columns["slot"][keep]
        forward = rows.columns["phase"][keep] == PHASES.index("forward")
        pipeline_slots = [i for p, i in tables.peers.table.items() if p.axis == "pp"]
        pipeline = np.isin(slot, pipeline_slots) & (local >= 0)
        receives = rows.columns["kind"][keep] == TaskKind.RECV
        # A message between stages is numbered by the earlier one.
        boundary = stage - (pipeline & (receives == forward))
        one = (boundary * 2 + ~forward) * tables.messages + local
        stages = next(iter(self.stages.values())).stages
        tags = one[None, :] + microbatch[:, None] * (stages * 2 * tables.messages)
        return np.where(local >= 0, tags % MAX_TAG, -1).ravel()

    def _dependencies(self, copies: _Copies, pointer: Int, data: NDArray[np.int32]) -> None:
        """Write the row numbers that all copies of some rows depend on."""
        form, base, microbatch = copies
        rows = form.rows
        new = form.place()
        kept = new[rows.dep_row] >= 0
        # Rows may stand in another order than in the longest variant, their dependencies do not.
        nth = np.arange(len(rows.dep_row)) - np.searchsorted(rows.dep_row, rows.dep_row)
        place = pointer[base[:, None] + new[rows.dep_row[kept]]] + nth[kept]
        whose, stage, at = rows.dep_whose[kept], rows.dep_stage[kept], rows.dep_at[kept]
        half = np.where(np.isin(whose, (BACKWARD, LAST)), 1, 0)
        for s, owner in self.stages.items():
            mine = (stage == s) & (half > 0)
            half[mine] += owner.backward.weight[at[mine]]
        once = np.isin(whose, (FIRST, LAST))
        value = np.empty((len(base), len(at)), dtype=np.int64)
        value[:, whose == STEP] = self.end + at[whose == STEP]
        for s, h, all_alike in {*zip(stage.tolist(), half.tolist(), once.tolist(), strict=True)}:
            mine = (stage == s) & (half == h) & (once == all_alike) & (whose != STEP)
            if not mine.any():
                continue
            if all_alike or microbatch is None:
                actions = np.full(len(base), self.once[s, h])
            else:
                actions = self.at[s, h][microbatch]
            value[:, mine] = self._rows(actions, at[mine])
        data[place.ravel()] = value.ravel()

    def _rows(self, actions: Int, at: Int, absent: int | None = None) -> Int:
        """The row numbers of some places in some actions; `absent` where there are none."""
        forms = self.form_of[actions]
        offset = np.empty((len(actions), len(at)), dtype=np.int64)
        for f in np.unique(forms):
            offset[forms == f] = self.table[f][at]
        rows = self.base[actions][:, None] + offset
        return rows if absent is None else np.where(offset < 0, absent, rows)


def _in_turn(some: Sequence[tuple[Rows, Int]]) -> list[_Form]:
    """The forms of the actions of one step: of one alone, or of two that overlap.

    Those take turns: each goes on until its next kernel needs what it has communicated.
    """
    turn = [np.cumsum(rows.waits[keep]) * len(some) + n for n, (rows, keep) in enumerate(some)]
    order = np.argsort(np.concatenate(turn), kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(order))
    ends = np.cumsum([len(keep) for _, keep in some])
    return [
        _Form(rows, keep, mine)
        for (rows, keep), mine in zip(some, np.split(offset, ends[:-1]), strict=True)
    ]


def _streams(
    columns: Mapping[str, NDArray[np.generic]], counts: Int, streams: str
) -> tuple[Int, NDArray[np.int32]]:
    """Ordering dependencies: the chains of the streams, as CSR."""
    kind = columns["kind"]
    n = len(kind)
    rows = np.arange(n)
    compute = kind == TaskKind.COMPUTE
    before = np.maximum.accumulate(np.where(compute, rows, -1)) if n else rows
    previous = np.concatenate([[-1], before[:-1]])  # the kernel before each row
    copies = (kind == TaskKind.LOAD) | (kind == TaskKind.STORE)
    moves = (kind == TaskKind.COLLECTIVE) | (kind == TaskKind.SEND) | copies
    slot = np.asarray(columns["slot"], dtype=np.int64)
    key = (
        np.where(kind == TaskKind.SEND, -1, slot)
        if streams == "separate"
        else np.zeros(n, dtype=np.int64)
    )
    if streams == "separate":  # each way has an engine of its own
        key = np.where(copies, -2 - kind.astype(np.int64), key)
    chain = np.full(n, -1, dtype=np.int64)
    for k in np.unique(key[moves]):
        mine = np.flatnonzero(moves & (key == k))
        chain[mine[1:]] = mine[:-1]
    ahead = (counts == 0) | (kind == TaskKind.LOAD)
    waits = np.where(compute | ahead, previous, -1)
    pairs = np.stack([waits, chain], axis=1)
    there = pairs >= 0
    pointer = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
    return pointer, pairs[there].astype(np.int32)


def _optimizer(
    stages: Sequence[Stage],
    norm_dims: Sequence[tuple[str, ...]],
    total: tuple[str, ...],
    clip: bool,
) -> Rows:
    """Rows after all actions: tied embeddings, the global norm, then the updates."""
    b = Builder(stages[0].tables)
    place: dict[tuple[int, int, Dependency], int] = {}
    norms: list[int] = []
    clip_row = -1
    for part in (TaskPart.TIE, TaskPart.NORM, TaskPart.UPDATE):
        if part is TaskPart.UPDATE and clip and norms:
            each = 4 * sum(n.op == "norm2" for s in stages for p in s.blocks for n in p.block.graph)
            exchanged = [(axes, each) for axes in norm_dims] + ([(total, 4)] if total else [])
            clip_row = _clip(b, norms, exchanged)
        some = [
            (c, s, i, s.parts[i].get(part, ()))
            for c, s in enumerate(stages)
            for i in range(len(s.blocks))
        ]
        if part is TaskPart.TIE:  # ranks that hold several tables meet in one order
            each = [(c, s, i, (t,)) for c, s, i, tasks in some for t in tasks]
            some = sorted(each, key=lambda one: one[3][0].axes)
        for c, s, i, tasks in some:
            placed = s.blocks[i]
            for t in tasks:
                row = b.add(t, placed.label, placed.layer, s.stage)
                place[c, i, t] = row
                s.touch(i, t, (STEP, -1, row))
                for d in t.deps:
                    if isinstance(d, LiveValue) and d.name == CLIP:
                        b.deps += [(row, STEP, -1, clip_row)] if clip_row >= 0 else []
                    elif (c, i, d) in place:
                        b.deps.append((row, STEP, -1, place[c, i, d]))
                    elif isinstance(d, Kernel):
                        b.deps.append(s.from_step(row, i, d))
            if part is TaskPart.NORM and tasks:
                norms.append(len(b.rows) - 1)
    return b.finish((STEP, -1))


def _clip(b: Builder, norms: list[int], exchanged: Sequence[tuple[tuple[str, ...], int]]) -> int:
    """Gradient clipping by the global norm: add up, all-reduce one number or many, scale."""
    size = len(norms)
    add = Kernel("grad_norm", "add", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
               flops=size, traffic=4 * (size + 1), dtype="fp32")  # fmt: skip
    row = b.add(add, "", -1, -1)
    b.deps += [(row, STEP, -1, n) for n in norms]
    for axes, width in exchanged:
        t = Kernel("grad_norm.all_reduce", "all_reduce", TaskKind.COLLECTIVE, "optimizer",
                   TaskPart.NORM,
                 axes=axes, comm_bytes=width, dtype="fp32")  # fmt: skip
        reduced = b.add(t, "", -1, -1)
        b.deps.append((reduced, STEP, -1, row))
        row = reduced
    scale = Kernel("clip_scale", "divide", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
                 flops=3, traffic=8, dtype="fp32")  # fmt: skip
    last = b.add(scale, "", -1, -1)
    b.deps.append((last, STEP, -1, row))
    return last


def _holders(
    stages: Sequence[Sequence[Placed]], where: Sequence[Place]
) -> dict[str, tuple[int, ...]]:
    """Of each table with copies, the pipeline ranks that hold one."""
    held: dict[str, set[int]] = {}
    for p in where:
        for name in {name for placed in stages[p.stage] for name in placed.block.tied}:
            held.setdefault(name, set()).add(p.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in held.items()}


def _most(order: Order) -> int:
    """The number of microbatches."""
    return 1 + max(a.microbatch for steps in order for a in flat(steps))


def lower(
    stages: Sequence[Sequence[Placed]],
    order: Order,
    mesh: Mesh,
    *,
    norm_axes: tuple[str, ...] = (),
    norm_dims: Sequence[tuple[str, ...]] = (),
    clip_grad: bool = True,
    streams: str = "one",
    bucket_cap: int = 0,
    units: bool = False,
    caches: bool = False,
    schedule: str = "",
) -> Program:
    """The program of every rank class: one class per pipeline rank.

    `norm_axes` are the axes over which the gradients' norm is a sum; over those of `norm_dims`, one
    after the other, ranks exchange the norm of each gradient. `bucket_cap`: bytes of a
    bucket of gradients; 0: what blocks reduce are messages of their own. `units`: blocks are the
    units of FSDP2. `caches`: stages keep buffers for messages, and what they send; where the
    `schedule` is PyTorch's 1F1B, gradients too, each until the next.
    """
    where = places(order)
    pp = len(order)
    halves = any(a.kind == "I" for steps in order for a in flat(steps))
    kept = _most(order) if caches and pp > 1 else 0
    holders = _holders(stages, where)
    tables = Tables(
        pp, holders, bucket_cap, units, kept,
        retains=caches and halves, keeps_sent=caches and schedule == "1f1b",
    )  # fmt: skip
    between = crossings(stages)
    held: list[dict[int, Stage]] = [{} for _ in range(pp)]
    trains = any(a.kind != "F" for steps in order for a in flat(steps))
    for p in where:
        held[p.rank][p.stage] = Stage(stages[p.stage], p, between, tables)
    for here in held:
        for s in sorted(here):
            here[s].build(here, forward=True)
        for s in sorted(here, reverse=True) if trains else ():
            here[s].build(here, forward=False)
    norms = [tuple(sorted(axes)) for axes in norm_dims if axes]
    total = tuple(a for a in norm_axes if not any(a in axes for axes in norms))
    rest = [_optimizer([*here.values()], norms, total, clip_grad) for here in held]
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    at = ranks // mesh.stride("pp") % pp if pp > 1 else np.zeros_like(ranks)
    classes: list[RankClass] = []
    for p, (here, step) in enumerate(zip(held, rest, strict=True)):
        rank = _Rank([*here.values()], order[p], step, streams)
        tasks, values = rank.tasks(tables), rank.values()
        classes.append(RankClass(ranks[at == p], p, tasks, at_peak(values, len(tasks)), values))
    who = tuple(tables.communicators.table), tuple(tables.peers.table)
    return Program(mesh, tuple(classes), *who)
