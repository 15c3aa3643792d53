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
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.program.columns import PHASES, Program, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.issue import Issue, axis_of, degree, issue, with_needs

GPU, ASIDE, HOST, MESSAGE = range(4)
INPUTS = 4
"""Inputs of a `Response`, and how many there are."""
NEVER = -1e30
"""Seconds before every time; to add durations to it leaves it before every time."""
LAUNCHES = "launches"


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


@dataclass(frozen=True, slots=True, eq=False)
class ActionColumns:
    """An action in columns: its response, and where its time goes."""

    response: Response
    busy: Float
    """Seconds that its kernels run: [configurations]."""
    waits: Mapping[str, Float]
    """Seconds that its kernels wait, by axis of communication or `LAUNCHES`: [configurations]."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassRows:
    """The rows of a rank class in issue order, with durations in columns."""

    tasks: Tasks
    issue: Issue
    kind: NDArray[np.uint8]
    seconds: Sequence[Float]
    """By place: [configurations] or one number."""
    launch: Sequence[Float]
    """Seconds of the host by place, likewise; empty: launches take no time."""
    waits: Bool
    """By place: the host waits for its end."""
    axis: Sequence[str]
    """By place: the axis of communication, "" for kernels."""
    data: Bool
    """By place: communication along dp, or once per step, which runs on beside later actions."""
    sends: Bool
    """By place: messages to another rank of the pipeline."""
    receives: Bool
    """By place: messages from another rank of the pipeline."""
    count: int
    """Configurations."""

    @classmethod
    def of(
        cls,
        program: Program,
        nth: int,
        seconds: Float,
        host: tuple[Float, Bool] | None,
        how: Execution,
    ) -> Self:
        """Class number `nth`; `seconds` are [rows, configurations], the host's [rows, 1] or so."""
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
        # Messages of the pipeline are on their way between actions (`explore.pipeline`), and take
        # the time of their send.
        pipeline = [n for n, peer in enumerate(program.peers) if peer.axis == "pp"]
        of_pipeline = np.isin(tasks.slot[rows], pipeline)
        sends = (kind == TaskKind.SEND) & of_pipeline
        message = sends | (kind == TaskKind.RECV)
        seconds = np.where(message[:, None], 0.0, seconds[rows])
        launch: list[Float] = [] if host is None else [*host[0][rows]]
        waits = np.zeros(len(rows), dtype=bool) if host is None else host[1][rows]
        return cls(
            tasks, order, kind, [*seconds], launch, waits, [*axis], data,
            sends, of_pipeline & (kind == TaskKind.RECV), seconds.shape[1],
        )  # fmt: skip

    def play(self, begin: int, end: int) -> ActionColumns:
        """The places from `begin` to `end` as one action."""
        order = self.issue
        pointer: list[int] = order.pointer.tolist()
        needs: list[int] = order.needs[: pointer[end]].tolist()
        main: list[bool] = (order.stream == 0).tolist()
        data: list[bool] = self.data.tolist()
        streams: list[int] = order.stream.tolist()
        inputs = np.full((INPUTS, INPUTS, self.count), NEVER)
        inputs[range(INPUTS), range(INPUTS)] = 0.0
        ends: list[Float] = []
        kernel, aside, thread, message = inputs
        chains: dict[int, Float] = {}
        sent = last = np.full((INPUTS, self.count), NEVER)
        busy = np.zeros(self.count)
        waits: dict[str, Float] = {}
        for place in range(begin, end):
            mine = needs[pointer[place] : pointer[place + 1]]
            start = np.full((INPUTS, self.count), NEVER)
            for need in mine or [-1]:
                before = inputs[ASIDE if need >= 0 and data[need] else GPU]
                np.maximum(start, ends[need - begin] if need >= begin else before, out=start)
            if data[place] and streams[place] not in chains:
                # Issue orders leave this out where kernels between imply it, here or there.
                np.maximum(start, inputs[ASIDE], out=start)
            if self.receives[place]:
                np.maximum(start, message, out=start)
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
                sent = np.maximum(sent, done)
            last = np.maximum(last, done)
        chain = np.full((INPUTS, self.count), NEVER)
        for found in chains.values():
            chain = np.maximum(chain, found)
        return ActionColumns(Response(kernel, aside, thread, sent, last, chain), busy, waits)


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


class ActionPlaces(NamedTuple):
    """The places of an action: a forward or a backward of a microbatch."""

    stage: int
    backward: bool
    microbatch: int
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

    actions: list[ActionPlaces]
    sections: list[tuple[int, int]]
    meetings: list[StageMeeting]
    """One behind each section but the last."""


def cuts(program: Program, rows: ClassRows) -> Cuts:
    """Cut the places of a rank class into actions and what comes after these."""
    tasks, at = rows.tasks, rows.issue.rows
    backward = tasks.phase[at] != PHASES.index("forward")
    inside = np.flatnonzero(tasks.microbatch[at] >= 0)
    key = np.stack([tasks.stage[at], backward, tasks.microbatch[at]], axis=1)[inside]
    _, first = np.unique(key, axis=0, return_index=True)
    begin = np.sort(inside[first])
    begin[:1] = 0
    slots = [n for n, of in enumerate(program.communicators) if "pp" in of.axes]
    meets = (rows.kind == TaskKind.COLLECTIVE) & np.isin(tasks.slot[at], slots)
    step = np.flatnonzero(tasks.phase[at] == PHASES.index("optimizer"))
    met = np.flatnonzero(meets)
    tail = min([*step[:1].tolist(), *met[:1].tolist(), len(at)])
    edges = [*begin.tolist(), tail]
    firsts = dict(zip(inside[first].tolist(), key[first].tolist(), strict=True))
    named = [firsts[min(n for n in firsts if n >= b)] for b in begin.tolist()]
    actions = [
        ActionPlaces(stage, bool(back), microbatch, b, e)
        for (stage, back, microbatch), b, e in zip(named, edges[:-1], edges[1:], strict=True)
    ]
    borders = [tail, *(met + 1).tolist()]
    ends = [*met.tolist(), len(at)]
    meetings: list[StageMeeting] = []
    for place in met.tolist():
        before = rows.issue.needs[rows.issue.pointer[place] : rows.issue.pointer[place + 1]]
        waits = bool(rows.data[before].any())
        meetings.append(StageMeeting(int(tasks.slot[at[place]]), waits, rows.seconds[place]))
    return Cuts(actions, [*zip(borders, ends, strict=True)], meetings)
