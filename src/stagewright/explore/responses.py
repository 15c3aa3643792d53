"""The actions of every stage of a structure's pipelines, as its template's actions and differences.

A response of a stage with n layers of a variant is that of the template's stage and n - 2 times
what one layer more has added to it. Where that does not hold for few layers, stages with fewer have
responses of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float, Int, distinct_rows, latest
from stagewright.explore.actions import (
    ASIDE,
    GPU,
    INPUTS,
    MESSAGE,
    NEVER,
    STREAMS,
    StepKind,
    TimedAction,
)
from stagewright.explore.class_rows import ClassPlaces, ClassRows, Cuts, StageMeeting, cuts
from stagewright.explore.shared.played import EqualRows, LinearResponse, LinearRows, Played
from stagewright.explore.templates import Kinds, StructureTemplate
from stagewright.lower.assembly.assemble import Assembly
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.issue import Transfers

FIELDS = MESSAGE + 2 + len(STREAMS)
"""Fields of a `Response` with a row for each input, those of a sequence each, but for that of a
pair alone."""
SENT = MESSAGE
"""The field behind those of its moments, which are numbered as these."""

SUMS = 2
"""Rows of a `LinearResponse` behind those of its response: the seconds that kernels run, and the
seconds at TDP in which a GPU draws as much; then come the seconds that they wait, by axis."""


def seconds_behind(of: EqualRows, field: int, nth: int) -> Float:
    """A field of a `Response` behind input number `nth`, among the rows of a `LinearResponse`:
    [configurations]. Fields are numbered as moments, and `SENT`."""
    inputs = INPUTS + (len(of.of) > FIELDS * INPUTS + 1)
    return of.row(1 + field * inputs + nth)


StepLayers: TypeAlias = "tuple[tuple[int, ...], ...]"
"""The layers of each variant on the stage of each action of a step."""
Moments: TypeAlias = "list[Float | None]"
"""A field of a `Response` by input, [configurations] each; None: the input has no effect."""


class LiveResponse(NamedTuple):
    """A `Response` without the inputs that have no effect."""

    behind: Float | None
    moments: Sequence[Moments]
    sent: Moments
    end: Moments
    chains: Sequence[Moments]
    sent_gradient: Moments | None = None

    @classmethod
    def of(cls, rows: EqualRows) -> Self:
        """The response among the rows of a `LinearResponse`: of an action, or of a pair of them."""
        pair = len(rows.of) > FIELDS * INPUTS + 1
        inputs = INPUTS + pair
        live = [row if (row > NEVER / 2).any() else None for row in rows.distinct]
        behind, *every = [live[number] for number in rows.of.tolist()]
        fields = [every[n * inputs : (n + 1) * inputs] for n in range(FIELDS + pair)]
        sent, end = fields[MESSAGE : MESSAGE + 2]
        return cls(
            behind, fields[:MESSAGE], sent, end, fields[MESSAGE + 2 : FIELDS], *fields[FIELDS:]
        )

    def late(self, of: int) -> Moments:
        """The latest end of transfers of one kind of stream, in an action with more layers than the
        one that was played."""
        found = [*map(_latest, self.moments[of], self.chains[STREAMS.index(of)])]
        if of != ASIDE or self.behind is None:
            return found
        behind = [None if gpu is None else gpu + self.behind for gpu in self.moments[GPU]]
        return [*map(_latest, found, behind)]


def _latest(*moments: Float | None) -> Float | None:
    live = [moment for moment in moments if moment is not None]
    return latest(live) if live else None


class TimedMeeting(NamedTuple):
    """A collective with other ranks of the pipeline, after all actions (`class_rows`)."""

    slot: int
    aside: bool
    seconds: Float
    """[tuples]."""


class RankTail(NamedTuple):
    """What a rank does after all actions: sections, and the meetings between them."""

    sections: list[LinearResponse]
    meetings: list[TimedMeeting]


@dataclass(frozen=True, slots=True, eq=False)
class Responses:
    """The actions of a structure's stages, by kind of stage, kind of action, and whether complete.

    An action is complete if it does what happens once per step. The responses of a structure each
    have waits along the axes that their own kernels wait for; only those that `concatenated` has
    made, be it of one structure, have rows for all `axes`, which `moments` and `sums` count on.
    """

    actions: Mapping[tuple[StepKind, bool], LinearResponse]
    """In the place of a stage stands its kind (`templates.FIRST`)."""
    tails: Mapping[int, RankTail]
    """By kind of the rank: where it is in the pipeline (`templates.Kinds`)."""
    pairs: Mapping[tuple[StepKind, bool, StepLayers], LinearResponse]
    """Of pairs of actions whose stages have other layers than the base: they take turns as the
    layers of both have it, and no other layers say how long that takes."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that kernels wait for."""
        sections = (each for tail in self.tails.values() for each in tail.sections)
        every = itertools.chain(self.actions.values(), self.pairs.values(), sections)
        return (*dict.fromkeys(axis for of in every for axis in of.cases.axes),)

    @property
    def form(self) -> Hashable:
        """What several structures must have in common for their responses to be joined."""
        tails = [
            (kind, len(sections), tuple((m.slot, m.aside) for m in meetings))
            for kind, (sections, meetings) in sorted(self.tails.items())
        ]
        actions = frozenset((key, frozenset(of.rows.few)) for key, of in self.actions.items())
        layers = next(iter(self.actions.values())).rows.layers
        return actions, tuple(tails), layers, frozenset(self.pairs)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Those of several structures of one form: their tuples behind each other."""
        axes = tuple(dict.fromkeys(axis for part in parts for axis in part.axes))
        first = parts[0]
        actions = {
            key: _concat([part.actions[key] for part in parts], axes) for key in first.actions
        }
        tails = {
            kind: RankTail(
                [
                    _concat([part.tails[kind].sections[n] for part in parts], axes)
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
        pairs = {key: _concat([part.pairs[key] for part in parts], axes) for key in first.pairs}
        return cls(actions, tails, pairs)

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
        every = *self.actions.values(), *self.pairs.values()
        return distinct_rows([of.cases.classes(self.moments)[of.of] for of in every])[1]

    def at(
        self, kind: StepKind, complete: bool, tuples: Int, layers: Int, rows: slice
    ) -> EqualRows:
        """Rows of a step by the kinds of its stages, `moments` or `sums`, of some tuples.

        `layers` are those of each variant on the stage of each action: [variants, actions].
        """
        own = tuple(tuple(of) for of in layers.T.tolist())
        pair = self.pairs.get((kind, complete, own), self.pairs.get((kind, False, own)))
        if pair is not None:
            return pair.at(tuples, np.zeros(0), rows)
        return self.of(kind, complete).at(tuples, layers[:, 0].astype(np.float64), rows)

    def of(self, kind: StepKind, complete: bool) -> LinearResponse:
        """The response of a step by the kinds of its stages; of a pair, with the base's layers."""
        found = self.actions.get((kind, complete))
        return self.actions[kind, False] if found is None else found


def _concat(parts: Sequence[LinearResponse], axes: tuple[str, ...]) -> LinearResponse:
    """Responses behind each other, with waits along all of `axes`."""
    begin: dict[int, int] = {}
    distinct: list[LinearRows] = []
    count = 0
    for part in parts:
        if id(part.cases) not in begin:
            begin[id(part.cases)] = count
            distinct.append(part.cases)
            count += part.cases.table.shape[1]
    dtype = np.min_scalar_type(count)
    of = np.concatenate(
        [part.of.astype(dtype) + dtype.type(begin[id(part.cases)]) for part in parts]
    )
    return LinearResponse(LinearRows.concatenated(distinct, axes), of)


class ChosenStep(NamedTuple):
    """One step of a kind, and its places on a rank."""

    kind: StepKind
    layers: StepLayers
    complete: bool
    begin: int
    end: int


class RankActions(NamedTuple):
    """Which places of a rank class of a template are which action, whatever they take."""

    places: ClassPlaces
    kind: int
    """Of the rank (`templates.Kinds`)."""
    chosen: Sequence[ChosenStep]
    """One step of each kind and layers. Those that are not complete come first."""
    sections: Sequence[tuple[int, int]]
    meetings: Sequence[StageMeeting]

    @classmethod
    def of(
        cls,
        of: Kinds,
        layers: StepLayers,
        assembly: Assembly,
        rank: int,
        known: Transfers,
        how: Execution,
    ) -> Self:
        """Those of rank class number `rank` of a program of a template, with so many layers on each
        stage; `known` is its own."""
        places = ClassPlaces.of_class(assembly.program, known, how)
        found = cuts(assembly.program, places, assembly.ranks[rank].rows)
        chosen = sorted(_chosen(of, layers, found), key=lambda step: step.complete)
        return cls(places, of.rank(rank), chosen, found.sections, found.meetings)


def responses(
    of: StructureTemplate,
    ranks: Sequence[Sequence[RankActions]],
    timed: Sequence[Sequence[ClassRows]],
    played: Played,
    *,
    usual: bool = False,
) -> Responses:
    """The responses of a template; `ranks` and what their rows take by program, the base first.

    `usual`: those of actions that do nothing that happens once per step, and of nothing else.
    """
    some = slice(1 + len(of.more) + len(of.few))  # others are for pairs alone
    programs = zip(ranks[some], timed[some], strict=True)
    every = [_actions(*each, played, usual=usual) for each in programs]
    base, more = every[0], every[1 : 1 + len(of.more)]
    alone = dict(zip(of.few, every[1 + len(of.more) :], strict=True))
    actions = {
        key: played.response(
            each,
            [other.actions[key] for other in more],
            {
                layers: other.actions[key]
                for layers, other in alone.items()
                if of.stands_for(layers, (stage for stage, _ in key[0]))
            },
            of.layers,
            1,
        )
        for key, each in base.actions.items()
    }
    chunks = of.stages * (2 if of.kinds.traits.doubled else 1) // of.run.pp
    held = tuple(count * chunks for count in of.layers)
    tails = {
        kind: RankTail(
            [
                played.response(each, [other.tails[kind][0][n] for other in more], {}, held, chunks)
                for n, each in enumerate(sections)
            ],
            meetings,
        )
        for kind, (sections, meetings) in base.tails.items()
    }
    own = zip(ranks[some.stop :], timed[some.stop :], strict=True)
    pairs = {
        key: played.response(action, [], {}, (), 1)
        for program in own
        for key, action in _pairs(*program, played).items()
    }
    return Responses(actions, tails, pairs)


def _pairs(
    ranks: Sequence[RankActions], timed: Sequence[ClassRows], played: Played
) -> dict[tuple[StepKind, bool, StepLayers], TimedAction]:
    """The pairs of actions of a program that has the layers of their stages."""
    return {
        (step.kind, step.complete, step.layers): played.action(
            rows, rank.places.part(step.begin, step.end, pair=True), slice(step.begin, step.end)
        )
        for rank, rows in zip(ranks, timed, strict=True)
        for step in rank.chosen
        if len(step.kind) > 1
    }


class _TemplateActions(NamedTuple):
    """The actions of a program of a template, one of each kind, and what follows them."""

    actions: dict[tuple[StepKind, bool], TimedAction]
    tails: dict[int, tuple[list[TimedAction], list[TimedMeeting]]]


def _actions(
    ranks: Sequence[RankActions], timed: Sequence[ClassRows], played: Played, *, usual: bool
) -> _TemplateActions:
    actions: dict[tuple[StepKind, bool], TimedAction] = {}
    tails: dict[int, tuple[list[TimedAction], list[TimedMeeting]]] = {}
    slots: dict[int, int] = {}  # numbered as they are met, so that structures compare
    for rank, rows in zip(ranks, timed, strict=True):
        lengths = {(of.kind, of.complete): of.end - of.begin for of in rank.chosen}
        for kind, _, complete, begin, end in rank.chosen:
            if (kind, complete) in actions or (usual and complete):  # of a rank that does the same
                continue
            if complete and lengths.get((kind, False)) == end - begin:  # nothing happens once
                actions[kind, complete] = actions[kind, False]
            else:
                part = rank.places.part(begin, end, pair=len(kind) > 1)
                actions[kind, complete] = played.action(rows, part, slice(begin, end))
        if usual:
            continue
        meetings = [
            TimedMeeting(
                slots.setdefault(slot, len(slots)), aside, rows.known.rows[int(rows.seconds[place])]
            )
            for place, slot, aside in rank.meetings
        ]
        if rank.kind not in tails:
            sections = [
                played.action(rows, rank.places.part(begin, end), slice(begin, end))
                for begin, end in rank.sections
            ]
            tails[rank.kind] = sections, meetings
    return _TemplateActions(actions, tails)


def _chosen(of: Kinds, layers: StepLayers, found: Cuts) -> list[ChosenStep]:
    """One step of each kind and layers on a rank, complete and not.

    The first forward that is not complete is behind another one; of other steps the second is
    taken, which is.
    """
    alike: dict[tuple[StepKind, StepLayers, bool], list[tuple[int, int]]] = {}
    for step in found.steps:
        kind = tuple((of.stage(stage), letter) for stage, letter in step.kind)
        own = tuple(layers[stage] for stage, _ in step.kind)
        alike.setdefault((kind, own, step.complete), []).append((step.begin, step.end))
    chosen = {
        key: places[0 if key[0][-1][1] == "F" else min(1, len(places) - 1)]
        for key, places in alike.items()
    }
    for (kind, own, complete), place in [*chosen.items()]:
        if complete:  # of one microbatch
            chosen.setdefault((kind, own, False), place)
    return [ChosenStep(*key, *place) for key, place in chosen.items()]
