"""From stages and a schedule to columns: array work, however many microbatches.

The rows of a block are made once. A stage is its blocks' rows behind each other (`stages`), an
action is a stage's rows with a microbatch (`segments`), a rank is its actions in the schedule's
order and then the optimizer (`rank_rows`). Rows of actions that differ in their microbatch only are
copied, and their dependencies become row numbers, for all of them at once.

What waits for what besides data is in `streams`. Of a forward and a backward that overlap, kernels
take turns: where one would wait for what it communicates, the other goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Bool, Int, is_any
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lifetimes import Value
from stagewright.lower.assembly.live_ranges import live_ranges
from stagewright.lower.assembly.lowered_block import Placed, crossings
from stagewright.lower.assembly.optimizer_step import ClipNorm, optimizer_step
from stagewright.lower.assembly.rank_rows import HALVES, Form, RankRows
from stagewright.lower.assembly.segments import (
    BACKWARD,
    COLUMNS,
    DTYPES,
    FIRST,
    FORWARD,
    LAST,
    OWN,
    STEP,
    Segment,
    Tables,
)
from stagewright.lower.assembly.stages import Stage, StagesMade
from stagewright.lower.assembly.streams import order_by_streams
from stagewright.lower.kernels.kernel import Kernel
from stagewright.program.columns import PHASES, Program, RankClass, TaskKind, Tasks, Values
from stagewright.program.step import (
    KINDS,
    ActionOrder,
    Actions,
    Deltas,
    MemoryChanges,
    RankWork,
    changed_bytes,
)
from stagewright.schedule.actions import Order, flat
from stagewright.schedule.places import Place, places

MAX_TAG = 500_000_000  # ASTRA-sim takes message tags modulo this


class AssembledWork(RankWork):
    """The work of a pipeline rank, made of its stages' segments when it is asked for."""

    def __init__(
        self,
        rank: RankRows,
        tables: Tables,
        of_kernels: Mapping[str, NDArray[Any]],
        streams: str,
    ) -> None:
        self._rank, self._tables, self._of_kernels, self._streams = (
            rank, tables, of_kernels, streams,
        )  # fmt: skip

    @cached_property
    def _rows(self) -> tuple[Tasks, Int]:
        return _tasks(self._rank, self._tables, self._of_kernels, self._streams)

    @property
    def tasks(self) -> Tasks:
        return self._rows[0]

    @property
    def kernel(self) -> Int:
        """The kernel that each row is a copy of."""
        return self._rows[1]

    @cached_property
    def values(self) -> Values:
        stages = self._rank.stages.items()
        return live_ranges({s: stage.values.values for s, stage in stages}, self._rank)

    @cached_property
    def _cut(self) -> tuple[Actions, ActionOrder, MemoryChanges]:
        return _cut(self._rank, self.tasks, changed_bytes(self.values, len(self.tasks)))

    @property
    def actions(self) -> Actions:
        return self._cut[0]

    @property
    def order(self) -> ActionOrder:
        return self._cut[1]

    @property
    def changes(self) -> MemoryChanges:
        return self._cut[2]

    @cached_property
    def memory(self) -> Mapping[str, int]:
        return self.changes.at_peak()


class _ExpandedOrder:
    """The copies of a rank's actions, with what they need as the rows of the rank say."""

    def __init__(self, action: Int, begin: Int, parts: Int, tasks: Tasks) -> None:
        self.action, self.begin, self._tasks = action, begin, tasks
        self.kind, self.stage, self.microbatch = parts
        self._first = np.concatenate([[0], np.cumsum(_lengths(action, begin))])

    def sources(self, action: int, needs: Int) -> tuple[Int, Int]:
        copies = np.flatnonzero(self.action == action)
        pointer = self._tasks.data_ptr
        at = pointer[self.begin[copies]][:, None] + needs - self._needs(action)
        row = self._tasks.data[at].astype(np.int64)
        copy = np.searchsorted(self.begin, row, side="right") - 1
        return copy, self._first[self.action[copy]] + row - self.begin[copy]

    def _needs(self, action: int) -> int:
        """Where the needs of an action begin among those of all actions."""
        pointer = self._tasks.data_ptr
        count = 0
        for before in range(action):
            copy = int(np.flatnonzero(self.action == before)[0])
            count += int(pointer[self.begin[copy + 1]] - pointer[self.begin[copy]])
        return count

    def tags(self, action: int, rows: Int) -> Int:
        copies = np.flatnonzero(self.action == action)
        at = self.begin[copies][:, None] + rows - self._first[action]
        return self._tasks.tag[at].astype(np.int64)


def _lengths(action: Int, begin: Int) -> Int:
    _, first = np.unique(action, return_index=True)
    return np.diff(begin)[first]


def _cut(rank: RankRows, tasks: Tasks, deltas: Deltas) -> tuple[Actions, ActionOrder, MemoryChanges]:
    begin: list[int] = []
    parts: list[list[list[int]]] = []
    keys: dict[tuple[int, ...], int] = {}
    action: list[int] = []
    i = 0
    part_of: dict[int, Int] = {}
    tags: list[Int] = []
    for size in rank.sizes:
        some = rank.actions[i : i + size]
        key = tuple(int(f) for f in rank.form_of[i : i + size])
        number = keys.setdefault(key, len(keys))
        if number not in part_of:
            forms = [rank.forms[f] for f in key]
            part, tag = (np.empty(sum(len(f.keep) for f in forms), dtype=np.int64) for _ in range(2))
            for nth, f in enumerate(forms):
                part[f.offset] = nth
                tag[f.offset] = f.segment.columns["tag"][f.keep]
            tags.append(tag)
            part_of[number] = part
        action.append(number)
        begin.append(int(rank.begin[i]))
        row = [[KINDS.index(a.kind), a.stage, a.microbatch] for a in some]
        parts.append([*row, *[[-1] * 3] * (2 - size)])
        i += size
    if len(rank.after):
        part_of[len(keys)] = np.zeros(len(rank.after), dtype=np.int64)
        tags.append(rank.after.columns["tag"])
        action.append(len(keys))
        begin.append(rank.end)
        parts.append([[-1] * 3] * 2)
    actions = np.array(action, dtype=np.int64)
    begins = np.array([*begin, rank.total], dtype=np.int64)
    columns = np.array(parts, dtype=np.int64).reshape(-1, 2, 3).transpose(2, 0, 1)
    order = _ExpandedOrder(actions, begins, columns, tasks)
    first = {int(a): n for n, a in reversed([*enumerate(actions.tolist())])}
    rows = np.concatenate(
        [np.arange(begins[first[a]], begins[first[a] + 1]) for a in range(len(first))]
    )
    part = np.concatenate([part_of[a] for a in range(len(first))])
    of_action = np.repeat(np.arange(len(first)), [len(part_of[a]) for a in range(len(first))])
    counts = np.diff(tasks.data_ptr)[rows]
    pointer = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    entry = np.repeat(tasks.data_ptr[rows] - pointer[:-1], counts) + np.arange(pointer[-1])
    needed = tasks.data[entry].astype(np.int64)
    copy = np.searchsorted(begins, needed, side="right") - 1
    owner = np.repeat(of_action, counts)
    carried = copy != np.array([first[a] for a in range(len(first))], dtype=np.int64)[owner]
    needed = order._first[actions[copy]] + needed - begins[copy]
    microbatch = np.where(tasks.microbatch[rows] < 0, -1, 1 + 2 * of_action + part)
    for a, n in first.items():
        for p in range(2):
            stage = int(columns[1][n, p])
            if columns[0][n, p] == 0 and rank.by_microbatch[stage, 0][columns[2][n, p]] == rank.once[stage, 0]:
                microbatch[(of_action == a) & (part == p) & (microbatch >= 0)] = 0
    table = replace(
        tasks,
        **{c: getattr(tasks, c)[rows] for c in COLUMNS if c not in ("microbatch", "kernel", "tag")},
        tag=np.concatenate(tags).astype(np.int32),
        microbatch=microbatch.astype(np.int32), data_ptr=pointer, data=needed.astype(np.int32),
        order_ptr=np.zeros(len(rows) + 1, np.int64), order=np.zeros(0, np.int32),
    )  # fmt: skip
    # Memory: distinct profiles.
    profiles: dict[tuple[int, bytes, bytes], int] = {}
    kind: list[int] = []
    found: list[Deltas] = []
    nothing = np.zeros_like(deltas.start)
    for n, a in enumerate(actions.tolist()):
        some = slice(int(begins[n]), int(begins[n + 1]))
        up, down = deltas.allocated[:, some], deltas.freed[:, some]
        number = profiles.setdefault((a, up.tobytes(), down.tobytes()), len(found))
        if number == len(found):
            found.append(Deltas(nothing, up, down))
        kind.append(number)
    changes = MemoryChanges(deltas.start, np.array(kind, dtype=np.int64), tuple(found))
    every = np.concatenate([[0], np.cumsum([len(part_of[a]) for a in range(len(first))])])
    return Actions(table, every, part, carried), order, changes


class AssembledRank(NamedTuple):
    """One pipeline rank of an assembly, and what its columns were made of."""

    of: RankClass
    work: AssembledWork
    values: Sequence[Value]
    """Those of `RankClass.values`, in the same order."""
    rows: RankRows
    """Its actions, and where each begins."""

    @property
    def kernel(self) -> Int:
        """The kernel that each row is a copy of, as an index into `Assembly.kernels`."""
        return self.work.kernel


class Assembly(NamedTuple):
    """A program, and the kernels that its rows are copies of.

    Kernels and values of blocks whose numbers are `Varying` have such numbers; the program has
    those of the first configuration.
    """

    program: Program
    kernels: Sequence[Kernel]
    ranks: Sequence[AssembledRank]


def assemble(
    stages: Sequence[Sequence[Placed]],
    order: Order,
    mesh: Mesh,
    *,
    clip: ClipNorm | None = None,
    streams: str = "one",
    habits: Habit = MEGATRON_LM,
) -> Assembly:
    """The program of every rank class: one class per pipeline rank.

    `stages` are the blocks of each stage of the model, `order` the actions of each pipeline rank.
    `clip`: gradients are clipped by their norm. `habits`: those of the run's framework.
    """
    pp = len(order)
    held_by = places(order)
    between = crossings(stages)
    tables = Tables(pp, _holders(stages, held_by))
    ranks: list[dict[int, Stage]] = [{} for _ in range(pp)]
    for p in held_by:
        stage = Stage(stages[p.stage], p, between, tables, habits)
        ranks[p.rank][p.stage] = stage
    trains = any(a.kind != "F" for steps in order for a in flat(steps))
    made = StagesMade(trains)
    for on_rank in ranks:
        _build(on_rank, made)
    after = [optimizer_step([*on_rank.values()], clip) for on_rank in ranks]
    numbers = np.arange(mesh.world_size, dtype=np.int64)
    pipeline_rank = numbers // mesh.stride("pp") % pp if pp > 1 else np.zeros_like(numbers)
    of_kernels = tables.of_kernels()
    found: list[AssembledRank] = []
    for p, on_rank in enumerate(ranks):
        rows = RankRows([*on_rank.values()], order[p], after[p], habits.unit_weights())
        work = AssembledWork(rows, tables, of_kernels, streams)
        of = RankClass(numbers[pipeline_rank == p], p, work)
        every = [v for stage in on_rank.values() for v in stage.values.values]
        found.append(AssembledRank(of, work, every, rows))
    partners = tuple(tables.communicators.table), tuple(tables.peers.table)
    program = Program(mesh, tuple(rank.of for rank in found), *partners)
    return Assembly(program, tuple(tables.kernels.table), found)


def _build(on_rank: dict[int, Stage], made: StagesMade) -> None:
    """Make the rows of a rank's stages, each after the stage that hands it values."""
    for stage in on_rank.values():
        stage.join(on_rank)
    for s in sorted(on_rank):
        on_rank[s].build(made, forward=True)
    for s in sorted(on_rank, reverse=True) if made.trains else ():
        on_rank[s].build(made, forward=False)


def _holders(
    stages: Sequence[Sequence[Placed]], held_by: Sequence[Place]
) -> dict[str, tuple[int, ...]]:
    """Of each table with copies, the pipeline ranks that hold one."""
    holders: dict[str, set[int]] = {}
    for p in held_by:
        for name in {name for placed in stages[p.stage] for name in placed.block.tied}:
            holders.setdefault(name, set()).add(p.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}


# ---- the columns of a rank -----------------------------------------------------------------------


class _Copies(NamedTuple):
    """A form, repeated: where each copy begins, and its microbatch."""

    form: Form
    begin: Int
    microbatch: Int | None


def _copies(rank: RankRows) -> list[_Copies]:
    """Everything that a rank runs: its actions by form, and the rows after all actions."""
    microbatch = np.array([a.microbatch for a in rank.actions], dtype=np.int64)
    result: list[_Copies] = []
    for f, form in enumerate(rank.forms):
        of_form = np.flatnonzero(rank.form_of == f)
        result.append(_Copies(form, rank.begin[of_form], microbatch[of_form]))
    every_row = np.arange(len(rank.after))
    last = Form(rank.after, every_row, every_row)
    return [*result, _Copies(last, np.array([rank.end]), None)]


class _Sources(NamedTuple):
    """What each row of a rank is a copy of."""

    segments: Sequence[Segment]
    columns: Mapping[str, NDArray[Any]]
    """Of the rows of all segments behind each other: those in `OWN`."""
    dependencies: Int
    """How many rows each of them depends on."""
    row: Int
    """By row of the rank: which of them it is."""
    microbatch: Int
    """By row of the rank: that of its action; -1 after all actions."""
    once: Bool
    """Which rows of the rank are there once per step."""

    @classmethod
    def of(cls, rank: RankRows, copies: Sequence[_Copies]) -> _Sources:
        """The sources of the rows of a rank."""
        segments = {id(c.form.segment): c.form.segment for c in copies}
        starts = np.cumsum([0, *(len(segment) for segment in segments.values())])
        start = dict(zip(segments, starts.tolist(), strict=False))
        row, microbatch, once = (np.empty(rank.total, dtype=t) for t in (np.int64, np.int64, bool))
        for form, begin, numbers in copies:
            place = begin[:, None] + form.offset
            row[place] = form.keep + start[id(form.segment)]
            microbatch[place] = -1 if numbers is None else numbers[:, None]
            once[place] = form.segment.once[form.keep] | form.ahead | (numbers is None)
        every = segments.values()
        columns = {
            c: np.concatenate([of.columns[c] for of in every]).astype(COLUMNS[c]) for c in OWN
        }
        counts = [np.bincount(of.dep_row, minlength=len(of)) for of in every]
        return cls([*every], columns, np.concatenate(counts), row, microbatch, once)


def _tasks(
    rank: RankRows, tables: Tables, of_kernels: Mapping[str, NDArray[Any]], streams: str
) -> tuple[Tasks, Int]:
    """The columns of a rank's tasks, with the rows that each depends on; and each row's kernel."""
    copies = _copies(rank)
    sources = _Sources.of(rank, copies)
    columns = {c: column[sources.row] for c, column in sources.columns.items()}
    kernel = columns.pop("kernel")
    columns |= {c: column[kernel] for c, column in of_kernels.items()}
    columns["microbatch"] = np.where(sources.once, -1, sources.microbatch).astype(np.int32)
    _number_messages(columns, sources.microbatch, tables, next(iter(rank.stages.values())).stages)
    counts = sources.dependencies[sources.row]
    pointer = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    data = np.empty(int(pointer[-1]), dtype=np.int32)
    known = {id(segment): _Dependencies.of(segment, rank) for segment in sources.segments}
    for form_copies in copies:
        of_segment = known[id(form_copies.form.segment)]
        _write_dependencies(rank, form_copies, of_segment, pointer, data)
    order_pointer, order = order_by_streams(columns, counts, streams)
    tasks = Tasks(
        **columns, data_ptr=pointer, data=data, order_ptr=order_pointer, order=order,
        names=tuple(tables.names.table), ops=tuple(tables.ops.table), dtypes=DTYPES,
        shapes=tuple(tables.shapes.table),
    )  # fmt: skip
    return tasks, kernel


def _number_messages(
    columns: Mapping[str, NDArray[Any]], microbatch: Int, tables: Tables, stages: int
) -> None:
    """Set the tags: equal on both ends, and different for all messages between two ranks."""
    rows = np.flatnonzero((columns["tag"] >= 0) & (microbatch >= 0))
    stage, slot, local = (columns[c][rows].astype(np.int64) for c in ("stage", "slot", "tag"))
    forward = columns["phase"][rows] == PHASES.index("forward")
    pipeline_slots = [i for p, i in tables.peers.table.items() if p.axis == "pp"]
    pipeline = is_any(slot, pipeline_slots)
    receives = columns["kind"][rows] == TaskKind.RECV
    # A message between stages is numbered by the earlier one.
    boundary = stage - (pipeline & (receives == forward))
    tag = (boundary * 2 + ~forward) * tables.messages + local
    tags = tag + microbatch[rows] * (stages * 2 * tables.messages)
    columns["tag"][rows] = tags % MAX_TAG


class _Dependencies(NamedTuple):
    """The dependencies of the rows of a segment, whichever of them an action has."""

    nth: Int
    """Of those of its row, which one each is."""
    kind: Int
    """Equal for those that are found together: in one half of one stage, once per step or not; -1:
    after all actions."""

    @classmethod
    def of(cls, segment: Segment, rank: RankRows) -> _Dependencies:
        """Those of a segment of a rank."""
        whose = segment.dep_whose
        # Rows may stand in another order than in their segment, the dependencies of each do not.
        nth = np.arange(len(segment.dep_row)) - np.searchsorted(segment.dep_row, segment.dep_row)
        half = rank.places(whose, segment.dep_stage, segment.dep_at).half
        once = (whose == FIRST) | (whose == LAST)
        kind = (segment.dep_stage * len(HALVES) + half) * 2 + once
        return cls(nth, np.where(whose == STEP, -1, kind))


def _write_dependencies(
    rank: RankRows,
    copies: _Copies,
    of_segment: _Dependencies,
    pointer: Int,
    data: NDArray[np.int32],
) -> None:
    """Write the row numbers that all copies of some rows depend on."""
    form, begin, microbatch = copies
    segment = form.segment
    offset = form.offsets()[segment.dep_row]
    kept = np.flatnonzero(offset >= 0)
    place = pointer[begin[:, None] + offset[kept]] + of_segment.nth[kept]
    at, kind = segment.dep_at[kept], of_segment.kind[kept]
    value = np.empty((len(begin), len(at)), dtype=np.int64)
    for number in {*kind.tolist()}:
        alike = np.flatnonzero(kind == number)
        places = at[alike]
        if number < 0:
            value[:, alike] = rank.end + places
            continue
        (s, h), single = divmod(number // 2, len(HALVES)), number % 2
        if single or microbatch is None:
            actions = np.full(len(begin), rank.once[s, h])
        else:
            actions = rank.by_microbatch[s, h][microbatch]
        value[:, alike] = rank.rows(actions, places)
        if not rank.borrows:
            continue
        owner = rank.stages[s].backward if h else rank.stages[s].forward
        gathers = np.flatnonzero(owner.gathers[places])
        if len(gathers) and (rank.supplier[actions] != actions).any():
            whose_rows = BACKWARD if h else FORWARD
            value[:, alike[gathers]] = rank.suppliers_rows(actions, whose_rows, s, places[gathers])
    data[place.ravel()] = value.ravel()
