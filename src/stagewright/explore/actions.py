"""What an action of a stage makes of the times at which it may start, for many configurations.

The rows of a stage are the same in configurations of one structure, and so is what each waits for
(`time.simulate.issue`, `time.simulate.host`); only durations differ. An action is played once with
arrays [configurations] as its times. What comes before it enters by five moments: when the kernels
before it have ended (`GPU`), when communication along dp is done (`ASIDE`), when the host has
launched everything before it (`HOST`), when activations that go to the host are there (`STORED`),
and when the message that it needs is there (`MESSAGE`).
Every end is the latest of these moments, each plus a constant: a matrix over (max, +), `Response`,
which a schedule of any number of microbatches and stages puts together (`explore.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.time.columns.row_kinds import DistinctRows, digest

GPU, ASIDE, HOST, STORED, MESSAGE, GRADIENT = range(6)
INPUTS = 5
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
    stored: Float
    """All activations that go to the host are there."""
    sent: Float
    """Its message has been made; `NEVER` where it sends none."""
    end: Float
    """Every task has ended."""
    chain: Float
    """All communication that runs on beside later actions has ended, if none waits but the first of
    each stream. With more layers this may come to be the longest of all ways through an action."""
    chain_stored: Float
    """As `chain`, of what goes to the host."""
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


MAIN, DATA, SENDS, RECEIVES, BACKWARD, WAITS, STORING = (1 << n for n in range(7))
"""What a place is: a kernel of the model's stream; communication along dp, once per step, or to the
host, which runs on beside later actions; a message to another rank of the pipeline, and from one;
part of a backward; what the host waits for the end of; a transfer to the host."""
BEFORE, BESIDE, BESIDE_STORES = -1, -2, -3
"""What a place of an action waits for before its action: kernels, communication that runs on
beside, or transfers to the host."""
_MOMENTS = {BEFORE: GPU, BESIDE: ASIDE, BESIDE_STORES: STORED}


StepKind: TypeAlias = "tuple[tuple[int, str], ...]"
"""Stage and kind of an action (`schedule.actions`), or of a forward and a backward that overlap."""


@dataclass(frozen=True, eq=False)
class ActionPlaces:
    """The rows of an action but for what they take, and what its host waits for."""

    pointer: Int
    needs: Int
    """The places of the action that place n waits for: `needs[pointer[n] : pointer[n + 1]]`, or
    what was before the action (`BEFORE`, `BESIDE`)."""
    flags: Int
    """By place: `MAIN` and others."""
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
        columns = self.pointer, self.needs, self.flags, self.stream, self.axis
        arrays = [of.astype(np.int64) for of in columns]
        return digest([len(of) for of in arrays], *arrays, self.axes, self.handed_on, self.pair)


@dataclass(frozen=True, slots=True, eq=False)
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

    def play(self, some: Int) -> ActionColumns:
        """The response of some configurations, and where their time goes."""
        drawn = np.zeros(len(some))
        for number, times in self.drawn.items():
            drawn += times * self.known.rows[number][some]
        flags: list[int] = self.places.flags.tolist()
        if self.waits is not None:
            flags = (self.places.flags | WAITS * self.waits).tolist()
        seconds = [self.known.rows[number][some] for number in self.seconds]
        kinds: list[int] = self.kind.tolist()
        launch = self.launch if self.launch.shape[1] == 1 else self.launch[:, some]
        return _played(self.places, flags, [seconds[kind] for kind in kinds], [*launch], drawn)


def _clock(kernels: Float, launch: Sequence[Float]) -> Callable[[Float], Float]:
    """From a moment by input to the seconds since an action began, [configurations]; `kernels` are
    the seconds of those of the model's stream.

    The host is far ahead of the kernels, but where launches take longer than these do: there
    the kernels before have just run, as they were launched.
    """
    late = np.sum(launch, axis=0) - kernels
    if not (late > 0).any():
        return lambda moment: moment[GPU]
    ahead = np.where(late > 0, 0.0, NEVER)
    return lambda moment: np.maximum(moment[GPU], moment[HOST] + ahead)


def _played(
    places: ActionPlaces,
    flags: Sequence[int],
    seconds: Sequence[Float],
    launch: Sequence[Float],
    drawn: Float,
) -> ActionColumns:
    """An action of rows with these flags: what they take, and the host, by place."""
    lists: list[list[int]] = [
        of.tolist() for of in (places.pointer, places.needs, places.stream, places.axis)
    ]
    pointer, needs, streams, axis = lists
    pair, axes, configurations = places.pair, places.axes, len(drawn)
    count = INPUTS + pair
    inputs = np.full((count, count, configurations), NEVER)
    inputs[range(count), range(count)] = 0.0
    ends: list[Float] = []
    kernel, aside, thread, stored = inputs[:MESSAGE]
    chains: dict[int, Float] = {}
    to_host: set[int] = set()
    never = np.full((count, configurations), NEVER)
    sent = [never, never]
    busy = np.zeros(configurations)
    waits: dict[str, Float] = {}
    main = [took for took, flag in zip(seconds, flags, strict=True) if flag & MAIN]
    clock = _clock(np.sum(main, axis=0), launch)
    for place, flag in enumerate(flags):
        mine = needs[pointer[place] : pointer[place + 1]]
        took = seconds[place]
        way = int(pair and bool(flag & BACKWARD))
        awaited = [inputs[_MOMENTS[need]] if need < 0 else ends[need] for need in mine]
        if flag & DATA and streams[place] not in chains:
            # Issue orders leave this out where kernels between imply it, here or there.
            awaited.append(inputs[STORED if flag & STORING else ASIDE])
        if flag & RECEIVES:
            awaited.append(inputs[MESSAGE + way])
        if not mine:
            awaited.append(inputs[GPU])
        if launch:
            thread = thread + launch[place]
            awaited.append(thread)
        start = reduce(np.maximum, awaited)
        done = start + took
        ends.append(done)
        if flag & MAIN:
            at = clock(start)
            left = at - clock(kernel)
            for need in mine:
                if need >= 0 and not flags[need] & MAIN:
                    part = np.where(clock(ends[need]) >= at, left, 0.0)
                    of = axes[axis[need]]
                    waits[of] = waits.get(of, 0.0) + part
                    left = left - part
            waits[LAUNCHES] = waits.get(LAUNCHES, 0.0) + left
            busy, kernel = busy + took, done
        if flag & WAITS:
            thread = np.maximum(thread, done)
        if flag & DATA:
            stream = streams[place]
            if flag & STORING:
                stored = np.maximum(stored, done)
                to_host.add(stream)
            else:
                aside = np.maximum(aside, done)
            before = chains.get(stream)
            chains[stream] = done if before is None else before + took
        if flag & SENDS:
            sent[way] = np.maximum(sent[way], done)
    for need, of in places.handed_on:
        until = np.maximum(kernel, ends[need] if need >= 0 else inputs[_MOMENTS[need]])
        waits[of] = waits.get(of, 0.0) + clock(until) - clock(kernel)
        kernel = until
    chain = chain_stored = never
    for stream, found in chains.items():
        if stream in to_host:
            chain_stored = np.maximum(chain_stored, found)
        else:
            chain = np.maximum(chain, found)
    gradient = sent[1] if pair else None
    last = np.max(ends, axis=0) if ends else never
    found = Response(kernel, aside, thread, stored, sent[0], last, chain, chain_stored, gradient)
    return ActionColumns(found, busy, drawn, waits)
