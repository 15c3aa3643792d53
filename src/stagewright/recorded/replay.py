"""A recorded step executed again, as recorded or with a change: what it would be without waiting.

Kernels keep their recorded durations and the host its time between calls, except for what the
change concerns. Nothing new begins to wait: a kernel that was bound by its launch, and now by its
stream, starts as long after the kernel before it as others of the trace do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagewright.errors import UserError, did_you_mean
from stagewright.numbers import plural, spans
from stagewright.recorded.link import HOST, LAUNCH, StepGraph, StepNode, link
from stagewright.recorded.rank import FAMILIES, Kernel, RankTrace
from stagewright.recorded.steps import window_notes

_MOVES = ("collective", "message", "copy", "memset")
"""Families of kernels that do not compute."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the recorded step."""

    without_host: bool = False
    """Calls, launches and the time between calls take no time; who waits for whom stays."""
    without_waiting: bool = False
    """Collectives take their transfer only, and no rank waits for another."""
    scale: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor of the duration, by family of kernels."""
    link: float = 1.0
    """Factor of the bandwidth between ranks."""
    stragglers: Mapping[int, float] = field(default_factory=dict[int, float])
    """Factor of the duration of kernels that compute, by rank."""

    def factor(self, kernel: Kernel, rank: int) -> float:
        """Factor of the duration of a kernel; of a collective: of its transfer."""
        factor = self.scale.get(kernel.family, 1.0)
        if kernel.family in ("collective", "message"):
            return factor / self.link
        return factor if kernel.family in _MOVES else factor * self.stragglers.get(rank, 1.0)


NO_CHANGE = Change()


class NodeTimes(NamedTuple):
    """Start and end of every node of a graph (ns)."""

    start: list[int]
    end: list[int]


def execute(graph: StepGraph, change: Change = NO_CHANGE, *, typical: bool = False) -> NodeTimes:
    """Execute the graph; with `typical`, by its links alone.

    Then the delay of a kernel is that of the median kernel of its rank, not its own, and it waits
    for nothing that its links do not explain.
    """
    starts, ends = [0] * len(graph.nodes), [0] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.members:
            if not change.without_waiting:
                _meet(node, starts, ends, change)
            continue
        if not node.after:  # the first call of a thread, or a kernel without a call
            start = node.start if node.kernel else node.start - node.duration
        else:
            start = node.not_before
            for before, delay, why in node.after:
                if change.without_host and why in (HOST, LAUNCH):
                    delay = 0
                elif typical and why != HOST:
                    delay = graph.typical[node.rank][why]
                start = max(start, ends[before.index] + delay)
            if node.unexplained and not typical:
                start = max(start, node.not_before) + node.unexplained
        starts[index] = start
        ends[index] = start + _duration(node, change)
    return NodeTimes(starts, ends)


def _duration(node: StepNode, change: Change) -> int:
    """Nanoseconds of a host segment, or of a kernel that meets no other rank."""
    kernel = node.kernel
    if kernel is None:
        return 0 if change.without_host else node.duration
    duration = node.duration
    if change.without_waiting and kernel.comm is not None and kernel.comm.transfer >= 0:
        duration = kernel.comm.transfer
    return round(duration * change.factor(kernel, node.rank))


def _meet(meeting: StepNode, starts: list[int], ends: list[int], change: Change) -> None:
    """End the kernels of a collective, when the last of them has started."""
    met = max(starts[member.index] for member in meeting.members)
    for member in meeting.members:
        assert member.kernel is not None
        after = member.start + member.duration - meeting.start
        ends[member.index] = met + round(after * change.factor(member.kernel, member.rank))


def recorded(graph: StepGraph) -> NodeTimes:
    """The times of kernels as they were recorded, on the clock of the first rank."""
    starts = [node.start for node in graph.nodes]
    ends = [node.start + (node.duration if node.kernel else 0) for node in graph.nodes]
    return NodeTimes(starts, ends)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Times of an execution, and the spans of its kernels (ns)."""

    times: NodeTimes
    span: int
    of_rank: Mapping[int, int]

    @staticmethod
    def of(graph: StepGraph, times: NodeTimes) -> Spans:
        """The spans of all ranks together, and of each."""
        by_rank: dict[int, tuple[int, int]] = {}
        for node in graph.nodes:
            if node.kernel is not None:
                start, end = times.start[node.index], times.end[node.index]
                first, last = by_rank.get(node.rank, (start, end))
                by_rank[node.rank] = min(first, start), max(last, end)
        span = max(last for _, last in by_rank.values()) - min(f for f, _ in by_rank.values())
        return Spans(times, span, {rank: last - first for rank, (first, last) in by_rank.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A recorded step: as recorded, replayed, and with a change."""

    graph: StepGraph
    recorded: Spans
    replayed: Spans
    linked: Spans
    """Replayed by the links alone, with typical delays."""
    change: Change
    changed: Spans | None
    """None: there is no change."""

    @property
    def unexplained(self) -> Mapping[int, int]:
        """ns by which kernels started later than their links explain, by rank."""
        late = dict.fromkeys((trace.rank for trace in self.graph.traces), 0)
        for node in self.graph.nodes:
            late[node.rank] += node.unexplained
        return late

    @property
    def notes(self) -> list[str]:
        """What the traces lack and what was assumed, with the ranks it holds for."""
        traces = self.graph.traces
        ranks_of: dict[str, list[int]] = {}
        for trace in traces:
            for note in (*window_notes(trace), *trace.notes):
                ranks_of.setdefault(note, []).append(trace.rank)
        notes = [
            note if len(ranks) == len(traces) else f"rank {spans(ranks)}: {note}"
            for note, ranks in ranks_of.items()
        ]
        kernels = [kernel for trace in traces for kernel in trace.kernels]
        if len(traces) == 1 and any(k.comm and k.comm.size != 1 for k in kernels):
            notes.append(
                "one rank: its collectives' time is transfer and waiting together, an upper bound "
                "of the transfer"
            )
        inferred = self.graph.inferred
        if inferred:
            notes.append(
                f"{plural(inferred, 'kernel is', 'kernels are')} taken to wait for a kernel of "
                "another stream that ended just before: events were not recorded"
            )
        late = [node.unexplained for node in self.graph.nodes if node.unexplained]
        if late:
            notes.append(
                f"{plural(len(late), 'kernel', 'kernels')} started {sum(late) / 1e6:,.1f} ms in "
                "all after what they are known to wait for: kept as recorded"
            )
        return notes


def replay(traces: Sequence[RankTrace], change: Change = NO_CHANGE) -> Replayed:
    """Replay the ranks of a job, with a change if one is given."""
    ranks = [trace.rank for trace in traces]
    for rank in change.stragglers:
        if rank not in ranks:
            raise UserError(f"straggler {rank}: the traces are of ranks {spans(ranks)}")
    for family in change.scale:
        if family not in FAMILIES:
            hint = did_you_mean(family, FAMILIES)
            raise UserError(f"scale {family!r}: wanted one of {', '.join(FAMILIES)}{hint}")
    graph = link(traces)

    def run(change: Change, *, typical: bool = False) -> Spans:
        return Spans.of(graph, execute(graph, change, typical=typical))

    return Replayed(
        graph=graph,
        recorded=Spans.of(graph, recorded(graph)),
        replayed=run(NO_CHANGE),
        linked=run(NO_CHANGE, typical=True),
        change=change,
        changed=None if change == NO_CHANGE else run(change),
    )
