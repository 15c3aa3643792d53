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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.time.columns.row_kinds import digest

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


class ActionPlaces(NamedTuple):
    """The rows of an action but for what they take."""

    pointer: Int
    needs: Int
    """The places of the action that place n waits for: `needs[pointer[n] : pointer[n + 1]]`, or
    what was before the action (`BEFORE`, `BESIDE`)."""
    flags: Int
    """By place: `MAIN` and others."""
    stream: Int
    axis: Int
    """By place, a number of `axes`."""
    kind: Int
    """By place, a number of `TimedAction.seconds`."""
    axes: tuple[str, ...]
    handed_on: tuple[tuple[int, str], ...]
    """Places whose end the next kernel waits for, and their axes."""
    pair: bool

    @property
    def content(self) -> bytes:
        """What is equal for equal rows."""
        arrays = [of.astype(np.int64) for of in self[:6]]
        sizes = [len(of) for of in arrays]
        return digest(sizes, *arrays, self.axes, self.handed_on, self.pair)


class TimedAction(NamedTuple):
    """An action of a stage, or two that overlap."""

    places: ActionPlaces
    seconds: Float
    """Of each kind of rows: [kinds, configurations]."""
    drawn: Float
    """Seconds at TDP in which a GPU draws as much as in all rows: [configurations]."""
    launch: Float
    """Seconds of the host by place [places, 1 or configurations]; of none: they take no time."""

    def take(self, configurations: Int) -> Self:
        """The action of some configurations."""
        launch = self.launch
        if launch.shape[1] > 1:
            launch = launch[:, configurations]
        seconds = np.ascontiguousarray(self.seconds[:, configurations])
        return self._replace(seconds=seconds, drawn=self.drawn[configurations], launch=launch)

    @property
    def content(self) -> bytes:
        """What is equal for equal actions."""
        numbers = self.seconds, self.drawn, np.ascontiguousarray(self.launch)
        return digest(self.places.content, *(of.shape for of in numbers), *numbers)

    def _clock(self) -> Callable[[Float], Float]:
        """From a moment by input to the seconds since the action began, [configurations].

        The host is far ahead of the kernels, but where launches take longer than these do: there
        the kernels before have just run, as they were launched.
        """
        kinds = self.places.kind[(self.places.flags & MAIN) > 0]
        kernels = np.bincount(kinds, minlength=len(self.seconds)) @ self.seconds
        late = self.launch.sum(axis=0) - kernels
        if not (late > 0).any():
            return lambda moment: moment[GPU]
        ahead = np.where(late > 0, 0.0, NEVER)
        return lambda moment: np.maximum(moment[GPU], moment[HOST] + ahead)

    def play(self) -> ActionColumns:
        """Its response, and where its time goes."""
        lists: list[list[int]] = [of.tolist() for of in self.places[:6]]
        pointer, needs, flags, streams, axis, kind = lists
        pair, axes = self.places.pair, self.places.axes
        configurations = len(self.drawn)
        seconds: list[Float] = [*self.seconds]
        launch: list[Float] = [*self.launch]
        count = INPUTS + pair
        inputs = np.full((count, count, configurations), NEVER)
        inputs[range(count), range(count)] = 0.0
        ends: list[Float] = []
        kernel, aside, thread, stored = inputs[:MESSAGE]
        chains: dict[int, Float] = {}
        to_host: set[int] = set()
        never = np.full((count, configurations), NEVER)
        sent, last = [never, never], never
        busy = np.zeros(configurations)
        waits: dict[str, Float] = {}
        clock = self._clock()
        for place, flag in enumerate(flags):
            mine = needs[pointer[place] : pointer[place + 1]]
            took = seconds[kind[place]]
            way = int(pair and bool(flag & BACKWARD))
            start = inputs[GPU].copy() if not mine else np.full_like(never, NEVER)
            for need in mine:
                before = inputs[_MOMENTS[need]] if need < 0 else ends[need]
                np.maximum(start, before, out=start)
            if flag & DATA and streams[place] not in chains:
                # Issue orders leave this out where kernels between imply it, here or there.
                np.maximum(start, inputs[STORED if flag & STORING else ASIDE], out=start)
            if flag & RECEIVES:
                np.maximum(start, inputs[MESSAGE + way], out=start)
            if launch:
                thread = thread + launch[place]
                np.maximum(start, thread, out=start)
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
            last = np.maximum(last, done)
        for need, of in self.places.handed_on:
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
        found = Response(
            kernel, aside, thread, stored, sent[0], last, chain, chain_stored, gradient
        )
        return ActionColumns(found, busy, self.drawn, waits)
