"""The actions of every stage of a structure's pipelines, as its template's actions and differences.

A response of a stage with n layers of a variant is that of the template's stage and n - 2 times
what one layer more has added to it. Where that does not hold for few layers, stages with fewer have
responses of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.explore.actions import (
    INPUTS,
    NEVER,
    ActionColumns,
    ClassRows,
    Cuts,
    Response,
    RowTimes,
    StageMeeting,
    StepKind,
    cuts,
)
from stagewright.explore.templates import StructureTemplate, at_most
from stagewright.lower.assembly.assemble import Assembly
from stagewright.run.sections.execution import Execution

FIELDS = len(Response._fields) - 1

SUMS = 2
"""Rows of a `LinearResponse` behind those of its response: the seconds that kernels run, and the
seconds at TDP in which a GPU draws as much; then come the seconds that they wait, by axis."""

Timed = Sequence[RowTimes]
"""What the rows of a program take, by class."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearResponse:
    """An action's response as a function of the layers of its stage: [rows, tuples].

    Rows are the fields of `Response` by input, and sums over its kernels (`SUMS`).
    """

    base: Float
    more: Float
    """[variants, rows, tuples]: what one layer more adds."""
    layers: tuple[int, ...]
    """Of each variant that the base has."""
    few: Mapping[tuple[float, ...], Float] = field(default_factory=dict[tuple[float, ...], Float])
    """As the base, by other layers of each variant (`templates.Kind.few`)."""

    def at(self, tuples: Int, layers: Float) -> Float:
        """[rows, candidates]: of some tuples, with so many layers of each variant."""
        counts: list[float] = layers.tolist()
        few = at_most(counts)
        base, has = (self.few[few], few) if few in self.few else (self.base, self.layers)
        found = base[:, tuples]
        for each, count, own in zip(self.more, counts, has, strict=True):
            if count != own:
                found += each[:, tuples] * (count - own)
        return found


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
        some = next(iter(self.actions.values()))
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

    def moments(self, rows: Float) -> Float:
        """The rows that are those of a response (`response`)."""
        return rows[: len(rows) - SUMS - len(self.axes)]

    def sums(self, rows: Float) -> Float:
        """The other rows (`SUMS`)."""
        return rows[len(rows) - SUMS - len(self.axes) :]

    def at(self, kind: StepKind, complete: bool, tuples: Int, layers: Int) -> Float:
        """The rows of a step by the kinds of its stages: [rows, candidates].

        `layers` are those of each variant on the stage of each action: [variants, actions].
        """
        of = self._of(kind, complete)
        found = of.at(tuples, layers.mean(axis=1))
        if len(kind) > 1 and (layers[:, 0] != layers[:, 1]).any():
            # Templates of pairs have equal stages: a layer more here and less there is what the
            # actions alone have of it.
            forward, backward = (
                self._layers(stage, letter)[:, :, tuples] for stage, letter in kind
            )
            apart = (layers[:, 0] - layers[:, 1]) / 2
            alone = np.tensordot(apart, forward - backward, axes=1)
            moments, sums = self.moments(found), self.sums(found)
            moments += np.where(moments > NEVER / 2, alone[0], 0.0)
            sums += alone[1:]
        return found

    def _of(self, kind: StepKind, complete: bool) -> LinearResponse:
        found = self.actions.get((kind, complete))
        return self.actions[kind, False] if found is None else found

    def _layers(self, stage: int, letter: str) -> Float:
        """What one layer more of each variant adds to an action: the seconds until its last kernel
        ends, and its sums: [variants, rows, tuples]."""
        whole = ((stage, letter),) in {kind for kind, _ in self.actions}
        parts = [self._of(((stage, x),), False) for x in (letter if whole else "IW")]
        rows = [0, *range(-SUMS - len(self.axes), 0)]
        return np.sum([of.more[:, rows] for of in parts], axis=0)


def _concat(
    parts: Sequence[LinearResponse], places: Sequence[Sequence[int]], axes: int
) -> LinearResponse:
    """Responses behind each other; `places` are the axes of each among all axes."""
    others = len(parts[0].base) - len(places[0])  # rows before those of axes
    rows, tuples = others + axes, sum(part.base.shape[1] for part in parts)
    base, more = np.zeros((rows, tuples)), np.zeros((len(parts[0].more), rows, tuples))
    few = {layers: np.zeros((rows, tuples)) for layers in parts[0].few}
    begin = 0
    for part, own in zip(parts, places, strict=True):
        end = begin + part.base.shape[1]
        place = [*range(others), *(others + axis for axis in own)]
        base[place, begin:end] = part.base
        more[:, place, begin:end] = part.more
        for layers, alone in part.few.items():
            few[layers][place, begin:end] = alone
        begin = end
    return LinearResponse(base, more, parts[0].layers, few)


def responses(
    of: StructureTemplate, timed: Sequence[Timed], how: Execution, *, usual: bool = False
) -> Responses:
    """The responses of a template; `timed` by program, the base first.

    `usual`: those of actions that do nothing that happens once per step, and of nothing else.
    """
    every = [
        _played(of, assembly, seconds, how, usual=usual)
        for assembly, seconds in zip(of.assemblies, timed, strict=True)
    ]
    names = dict.fromkeys(
        axis
        for actions, tails in every
        for played in [*actions.values(), *(p for sections, _ in tails.values() for p in sections)]
        for axis in played.waits
    )
    axes = tuple(names)
    base, others = every[0], every[1:]
    more, alone = others[: len(of.more)], dict(zip(of.few, others[len(of.more) :], strict=True))
    actions = {
        key: replace(
            _linear(each, [other[0][key] for other in more], axes, of.layers),
            few={
                layers: _rows(played[key], axes)
                for layers, (played, _) in alone.items()
                if of.stands_for(layers, (stage for stage, _ in key[0]))
            },
        )
        for key, each in base[0].items()
    }
    chunks = of.stages * (2 if of.kind_of.traits.doubled else 1) // of.run.pp
    held = tuple(count * chunks for count in of.layers)
    tails = {
        kind: RankTail(
            [
                _linear(section, [other[1][kind][0][n] for other in more], axes, held, chunks)
                for n, section in enumerate(sections)
            ],
            meetings,
        )
        for kind, (sections, meetings) in base[1].items()
    }
    return Responses(actions, tails, axes)


def _linear(
    base: ActionColumns,
    more: Sequence[ActionColumns],
    axes: Sequence[str],
    layers: tuple[int, ...],
    added: int = 1,
) -> LinearResponse:
    """`added` layers more are in each of `more`."""
    rows = _rows(base, axes)
    differ = [np.where(rows > NEVER / 2, _rows(one, axes) - rows, 0.0) / added for one in more]
    return LinearResponse(rows, np.stack(differ), layers)


def _rows(played: ActionColumns, axes: Sequence[str]) -> Float:
    zero = np.zeros_like(played.busy)
    waits = [played.waits.get(axis, zero) for axis in axes]
    moments = [field for field in played.response if field is not None]
    return np.concatenate([*moments, np.stack([played.busy, played.drawn, *waits])])


_Actions = dict[tuple[StepKind, bool], ActionColumns]
_Tails = dict[int, tuple[list[ActionColumns], list[StageMeeting]]]


def _played(
    of: StructureTemplate, assembly: Assembly, timed: Timed, how: Execution, *, usual: bool
) -> tuple[_Actions, _Tails]:
    """The actions of a program of the template, one of each kind, and what follows them."""
    actions: _Actions = {}
    tails: _Tails = {}
    slots: dict[int, int] = {}  # numbered as they are met, so that structures compare
    for rank, times in enumerate(timed):
        rows = ClassRows.of(assembly.program, rank, times, how)
        found = cuts(assembly.program, rows, assembly.ranks[rank].rows)
        chosen = _chosen(of, found)
        for (kind, complete), (begin, end) in sorted(chosen.items(), key=lambda item: item[0][1]):
            if (kind, complete) in actions or (usual and complete):  # of a rank that does the same
                continue
            other = chosen.get((kind, False))
            if complete and other and end - begin == other[1] - other[0]:  # nothing happens once
                actions[kind, complete] = actions[kind, False]
            else:
                actions[kind, complete] = rows.play(begin, end, pair=len(kind) > 1)
        if usual:
            continue
        place = of.kind_of.rank(rank)
        meetings = [m._replace(slot=slots.setdefault(m.slot, len(slots))) for m in found.meetings]
        if place not in tails:
            tails[place] = [rows.play(begin, end) for begin, end in found.sections], meetings
    return actions, tails


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
