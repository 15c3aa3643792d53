"""Repeated layers: found by the structure of what is between places where one value is alive."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.imports.ops import LEAVES, OpCall

MOST_HANDED = 3
"""Values beside the stream that may go through many layers: an encoder's output, for example."""

MOST_TRIED = 3
"""Values that are tried at a time as one that goes through many layers."""

SHORTEST_STRETCH = 8
"""Calls between layers, from which on a value that goes through them is looked for."""

RELAXED = ("causal", "window", "by")
"""Attributes in which layers of one model may differ."""

Cut = tuple[int, str]
"""Where a pass can be cut, and the value that is alive there."""
Group = tuple[int, int, bool]
"""The first segment, the one behind the last, and whether they are a layer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive calls that read one value of the calls before them, and yield one."""

    calls: tuple[OpCall, ...]
    reads: str
    """The value that comes in; empty: the piece is the first."""
    yields: str
    layer: bool
    signature: tuple[object, ...]


class Folded(NamedTuple):
    """A forward pass in pieces."""

    pieces: tuple[Piece, ...]
    handed: frozenset[str]
    """Values that pieces read besides the one that comes in."""


def fold(calls: Mapping[str, OpCall], outputs: Sequence[str]) -> Folded:
    """The calls in pieces; equal pieces have equal signatures, and those that repeat are layers."""
    computed = [call for call in calls.values() if call.op not in LEAVES]
    best = now = _folding(calls, computed, outputs, frozenset())
    for _ in range(MOST_HANDED):
        more = _candidates(computed, now)
        if not more:
            break
        tried = [_folding(calls, computed, outputs, now.handed | {name}) for name in more]
        now = max(tried, key=lambda found: found.covered)
        if now.covered >= best.covered + SHORTEST_STRETCH:
            best = now
    return Folded(best.pieces(outputs), best.handed)


class _Folding(NamedTuple):
    """A forward pass cut where one value, besides those handed on, is alive."""

    cuts: Sequence[Cut]
    segments: Sequence[Stretch]
    groups: Sequence[Group]
    handed: frozenset[str]

    @property
    def covered(self) -> int:
        """The number of calls that are in layers: what a choice of handed values is good for."""
        return sum(self.length(a, b) for a, b, layer in self.groups if layer)

    def length(self, a: int, b: int) -> int:
        """The number of calls of some segments."""
        return sum(len(segment.calls) for segment in self.segments[a:b])

    def pieces(self, outputs: Sequence[str]) -> tuple[Piece, ...]:
        """The groups of segments, each with what it reads and yields."""
        exact = [segment.signature(relaxed=False) for segment in self.segments]
        made: list[Piece] = []
        for a, b, layer in self.groups:
            calls = tuple(call for segment in self.segments[a:b] for call in segment.calls)
            yields = self.cuts[b][1] if b < len(self.segments) else outputs[0]
            made.append(Piece(calls, self.cuts[a][1], yields, layer, (layer, *exact[a:b])))
        return tuple(made)


def _folding(
    calls: Mapping[str, OpCall],
    computed: Sequence[OpCall],
    outputs: Sequence[str],
    handed: frozenset[str],
) -> _Folding:
    """The pass cut, and its repeated layers, where some values are handed on beside the stream."""
    cuts = _cuts(computed, outputs, handed)
    segments = [
        Stretch(tuple(computed[a:b]), calls, handed, stream)
        for (a, stream), (b, _) in itertools.pairwise(cuts)
    ]
    loose = [hash(segment.signature(relaxed=True)) for segment in segments]
    return _Folding(cuts, segments, _groups(loose, segments), handed)


class Stretch(NamedTuple):
    """The calls between two cuts."""

    calls: tuple[OpCall, ...]
    of: Mapping[str, OpCall]
    handed: frozenset[str]
    reads: str

    @property
    def has_parameters(self) -> bool:
        """Whether some call reads a parameter."""
        return any(self.of[n].op == "param" for call in self.calls for n in call.operands)

    def signature(self, *, relaxed: bool) -> tuple[object, ...]:
        """The structure without names; `relaxed`: and without reach of attention and factors."""
        numbers: dict[str, object] = {self.reads: "stream"}
        rows: list[object] = []
        for call in self.calls:
            operands: list[object] = []
            for name in call.operands:
                if name not in numbers:
                    leaf = self.of[name]
                    numbers[name] = len(numbers)
                    if leaf.op == "input" or name in self.handed:
                        numbers[name] = name
                    operands.append((leaf.op, leaf.shape, leaf.dtype))
                operands.append(numbers[name])
            numbers[call.name] = len(numbers)
            known = call.signature
            if relaxed:
                attrs = {k: v for k, v in call.attrs.items() if k not in RELAXED}
                known = (call.op, call.shape, call.dtype, call.ins, call.out, str(attrs))
            rows.append((known, tuple(operands)))
        return tuple(rows)


def _cuts(computed: Sequence[OpCall], outputs: Sequence[str], handed: frozenset[str]) -> list[Cut]:
    """The places where one value alone is alive, and that value; the beginning and the end."""
    last = {name: i for i, call in enumerate(computed) for name in call.operands}
    last |= {name: len(computed) for name in outputs}
    alive = set[str]()
    cuts: list[Cut] = [(0, "")]
    aside = False  # whether a value that is handed on was made since the last cut
    for i, call in enumerate(computed):
        if i and len(alive) == 1:
            (only,) = alive
            if only != cuts[-1][1] or aside:
                cuts.append((i, only))
                aside = False
        aside |= call.name in handed
        if last.get(call.name, -1) > i and call.name not in handed:
            alive.add(call.name)
        alive -= {name for name in call.operands if last[name] <= i}
    return [*cuts, (len(computed), "")]


def _candidates(computed: Sequence[OpCall], found: _Folding) -> list[str]:
    """Values that the longest stretch without a layer reads often, and from afar."""
    lengths = {(a, b): found.length(a, b) for a, b, layer in found.groups if not layer}
    length = max(lengths.values(), default=0)
    if length < SHORTEST_STRETCH:
        return []
    first = next(a for (a, _), n in lengths.items() if n == length)
    begin = found.cuts[first][0]
    made = {call.name: i for i, call in enumerate(computed)}
    readers: dict[str, int] = {}
    spans: dict[str, int] = {}
    for i in range(begin, begin + length):
        for name in computed[i].operands:
            if name in made and name not in found.handed:
                readers[name] = readers.get(name, 0) + 1
                spans[name] = i - made[name]
    many = [name for name, count in readers.items() if count > 1 and spans[name] > length // 3]
    return sorted(many, key=lambda name: -spans[name] * readers[name])[:MOST_TRIED]


def _groups(signatures: Sequence[int], segments: Sequence[Stretch]) -> list[Group]:
    """Segments in groups: those of each repeated layer, and those between layers."""
    found = _layers(signatures, segments, 0, len(signatures))
    groups: list[Group] = []
    at = 0
    for begin, end in sorted(found):
        if begin > at:
            groups.append((at, begin, False))
        groups.append((begin, end, True))
        at = end
    if at < len(signatures):
        groups.append((at, len(signatures), False))
    if groups and groups[0][2]:  # the first piece reads what comes from outside
        groups[0] = (*groups[0][:2], False)
    return groups


def _layers(
    signatures: Sequence[int], segments: Sequence[Stretch], low: int, high: int
) -> list[tuple[int, int]]:
    """The layers among some segments: of the longest repetition, and of those before and behind."""
    best = (0, 0, 0, 0)  # segments covered, -period, -start, count
    for period in range(1, (high - low) // 2 + 1):
        run = 0
        for i in range(low + period, high):
            run = run + 1 if signatures[i] == signatures[i - period] else 0
            count = run // period + 1
            if run >= period:
                start = i - run - period + 1
                best = max(best, (count * period, -period, -start, count))
    covered, period, start, count = best[0], -best[1], -best[2], best[3]
    if not covered:
        return []
    unit = segments[start : start + period]
    if not any(segment.has_parameters for segment in unit):
        return []
    begin, end = start, start + period * count
    while period > 1 and begin - period > low and signatures[begin - period] == signatures[start]:
        begin -= period
    while period > 1 and end + period <= high and signatures[end] == signatures[start]:
        end += period
    here = [(i, i + period) for i in range(begin, end, period)]
    return [
        *_layers(signatures, segments, low, begin),
        *here,
        *_layers(signatures, segments, end, high),
    ]
