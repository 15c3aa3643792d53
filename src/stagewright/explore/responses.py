"""The actions of every stage of a structure's pipelines, as its template's actions and differences.

A response of a stage with n layers of a variant is that of the template's stage and n - 2 times
what one layer more has added to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
    StageMeeting,
    cuts,
)
from stagewright.explore.templates import StructureTemplate
from stagewright.program.columns import Program
from stagewright.run.sections.execution import Execution
from stagewright.schedule.actions import flat

FIELDS = len(Response._fields)
BUSY = FIELDS * INPUTS
"""Row of the seconds that kernels run; those of waits by axis follow, see `Responses.axes`."""

Timed = Sequence[tuple[Float, tuple[Float, np.ndarray] | None]]
"""By class of a program the seconds of its rows [rows, tuples], and what its host does: the seconds
of launches and whether the host waits."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearResponse:
    """An action's response as a function of the layers of its stage: [rows, tuples].

    Rows are the fields of `Response` by input, the seconds that kernels run (`BUSY`), and those
    that they wait, by axis.
    """

    base: Float
    more: Float
    """[variants, rows, tuples]: what one layer more adds."""
    layers: int
    """Layers of each variant that the base has."""

    def at(self, tuples: Int, layers: Int) -> Float:
        """[rows, candidates]: of some tuples, with so many layers of each variant."""
        found = self.base[:, tuples]
        for each, count in zip(self.more, layers.tolist(), strict=True):
            if count != self.layers:
                found += each[:, tuples] * (count - self.layers)
        return found


def response(rows: Float) -> Response:
    """The response among the rows of a `LinearResponse`."""
    fields = [rows[n * INPUTS : (n + 1) * INPUTS] for n in range(FIELDS)]
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

    actions: Mapping[tuple[int, str, bool], LinearResponse]
    tails: Mapping[int, RankTail]
    """By kind of the rank: where it is in the pipeline (`templates.kind_of`)."""
    axes: tuple[str, ...]

    @property
    def form(self) -> Hashable:
        """What several structures must have in common for their responses to be joined."""
        tails = [
            (kind, len(sections), tuple((m.slot, m.aside) for m in meetings))
            for kind, (sections, meetings) in sorted(self.tails.items())
        ]
        some = next(iter(self.actions.values()))
        return frozenset(self.actions), tuple(tails), len(some.more), some.layers

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of several structures of one form: their tuples behind each other."""
        axes = tuple(dict.fromkeys(axis for part in parts for axis in part.axes))
        first = parts[0]
        places = [_places(part.axes, axes) for part in parts]
        actions = {
            key: _joined([part.actions[key] for part in parts], places, len(axes))
            for key in first.actions
        }
        tails = {
            kind: RankTail(
                [
                    _joined([part.tails[kind].sections[n] for part in parts], places, len(axes))
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


def _places(axes: Sequence[str], among: Sequence[str]) -> Int:
    """The rows of responses with some axes among the rows of those with more axes."""
    own = [BUSY + 1 + among.index(axis) for axis in axes]
    return np.array([*range(BUSY + 1), *own], dtype=np.int64)


def _joined(parts: Sequence[LinearResponse], places: Sequence[Int], axes: int) -> LinearResponse:
    """Responses behind each other; `places` are the rows of each among those with all axes."""
    rows, tuples = BUSY + 1 + axes, sum(part.base.shape[1] for part in parts)
    base, more = np.zeros((rows, tuples)), np.zeros((len(parts[0].more), rows, tuples))
    begin = 0
    for part, place in zip(parts, places, strict=True):
        end = begin + part.base.shape[1]
        base[place, begin:end] = part.base
        more[:, place, begin:end] = part.more
        begin = end
    return LinearResponse(base, more, parts[0].layers)


def responses(of: StructureTemplate, timed: Sequence[Timed], how: Execution) -> Responses:
    """The responses of a template; `timed` by program, the base first."""
    every = [
        _played(of, assembly.program, seconds, how)
        for assembly, seconds in zip((of.base, *of.more), timed, strict=True)
    ]
    names = dict.fromkeys(
        axis
        for actions, tails in every
        for played in [*actions.values(), *(p for sections, _ in tails.values() for p in sections)]
        for axis in played.waits
    )
    axes = tuple(names)
    base, *more = every
    actions = {
        key: _linear(each, [other[0][key] for other in more], axes, of.layers)
        for key, each in base[0].items()
    }
    chunks = of.stages // of.run.pp
    tails = {
        kind: RankTail(
            [
                _linear(section, [o[1][kind][0][n] for o in more], axes, of.layers * chunks, chunks)
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
    layers: int,
    added: int = 1,
) -> LinearResponse:
    """`added` layers more are in each of `more`."""
    rows = _rows(base, axes)
    differ = [np.where(rows > NEVER / 2, _rows(one, axes) - rows, 0.0) / added for one in more]
    return LinearResponse(rows, np.stack(differ), layers)


def _rows(played: ActionColumns, axes: Sequence[str]) -> Float:
    zero = np.zeros_like(played.busy)
    waits = [played.waits.get(axis, zero) for axis in axes]
    return np.concatenate([*played.response, np.stack([played.busy, *waits])])


_Actions = dict[tuple[int, str, bool], ActionColumns]
_Tails = dict[int, tuple[list[ActionColumns], list[StageMeeting]]]


def _played(
    of: StructureTemplate, program: Program, timed: Timed, how: Execution
) -> tuple[_Actions, _Tails]:
    """The actions of a program of the template, one of each kind, and what follows them."""
    actions: _Actions = {}
    tails: _Tails = {}
    slots: dict[int, int] = {}  # numbered as they are met, so that structures compare
    for rank, (seconds, host) in enumerate(timed):
        rows = ClassRows.of(program, rank, seconds, host, how)
        found = cuts(program, rows)
        chosen = _chosen(of, rank, found)
        for (kind, complete), (begin, end) in sorted(chosen.items(), key=lambda item: item[0][1]):
            stage, letter = kind
            key = of.kind(stage), letter, complete
            usual = chosen[kind, False]
            if complete and end - begin == usual[1] - usual[0]:  # nothing happens once
                actions[key] = actions[of.kind(stage), letter, False]
            else:
                actions[key] = rows.play(begin, end)
        sections = [rows.play(begin, end) for begin, end in found.sections]
        meetings = [m._replace(slot=slots.setdefault(m.slot, len(slots))) for m in found.meetings]
        tails[of.kind(rank)] = sections, meetings
    return actions, tails


def _chosen(
    of: StructureTemplate, rank: int, found: Cuts
) -> dict[tuple[tuple[int, str], bool], tuple[int, int]]:
    """One action of each stage and kind on a rank, complete and not: its places."""
    kinds = {(a.stage, a.kind) for a in flat(of.order[rank])}
    chosen: dict[tuple[tuple[int, str], bool], tuple[int, int]] = {}
    for stage, kind in sorted(kinds):
        mine = [c for c in found.actions if c.stage == stage and c.backward == (kind != "F")]
        complete = mine[0] if kind == "F" else mine[-1]
        usual = mine[min(1, len(mine) - 1)]
        chosen[(stage, kind), True] = complete.begin, complete.end
        chosen[(stage, kind), False] = usual.begin, usual.end
    return chosen
