"""What an action of a stage makes of the times at which it may start, for many configurations.

The rows of a stage are the same in configurations of one structure, and so is what each waits for
(`time.simulate.issue`, `time.simulate.host`); only durations differ. An action is played once with
arrays [configurations] as its times. What comes before it enters by four moments: when the kernels
before it have ended (`GPU`), when communication along dp is done (`ASIDE`), when the host has
launched everything before it (`HOST`), and when the message that it needs is there (`MESSAGE`).
Every end is the latest of these moments, each plus a constant: a matrix over (max, +), `Response`,
which a schedule of any number of microbatches and stages puts together (`explore.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.lower.assembly.rank_rows import UNSHARD, RankRows
from stagewright.program.columns import PHASES, Program, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.issue import (
    Issue,
    axis_of,
    degree,
    issue,
    reductions,
    with_needs,
)

GPU, ASIDE, HOST, MESSAGE, GRADIENT = range(5)
INPUTS = 4
"""Inputs of a `Response`, and how many there are; a forward and a backward that overlap have one
more, since each waits for a message: `GRADIENT` is the backward's."""
NEVER = -1e30
"""Seconds before every time; to add durations to it leaves it before every time."""
LAUNCHES = "launches"
REDUCES, STORES = 1, 2
"""Kinds of transfers that free memory, of which no more than two lots may be pending."""


class Response(NamedTuple):
    """When an action is done with what, in seconds [inputs, configurations] from each input."""

    gpu: Float
    """Its last kernel has ended."""
    aside: Float
    """All communication that happens once per step has ended."""
    host: Float
    """The host has launched all of it."""
    sent: Float
    """Its message has been made; `NEVER` where it sends none."""
    end: Float
    """Every task has ended."""
    chain: Float
    """All communication that runs on beside later actions has ended, if none waits but the first of
    each stream. With more layers this may come to be the longest of all ways through an action."""
    sent_gradient: Float | None = None
    """Of a forward and a backward that overlap, as `sent` for the backward; else None."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionColumns:
    """An action in columns: its response, and where its time goes."""

    response: Response
    busy: Float
    """Seconds that its kernels run: [configurations]."""
    drawn: Float
    """Seconds at TDP that they draw as much in (`time.expense.power`): [configurations]."""
    waits: Mapping[str, Float]
    """Seconds that its kernels wait, by axis of communication or `LAUNCHES`: [configurations]."""


class RowTimes(NamedTuple):
    """What the rows of a rank class take, in the order of the program."""

    seconds: Float
    """[rows, configurations]."""
    drawn: Float
    """Seconds at TDP in which a GPU draws as much: [rows, configurations]."""
    host: tuple[Float, Bool] | None
    """Seconds of launches [rows, 1 or configurations], and whether the host waits."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassRows:
    """The rows of a rank class in issue order, with durations in columns."""

    tasks: Tasks
    issue: Issue
    kind: NDArray[np.uint8]
    seconds: Sequence[Float]
    """By place: [configurations] or one number."""
    drawn: Float
    """By place: seconds at TDP in which a GPU draws as much, [places, configurations]."""
    launch: Sequence[Float]
    """Seconds of the host by place, likewise; empty: launches take no time."""
    waits: Bool
    """By place: the host waits for its end."""
    axis: Sequence[str]
    """By place: the axis of communication, "" for kernels."""
    data: Bool
    """By place: communication along dp, once per step, or to the host, which runs on beside later
    actions."""
    frees: Int
    """By place: `REDUCES` or `STORES` where kernels behind the next transfer of this kind wait for
    the end, since it frees memory; else 0."""
    sends: Bool
    """By place: messages to another rank of the pipeline."""
    receives: Bool
    """By place: messages from another rank of the pipeline."""
    backward: Bool
    """By place: part of a backward."""
    count: int
    """Configurations."""

    @classmethod
    def of(
        cls,
        program: Program,
        nth: int,
        times: RowTimes,
        how: Execution,
    ) -> Self:
        """Class number `nth`, whose rows take these times."""
        tasks = program.classes[nth].tasks
        order = issue(program, tasks, how)
        order = with_needs(order, *_own_messages(program, tasks, order))
        rows = order.rows
        kind = tasks.kind[rows]
        axis = np.full(len(rows), "", dtype=object)
        data = (kind == TaskKind.COMPUTE) & (order.stream != 0)
        for (of, slot, collective), along in axis_of(program, tasks).items():
            mine = (kind == of) & (tasks.slot[rows] == slot)
            mine &= tasks.collective[rows] == collective
            axis[mine] = str(along)
            if of == TaskKind.COLLECTIVE:
                data |= mine & ((tasks.microbatch[rows] < 0) | (degree(program, along) == "dp"))
        frees = np.where(kind == TaskKind.STORE, STORES, reductions(program, tasks)[rows] * REDUCES)
        data |= kind == TaskKind.STORE
        # Messages of the pipeline are on their way between actions (`explore.pipeline`), and take
        # the time of their send.
        pipeline = [n for n, peer in enumerate(program.peers) if peer.axis == "pp"]
        of_pipeline = np.isin(tasks.slot[rows], pipeline)
        sends = (kind == TaskKind.SEND) & of_pipeline
        message = sends | (kind == TaskKind.RECV)
        seconds = np.where(message[:, None], 0.0, times.seconds[rows])
        host = times.host
        launch: list[Float] = [] if host is None else [*host[0][rows]]
        waits = np.zeros(len(rows), dtype=bool) if host is None else host[1][rows]
        return cls(
            tasks, order, kind, [*seconds], times.drawn[rows], launch, waits, [*axis], data,
            frees, sends, of_pipeline & (kind == TaskKind.RECV),
            tasks.phase[rows] != PHASES.index("forward"), seconds.shape[1],
        )  # fmt: skip

    def play(self, begin: int, end: int, *, pair: bool = False) -> ActionColumns:
        """The places from `begin` to `end` as one action, or as a pair of actions that overlap."""
        order = self.issue
        pointer: list[int] = order.pointer.tolist()
        needs: list[int] = order.needs[: pointer[end]].tolist()
        main: list[bool] = (order.stream == 0).tolist()
        data: list[bool] = self.data.tolist()
        streams: list[int] = order.stream.tolist()
        count = INPUTS + pair
        inputs = np.full((count, count, self.count), NEVER)
        inputs[range(count), range(count)] = 0.0
        ends: list[Float] = []
        kernel, aside, thread = inputs[:MESSAGE]
        chains: dict[int, Float] = {}
        never = np.full((count, self.count), NEVER)
        sent, last = [never, never], never
        busy = np.zeros(self.count)
        waits: dict[str, Float] = {}
        recent = self._recent(begin)
        for place in range(begin, end):
            mine = needs[pointer[place] : pointer[place + 1]]
            start = np.full((count, self.count), NEVER)
            way = int(pair and self.backward[place])
            for need in mine or [-1]:
                before = inputs[ASIDE if need in recent else GPU]
                np.maximum(start, ends[need - begin] if need >= begin else before, out=start)
            if data[place] and streams[place] not in chains:
                # Issue orders leave this out where kernels between imply it, here or there.
                np.maximum(start, inputs[ASIDE], out=start)
            if self.receives[place]:
                np.maximum(start, inputs[MESSAGE + way], out=start)
            if self.launch:
                thread = thread + self.launch[place]
                np.maximum(start, thread, out=start)
            done = start + self.seconds[place]
            ends.append(done)
            if main[place]:
                left = start[GPU] - kernel[GPU]
                for need in mine:
                    if need >= begin and not main[need]:
                        part = np.where(ends[need - begin][GPU] >= start[GPU], left, 0.0)
                        waits[self.axis[need]] = waits.get(self.axis[need], 0.0) + part
                        left = left - part
                waits[LAUNCHES] = waits.get(LAUNCHES, 0.0) + left
                busy, kernel = busy + self.seconds[place], done
            if self.waits[place]:
                thread = np.maximum(thread, done)
            if data[place]:
                aside = np.maximum(aside, done)
                stream = streams[place]
                before = chains.get(stream)
                chains[stream] = done if before is None else before + self.seconds[place]
            if self.sends[place]:
                sent[way] = np.maximum(sent[way], done)
            last = np.maximum(last, done)
        for need in self._handed_on(end):
            until = np.maximum(kernel, ends[need - begin] if need >= begin else inputs[ASIDE])
            of = self.axis[need]
            waits[of] = waits.get(of, 0.0) + until[GPU] - kernel[GPU]
            kernel = until
        chain = never
        for found in chains.values():
            chain = np.maximum(chain, found)
        gradient = sent[1] if pair else None
        found = Response(kernel, aside, thread, sent[0], last, chain, gradient)
        return ActionColumns(found, busy, self.drawn[begin:end].sum(axis=0), waits)

    def _recent(self, begin: int) -> set[int]:
        """Places before `begin` for which `ASIDE` stands: communication that runs on beside later
        actions, but what has been waited for, since another transfer of its kind was issued."""
        found = set(np.flatnonzero(self.data[:begin] & (self.frees[:begin] == 0)).tolist())
        kernels = np.append(-1, np.flatnonzero(self.issue.stream[:begin] == 0))
        for kind in (REDUCES, STORES):
            places = np.flatnonzero(self.frees[:begin] == kind)
            if len(places):  # the last lot, which no kernel cuts
                kernel = kernels[np.searchsorted(kernels, places[-1]) - 1]
                found |= set(places[places > kernel].tolist())
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


def _own_messages(program: Program, tasks: Tasks, order: Issue) -> tuple[Int, Int]:
    """The receives of messages between ranks of the class, and the send of each: places.

    Ranks along another axis than the pipeline's do the same: what one receives is what it sends.
    """
    slot, kind, tag = (column[order.rows] for column in (tasks.slot, tasks.kind, tasks.tag))
    receives: list[Int] = [np.zeros(0, dtype=np.int64)]
    sends: list[Int] = [np.zeros(0, dtype=np.int64)]
    for axis in {peer.axis for peer in program.peers} - {"pp"}:
        slots = [n for n, peer in enumerate(program.peers) if peer.axis == axis]
        ends = [
            np.flatnonzero(np.isin(slot, slots) & (kind == of))
            for of in (TaskKind.RECV, TaskKind.SEND)
        ]
        received, sent = (mine[np.argsort(tag[mine], kind="stable")] for mine in ends)
        receives.append(received)
        sends.append(sent)
    return np.concatenate(receives), np.concatenate(sends)


# ---- which places are which action ---------------------------------------------------------------


StepKind: TypeAlias = "tuple[tuple[int, str], ...]"
"""Stage and kind of an action (`schedule.actions`), or of a forward and a backward that overlap."""


class StepPlaces(NamedTuple):
    """The places of an action, or of two that overlap."""

    kind: StepKind
    complete: bool
    """Whether it does what happens once per step."""
    begin: int
    end: int


class StageMeeting(NamedTuple):
    """A collective with other ranks of the pipeline, after all actions."""

    slot: int
    aside: bool
    """Whether it waits for communication that happens once per step."""
    seconds: Float


class Cuts(NamedTuple):
    """The actions of a rank in issue order, and the sections of what comes after all of them."""

    steps: list[StepPlaces]
    sections: list[tuple[int, int]]
    meetings: list[StageMeeting]
    """One behind each section but the last."""


def cuts(program: Program, rows: ClassRows, rank: RankRows) -> Cuts:
    """Cut the places of a rank class into actions and what comes after these.

    Actions whose places are mixed, as the schedule or `time.simulate.ep_overlap` has them, are one.
    """
    tasks, at = rows.tasks, rows.issue.rows
    slots = [n for n, of in enumerate(program.communicators) if "pp" in of.axes]
    meets = (rows.kind == TaskKind.COLLECTIVE) & np.isin(tasks.slot[at], slots)
    meets &= at >= rank.end  # two ranks that hold the same reduce gradients before
    met = np.flatnonzero(meets)
    inside = np.flatnonzero((tasks.microbatch[at] >= 0) & (at < rank.end))
    last = int(inside[-1]) + 1
    # Parameters that were updated may be gathered in front of the first forward.
    step = last + np.flatnonzero(tasks.phase[at[last:]] == PHASES.index("optimizer"))
    late = last + np.flatnonzero(at[last:] < at[inside].max())  # issued behind all actions
    tail = min([*step[:1].tolist(), *met[:1].tolist(), *late[:1].tolist(), len(at)])
    borders = [tail, *(met + 1).tolist()]
    ends = [*met.tolist(), len(at)]
    meetings: list[StageMeeting] = []
    for place in met.tolist():
        before = rows.issue.needs[rows.issue.pointer[place] : rows.issue.pointer[place + 1]]
        waits = bool(rows.data[before].any())
        meetings.append(StageMeeting(int(tasks.slot[at[place]]), waits, rows.seconds[place]))
    return Cuts(_steps(tasks, at, rank, tail), [*zip(borders, ends, strict=True)], meetings)


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
    for numbers, first, end in zip(mixed, begin, [*begin[1:], tail], strict=True):
        actions = sorted((rank.actions[n] for n in numbers), key=lambda a: a.kind != "F")
        kind = tuple((a.stage, a.kind) for a in actions)
        found.append(StepPlaces(kind, not complete.isdisjoint(numbers), first, end))
    return found
