"""What the fullest rank holds at its peak, where transfers that free memory end behind kernels.

In issue order (`explore.memory`) a row frees what it was the last to touch when the next one runs.
A reduction of gradients, or a store to the host, runs on beside later kernels, and what it frees
stays until it ends; what a transfer makes comes when it starts. So an action is played row by row
behind the action before it (`row_times`), and bytes are counted at the time of each of its kernels,
as `simulate` does. Only those actions are played whose states may hold most: a bound says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_values, product
from stagewright.explore.actions import STORES
from stagewright.explore.class_rows import ClassRows
from stagewright.explore.memory import Peaks
from stagewright.explore.occupancy import Holding, Occupancy
from stagewright.explore.responses import RankActions
from stagewright.explore.template_memory import PAIR, MomentRows, Spot, TemplateRank
from stagewright.explore.templates import StructureTemplate, mean_layers, nearest
from stagewright.explore.timed_memory.row_times import Clock, RowTimes, TimedRank
from stagewright.program.columns import CATEGORIES
from stagewright.schedule.in_flight import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    INPUT_HALF,
    LAST_BACKWARD,
    LAST_WEIGHT_HALF,
    STEP,
    WEIGHT_HALF,
)

_MOMENTS = {
    FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD, INPUT_HALF, WEIGHT_HALF, LAST_WEIGHT_HALF,
    STEP, PAIR,
}  # fmt: skip
"""What a stage holds while some of its rows run."""


_PairKey = tuple[tuple[int, ...], tuple[int, ...]]
"""The kinds of two stages whose actions overlap; the layers of each variant on one, and then on the
other."""


class _Spans(NamedTuple):
    """When something is there, and its bytes."""

    born: Float
    """Seconds: [spans, tuples]."""
    gone: Float
    """Likewise."""
    size: Float
    """By category: [spans, categories, tuples]."""

    @classmethod
    def none(cls, tuples: int) -> _Spans:
        """None is there."""
        no = np.zeros((0, tuples))
        return cls(no, no, np.zeros((0, len(CATEGORIES), tuples)))

    def with_more(self, other: _Spans) -> _Spans:
        """These and others."""
        return _Spans(*map(np.concatenate, zip(self, other, strict=True)))


class _Before(NamedTuple):
    """What an action leaves to the next one of its rank."""

    clock: Clock
    pending: _Spans


class _ProgramRank(NamedTuple):
    """A rank of a program, and what its rows take."""

    of: TemplateRank
    timed: TimedRank


class _StepBefore(NamedTuple):
    """A step before: the kinds of its actions and of their stages, and its program."""

    what: tuple[str, ...]
    kinds: tuple[int, ...]
    layers: tuple[int, ...]


class _PlayedMoment(NamedTuple):
    """A moment of some stages behind some steps; see `explore.occupancy.Holding`."""

    what: str
    kinds: tuple[int, ...]
    layers: tuple[int, ...]
    """Of the program that it is played in."""
    after: tuple[_StepBefore, ...]


class _HeldInOrder(NamedTuple):
    """What a stage holds in the order of issue, and how much more it may be."""

    in_order: Float
    """By category: [categories, tuples]."""
    bytes: Float
    """[tuples]."""
    more: Float
    """At most: [tuples]."""
    moment: _PlayedMoment | None
    """None: it is held whatever runs."""


class LatePeaks:
    """The memory of a template's pipelines on one machine."""

    def __init__(
        self,
        template: StructureTemplate,
        every: Sequence[Sequence[TemplateRank]],
        issued: Sequence[Sequence[RankActions]],
        timed: Sequence[Sequence[ClassRows]],
        peaks: Peaks,
        message: Float,
    ) -> None:
        """Ranks by program (`StructureTemplate.assemblies`), and `peaks` in the order of issue;
        `message`: seconds of a message between stages, [tuples]."""
        self.template, self.in_order, self.cases = template, peaks, peaks.cases
        programs = [
            [
                _ProgramRank(of, TimedRank.of(assembly.program, each.places, rows, message))
                for of, each, rows in zip(*ranks, strict=True)
            ]
            for assembly, ranks in zip(
                template.assemblies, zip(every, issued, timed, strict=True), strict=True
            )
        ]
        few = programs[1 + len(template.more) :][: len(template.few)]
        own = programs[1 + len(template.more) + len(few) :]
        self.programs = {template.layers: programs[0], **dict(zip(template.few, few, strict=True))}
        """The base and those of few layers, by the layers of each variant."""
        self.pairs: dict[_PairKey, tuple[_ProgramRank, tuple[int, ...]]] = {}
        """The rank and the stages of each pair that has a program of its own."""
        for program in own:
            for each in program:
                for of in each.of.stages:
                    kinds = tuple(each.of.kinds.stage(s) for s in of)
                    if len(of) > 1:
                        self.pairs.setdefault((kinds, _flat(each.of.layers_of(of))), (each, of))
        stores = any((each.places.frees == STORES).any() for each in issued[0])
        self.lasting = "FBW" if stores else "BW"
        """Kinds of actions whose transfers may run on beside the next one."""
        self.tuples = np.arange(len(self.cases))
        self._holdings: dict[Holding, _HeldInOrder] = {}
        self._late_holdings: dict[Holding, Float] = {}
        self._moments: dict[_PlayedMoment, Mapping[Spot, Float]] = {}
        self._before: dict[tuple[_StepBefore, ...], _Before] = {}
        self._freed: dict[object, Float] = {}

    def at(self, found: Occupancy, tuples: Int) -> dict[str, Int]:
        """As `Peaks.at`, of an occupancy whose states are apart by the steps before."""
        distinct, of_row = distinct_values(tuples)
        best = self._most(found, distinct).astype(np.int64)
        by = {name: of[of_row] for name, of in zip(CATEGORIES, best, strict=True)}
        allowance = self.in_order.allowance[tuples]
        return by | ({"allowance": allowance} if allowance.any() else {})

    def _most(self, found: Occupancy, tuples: Int) -> Float:
        """The most that is held, by category: [categories, tuples].

        The moments whose states may hold most are played, until no other one can hold more.
        """
        known = [self._known(one) for one in found.holdings]
        each = np.stack([of.in_order[:, tuples] for of in known])
        bytes_ = np.stack([of.bytes[tuples] for of in known])
        more = np.stack([of.more[tuples] for of in known])
        moments = np.array([of.moment is not None for of in known])
        of_state = ((found.counts > 0) & moments).argmax(axis=1)
        total = product(found.counts, bytes_)
        upper = total + more[of_state]
        least = np.full(len(tuples), -np.inf)
        played = np.zeros(len(total), dtype=bool)
        while True:
            gain = np.where(played, -np.inf, (upper - least).max(axis=1))
            state = int(gain.argmax())
            if gain[state] <= 0:
                break
            nth = int(of_state[state])
            each[nth] = self._played(found.holdings[nth], known[nth])[:, tuples]
            states = np.flatnonzero(of_state == nth)
            total[states] += each[nth].sum(axis=0) - bytes_[nth]
            played[states] = True
            least = np.maximum(least, total[states].max(axis=0))
        total[~played] = -np.inf
        return np.einsum("ch,hkc->kc", found.counts[total.argmax(axis=0)], each)

    def _known(self, one: Holding) -> _HeldInOrder:
        """What is known of a holding before it is played."""
        if one not in self._holdings:
            own = one._replace(after=())
            moment = self._moment(one) if one.what in _MOMENTS else None
            if moment is None or own == one:
                in_order = self.in_order.holding(one, self.cases)
                bytes_ = in_order.sum(axis=0)
            else:
                in_order, bytes_, *_ = self._known(own)
            more = np.zeros(len(self.tuples)) if moment is None else self._late(moment)
            self._holdings[one] = _HeldInOrder(in_order, bytes_, more, moment)
        return self._holdings[one]

    def _played(self, one: Holding, known: _HeldInOrder) -> Float:
        """Bytes of what a stage holds, where it has most at any time: [categories, tuples]."""
        if one not in self._late_holdings:
            of = known.moment
            assert of is not None, f"not a moment: {one}"
            if of not in self._moments:
                self._moments[of] = self._at_spots(of)
            found = of.layers, self._moments[of]
            held = self.in_order.holding(one, self.cases, played=found)
            self._late_holdings[one] = held
        return self._late_holdings[one]

    def _moment(self, one: Holding) -> _PlayedMoment:
        after = tuple(
            _StepBefore(
                tuple(of.kind for of in step),
                (kinds := tuple(of.stage for of in step)),
                self._program([of.layers for of in step], kinds),
            )
            for step in one.after
        )
        return _PlayedMoment(one.what, one.kinds, self._program(one.layers, one.kinds), after)

    def _program(self, layers: Sequence[tuple[int, ...]], kinds: Sequence[int]) -> tuple[int, ...]:
        """The program for stages of these kinds with so many layers of each variant; of a pair that
        has one of its own, those of one stage and then of the other."""
        if ((*kinds,), _flat(layers)) in self.pairs:
            return _flat(layers)
        few = [own for own in self.template.few if self.template.stands_for(own, kinds)]
        return tuple(map(int, nearest(mean_layers(layers), few, self.template.layers)))

    def _late(self, of: _PlayedMoment) -> Float:
        """Bytes that may still be there while an action runs, at most: [tuples]."""
        own = self._frees(of.what, of.kinds, of.layers)
        return reduce(np.maximum, [self._frees(*step) for step in of.after], own).sum(axis=0)

    def _rows(
        self, what: str | tuple[str, ...], kinds: tuple[int, ...], layers: tuple[int, ...]
    ) -> tuple[_ProgramRank, tuple[int, ...], MomentRows] | None:
        """The rank of a program that has an action of stages of these kinds, the stages, and the
        rows: at a moment, or of the kinds of a step."""
        own = self.pairs.get((kinds, layers))
        if own is not None:
            each, stages = own
            moment = each.of.moment(PAIR, stages)
            return None if moment is None else (each, stages, moment)
        for each in self.programs[layers]:
            for stages in each.of.stages:
                if tuple(each.of.kinds.stage(s) for s in stages) == kinds:
                    if isinstance(what, str):
                        moment = each.of.moment(what, stages)
                    else:
                        moment = each.of.step(what, stages)
                    if moment is not None:
                        return each, stages, moment
        return None

    def _frees(
        self, what: str | tuple[str, ...], kinds: tuple[int, ...], layers: tuple[int, ...]
    ) -> Float:
        """Bytes that an action frees behind later kernels, at most: with two lots of transfers, as
        more are never under way (`time.simulate.issue`), and with messages: [2, tuples]."""
        key = what, kinds, layers
        if key not in self._freed:
            found = self._rows(what, kinds, layers)
            self._freed[key] = np.zeros((2, len(self.tuples)))
            if found is not None:
                each, _, moment = found
                of = each.timed.places
                rows = of.issue.rows
                own = of.data & (rows >= moment.begin) & (rows < moment.end)
                lot = np.cumsum(of.issue.stream == 0)[own]
                counts = each.of.live.last_at(rows[own], np.unique(lot, return_inverse=True)[1])
                lots = np.sort(each.of.sizes.total(counts), axis=0)[-2:].sum(axis=0)
                sent = rows[each.timed.sends & (rows >= moment.begin) & (rows < moment.end)]
                counts = each.of.live.last_at(sent, np.zeros_like(sent))
                messages = each.of.sizes.total(counts).sum(axis=0)
                self._freed[key] = np.stack([lots, messages])[:, self.cases]
        return self._freed[key]

    def _behind(self, after: tuple[_StepBefore, ...]) -> _Before:
        """What the steps before leave."""
        if after not in self._before:
            self._before[after] = self._left(after)
        return self._before[after]

    def _left(self, after: tuple[_StepBefore, ...]) -> _Before:
        if not after:
            return _Before(Clock.start(len(self.tuples)), _Spans.none(len(self.tuples)))
        before = self._behind(after[:-1])
        found = self._rows(*after[-1])
        if found is None:
            return before
        each, _, moment = found
        times, clock = each.timed.play(moment.begin, moment.end, before.clock, self.tuples)
        late = (times.end > clock.gpu).any(axis=1)
        pairs, counts = each.of.live.lasting_to(moment.begin + np.flatnonzero(late))
        spans = before.pending.with_more(self._spans(each, moment, times, pairs, counts))
        some = (spans.gone > clock.gpu).any(axis=1)
        return _Before(clock, _Spans(*(of[some] for of in spans)))

    def _spans(
        self, each: _ProgramRank, moment: MomentRows, times: RowTimes, pairs: Int, counts: Int
    ) -> _Spans:
        """When instances of values are there, by their first and last row."""
        first, last = pairs.T - moment.begin
        inside = (first >= 0)[:, None]
        born = np.where(inside, times.ready[np.maximum(first, 0)], -np.inf)
        inside = (last < moment.end - moment.begin)[:, None]
        gone = np.where(inside, times.end[np.minimum(last, len(times.end) - 1)], np.inf)
        return _Spans(born, gone, each.of.sizes.bytes(counts)[:, :, self.cases])

    def _at_spots(self, of: _PlayedMoment) -> Mapping[Spot, Float]:
        """The most that is held at each place of a moment, by category: [categories, tuples]."""
        found = self._rows(of.what, of.kinds, of.layers)
        if found is None:
            return {}
        each, stages, moment = found
        begin, end = moment.begin, moment.end
        before = self._behind(of.after)
        times, _ = each.timed.play(begin, end, before.clock, self.tuples)
        main = each.timed.main[begin:end]
        kernels = np.flatnonzero(main)
        if not len(kernels):
            return {}
        come, go = _out_of_order(times, kernels)
        counts, pairs, lasting = each.of.live.apart(begin, end, moment.of, ~main & come, ~main & go)
        spans = before.pending.with_more(self._spans(each, moment, times, pairs, lasting))
        # Rows in order start where they stand; a transfer that starts late, beside a kernel.
        every = np.arange(len(self.tuples))
        runs = each.of.runs[begin:end]
        rows = np.flatnonzero(main | (runs & ~come))
        held = each.of.sizes.bytes(counts[rows] - moment.elsewhere)[:, :, self.cases]
        during = times.ready[~main & come]
        nth = (times.ready[kernels] <= during[:, None]).sum(axis=1) - 1
        beside = (nth >= 0) & (times.end[kernels][nth, every] > during)
        own = np.broadcast_to(np.arange(len(rows))[:, None], (len(rows), len(every)))
        running = np.concatenate([own, np.searchsorted(rows, kernels)[nth]])
        counted = np.concatenate([np.broadcast_to(runs[rows][:, None], own.shape), beside])
        at = np.concatenate([times.ready[rows], during])
        alive = (spans.born <= at[:, None]) & (spans.gone > at[:, None])
        total = held.sum(axis=1)[running, every]
        total += np.einsum("rsc,sc->rc", alive, spans.size.sum(axis=1))
        total[~counted] = -np.inf
        result: dict[Spot, Float] = {}
        for spot, there in each.of.spots(begin, end, stages).items():
            mine = np.where(there[rows][running], total, -np.inf)
            if len(mine) and np.isfinite(mine.max(axis=0)).all():
                most = mine.argmax(axis=0)
                more = np.einsum("cs,skc->kc", alive[most, :, every], spans.size)
                result[spot] = held[running[most, every], :, every].T + more
        return result


def _flat(layers: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The layers of stages behind each other."""
    return tuple(count for of in layers for count in of)


def _out_of_order(times: RowTimes, kernels: Int) -> tuple[Bool, Bool]:
    """Which rows can start, and which have ended, not between the kernels around them: [rows]."""
    rows = np.arange(len(times.ready))
    behind = np.searchsorted(kernels, rows, side="right")
    at = np.concatenate([
        np.full_like(times.ready[:1], -np.inf), times.ready[kernels],
        np.full_like(times.ready[:1], np.inf),
    ])  # fmt: skip
    before, after = at[behind], at[behind + 1]

    def outside(moment: Float) -> Bool:
        return np.any((moment <= before) | (moment > after), axis=1)

    return outside(times.ready), outside(times.end)
