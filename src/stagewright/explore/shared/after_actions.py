"""What the ranks of pipelines do after all actions: sections, and the collectives between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, latest
from stagewright.explore.actions import ASIDE, GPU, HOST, STREAMS
from stagewright.explore.pipeline.rank_times import RankEnds
from stagewright.explore.responses import SUMS, LiveResponse, Moments, Responses
from stagewright.explore.shared.played import EqualRows
from stagewright.explore.templates import Kinds


class Ends(NamedTuple):
    """When all is done, and when all actions are: [tuples of a set], NaN of those that are not
    played."""

    whole: Float
    actions: Float
    tail: Float
    """Seconds that the mean rank takes after its actions, without its waits for other ranks."""


class _RankGroup(NamedTuple):
    """Ranks that do the same after all actions."""

    kind: int
    held: Float
    """Layers of each variant that each of them has."""
    ranks: list[int]


class AfterActions:
    """What the ranks of one pipeline do after all actions."""

    def __init__(
        self,
        responses: Responses,
        tuples: Int,
        layers: Int,
        pp: int,
        kinds: Kinds,
        held: Sequence[Sequence[int]],
    ) -> None:
        """`layers` of each variant on each stage; `held` are the stages of each rank."""
        self.responses, self.tuples, self.pp = responses, tuples, pp
        groups: dict[tuple[int, bytes], _RankGroup] = {}
        for rank in range(pp):
            has = layers[:, held[rank]].sum(axis=1).astype(np.float64)
            kind = kinds.rank(rank)
            group = groups.setdefault((kind, has.tobytes()), _RankGroup(kind, has, []))
            group.ranks.append(rank)
        self.groups = [*groups.values()]
        self._sections: dict[tuple[int, int], EqualRows] = {}

    def _section(self, own: int, number: int, some: Int) -> LiveResponse:
        """The response of a section of a group, of some tuples."""
        if (own, number) not in self._sections:
            moments = self.responses.moments
            self._sections[own, number] = self._rows(self.groups[own], number, moments)
        rows = self._sections[own, number]
        if len(some) < len(self.tuples):
            rows = rows._replace(distinct=rows.distinct.take(some, axis=1))
        return LiveResponse.of(rows)

    def _rows(self, of: _RankGroup, number: int, rows: slice) -> EqualRows:
        """Rows of a section, of all tuples."""
        section = self.responses.tails[of.kind].sections[number]
        return section.at(self.tuples, of.held, rows)

    def sums(self) -> Float:
        """Sums over all sections, of the mean rank: [rows, tuples]."""
        responses = self.responses
        found = np.zeros((SUMS + len(responses.axes), len(self.tuples)))
        for group in self.groups:
            for number in range(len(responses.tails[group.kind].sections)):
                found += len(group.ranks) * self._rows(group, number, responses.sums).expanded()
        found /= self.pp
        return found

    def ends(self, some: Int, at: Int, ranks: RankEnds) -> Ends:
        """The end of the last task of all ranks, given when they are done with all actions, of some
        tuples, and where these are in `ranks`.

        Of ranks that do the same the latest of each moment decides.
        """
        groups = self.groups
        meetings = [self.responses.tails[of.kind].meetings for of in groups]
        state = [
            RankEnds(*(every[group.ranks].max(axis=0)[at] for every in ranks)) for group in groups
        ]
        actions = latest([of.gpu for of in state])
        last = [latest([of.gpu, *of[ASIDE:]]) for of in state]
        waited = [of.gpu for of in state]
        reached = [0] * len(groups)
        for own in range(len(groups)):
            state[own], last[own] = _after(state[own], self._section(own, 0, some), last[own])
        for meeting in max(meetings, key=len):
            met = [
                own for own in range(len(groups))
                if reached[own] < len(meetings[own])
                and meetings[own][reached[own]].slot == meeting.slot
            ]  # fmt: skip
            ready = [
                np.maximum(state[own].gpu, state[own].aside) if meeting.aside else state[own].gpu
                for own in met
            ]
            took = meeting.seconds
            took = took[self.tuples[some]] if len(took) > 1 else took
            ended = latest(ready) + took
            for own, there in zip(met, ready, strict=True):
                waited[own] = waited[own] + (ended - took - there)
                reached[own] += 1
                after = state[own]._replace(gpu=ended)
                section = self._section(own, reached[own], some)
                state[own], last[own] = _after(after, section, last[own])
        pairs = zip(groups, last, waited, strict=True)
        tails = [len(group.ranks) * (end - before) for group, end, before in pairs]
        every = latest(last), actions, sum(tails, 0 * last[0]) / self.pp
        found = np.full((len(every), len(self.tuples)), np.nan)
        for column, ended in zip(found, every, strict=True):
            column[some] = ended
        return Ends(*found)


def _after(state: RankEnds, of: LiveResponse, last: Float) -> tuple[RankEnds, Float]:
    """A rank's moments after a section, and its last end."""

    def moved(field: Moments) -> list[Float]:
        """When what a field tells has ended, behind each input."""
        return [at + after for at, after in zip(state, field, strict=False) if after is not None]

    late = [latest(moved(of.late(each))) for each in STREAMS]
    after = RankEnds(*(latest(moved(of.moments[each])) for each in (GPU, HOST)), *late)
    return after, latest([last, *moved(of.end), *late])
