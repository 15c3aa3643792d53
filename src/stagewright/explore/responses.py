"""The actions of every stage of a structure's pipelines, as its template's actions and differences.

A response of a stage with n layers of a variant is that of the template's stage and n - 2 times
what one layer more has added to it. Where that does not hold for few layers, stages with fewer have
responses of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_columns, distinct_rows
from stagewright.explore.actions import (
    INPUTS,
    NEVER,
    ActionColumns,
    Response,
    StepKind,
    TimedAction,
)
from stagewright.explore.class_rows import (
    ClassPlaces,
    ClassRows,
    Cuts,
    RowTimes,
    StageMeeting,
    cuts,
)
from stagewright.explore.shared.played import LinearRows, Played
from stagewright.explore.templates import StructureTemplate
from stagewright.lower.assembly.assemble import Assembly

FIELDS = len(Response._fields) - 1

SUMS = 2
"""Rows of a `LinearResponse` behind those of its response: the seconds that kernels run, and the
seconds at TDP in which a GPU draws as much; then come the seconds that they wait, by axis."""

Timed = Sequence[RowTimes]
"""What the rows of a program take, by class."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearResponse:
    """The response of an action: many tuples have the same."""

    cases: LinearRows
    """Shared by structures whose actions are equal."""
    of: Int
    """Which case each tuple has: [tuples]."""

    def at(self, tuples: Int, layers: Float, rows: slice) -> Float:
        """[rows, candidates]: of some tuples, with so many layers of each variant."""
        return self.cases.at(self.of[tuples], layers, rows)


def response(rows: Float) -> Response:
    """The response among the rows of a `LinearResponse`: of an action, or of a pair of them."""
    pair = len(rows) > FIELDS * INPUTS
    inputs = INPUTS + pair
    fields = [rows[n * inputs : (n + 1) * inputs] for n in range(FIELDS + pair)]
    return Response(*fields)


class RankTail(NamedTuple):
    """What a rank does after all actions: sections, and the meetings between them."""

    sections: list[LinearResponse]
    meetings: list[StageMeeting]


@dataclass(frozen=True, slots=True, eq=False)
class Responses:
    """The actions of a structure's stages, by kind of stage, kind of action, and whether complete.

    An action is complete if it does what happens once per step.
    """

    actions: Mapping[tuple[StepKind, bool], LinearResponse]
    """In the place of a stage stands its kind (`templates.FIRST`)."""
    tails: Mapping[int, RankTail]
    """By kind of the rank: where it is in the pipeline (`templates.Kinds`)."""
    axes: tuple[str, ...]

    @property
    def form(self) -> Hashable:
        """What several structures must have in common for their responses to be joined."""
        tails = [
            (kind, len(sections), tuple((m.slot, m.aside) for m in meetings))
            for kind, (sections, meetings) in sorted(self.tails.items())
        ]
        some = next(iter(self.actions.values())).cases
        return frozenset(self.actions), tuple(tails), some.layers, tuple(some.few)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Those of several structures of one form: their tuples behind each other."""
        axes = tuple(dict.fromkeys(axis for part in parts for axis in part.axes))
        first = parts[0]
        places = [[axes.index(axis) for axis in part.axes] for part in parts]
        actions = {
            key: _concat([part.actions[key] for part in parts], places, len(axes))
            for key in first.actions
        }
        tails = {
            kind: RankTail(
                [
                    _concat([part.tails[kind].sections[n] for part in parts], places, len(axes))
                    for n in range(len(tail.sections))
                ],
                [
                    meeting._replace(
                        seconds=np.concatenate([p.tails[kind].meetings[n].seconds for p in parts])
                    )
                    for n, meeting in enumerate(tail.meetings)
                ],
            )
            for kind, tail in first.tails.items()
        }
        return cls(actions, tails, axes)

    @property
    def moments(self) -> slice:
        """The rows that are those of a response (`response`)."""
        return slice(0, -SUMS - len(self.axes))

    @property
    def sums(self) -> slice:
        """The other rows (`SUMS`)."""
        return slice(-SUMS - len(self.axes), None)

    @property
    def classes(self) -> Int:
        """Numbers of tuples, equal where the moments of all actions are: [tuples]."""
        every = self.actions.values()
        return distinct_rows([of.cases.classes(self.moments)[of.of] for of in every])[1]

    def at(self, kind: StepKind, complete: bool, tuples: Int, layers: Int, rows: slice) -> Float:
        """Rows of a step by the kinds of its stages, `moments` or `sums`: [rows, candidates].

        `layers` are those of each variant on the stage of each action: [variants, actions].
        """
        found = self.of(kind, complete).at(tuples, layers.mean(axis=1), rows)
        if len(kind) > 1 and (layers[:, 0] != layers[:, 1]).any():
            # Templates of pairs have equal stages: a layer more here and less there is what the
            # actions alone have of it: until the last kernel ends, and of each sum.
            own = slice(0, 1) if rows == self.moments else rows
            forward, backward = (self._layers(stage, letter, tuples, own) for stage, letter in kind)
            apart = (layers[:, 0] - layers[:, 1]) / 2
            found += np.where(
                found > NEVER / 2, np.tensordot(apart, forward - backward, axes=1), 0.0
            )
        return found

    def of(self, kind: StepKind, complete: bool) -> LinearResponse:
        """The response of a step by the kinds of its stages."""
        found = self.actions.get((kind, complete))
        return self.actions[kind, False] if found is None else found

    def _layers(self, stage: int, letter: str, tuples: Int, rows: slice) -> Float:
        """What a layer more of each variant adds to rows of an action: [variants, rows, tuples]."""
        whole = ((stage, letter),) in {kind for kind, _ in self.actions}
        parts = [self.of(((stage, x),), False) for x in (letter if whole else "IW")]
        return np.sum([of.cases.more[:, rows][:, :, of.of[tuples]] for of in parts], axis=0)


def _concat(
    parts: Sequence[LinearResponse], places: Sequence[Sequence[int]], axes: int
) -> LinearResponse:
    """Responses behind each other; `places` are the axes of each among all axes."""
    begin: dict[int, int] = {}
    distinct: list[tuple[LinearRows, Sequence[int]]] = []
    count = 0
    for part, own in zip(parts, places, strict=True):
        if id(part.cases) not in begin:
            begin[id(part.cases)] = count
            distinct.append((part.cases, own))
            count += part.cases.base.shape[1]
    of = np.concatenate([part.of + begin[id(part.cases)] for part in parts])
    some = distinct[0][0]
    others = len(some.base) - len(distinct[0][1])  # rows before those of axes
    rows = others + axes
    base, more = np.zeros((rows, count)), np.zeros((len(some.more), rows, count))
    few = {layers: np.zeros((rows, count)) for layers in some.few}
    for cases, own in distinct:
        mine = slice(begin[id(cases)], begin[id(cases)] + cases.base.shape[1])
        place = [*range(others), *(others + axis for axis in own)]
        base[place, mine] = cases.base
        more[:, place, mine] = cases.more
        for layers, alone in cases.few.items():
            few[layers][place, mine] = alone
    return LinearResponse(LinearRows(base, more, some.layers, few), of)


def responses(
    of: StructureTemplate,
    places: Sequence[Sequence[ClassPlaces]],
    timed: Sequence[Timed],
    played: Played,
    *,
    usual: bool = False,
) -> Responses:
    """The responses of a template; `places` and `timed` by program, the base first.

    `usual`: those of actions that do nothing that happens once per step, and of nothing else.
    """
    played = played.of_template()
    every = [
        _actions(of, assembly, issued, seconds, usual=usual)
        for assembly, issued, seconds in zip(of.assemblies, places, timed, strict=True)
    ]
    base, more = every[0], every[1 : 1 + len(of.more)]
    alone = dict(zip(of.few, every[1 + len(of.more) :], strict=True))
    actions = {
        key: _Varied.of(
            [each, *(other.actions[key] for other in more)],
            {
                layers: other.actions[key]
                for layers, other in alone.items()
                if of.stands_for(layers, (stage for stage, _ in key[0]))
            },
            played,
        )
        for key, each in base.actions.items()
    }
    tails = {
        kind: [
            _Varied.of([section, *(other.tails[kind][0][n] for other in more)], {}, played)
            for n, section in enumerate(sections)
        ]
        for kind, (sections, _) in base.tails.items()
    }
    varied = [*actions.values(), *(of for sections in tails.values() for of in sections)]
    most = max(len(of.waits) for of in varied)
    axes = tuple(
        dict.fromkeys(
            axis for n in range(most) for of in varied for each in of.waits[n : n + 1]
            for axis in each
        )
    )  # fmt: skip
    chunks = of.stages * (2 if of.kind_of.traits.doubled else 1) // of.run.pp
    held = tuple(count * chunks for count in of.layers)
    return Responses(
        {key: each.linear(axes, of.layers, 1, played) for key, each in actions.items()},
        {
            kind: RankTail(
                [each.linear(axes, held, chunks, played) for each in sections],
                base.tails[kind][1],
            )
            for kind, sections in tails.items()
        },
        axes,
    )


class _Varied(NamedTuple):
    """An action of the base, with one layer more of each variant, and with few layers."""

    actions: Sequence[TimedAction]
    """Of the distinct cases among all tuples."""
    content: tuple[bytes, ...]
    waits: Sequence[tuple[str, ...]]
    few: tuple[tuple[int, ...], ...]
    """The layers of those with few."""
    cases: Int
    """Which case each tuple has."""

    @classmethod
    def of(
        cls,
        actions: Sequence[TimedAction],
        few: Mapping[tuple[int, ...], TimedAction],
        played: Played,
    ) -> Self:
        """Join tuples for which all programs take as long."""
        every = [*actions, *few.values()]
        numbers = [*(of.seconds for of in every), *(of.drawn[None] for of in every)]
        numbers += [of.launch for of in every if of.launch.shape[1] > 1]
        first, cases = distinct_columns(np.concatenate(numbers))
        distinct = [action.take(first) for action in every]
        content = tuple(action.content for action in distinct)
        waits = [*map(played.waits_of, content, distinct)]
        return cls(distinct, content, waits, (*few,), cases)

    def linear(
        self, axes: tuple[str, ...], layers: tuple[int, ...], added: int, played: Played
    ) -> LinearResponse:
        """The response; `added` layers more are in each program with more than the base."""
        key = self.content, self.few, axes, layers, added
        if key not in played.rows:
            columns = map(played.play, self.content, self.actions)
            rows, *others = (_rows(one, axes) for one in columns)
            more = others[: len(layers)]
            differ = [np.where(rows > NEVER / 2, one - rows, 0.0) / added for one in more]
            few: dict[tuple[float, ...], Float] = {}
            few |= zip(self.few, others[len(layers) :], strict=True)
            played.rows[key] = LinearRows(rows, np.stack(differ), layers, few)
        return LinearResponse(played.rows[key], self.cases)


def _rows(played: ActionColumns, axes: Sequence[str]) -> Float:
    zero = np.zeros_like(played.busy)
    waits = [played.waits.get(axis, zero) for axis in axes]
    moments = [field for field in played.response if field is not None]
    return np.concatenate([*moments, np.stack([played.busy, played.drawn, *waits])])


class _TemplateActions(NamedTuple):
    """The actions of a program of a template, one of each kind, and what follows them."""

    actions: dict[tuple[StepKind, bool], TimedAction]
    tails: dict[int, tuple[list[TimedAction], list[StageMeeting]]]


def _actions(
    of: StructureTemplate,
    assembly: Assembly,
    places: Sequence[ClassPlaces],
    timed: Timed,
    *,
    usual: bool,
) -> _TemplateActions:
    actions: dict[tuple[StepKind, bool], TimedAction] = {}
    tails: dict[int, tuple[list[TimedAction], list[StageMeeting]]] = {}
    slots: dict[int, int] = {}  # numbered as they are met, so that structures compare
    for rank, times in enumerate(timed):
        rows = ClassRows(places[rank], times)
        found = cuts(assembly.program, rows, assembly.ranks[rank].rows)
        chosen = _chosen(of, found)
        for (kind, complete), (begin, end) in sorted(chosen.items(), key=lambda item: item[0][1]):
            if (kind, complete) in actions or (usual and complete):  # of a rank that does the same
                continue
            other = chosen.get((kind, False))
            if complete and other and end - begin == other[1] - other[0]:  # nothing happens once
                actions[kind, complete] = actions[kind, False]
            else:
                actions[kind, complete] = rows.action(begin, end, pair=len(kind) > 1)
        if usual:
            continue
        place = of.kind_of.rank(rank)
        meetings = [m._replace(slot=slots.setdefault(m.slot, len(slots))) for m in found.meetings]
        if place not in tails:
            tails[place] = [rows.action(begin, end) for begin, end in found.sections], meetings
    return _TemplateActions(actions, tails)


def _chosen(of: StructureTemplate, found: Cuts) -> dict[tuple[StepKind, bool], tuple[int, int]]:
    """The places of one step of each kind on a rank, complete and not.

    The first forward that is not complete is behind another one; of other steps the second is
    taken, which is.
    """
    alike: dict[tuple[StepKind, bool], list[tuple[int, int]]] = {}
    for step in found.steps:
        kind = tuple((of.kind_of.stage(stage), letter) for stage, letter in step.kind)
        alike.setdefault((kind, step.complete), []).append((step.begin, step.end))
    chosen = {
        key: places[0 if key[0][-1][1] == "F" else min(1, len(places) - 1)]
        for key, places in alike.items()
    }
    for (kind, complete), place in [*chosen.items()]:
        if complete:  # of one microbatch
            chosen.setdefault((kind, False), place)
    return chosen
