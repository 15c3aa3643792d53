"""Repeated layers of a forward pass.

The pass is cut wherever one value alone is alive (the stream). Segments between cuts that have the
same structure, one after another, are layers; the segments before, between and after them are
joined into sections, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.imports.ops import LEAVES, OpCall

MAX_SIDE_VALUES = 3
"""Limit of values besides the stream that many layers read, such as an encoder's output."""

MAX_CANDIDATES = 3
"""Limit of values that are tried as a side value at a time."""

MIN_SPAN = 8
"""Number of calls without a layer from which on a side value is searched for."""

RELAXED = ("causal", "window", "by")
"""Attributes in which layers of one model may differ."""

Cut = tuple[int, str]
"""Position of a cut, and the value that is alive there."""
Group = tuple[int, int, bool]
"""First segment, end, and True for a layer."""


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive calls that read one value of the calls before them, and yield one."""

    calls: tuple[OpCall, ...]
    reads: str
    """The stream that the section reads; empty for the first section."""
    yields: str
    layer: bool
    signature: tuple[object, ...]


class Sections(NamedTuple):
    """A forward pass in sections."""

    sections: tuple[Section, ...]
    side_values: frozenset[str]
    """Values that sections read besides the stream."""


def find_sections(calls: Mapping[str, OpCall], outputs: Sequence[str]) -> Sections:
    """Divide the calls into sections; repeated ones, with equal signatures, are layers."""
    computed = [call for call in calls.values() if call.op not in LEAVES]
    best = current = _split_at_cuts(calls, computed, outputs, frozenset())
    for _ in range(MAX_SIDE_VALUES):
        candidates = _candidates(computed, current)
        if not candidates:
            break
        splits = [
            _split_at_cuts(calls, computed, outputs, current.side_values | {name})
            for name in candidates
        ]
        current = max(splits, key=lambda split: split.covered)
        if current.covered >= best.covered + MIN_SPAN:
            best = current
    return Sections(best.sections(outputs), best.side_values)


class _Split(NamedTuple):
    """A forward pass, cut where one value besides the side values is alive."""

    cuts: Sequence[Cut]
    segments: Sequence[CallRange]
    groups: Sequence[Group]
    side_values: frozenset[str]

    @property
    def covered(self) -> int:
        """Number of calls in layers; the best side values cover the most."""
        return sum(self.length(a, b) for a, b, layer in self.groups if layer)

    def length(self, a: int, b: int) -> int:
        """Number of calls in segments `a` to `b`."""
        return sum(len(segment.calls) for segment in self.segments[a:b])

    def sections(self, outputs: Sequence[str]) -> tuple[Section, ...]:
        """The sections, each of a group of segments."""
        exact = [segment.signature(relaxed=False) for segment in self.segments]
        sections: list[Section] = []
        for a, b, layer in self.groups:
            calls = tuple(call for segment in self.segments[a:b] for call in segment.calls)
            yields = self.cuts[b][1] if b < len(self.segments) else outputs[0]
            sections.append(Section(calls, self.cuts[a][1], yields, layer, (layer, *exact[a:b])))
        return tuple(sections)


def _split_at_cuts(
    calls: Mapping[str, OpCall],
    computed: Sequence[OpCall],
    outputs: Sequence[str],
    side_values: frozenset[str],
) -> _Split:
    """Cut the pass, given its side values, and find repeated layers."""
    cuts = _cuts(computed, outputs, side_values)
    segments = [
        CallRange(tuple(computed[a:b]), calls, side_values, stream)
        for (a, stream), (b, _) in itertools.pairwise(cuts)
    ]
    loose = [hash(segment.signature(relaxed=True)) for segment in segments]
    return _Split(cuts, segments, _groups(loose, segments), side_values)


class CallRange(NamedTuple):
    """Calls between two cuts."""

    calls: tuple[OpCall, ...]
    all_calls: Mapping[str, OpCall]
    side_values: frozenset[str]
    reads: str

    @property
    def has_parameters(self) -> bool:
        """True if a call reads a parameter."""
        return any(self.all_calls[n].op == "param" for call in self.calls for n in call.operands)

    def signature(self, *, relaxed: bool) -> tuple[object, ...]:
        """Structure without names; `relaxed`: also without windows of attention and factors."""
        numbers: dict[str, object] = {self.reads: "stream"}
        structure: list[object] = []
        for call in self.calls:
            operands: list[object] = []
            for name in call.operands:
                if name not in numbers:
                    leaf = self.all_calls[name]
                    numbers[name] = len(numbers)
                    if leaf.op == "input" or name in self.side_values:
                        numbers[name] = name
                    operands.append((leaf.op, leaf.shape, leaf.dtype))
                operands.append(numbers[name])
            numbers[call.name] = len(numbers)
            signature = call.signature
            if relaxed:
                attrs = {k: v for k, v in call.attrs.items() if k not in RELAXED}
                signature = (call.op, call.shape, call.dtype, call.ins, call.out, str(attrs))
            structure.append((signature, tuple(operands)))
        return tuple(structure)


def _cuts(
    computed: Sequence[OpCall], outputs: Sequence[str], side_values: frozenset[str]
) -> list[Cut]:
    """Positions where one value alone is alive, with that value; also the beginning and the end."""
    last = {name: i for i, call in enumerate(computed) for name in call.operands}
    last |= {name: len(computed) for name in outputs}
    alive = set[str]()
    cuts: list[Cut] = [(0, "")]
    aside = False  # True if a side value was made since the last cut
    for i, call in enumerate(computed):
        if i and len(alive) == 1:
            (only,) = alive
            if only != cuts[-1][1] or aside:
                cuts.append((i, only))
                aside = False
        aside |= call.name in side_values
        if last.get(call.name, -1) > i and call.name not in side_values:
            alive.add(call.name)
        alive -= {name for name in call.operands if last[name] <= i}
    return [*cuts, (len(computed), "")]


def _candidates(computed: Sequence[OpCall], split: _Split) -> list[str]:
    """Values that the longest section without a layer reads often, and late."""
    lengths = {(a, b): split.length(a, b) for a, b, layer in split.groups if not layer}
    length = max(lengths.values(), default=0)
    if length < MIN_SPAN:
        return []
    first = next(a for (a, _), n in lengths.items() if n == length)
    start = split.cuts[first][0]
    position = {call.name: i for i, call in enumerate(computed)}
    readers: dict[str, int] = {}
    spans: dict[str, int] = {}
    for i in range(start, start + length):
        for name in computed[i].operands:
            if name in position and name not in split.side_values:
                readers[name] = readers.get(name, 0) + 1
                spans[name] = i - position[name]
    names = [name for name, count in readers.items() if count > 1 and spans[name] > length // 3]
    return sorted(names, key=lambda name: -spans[name] * readers[name])[:MAX_CANDIDATES]


def _groups(signatures: Sequence[int], segments: Sequence[CallRange]) -> list[Group]:
    """Segments in groups: those of each repeated layer, and those between layers."""
    layers = _layers(signatures, segments, 0, len(signatures))
    groups: list[Group] = []
    position = 0
    for begin, end in sorted(layers):
        if begin > position:
            groups.append((position, begin, False))
        groups.append((begin, end, True))
        position = end
    if position < len(signatures):
        groups.append((position, len(signatures), False))
    if groups and groups[0][2]:  # the first piece reads what comes from outside
        groups[0] = (*groups[0][:2], False)
    return groups


def _layers(
    signatures: Sequence[int], segments: Sequence[CallRange], low: int, high: int
) -> list[tuple[int, int]]:
    """Layers of the longest repetition, and of those before and after it."""
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
    these = [(i, i + period) for i in range(begin, end, period)]
    return [
        *_layers(signatures, segments, low, begin),
        *these,
        *_layers(signatures, segments, end, high),
    ]
