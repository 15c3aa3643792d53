"""What an action of a stage makes of the times at which it may start, for many configurations.

The rows of a stage are the same in configurations of one structure, and so is what each waits for
(`time.simulate.issue`, `time.simulate.host`); only durations differ. An action is played once with
arrays [configurations] as its times. What comes before it enters by moments: when the kernels
before it have ended (`GPU`), when the host has launched everything before it (`HOST`), when
transfers that run on beside later actions are done, those of each kind of stream (`STREAMS`), and
when the message that it needs is there (`MESSAGE`).
Every end is the latest of these moments, each plus a constant: a matrix over (max, +), `Response`,
which a schedule of any number of microbatches and stages puts together (`explore.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.arrays import Bool, Float, Int, digest, distinct_rows
from stagewright.time.columns.row_kinds import DistinctRows

GPU, HOST, ASIDE, REPLICATED, STORED, MESSAGE, GRADIENT = range(7)
INPUTS = MESSAGE + 1
"""Inputs of a `Response`, and how many there are; a forward and a backward that overlap have one
more, since each waits for a message: `GRADIENT` is the backward's. Those before `MESSAGE` are the
moments of a rank, which a response moves."""
STREAMS = ASIDE, REPLICATED, STORED
"""Of transfers that run on beside later actions, by kind of stream: communication along dp, or
among shards; gradients of shards that are reduced among replicas; and stores to the host."""
NEVER = -1e30
"""Seconds before every time; to add durations to it leaves it before every time."""
LAUNCHES = "launches"
REDUCES, STORES = 1, 2
"""Kinds of transfers that free memory, of which no more than two lots may be pending."""


class Response(NamedTuple):
    """When an action is done with what, in seconds [inputs, configurations] from each input."""

    behind: Float
    """Seconds from the end of its kernels until all communication `ASIDE` has ended, if the last
    layer's waits for none of earlier layers, but 0 at least; `NEVER` without any:
    [1, configurations]."""
    moments: Sequence[Float]
    """By moment: its last kernel has ended, the host has launched all of it, and all transfers of
    each kind of stream have ended."""
    sent: Float
    """Its message has been made; `NEVER` where it sends none."""
    end: Float
    """Every task has ended."""
    chains: Sequence[Float]
    """By kind of stream, all transfers have ended, if none waits for kernels but that of the first
    layer. With more layers this, or what is `behind` the kernels, may come to be the longest of all
    ways through an action."""
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


MAIN, SENDS, RECEIVES, BACKWARD, WAITS, EARLY, LATE = (1 << n for n in range(7))
"""What a place is, as bits.

`MAIN`: a kernel of the model's stream. `SENDS`, `RECEIVES`: a message to another rank of the
pipeline, or from one. `BACKWARD`: part of a backward. `WAITS`: the host waits for its end. `EARLY`:
issued before the second layer's transfers that run beside kernels. `LATE`: issued with those of the
last layer or behind them.
"""


StepKind: TypeAlias = "tuple[tuple[int, str], ...]"
"""Stage and kind of an action (`schedule.actions`), or of a forward and a backward that overlap."""


@dataclass(frozen=True, eq=False)
class ActionPlaces:
    """The rows of an action but for what they take, and what its host waits for."""

    pointer: Int
    needs: Int
    """The places of the action that place n waits for: `needs[pointer[n] : pointer[n + 1]]`; for
    what was before the action, `~moment`."""
    flags: Int
    """By place: `MAIN` and others."""
    beside: Int
    """By place, the kind of its stream (`STREAMS`) where it runs on beside later actions; else 0:
    communication along dp, what happens once per step, and transfers to the host."""
    queue: Int
    """As `beside`, and of others on a stream that reduces gradients of microbatches: the first
    place of an action on a stream is behind what that has transferred before."""
    stream: Int
    axis: Int
    """By place, a number of `axes`."""
    axes: tuple[str, ...]
    handed_on: tuple[tuple[int, str], ...]
    """Places whose end the next kernel waits for, and their axes."""
    pair: bool

    @cached_property
    def content(self) -> bytes:
        """What is equal for equal rows."""
        columns = (
            self.pointer, self.needs, self.flags, self.beside, self.queue, self.stream, self.axis
        )  # fmt: skip
        arrays = [of.astype(np.int64) for of in columns]
        return digest([len(of) for of in arrays], *arrays, self.axes, self.handed_on, self.pair)


@dataclass(frozen=True, eq=False)
class TimedAction:
    """An action of a stage, or two that overlap."""

    places: ActionPlaces
    known: DistinctRows
    seconds: Sequence[int]
    """What rows of each kind take, as numbers of known rows: [kinds]."""
    kind: Int
    """By place, which of them."""
    drawn: Mapping[int, int]
    """Seconds at TDP in which a GPU draws as much as in all rows: as known rows by number, and how
    often each is added."""
    launch: Float
    """Seconds of the host by place [places, 1 or configurations]; of none: they take no time."""
    waits: Bool | None
    """By place, whether the host waits for it; None: nowhere."""

    @cached_property
    def shape(self) -> Hashable:
        """Equal for actions that can be played together, which differ in what their rows take."""
        waits = None if self.waits is None else self.waits.tobytes()
        return self.places.content, waits, len(self.launch)

    def launched(self, some: Int) -> Float:
        """Seconds of the host by place, of some configurations."""
        return self.launch if self.launch.shape[1] == 1 else self.launch[:, some]

    def drawn_by(self, some: Int) -> Float:
        """What a GPU draws in all rows, of some configurations."""
        drawn = np.zeros(len(some))
        for number, times in self.drawn.items():
            drawn += times * self.known.rows[number][some]
        return drawn


def played(every: Sequence[tuple[TimedAction, Int]]) -> ActionColumns:
    """The responses of actions of one `shape`, and where their time goes: of some configurations
    of each, behind each other."""
    action, some = every[0]
    flags: list[int] = action.places.flags.tolist()
    if action.waits is not None:
        flags = (action.places.flags | WAITS * action.waits).tolist()
    # Places of one kind take the same in each of the actions.
    place, kind = distinct_rows([of.kind for of, _ in every])
    kinds: list[int] = kind.tolist()
    places: list[int] = place.tolist()
    seconds: list[Float] = [
        np.concatenate([of.known.rows[of.seconds[int(of.kind[at])]][own] for of, own in every])
        for at in places
    ]
    launch = action.launched(some)
    if any(of.launch is not action.launch or of.launch.shape[1] > 1 for of, _ in every[1:]):
        sizes = [(len(of.launch), len(own)) for of, own in every]
        each = [of.launched(own) for of, own in every]
        launch = np.concatenate([*map(np.broadcast_to, each, sizes)], axis=1)
    drawn = np.concatenate([of.drawn_by(own) for of, own in every])
    return _played(action.places, flags, [seconds[kind] for kind in kinds], [*launch], drawn)


def _inputs(of: ActionPlaces, flags: Sequence[int], launch: Sequence[Float]) -> list[int]:
    """The inputs that anything of an action is behind, `GPU` first."""
    waits = {~need for need in (*of.needs.tolist(), *(need for need, _ in of.handed_on))}
    receives = {bool(flag & BACKWARD) for flag in flags if flag & RECEIVES}
    there = {GPU, *waits.intersection(STREAMS), *of.queue.tolist()}
    if launch:
        there.add(HOST)
    if receives and (False in receives or not of.pair):
        there.add(MESSAGE)
    if of.pair and True in receives:
        there.add(GRADIENT)
    return sorted(there)


def _clock(kernels: Float, launch: Sequence[Float], host: int) -> Callable[[Float], Float]:
    """From a moment by input to the seconds since an action began, [configurations]; `kernels` are
    the seconds of those of the model's stream, `host` is the row of that input.

    The host is far ahead of the kernels, except where launches take longer than kernels run: there
    each kernel ends when the host launches the next one.
    """
    late = np.sum(launch, axis=0) - kernels
    if not (late > 0).any():
        return _of_kernels
    ahead = np.where(late > 0, 0.0, NEVER)
    return lambda moment: np.maximum(moment[GPU], moment[host] + ahead)


def _of_kernels(moment: Float) -> Float:
    """The clock of kernels that are behind no launches."""
    return moment[GPU]


def _played(
    places: ActionPlaces,
    flags: Sequence[int],
    seconds: Sequence[Float],
    launch: Sequence[Float],
    drawn: Float,
) -> ActionColumns:
    """An action of rows with these flags: what they take, and the host, by place."""
    lists: list[list[int]] = [
        of.tolist()
        for of in (
            places.pointer,
            places.needs,
            places.beside,
            places.queue,
            places.stream,
            places.axis,
        )
    ]
    pointer, needs, beside, queue, streams, axis = lists
    pair, axes, configurations = places.pair, places.axes, len(drawn)
    count = INPUTS + pair
    own = _inputs(places, flags, launch)  # ends are behind these only: [of these, configurations]
    inputs = np.full((count, len(own), configurations), NEVER)
    inputs[own, range(len(own))] = 0.0
    ends: list[Float] = []
    kernel, thread = inputs[GPU], inputs[HOST]
    of_streams = {of: inputs[of] for of in STREAMS}
    chains: dict[int, dict[int, Float]] = {of: {} for of in STREAMS}  # by stream
    begun: set[int] = set()  # streams
    last_layer: dict[int, Float] = {}
    never = np.full((len(own), configurations), NEVER)
    sent = [never, never]
    busy = np.zeros(configurations)
    waits: dict[str, Float] = {}
    main = [took for took, flag in zip(seconds, flags, strict=True) if flag & MAIN]
    clock = _clock(np.sum(main, axis=0), launch, own.index(HOST) if launch else GPU)
    # Launches put off no kernel on the clock of kernels while they are behind none of these.
    put_off, last = clock is not _of_kernels, ~GPU
    for place, flag in enumerate(flags):
        mine = needs[pointer[place] : pointer[place + 1]]
        took = seconds[place]
        way = int(pair and bool(flag & BACKWARD))
        of_stream, stream = beside[place], streams[place]
        awaited = [inputs[~need] if need < 0 else ends[need] for need in mine]
        if queue[place] and stream not in begun:
            # Issue orders leave this out where kernels between imply it, here or there.
            awaited.append(inputs[queue[place]])
            begun.add(stream)
        if flag & RECEIVES:
            awaited.append(inputs[MESSAGE + way])
        if not mine:
            awaited.append(inputs[GPU])
        if launch:
            thread = thread + launch[place]
            awaited.append(thread)
        start = reduce(np.maximum, awaited)
        done = start + took
        if of_stream == ASIDE and flag & LATE:
            some = [thread] if launch else []
            for need in mine:
                if need in last_layer:
                    some.append(last_layer[need])
                elif need == ~GPU or (need >= 0 and not beside[need]):
                    some.append(inputs[GPU] if need < 0 else ends[need])
            last_layer[place] = reduce(np.maximum, some, never) + took
        ends.append(done)
        if flag & MAIN:
            if put_off or any(need != last for need in mine):
                at = clock(start)
                left = at - clock(kernel)
                for need in mine:
                    if need >= 0 and not flags[need] & MAIN:
                        part = np.where(clock(ends[need]) >= at, left, 0.0)
                        of = axes[axis[need]]
                        waits[of] = waits.get(of, 0.0) + part
                        left = left - part
                waits[LAUNCHES] = waits.get(LAUNCHES, 0.0) + left
            else:  # it waits for the kernel before it alone
                waits.setdefault(LAUNCHES, np.zeros(configurations))
            busy += took
            kernel, last = done, place
        if flag & WAITS:
            thread, put_off = np.maximum(thread, done), True
        if of_stream:
            of_streams[of_stream] = np.maximum(of_streams[of_stream], done)
            before = chains[of_stream].get(stream)
            chains[of_stream][stream] = done if before is None or flag & EARLY else before + took
        if flag & SENDS:
            sent[way] = np.maximum(sent[way], done)
    for need, of in places.handed_on:
        until = np.maximum(kernel, ends[need] if need >= 0 else inputs[~need])
        waits[of] = waits.get(of, 0.0) + clock(until) - clock(kernel)
        kernel = until
    # A kernel ends behind those before it, and every place behind those that it waits for.
    last_ones = sorted({*range(len(flags))}.difference(needs))
    others = [ends[place] for place in last_ones if not flags[place] & MAIN]
    latest = reduce(np.maximum, others, never if last < 0 else ends[last])
    behind = np.full((1, configurations), 0.0 if last_layer else NEVER)
    for end in last_layer.values():
        behind = np.maximum(behind, end[GPU] - kernel[GPU])

    def by_input(end: Float, own_input: int = GPU) -> Float:
        """By every input: those that nothing else of the action is behind have their own moment."""
        every = np.full((count, configurations), NEVER)
        every[own_input] = 0.0
        every[own] = end
        return every

    moments = kernel, thread, *of_streams.values()
    found = Response(
        behind,
        [by_input(end, own_input) for own_input, end in enumerate(moments)],
        by_input(sent[0]),
        by_input(latest),
        [by_input(reduce(np.maximum, each.values(), never)) for each in chains.values()],
        by_input(sent[1]) if pair else None,
    )
    return ActionColumns(found, busy, drawn, waits)
