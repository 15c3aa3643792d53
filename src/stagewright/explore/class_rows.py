"""The rows of a rank of a template in issue order, and which of them are which action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, is_any
from stagewright.errors import UserError
from stagewright.explore.actions import (
    ASIDE,
    BACKWARD,
    EARLY,
    GPU,
    LATE,
    MAIN,
    RECEIVES,
    REDUCES,
    REPLICATED,
    SENDS,
    STORED,
    STORES,
    ActionPlaces,
    StepKind,
)
from stagewright.lower.assembly.rank_rows import UNSHARD, RankRows
from stagewright.program.columns import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    PHASES,
    RECV,
    SEND,
    STORE,
    Program,
    Tasks,
)
from stagewright.run.sections.execution import Execution
from stagewright.time.columns.row_kinds import DistinctRows, RowKinds
from stagewright.time.simulate.host import HostWork
from stagewright.time.simulate.issue import (
    Issue,
    Transfers,
    issue,
    with_needs,
)

_ALL_GATHER = COLLECTIVES.index("all_gather")


@dataclass(frozen=True, slots=True, eq=False)
class ClassPlaces:
    """The rows of a rank class in issue order, whatever they take."""

    tasks: Tasks
    issue: Issue
    kind: NDArray[np.uint8]
    message: Bool
    """By place: it takes no time here."""
    flags: Int
    """By place: `MAIN` and others."""
    axis: Int
    """By place: the axis of communication, as a number of `axes`; that of "" for kernels."""
    axes: tuple[str, ...]
    beside: Int
    """By place: the kind of stream of a transfer that runs on beside later actions, or 0."""
    queue: Int
    """By place: as `beside`, and of others on a stream that reduces gradients of microbatches: they
    start behind these."""
    frees: Int
    """By place: `REDUCES` or `STORES` where kernels behind the next transfer of this kind wait for
    the end, since it frees memory; else 0."""
    _known: dict[tuple[int, int, bool], ActionPlaces] = field(
        default_factory=dict[tuple[int, int, bool], ActionPlaces]
    )

    @classmethod
    def of_class(cls, program: Program, known: Transfers, how: Execution) -> Self:
        """Those of the rank class of a program of whose communication all this is known."""
        tasks, of = known.tasks, known.along
        order = issue(program, tasks, how, known)
        order = with_needs(order, *_own_messages(program, tasks, order))
        rows = order.rows
        kind = tasks.kind[rows]
        names = [str(axis) for axis in of.axes]
        axes = (*dict.fromkeys(("", *names)),)
        axis = np.array([*map(axes.index, names), 0])[of.number[rows]]
        main = order.stream == 0
        data = (kind == COMPUTE) & ~main
        gathers = np.diff(tasks.data_ptr)[rows] == 0  # of weights, also along cp where dp is 1
        of_weights = gathers | of.of_tasks([degree == "dp" for degree in of.degrees])[rows]
        data |= (kind == COLLECTIVE) & ((tasks.microbatch[rows] < 0) | of_weights)
        reduces = known.reductions[rows]
        frees = np.where(kind == STORE, STORES, reduces * REDUCES)
        data |= reduces | (kind == STORE)
        # Messages of the pipeline are on their way between actions (`explore.pipeline`), and take
        # the time of their send.
        pipeline = [n for n, peer in enumerate(program.peers) if peer.axis == "pp"]
        of_pipeline = is_any(tasks.slot[rows], pipeline)
        sends = (kind == SEND) & of_pipeline
        message = sends | (kind == RECV)
        backward = tasks.phase[rows] != PHASES.index("forward")
        flags = (
            MAIN * main + SENDS * sends + RECEIVES * (of_pipeline & (kind == RECV))
            + BACKWARD * backward
        )  # fmt: skip
        beside = _kinds_of_streams(kind == STORE, order.stream, data, reduces)
        of_stream = np.zeros(int(order.stream.max(initial=0)) + 2, dtype=np.int64)  # receives: -1
        of_stream[order.stream[reduces]] = beside[reduces]
        queue = np.maximum(beside, of_stream[order.stream])
        return cls(tasks, order, kind, message, flags, axis, axes, beside, queue, frees)

    @property
    def data(self) -> Bool:
        """Which places run on beside later actions."""
        return self.beside > 0

    def part(self, begin: int, end: int, *, pair: bool = False) -> ActionPlaces:
        """The places from `begin` to `end` as one action, or as a pair of actions that overlap."""
        key = begin, end, pair
        if key not in self._known:
            self._known[key] = self._part(begin, end, pair=pair)
        return self._known[key]

    def _part(self, begin: int, end: int, *, pair: bool) -> ActionPlaces:
        order = self.issue
        pointer = order.pointer[begin : end + 1]
        needs = order.needs[pointer[0] : pointer[-1]]
        before = needs < begin
        earlier = needs[before]
        moment = np.where(self._recent(begin)[earlier], self.beside[earlier], GPU)
        needs = needs - begin
        needs[before] = ~moment
        handed: list[tuple[int, str]] = []
        for need in self._handed_on(end):
            place = need - begin if need >= begin else ~int(self.beside[need])
            handed.append((place, self.axes[int(self.axis[need])]))
        return ActionPlaces(
            pointer - pointer[0], needs, self._with_layers(begin, end), self.beside[begin:end],
            self.queue[begin:end], order.stream[begin:end], self.axis[begin:end], self.axes,
            (*handed,), pair,
        )  # fmt: skip

    def _with_layers(self, begin: int, end: int) -> Int:
        """The flags of the places from `begin` to `end`, `EARLY` and `LATE` among them."""
        layer = self.tasks.layer[self.issue.rows[begin:end]]
        own = np.flatnonzero(self.data[begin:end] & (layer >= 0))
        early, late = np.zeros((2, end - begin), dtype=bool)
        second, last = end - begin, 0
        if len(own):
            changes = np.flatnonzero(np.diff(layer[own]))
            if len(changes):
                second, last = int(own[changes[0] + 1]), int(own[changes[-1] + 1])
        early[:second], late[last:] = True, True
        return self.flags[begin:end] + EARLY * early + LATE * late

    def _recent(self, begin: int) -> Bool:
        """Places before `begin` that the moments of streams stand for: transfers that run on beside
        later actions, unless they free memory and kernels have waited for them, as they do behind
        the next transfer of its kind."""
        found = self.data[:begin] & (self.frees[:begin] == 0)
        for kind in (REDUCES, STORES):
            places = np.flatnonzero(self.frees[:begin] == kind)
            if len(places):  # the last lot, which no kernel cuts
                kernels = np.flatnonzero(self.issue.stream[: places[-1]] == 0)
                last = int(kernels[-1]) if len(kernels) else -1
                found[places[places > last]] = True
        return found

    def _handed_on(self, end: int) -> list[int]:
        """Transfers before the place `end` that free memory and that the next kernel from there on
        waits for (`time.simulate.issue`)."""
        order = self.issue
        later = np.flatnonzero(order.stream[end:] == 0)
        if not len(later):
            return []
        place = end + int(later[0])
        needs: list[int] = order.needs[order.pointer[place] : order.pointer[place + 1]].tolist()
        return [need for need in needs if need < end and self.frees[need]]


@dataclass(frozen=True, slots=True, eq=False)
class ClassRows:
    """What the rows of a rank class take, in issue order."""

    known: DistinctRows
    none: int
    """The known row of what takes no time."""
    seconds: Int
    """By place, a number of known rows."""
    drawn: Int
    """Seconds at TDP in which a GPU draws as much, likewise."""
    launch: Float
    """Seconds of launches by place: [places, 1 or configurations]; of none: they take no time."""
    waits: Bool | None
    """By place, whether the host waits for it; None: for none."""

    @classmethod
    def of(cls, places: ClassPlaces, kinds: RowKinds, drawn: Int, host: HostWork | None) -> Self:
        """Rows whose kinds have drawn so much (`Columns.energy`)."""
        rows = places.issue.rows
        of = kinds.of[rows]
        known = kinds.known
        none = known.number(np.zeros_like(known.rows[int(kinds.number[0])]))
        seconds = np.where(places.message, none, kinds.number[of])
        launch, waits = np.zeros((0, 1)), None
        if host is not None:
            launch = host.seconds.reshape(len(host.seconds), -1)[rows]
            waits = host.waits[rows]
        return cls(known, none, seconds, np.where(places.message, none, drawn[of]), launch, waits)


def _kinds_of_streams(stores: Bool, stream: Int, data: Bool, reduces: Bool) -> Int:
    """By place, the kind of stream of a transfer that runs on beside later actions, or 0.

    Of streams on which gradients of microbatches are reduced, that of the first transfer, a gather
    of weights or a reduction among shards, is not among replicas.
    """
    found = np.where(stores, STORED, ASIDE * data)
    if reduces.any():
        first = stream[np.flatnonzero(data & ~stores)[0]]
        streams = np.unique(stream[reduces])
        found[data & ~stores & is_any(stream, streams[streams != first].tolist())] = REPLICATED
    return found


def _own_messages(program: Program, tasks: Tasks, order: Issue) -> tuple[Int, Int]:
    """The receives of messages between ranks of the class, and the send of each: places.

    Ranks along another axis than the pipeline's do the same: what one receives is what it sends.
    """
    slot, kind, tag = (column[order.rows] for column in (tasks.slot, tasks.kind, tasks.tag))
    receives: list[Int] = [np.zeros(0, dtype=np.int64)]
    sends: list[Int] = [np.zeros(0, dtype=np.int64)]
    for axis in {peer.axis for peer in program.peers} - {"pp"}:
        slots = [n for n, peer in enumerate(program.peers) if peer.axis == axis]
        ends = [np.flatnonzero(is_any(slot, slots) & (kind == of)) for of in (RECV, SEND)]
        received, sent = (mine[np.argsort(tag[mine], kind="stable")] for mine in ends)
        receives.append(received)
        sends.append(sent)
    return np.concatenate(receives), np.concatenate(sends)


class StepPlaces(NamedTuple):
    """The places of an action, or of two that overlap."""

    kind: StepKind
    complete: bool
    """Whether it does what happens once per step."""
    begin: int
    end: int


class StageMeeting(NamedTuple):
    """A collective with other ranks of the pipeline, after all actions."""

    place: int
    slot: int
    aside: bool
    """Whether it waits for communication that happens once per step."""


class Cuts(NamedTuple):
    """The actions of a rank in issue order, and the sections of what comes after all of them."""

    steps: list[StepPlaces]
    sections: list[tuple[int, int]]
    meetings: list[StageMeeting]
    """One behind each section but the last."""


def cuts(program: Program, places: ClassPlaces, rank: RankRows) -> Cuts:
    """Cut the places of a rank class into actions and what comes after these.

    Actions whose places are mixed, as the schedule or `time.simulate.ep_overlap` has them, are one.
    """
    tasks, order, at = places.tasks, places.issue, places.issue.rows
    slots = [n for n, of in enumerate(program.communicators) if "pp" in of.axes]
    meets = (places.kind == COLLECTIVE) & is_any(tasks.slot[at], slots)
    # Ranks that hold the same stages reduce gradients earlier, and gather parameters at the same
    # time: gathers make none of them wait for another.
    meets &= (at >= rank.end) & (tasks.collective[at] != _ALL_GATHER)
    met = np.flatnonzero(meets)
    inside = np.flatnonzero((tasks.microbatch[at] >= 0) & (at < rank.end))
    last = int(inside[-1]) + 1
    # Parameters that were updated may be gathered in front of the first forward.
    step = last + np.flatnonzero(tasks.phase[at[last:]] == PHASES.index("optimizer"))
    late = last + np.flatnonzero(at[last:] < at[inside].max())  # issued behind all actions
    own = rank.begin[rank.begin <= at[last - 1]].max()
    if len(late) and (at[late] >= own).all() and _behind_another_stream(places, late):
        late = late[:0]  # parts of the last action, whose reductions each of them waits for
    tail = min([*step[:1].tolist(), *met[:1].tolist(), *late[:1].tolist(), len(at)])
    borders = [tail, *(met + 1).tolist()]
    ends = [*met.tolist(), len(at)]
    meetings: list[StageMeeting] = []
    for place in met.tolist():
        before = order.needs[order.pointer[place] : order.pointer[place + 1]]
        waits = bool(places.data[before].any())
        meetings.append(StageMeeting(place, int(tasks.slot[at[place]]), waits))
    return Cuts(_steps(tasks, at, rank, tail), [*zip(borders, ends, strict=True)], meetings)


def _behind_another_stream(places: ClassPlaces, some: Int) -> bool:
    """Whether some places wait for communication that runs on beside, on another stream: gradients
    of experts that every rank of tp has whole are reduced along dp and then along tp."""
    order = places.issue
    waiting = np.repeat(np.arange(len(order.stream)), np.diff(order.pointer))
    elsewhere = places.data[order.needs] & (order.stream[order.needs] != order.stream[waiting])
    return bool(elsewhere[np.isin(waiting, some)].any())


def _steps(tasks: Tasks, at: Int, rank: RankRows, tail: int) -> list[StepPlaces]:
    """The steps of a rank whose rows are issued as `at`, up to a place behind all of them."""
    place = np.empty_like(at)
    place[at] = np.arange(len(at))
    complete = {action for (_, half), action in rank.once.items() if half != 1}
    spans: list[tuple[int, int, int]] = []
    for nth, action in enumerate(rank.actions):
        rows: Int = rank.begin[nth] + rank.forms[int(rank.form_of[nth])].offset
        mine = place[rows[tasks.microbatch[rows] >= 0]]
        if action.kind != UNSHARD and len(mine):
            spans.append((int(mine.min()), int(mine.max()), nth))
    mixed: list[list[int]] = []
    begin: list[int] = []
    reached = -1
    for first, last, nth in sorted(spans):
        overlaps = mixed and rank.begin[nth] == rank.begin[mixed[-1][-1]]
        if first > reached and not overlaps:
            mixed.append([])
            begin.append(first)
        mixed[-1].append(nth)
        reached = max(reached, last)
    begin[:1] = [0]
    found: list[StepPlaces] = []
    if begin[-1] > tail:
        raise UserError("the last action is issued among what follows all actions")
    for numbers, first, end in zip(mixed, begin, [*begin[1:], tail], strict=True):
        actions = sorted((rank.actions[n] for n in numbers), key=lambda a: a.kind != "F")
        kind = tuple((a.stage, a.kind) for a in actions)
        found.append(StepPlaces(kind, not complete.isdisjoint(numbers), first, end))
    return found
