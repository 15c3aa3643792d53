"""Repeated layers: found by the structure of what is between places where one value is alive."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.imports.calls import LEAVES, OpCall

MOST_HANDED = 3
"""Values beside the stream that may go through many layers: an encoder's output, for example."""


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
    handed = frozenset[str]()
    cuts = _cuts(computed, outputs, handed)
    for _ in range(MOST_HANDED):
        more = _handed(computed, outputs, cuts, handed)
        if more is None:
            break
        tried = _cuts(computed, outputs, handed | {more})
        if len(tried) <= len(cuts) + 2:
            break
        handed, cuts = handed | {more}, tried
    segments = [
        Stretch(tuple(computed[a:b]), calls, handed, stream)
        for (a, stream), (b, _) in itertools.pairwise(cuts)
    ]
    exact = [segment.signature(relaxed=False) for segment in segments]
    loose = [segment.signature(relaxed=True) for segment in segments]
    groups = _groups([hash(s) for s in loose], segments)
    pieces: list[Piece] = []
    for a, b, layer in groups:
        made = tuple(call for segment in segments[a:b] for call in segment.calls)
        yields = cuts[b][1] if b < len(segments) else outputs[0]
        piece = Piece(made, cuts[a][1], yields, layer, (layer, *exact[a:b]))
        pieces.append(piece)
    return Folded(tuple(pieces), handed)


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
        """The structure without names; `relaxed`: and without the reach of attention."""
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
                attrs = {k: v for k, v in call.attrs.items() if k not in ("causal", "window")}
                known = (call.op, call.shape, call.dtype, call.ins, call.out, str(attrs))
            rows.append((known, tuple(operands)))
        return tuple(rows)


Cut = tuple[int, str]


def _cuts(computed: Sequence[OpCall], outputs: Sequence[str], handed: frozenset[str]) -> list[Cut]:
    """The places where one value alone is alive, and that value; the beginning and the end."""
    last = {name: i for i, call in enumerate(computed) for name in call.operands}
    last |= {name: len(computed) for name in outputs}
    alive = set[str]()
    cuts: list[Cut] = [(0, "")]
    for i, call in enumerate(computed):
        if i and len(alive) == 1:
            (only,) = alive
            if only != cuts[-1][1]:
                cuts.append((i, only))
        if last.get(call.name, -1) > i and call.name not in handed:
            alive.add(call.name)
        alive -= {name for name in call.operands if last[name] <= i}
    return [*cuts, (len(computed), "")]


def _handed(
    computed: Sequence[OpCall], outputs: Sequence[str], cuts: Sequence[Cut], handed: frozenset[str]
) -> str | None:
    """The value with the most readers inside the longest stretch without a cut."""
    stretches = [(b - a, a, b) for (a, _), (b, _) in itertools.pairwise(cuts)]
    length, begin, end = max(stretches, default=(0, 0, 0))
    if length < 8:
        return None
    readers: dict[str, int] = {}
    made = {call.name: i for i, call in enumerate(computed)}
    spans: dict[str, int] = {}
    for i in range(begin, end):
        for name in computed[i].operands:
            if name in made and name not in handed:
                readers[name] = readers.get(name, 0) + 1
                spans[name] = i - made[name]
    many = [name for name, count in readers.items() if count > 2 and spans[name] > length // 3]
    return max(many, key=lambda name: readers[name], default=None)


Group = tuple[int, int, bool]


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
