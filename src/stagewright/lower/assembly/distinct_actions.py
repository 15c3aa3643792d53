"""The distinct actions of a program: rows of stages put together once, for all ranks and stages.

A `StagePart` is what one action does of a stage: rows of the stage's segment in one direction. An
action is one part, or two that overlap; the rows after all actions of a rank are its last action.
Actions are equal where their stages have equal content, and they do what happens once per step, or
do not.
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
    HALVES,
    HAS_HALF,
    INPUT_HALF,
    UNSHARD,
    WEIGHT_HALF,
)
from stagewright.lower.assembly.segments import (
    DTYPES,
    FIRST,
    LAST,
    STEP,
    Numbers,
    Segment,
    Tables,
)
from stagewright.lower.assembly.segments import FORWARD as OF_FORWARD
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import Tasks
from stagewright.program.step import KINDS, Actions


class StagePart(NamedTuple):
    """What an action does of a stage."""

    content: int
    """The stage, by its number among those with distinct content."""
    kind: int
    """Index into `KINDS`."""
    complete: bool
    """Does what happens once per step."""
    gathers: bool
    """Gathers the weights that it uses; else an action before it has."""

    @staticmethod
    def codes(content: Int, kind: Int, complete: Bool, gathers: Bool) -> Int:
        """A number for each of some parts."""
        return ((content * len(KINDS) + kind) * 2 + complete) * 2 + gathers

    @classmethod
    def from_code(cls, code: int) -> StagePart:
        """The part with this number."""
        rest, gathers = divmod(code, 2)
        rest, complete = divmod(rest, 2)
        return cls(*divmod(rest, len(KINDS)), bool(complete), bool(gathers))


def half_of(stage: Stage, kind: int) -> Bool:
    """Mask of the rows of a stage's backward that an action of this kind has, once per step or
    not."""
    weight = stage.backward.weight
    return {INPUT_HALF: ~weight, WEIGHT_HALF: weight}.get(kind, np.ones_like(weight))


def rows_of(stage: Stage, part: StagePart) -> Bool:
    """Mask of the rows of the segment that a part has."""
    if part.kind in (FORWARD, UNSHARD):
        segment = stage.forward
        every = np.ones(len(segment), dtype=bool)
        mask = every if part.kind == FORWARD else segment.once | segment.gathers
    else:
        segment, mask = stage.backward, half_of(stage, part.kind)
    return mask & (part.complete | ~segment.once) & (part.gathers | ~segment.gathers)


class Form(NamedTuple):
    """A part in an action."""

    part: StagePart
    nth: int
    """1: the second of two that overlap."""
    place: Int
    """The rows of the segment that it has."""
    offset: Int
    """Of each of these, the distance from where the action begins."""


def forms_of(stages: Sequence[Stage], parts: Sequence[StagePart]) -> list[Form]:
    """The parts of an action. Two that overlap take turns: each goes on until its next kernel needs
    what the action has communicated."""
    places = [np.flatnonzero(rows_of(stages[part.content], part)) for part in parts]
    if len(parts) == 1:
        return [Form(parts[0], 0, places[0], np.arange(len(places[0])))]
    segments = [segment_of(stages[part.content], part.kind) for part in parts]
    turn = [
        np.cumsum(segment.waits[place]) * len(parts) + nth
        for nth, (segment, place) in enumerate(zip(segments, places, strict=True))
    ]
    order = np.argsort(np.concatenate(turn), kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(order))
    offsets = np.split(offset, np.cumsum([len(place) for place in places])[:-1])
    return [
        Form(part, nth, place, own)
        for nth, (part, place, own) in enumerate(zip(parts, places, offsets, strict=True))
    ]


def segment_of(stage: Stage, kind: int) -> Segment:
    """The rows of a stage in the direction of a kind of action."""
    return stage.forward if kind in (FORWARD, UNSHARD) else stage.backward


# ---- the table -----------------------------------------------------------------------------------


class After(NamedTuple):
    """The rows after all actions of ranks whose stages have these contents, in their order."""

    contents: tuple[int, ...]
    rows: OptimizerStep


class RowNeeds(NamedTuple):
    """What rows need, a column for each: [needs]."""

    half: Int
    """The half of its stage that has the needed row; -1: it is after all actions."""
    once: Bool
    """Whether that is the action that does what happens once per step."""
    stage: Int
    """How many stages further on; for rows after all actions, which of the rank's stages."""
    place: Int
    """The place in the segment."""

    def take(self, entries: Int) -> RowNeeds:
        """Some of them."""
        half, once, stage, place = self
        return RowNeeds(half[entries], once[entries], stage[entries], place[entries])


class Naming(NamedTuple):
    """A stage that stands for all with its content, and the layers and labels of its blocks."""

    stage: int
    layers: tuple[int, ...]
    labels: tuple[str, ...]

    def names(self, segment: Segment) -> Iterator[str]:
        """The names of the rows of a segment."""
        blocks: list[int] = segment.block.tolist()
        for block, t in zip(blocks, segment.kernels, strict=True):
            yield t.name if block < 0 else f"{self.labels[block]}.{t.name}"

    def layers_of(self, block: Int) -> Int:
        """The layers of blocks, -1 for none."""
        return np.array([*self.layers, -1], dtype=np.int64)[block]


@dataclass(frozen=True, slots=True, eq=False)
class ActionTable:
    """The distinct actions of a program, and what their rows are copies of."""

    actions: Actions
    stages: Sequence[Stage]
    """By content."""
    afters: Sequence[After]
    """The rows after all actions: those of action `first_after + n`."""
    first_after: int
    forms: Sequence[Form]
    form_of: Int
    """The form of each part of an action: [actions before `first_after`, 2]."""
    offsets: Int
    """By place in the segment of each form, the distance from where its action begins; -1: not in
    the action."""
    first_offset: Int
    """Where the offsets of each form begin: [forms]."""
    backward: Bool
    """Which rows are of a stage's backward: [rows]."""
    place: Int
    """The place of each row in its segment, or after all actions: [rows]."""
    needs: RowNeeds
    need_part: Int
    """The part whose row needs it: [needs]."""
    pipeline_peers: Sequence[int]
    """Slots of peers along the pipeline."""
    naming: Sequence[Naming]
    """By content, the stage whose columns `actions` has."""

    def offset(self, form: Int, place: Int) -> Int:
        """The distance of places from where the actions of their forms begin; -1: not there."""
        return self.offsets[self.first_offset[form] + place]

    @property
    def messages(self) -> int:
        """The most messages that one action exchanges along one axis."""
        return max(stage.messages for stage in self.stages)


class TableBuilder:
    """Puts the rows of distinct actions together.

    Segments stand one after the other: by content those of forward and of backward, then those
    after all actions. Rows of actions are copies of theirs.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        actions: Sequence[tuple[StagePart, ...]],
        afters: Sequence[After],
        neighbours: Mapping[tuple[int, int], int],
    ) -> None:
        """`neighbours`: by content and distance, the content of a stage on the same rank that hands
        values in memory to the content's stage, or takes them."""
        self.stages, self.actions, self.afters = stages, actions, afters
        self._neighbours = neighbours
        self.segments = [s for stage in stages for s in (stage.forward, stage.backward)]
        self._segment_begin = _begins([*map(len, self.segments), *(len(a.rows) for a in afters)])
        self._lay_out()

    def _lay_out(self) -> None:
        """Rows of actions: where each begins, and what they are copies of."""
        self.forms: list[Form] = []
        self.form_of = np.full((len(self.actions), 2), -1, dtype=np.int64)
        sizes: list[int] = []
        for nth, parts in enumerate(self.actions):
            made = forms_of(self.stages, parts)
            self.form_of[nth, : len(made)] = np.arange(len(made)) + len(self.forms)
            self.forms += made
            sizes.append(sum(len(form.place) for form in made))
        self.begin = _begins([*sizes, *(len(after.rows) for after in self.afters)])
        self.total, self.end = int(self.begin[-1]), int(self.begin[len(self.actions)])
        self._segment = np.array([_segment_number(f.part) for f in self.forms], dtype=np.int64)
        segments: list[int] = self._segment.tolist()
        self.first_offset = _begins([len(self.segments[n]) for n in segments])
        self.offsets = np.full(int(self.first_offset[-1]), -1, dtype=np.int64)
        self._action = np.repeat(np.arange(len(sizes)), [len(parts) for parts in self.actions])
        source, form, part = (np.zeros(self.total, dtype=np.int64) for _ in range(3))
        for f, of in enumerate(self.forms):
            at = self.begin[self._action[f]] + of.offset
            source[at] = self._segment_begin[self._segment[f]] + of.place
            form[at], part[at] = f, of.nth
            self.offsets[self.first_offset[f] + of.place] = of.offset
        source[self.end :] = np.arange(*self._segment_begin[[len(self.segments), -1]].tolist())
        self._source, self._form, self._part = source, form, part

    def table(
        self, tables: Tables, kernels: Sequence[Sequence[int]], naming: Sequence[Naming]
    ) -> ActionTable:
        """The table; `kernels` are the numbers of the kernels of all segments, one after the other,
        `naming` is by content."""
        data_ptr, entry = self._entries()
        owner = np.repeat(np.arange(self.total), np.diff(data_ptr))
        needs = self._needs().take(entry)
        data, carried = self._needed(owner, needs)
        kernel = np.concatenate([np.asarray(k, dtype=np.int64) for k in kernels])[self._source]
        columns: dict[str, NDArray[Any]] = {
            name: column[kernel] for name, column in tables.of_kernels().items()
        }
        tasks = Tasks(
            **columns,
            **self._named(naming),
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
        backward = np.zeros(self.total, dtype=bool)
        backward[: self.end] = (self._segment % 2 == 1)[self._form[: self.end]]
        segment = np.searchsorted(self._segment_begin, self._source, side="right") - 1
        return ActionTable(
            actions=Actions(tasks, self.begin, self._part, carried),
            stages=self.stages,
            afters=self.afters,
            first_after=len(self.actions),
            forms=self.forms,
            form_of=self.form_of,
            offsets=self.offsets,
            first_offset=self.first_offset,
            backward=backward,
            place=self._source - self._segment_begin[segment],
            needs=needs,
            need_part=self._part[owner],
            pipeline_peers=[n for peer, n in tables.peers.table.items() if peer.axis == "pp"],
            naming=naming,
        )

    # ---- columns ---------------------------------------------------------------------------------

    def _column(self, name: str, after: int) -> NDArray[Any]:
        """A column of the segments, by row; rows after all actions have one value."""
        rest = np.full(self.total - self.end, after)
        of_segments = [getattr(segment, name) for segment in self.segments]
        return np.concatenate([*of_segments, rest])[self._source]

    def _microbatch(self) -> Int:
        """A number of its own for each part; -1: once per step."""
        of_form = 2 * self._action + np.array([f.nth for f in self.forms], dtype=np.int64)
        kinds = np.array([f.part.kind for f in self.forms], dtype=np.int64)
        of_form[kinds == UNSHARD] = -1
        microbatch = np.full(self.total, -1, dtype=np.int64)
        microbatch[: self.end] = of_form[self._form[: self.end]]
        return np.where(self._column("once", 1).astype(bool), -1, microbatch)

    def _named(self, naming: Sequence[Naming]) -> dict[str, Any]:
        """Names, stages and layers."""
        numbers = Numbers[str]()
        name: list[int] = []
        stage: list[Int] = []
        layer: list[Int] = []
        for n, segment in enumerate(self.segments):
            named = naming[n // 2]
            name += numbers.each(named.names(segment))
            stage.append(np.full(len(segment), named.stage))
            layer.append(named.layers_of(segment.block))
        for contents, rows in self.afters:
            of = [naming[content] for content in contents]
            name += numbers.each(names_after(of, rows))
            # Stages with one content stay apart, by numbers that no other stage has.
            behind = 1 + max(named.stage for named in naming)
            numbered = [
                behind + c if content in contents[:c] else naming[content].stage
                for c, content in enumerate(contents)
            ]
            stage.append(np.array([*numbered, -1])[rows.stage])
            layer.append(layers_after(of, rows))
        columns = {"name": np.array(name), "stage": np.concatenate(stage)}
        columns["layer"] = np.concatenate(layer)
        found = {c: of[self._source].astype(np.int32) for c, of in columns.items()}
        return {**found, "names": tuple(numbers.table)}

    # ---- needs -----------------------------------------------------------------------------------

    def _entries(self) -> tuple[Int, Int]:
        """Pointers to the needs of each row, and which of those of segments each is."""
        counts = [np.bincount(s.dep_row, minlength=len(s)) for s in self.segments]
        counts += [np.bincount(a.rows.dep_row, minlength=len(a.rows)) for a in self.afters]
        pointer = _begins(np.concatenate([np.zeros(0, dtype=np.int64), *counts]))
        mine = np.diff(pointer)[self._source]
        data_ptr = _begins(mine)
        return data_ptr, np.repeat(pointer[self._source] - data_ptr[:-1], mine) + np.arange(
            int(data_ptr[-1])
        )

    def _needs(self) -> RowNeeds:
        """What the rows of all segments need."""
        half: list[Int] = []
        for n, s in enumerate(self.segments):
            mine = ((s.dep_whose != OF_FORWARD) & (s.dep_whose != FIRST)).astype(np.int64)
            for distance in np.unique(s.dep_stage[mine > 0]).tolist():
                there = (s.dep_stage == distance) & (mine > 0)
                weight = self.stages[self._content(n // 2, distance)].backward.weight
                mine[there] += weight[s.dep_at[there]]
            half.append(mine)
        for contents, rows in self.afters:
            mine = np.where(rows.dep_whose == STEP, -1, rows.dep_whose == LAST).astype(np.int64)
            for c, content in enumerate(contents):
                there = (rows.dep_stage == c) & (mine > 0)
                mine[there] += self.stages[content].backward.weight[rows.dep_at[there]]
            half.append(mine)
        every = [*self.segments, *(after.rows for after in self.afters)]
        whose, stage, place = (
            np.concatenate([getattr(of, name) for of in every])
            for name in ("dep_whose", "dep_stage", "dep_at")
        )
        return RowNeeds(np.concatenate(half), (whose == FIRST) | (whose == LAST), stage, place)

    def _content(self, content: int, distance: int) -> int:
        return self._neighbours[content, distance] if distance else content

    def _needed(self, owner: Int, needs: RowNeeds) -> tuple[Int, Bool]:
        """The row that each need names, and whether another copy has it."""
        of_action = owner < self.end
        form = self._form[owner]
        after = np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin)) - len(self.actions)
        nth_after = after[owner]
        content = np.array([f.part.content for f in self.forms], dtype=np.int64)[form]
        for distance in np.unique(needs.stage[of_action]).tolist():
            if distance:
                there = np.flatnonzero(of_action & (needs.stage == distance))
                content[there] = [self._content(c, distance) for c in content[there].tolist()]
        for n, (contents, _) in enumerate(self.afters):
            there = np.flatnonzero(~of_action & (needs.half >= 0) & (nth_after == n))
            content[there] = np.array(contents, dtype=np.int64)[needs.stage[there]]
        step = needs.half < 0
        data = self.begin[len(self.actions) + np.where(step, nth_after, 0)] + needs.place
        inside = of_action & self._in_same_action(form, needs)
        at = np.flatnonzero(inside)
        offset = self.offsets[self.first_offset[form[at]] + needs.place[at]]
        data[at] = self.begin[self._action[form[at]]] + offset
        others = np.flatnonzero(~inside & ~step)
        data[others] = self._examples(content[others], needs.take(others))
        return data, ~inside & ~step

    def _in_same_action(self, form: Int, needs: RowNeeds) -> Bool:
        """Which needs of rows of forms are met by the same part of the same copy."""
        if not self.forms:
            return np.zeros(len(form), dtype=bool)
        kind = np.array([f.part.kind for f in self.forms], dtype=np.int64)[form]
        complete = np.array([f.part.complete for f in self.forms], dtype=bool)[form]
        borrows = ~np.array([f.part.gathers for f in self.forms], dtype=bool)[form]
        inside = (needs.stage == 0) & HAS_HALF[kind, needs.half] & (~needs.once | complete)
        check = np.flatnonzero(inside & borrows)
        for f in np.unique(form[check]).tolist():
            mine = check[form[check] == f]
            gathers = self.segments[self._segment[f]].gathers
            inside[mine] = ~gathers[needs.place[mine]]
        return inside

    def _examples(self, content: Int, needs: RowNeeds) -> Int:
        """Rows that stand for needed ones of stages with these contents, in some action."""
        # By content and half, an action that does what happens once per step, and another one.
        of = np.full((len(self.stages), HALVES, 2), -1, dtype=np.int64)
        by_choice = sorted(range(len(self.forms)), key=lambda f: self.forms[f].part.gathers)
        for f in by_choice:  # the last one counts
            part = self.forms[f].part
            for half in np.flatnonzero(HAS_HALF[part.kind]).tolist():
                of[part.content, half, int(part.complete)] = f
        chosen = of[content, needs.half, needs.once.astype(np.int64)]
        other = of[content, needs.half, 1 - needs.once.astype(np.int64)]
        found = np.full(len(content), -1, dtype=np.int64)
        for forms in (chosen, other):
            at = np.flatnonzero((found < 0) & (forms >= 0))
            offset = self.offsets[self.first_offset[forms[at]] + needs.place[at]]
            found[at] = np.where(offset < 0, -1, self.begin[self._action[forms[at]]] + offset)
        for at in np.flatnonzero(found < 0).tolist():
            found[at] = self._any(int(content[at]), int(needs.half[at]), int(needs.place[at]))
        return found

    def _any(self, content: int, half: int, place: int) -> int:
        """A row of some action that is this place; or that gathers the same, in another direction:
        an action may use what one of the other direction has gathered."""
        forward = half == 0
        other = self.stages[content].gathered_elsewhere(place, forward=forward)
        for direction, at in ((forward, place), (not forward, other)):
            for f, form in enumerate(self.forms):
                mine = form.part.content == content and at >= 0
                if mine and (self._segment[f] % 2 == 0) == direction:
                    offset = int(self.offsets[self.first_offset[f] + at])
                    if offset >= 0:
                        return int(self.begin[self._action[f]]) + offset
        raise LookupError("no action has a row that another one needs")


def names_after(naming: Sequence[Naming], rows: OptimizerStep) -> Iterator[str]:
    """The names of rows after all actions of a rank, by stage of the rank."""
    stages: list[int] = rows.stage.tolist()
    blocks: list[int] = rows.block.tolist()
    for stage, block, t in zip(stages, blocks, rows.kernels, strict=True):
        yield t.name if block < 0 else f"{naming[stage].labels[block]}.{t.name}"


def layers_after(naming: Sequence[Naming], rows: OptimizerStep) -> Int:
    """The layers of rows after all actions of a rank, by stage of the rank."""
    layer = np.full(len(rows), -1, dtype=np.int64)
    for c, named in enumerate(naming):
        mine = rows.stage == c
        layer[mine] = named.layers_of(rows.block[mine])
    return layer


def _segment_number(part: StagePart) -> int:
    return part.content * 2 + (part.kind not in (FORWARD, UNSHARD))


def _begins(sizes: Sequence[int] | Int) -> Int:
    """Where things of these sizes begin one after the other, and the end."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)
