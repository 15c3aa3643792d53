"""When the rows of an action run on a rank that waits for no other: seconds of many tuples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.explore.actions import RECEIVES, SENDS
from stagewright.explore.class_rows import ClassPlaces, ClassRows
from stagewright.program.columns import Program


class Clock(NamedTuple):
    """What a rank has come to, in seconds [tuples] each."""

    gpu: Float
    """The kernels so far have ended, and what the next one waits for."""
    host: Float
    """The host has launched all rows so far."""
    streams: Mapping[Hashable, Float]
    """The last transfer of each stream but the kernels' has ended (`TimedRank.streams`)."""
    lots: Mapping[int, Float]
    """All transfers so far of each kind that frees memory have ended (`ClassPlaces.frees`)."""

    @classmethod
    def start(cls, tuples: int) -> Clock:
        """Nothing has run."""
        return cls(np.zeros(tuples), np.zeros(tuples), {}, {})


class RowTimes(NamedTuple):
    """When rows of an action, which follow each other, can start and have ended: [rows, tuples]."""

    ready: Float
    end: Float


_MESSAGE = -1
"""In place of the number of a row's seconds, for a message to another rank."""


class TimedRank(NamedTuple):
    """The rows of a rank class, and what they take."""

    places: ClassPlaces
    rows: ClassRows
    streams: tuple[Hashable, ...]
    """What each stream is, in whichever program (`time.simulate.issue.streams_of`)."""
    message: Float
    """Seconds of a message to another rank of the pipeline: [tuples]."""

    @classmethod
    def of(
        cls, program: Program, places: ClassPlaces, rows: ClassRows, message: Float
    ) -> TimedRank:
        """Of a program's rank class."""
        streams = (0, *program.communicators, *program.peers, "load", "store")
        return cls(places, rows, streams, message)

    @property
    def sends(self) -> Bool:
        """By place, whether it is a message to another rank: one to the same rank takes no time
        and a place that receives waits for it."""
        flags, order = self.places.flags, self.places.issue
        found = (flags & SENDS) > 0
        found[order.needs[np.repeat(flags & RECEIVES, np.diff(order.pointer)) > 0]] = False
        return found

    @property
    def main(self) -> Bool:
        """Which rows of the program are kernels of the model's stream."""
        order = self.places.issue
        found = np.zeros(len(order), dtype=bool)
        found[order.rows[order.stream == 0]] = True
        return found

    def _took(self, number: int) -> Float:
        """Seconds of rows of a kind, by its number: [tuples]."""
        return self.message if number == _MESSAGE else self.rows.known.rows[number]

    def _latest(self, place: int) -> set[int]:
        """The last place of each stream before one."""
        _, back = np.unique(self.places.issue.stream[:place][::-1], return_index=True)
        return {place - 1 - nth for nth in back.tolist()}

    def play(self, begin: int, end: int, before: Clock, some: Int) -> tuple[RowTimes, Clock]:
        """The rows of the program from `begin` to `end`, of some tuples, as `simulate` has them.

        Where they wait for earlier rows, these are those that the clock has come to: the kernels,
        or the last of a stream.
        """
        order, of = self.places.issue, self.rows
        own = np.flatnonzero((order.rows >= begin) & (order.rows < end)).tolist()
        rows: list[int] = (order.rows - begin).tolist()
        pointer: list[int] = order.pointer.tolist()
        needs: list[int] = order.needs.tolist()
        stream: list[int] = order.stream.tolist()
        seconds: list[int] = np.where(self.sends, _MESSAGE, of.seconds).tolist()
        waits = None if of.waits is None else of.waits.tolist()
        known = {n: self._took(n)[some] for n in {seconds[place] for place in own}}
        launch = of.launch if of.launch.shape[1] == 1 else of.launch[:, some]
        frees: list[int] = self.places.frees.tolist()
        latest = self._latest(own[0] if own else 0)
        streams, lots = dict(before.streams), dict(before.lots)
        open_: set[int] = set()  # kinds of transfers of which the last lot may go on
        gpu, host = before.gpu, before.host
        gate = gpu
        ends: dict[int, Float] = {}
        ready, done = np.zeros((2, end - begin, len(some)))
        for place in own:
            nth, row = stream[place], rows[place]
            start = ready[row]
            awaited = needs[pointer[place] : pointer[place + 1]]
            for need in awaited:
                if need in ends:
                    np.maximum(start, ends[need], out=start)
                elif stream[need] <= 0:
                    np.maximum(start, before.gpu, out=start)
                elif need in latest and self.streams[stream[need]] in before.streams:
                    np.maximum(start, before.streams[self.streams[stream[need]]], out=start)
            if not awaited:
                np.maximum(start, gate, out=start)
            free = frees[place]
            if free and free not in open_:  # kernels behind it wait for the lots before
                open_.add(free)
                gate = np.maximum(gate, lots.get(free, gate))
            # Issue orders leave out what kernels imply, in this program.
            if nth == 0:
                np.maximum(start, np.maximum(gpu, gate), out=start)
                open_.clear()
            elif nth > 0 and self.streams[nth] in streams:
                np.maximum(start, streams[self.streams[nth]], out=start)
            if len(launch):
                host = host + launch[place]
                np.maximum(start, host, out=start)
            ends[place] = finished = np.add(start, known[seconds[place]], out=done[row])
            if nth == 0:
                gpu = finished
            elif nth > 0:
                streams[self.streams[nth]] = finished
            if free:
                lots[free] = np.maximum(finished, lots.get(free, finished))
            if waits is not None and waits[place]:
                host = np.maximum(host, finished)
        return RowTimes(ready, done), Clock(np.maximum(gpu, gate), host, streams, lots)
