"""The graph of a recorded step: host segments, waits of the host, kernels, and their dependencies.

- A *host segment* leads to a call: it begins when the call before it on its thread was made, or, if
  that one waited, when it returned. A thread that was idle for more than `IDLE` waits for the call
  of another thread that returned last before its next call.
- A *wait* is a call that returns when the device has done something: all work launched before
  (device), the last kernel of a stream or before an event (where `cuda_sync` events name these),
  or, unnamed, the kernel that ended last while the call lasted. So is a launch that takes longer
  than `JITTER` while kernels wait in the queue of the device: the queue is full.
- A *kernel* starts after its call and after the kernel before it on its stream, each with a delay:
  the least launch delay of the trace and none, unless the kernel itself took longer to start, by at
  most `JITTER`. It also waits for the event that its stream was told to wait for. One that started
  later than all this explains, just after a kernel of another stream, waits for that kernel:
  profilers record events only if told to. What then remains is *unexplained*: work that was not
  recorded, of the driver or before the window. It is kept as it was, and counted.
- A collective of several recorded ranks, or a message between two, ends on each of them as long
  after the last rank has come as it was recorded to.

Kernels without a call were launched before the window and start when they were recorded to start.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from stagewright.numbers import plural
from stagewright.recorded.rank import Kernel, RankTrace, RuntimeCall
from stagewright.recorded.ranks import instances, messages

IDLE = 1_000_000
"""ns; a thread idle for longer waits for another thread: no Python of a training loop takes so long
between two calls."""
JITTER = 50_000
"""ns; the most that a launch or a gap between kernels takes longer than the least of the trace."""

HOST, LAUNCH, STREAM, EVENT = range(4)
"""Why a node waits for another: order of a thread or wait of the host; launch; stream; event."""


@dataclass(slots=True, eq=False)
class StepNode:
    """A host segment, a wait, a kernel, or the start of a transfer between ranks."""

    rank: int
    start: int
    """Recorded start of a kernel; else the recorded end. On the clock of the first rank."""
    duration: int
    kernel: Kernel | None = None
    after: list[Dependency] = field(default_factory=lambda: list[Dependency]())
    unexplained: int = 0
    """ns that a kernel started later than all that it is known to wait for."""
    not_before: int = 0
    """Earliest start; that of a kernel with no more than unknown work before it is as recorded."""
    members: tuple[StepNode, ...] = ()
    """Of the meeting of a collective: its kernels, one per rank; it takes place when all have
    started. Those that ended later end as long after it as they did."""
    index: int = -1
    """Position in the order of execution."""


class Dependency(NamedTuple):
    """A node that must end `delay` ns before another starts, and why: one of the reasons above."""

    node: StepNode
    delay: int
    why: int


@dataclass(slots=True, eq=False)
class StepGraph:
    """Nodes of all ranks; those that a node waits for come before it."""

    traces: Sequence[RankTrace]
    nodes: list[StepNode]
    typical: Mapping[int, Sequence[int]]
    """Median delay of kernels by what they were bound by, by rank: of `HOST` none."""
    inferred: int
    """Kernels that wait for a kernel of another stream by their times alone."""


def link(traces: Sequence[RankTrace]) -> StepGraph:
    """The graph of the ranks of a job."""
    links = [_Rank(trace) for trace in traces]
    nodes = [node for linked in links for node in linked.nodes]
    kernel_nodes = {id(node.kernel): node for node in nodes if node.kernel is not None}
    for instance in (*instances(traces), *messages(traces)):
        members = [kernel_nodes[id(kernel)] for kernel in instance.values()]
        last = max(members, key=lambda node: node.start)
        members = [node for node in members if node.start + node.duration >= last.start]
        if len(members) > 1:
            nodes.append(StepNode(last.rank, last.start, 0, members=tuple(members)))
    nodes = _ordered(nodes)
    for index, node in enumerate(nodes):
        node.index = index
    for node in nodes:
        node.after = [entry for entry in node.after if entry.node.index < node.index]
    return StepGraph(
        traces,
        nodes,
        {linked.trace.rank: linked.typical() for linked in links},
        sum(linked.inferred for linked in links),
    )


def _ordered(nodes: Sequence[StepNode]) -> list[StepNode]:
    """Nodes after what they wait for, else by time; a circle is cut at its earliest node."""
    meeting_of = {id(member): node for node in nodes for member in node.members}
    followers: dict[int, list[int]] = defaultdict(list)  # by id: positions in `nodes`
    missing = [0] * len(nodes)
    for position, node in enumerate(nodes):
        needed = {id(member) for member in node.members}
        for entry in node.after:
            needed.add(id(entry.node))
            # What follows one kernel of a meeting follows the meeting.
            needed.add(id(meeting_of.get(id(entry.node), entry.node)))
        missing[position] = len(needed)
        for key in needed:
            followers[key].append(position)
    by_time = sorted(range(len(nodes)), key=lambda position: nodes[position].start)
    place = {position: rank for rank, position in enumerate(by_time)}
    ready = [place[position] for position in range(len(nodes)) if not missing[position]]
    heapify(ready)
    ordered: list[StepNode] = []
    done = [False] * len(nodes)
    earliest = iter(by_time)
    while len(ordered) < len(nodes):
        if ready:
            position = by_time[heappop(ready)]
        else:
            position = next(position for position in earliest if not done[position])
        if done[position]:
            continue
        done[position] = True
        ordered.append(nodes[position])
        for follower in followers[id(nodes[position])]:
            missing[follower] -= 1
            if not missing[follower] and not done[follower]:
                heappush(ready, place[follower])
    return ordered


class _Rank:
    """Links of one rank."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.nodes: list[StepNode] = []
        self.inferred = 0
        self._delays: tuple[list[int], ...] = ([0], [], [], [])  # of kernels, by what bound them
        self._made: dict[int, StepNode] = {}  # by call: the node that ends as it is made
        self._launched: dict[int, tuple[list[int], list[Kernel]]] = {}  # by stream
        for kernel in sorted(trace.kernels, key=_launch):
            moments, kernels = self._launched.setdefault(kernel.stream, ([], []))
            moments.append(_launch(kernel))
            kernels.append(kernel)
        self._by_end = sorted(trace.kernels, key=lambda kernel: kernel.end)
        self._ends = [kernel.end for kernel in self._by_end]
        self._kernels_of: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in trace.kernels:
            self._kernels_of[id(kernel.call)].append(kernel)
        self._calls_by_id = {call.correlation: call for call in trace.calls}
        self._node_of = {
            id(kernel): self._add(StepNode(trace.rank, kernel.start, kernel.duration, kernel))
            for kernel in trace.kernels
        }
        delays = [k.start - k.call.start for k in trace.kernels if k.call is not None]
        self.least_delay = min((d for d in delays if 0 <= d <= JITTER), default=0)
        skewed = sum(delay < 0 for delay in delays)
        if skewed:
            trace.notes.append(
                f"{plural(skewed, 'kernel starts', 'kernels start')} before the call that launched "
                "it: the clocks of host and device differ"
            )
        self._link_host()
        self._link_kernels()

    def _add(self, node: StepNode) -> StepNode:
        node.start += self.trace.clock_offset
        self.nodes.append(node)
        return node

    # ---- host ------------------------------------------------------------------------------------

    def _link_host(self) -> None:
        trace, calls = self.trace, self.trace.calls
        by_end = sorted(calls, key=lambda call: call.end)
        ends = [call.end for call in by_end]
        before: dict[str, RuntimeCall] = {}  # by thread
        returned: dict[int, tuple[StepNode, int]] = {}  # by call: what a segment follows
        for call in calls:
            after: list[Dependency] = []
            start = call.start
            previous = before.get(call.thread)
            if previous is not None:
                node, start = returned[id(previous)]
                if start > call.start:  # a call inside another, as of the driver in the runtime
                    node, start = self._made[id(previous)], previous.start
                after.append(Dependency(node, 0, HOST))
            if previous is None or call.start - previous.end > IDLE:
                other = _last_of_others(by_end, ends, call, previous)
                if other is not None and id(other) in returned:
                    node, returned_at = returned[id(other)]
                    start = returned_at if previous is None else max(start, returned_at)
                    after.append(Dependency(node, 0, HOST))
            segment = self._add(StepNode(trace.rank, call.start, call.start - start, after=after))
            self._made[id(call)] = segment
            returned[id(call)] = segment, call.start
            awaited = self._awaited(call)
            if awaited:
                # It returns as long after what it waits for, or after it was made.
                delay = call.end - max(kernel.end for kernel in awaited)
                wait = self._add(StepNode(trace.rank, call.end, 0))
                nodes = [segment, *(self._node_of[id(kernel)] for kernel in awaited)]
                wait.after = [Dependency(node, delay, HOST) for node in nodes]
                returned[id(call)] = wait, call.end
            before[call.thread] = call

    def _awaited(self, call: RuntimeCall) -> list[Kernel]:
        """The kernels that a call returns after; none: it does not wait."""
        own = self._kernels_of.get(id(call), ())
        if own and "Memcpy" in call.name:  # from or to pageable memory, if it waits
            return [*own] if all(kernel.end <= call.end for kernel in own) else []
        if own:  # a launch, which waits while the queue of the device is full
            full = min(kernel.start for kernel in own) > call.end + JITTER
            waits = full and call.end - call.start > JITTER
            return self._ended_last(call.start, call.end, call.start) if waits else []
        if "Synchronize" not in call.name:
            return []
        sync = call.sync
        if sync is not None and sync.kind == "event":
            awaited = self._last_before_record(sync.record, sync.source)
        elif sync is not None and sync.kind == "stream" and sync.stream >= 0:
            awaited = self._last_launched(call.start, sync.stream)
        elif "Device" in call.name or "Ctx" in call.name:
            found = (self._last_launched(call.start, stream) for stream in self._launched)
            awaited = [kernel for last in found for kernel in last]
        else:
            awaited = self._ended_last(call.start, call.end, call.end)
        awaited = [kernel for kernel in awaited if kernel.end <= call.end]
        return awaited if any(kernel.end > call.start for kernel in awaited) else []

    def _last_launched(self, moment: int, stream: int) -> list[Kernel]:
        """The last kernel of a stream among those launched before a moment."""
        moments, kernels = self._launched.get(stream, ([], []))
        position = bisect_left(moments, moment)
        return kernels[position - 1 : position] if position else []

    def _last_before_record(self, record: int, stream: int) -> list[Kernel]:
        """The last kernel before an event that a call recorded on a stream."""
        call = self._calls_by_id.get(record)
        return self._last_launched(call.start, stream) if call is not None else []

    def _ended_last(
        self, after: int, until: int, launched: int, waiting: Kernel | None = None
    ) -> list[Kernel]:
        """The kernel that ended last in an interval, launched before, on another stream."""
        position = bisect_right(self._ends, until)
        while position and self._ends[position - 1] > after:
            position -= 1
            kernel = self._by_end[position]
            same = waiting is not None and kernel.stream == waiting.stream
            if not same and _launch(kernel) < launched:
                return [kernel]
        return []

    # ---- kernels ---------------------------------------------------------------------------------

    def _link_kernels(self) -> None:
        waits = self._stream_waits()
        before: dict[tuple[int, int], Kernel] = {}
        others: list[tuple[StepNode, Kernel]] = []  # with the kernel before them
        for kernel in self.trace.kernels:
            previous = before.get((kernel.device, kernel.stream))
            before[kernel.device, kernel.stream] = kernel
            node = self._node_of[id(kernel)]
            if kernel.call is None:
                node.not_before = node.start
                if previous is not None:
                    gap = min(kernel.start - previous.end, 0)
                    node.after.append(Dependency(self._node_of[id(previous)], gap, STREAM))
                continue
            gap = self._link_kernel(node, kernel, previous, waits.get(id(kernel), ()))
            if previous is not None and gap is not None:
                self._delays[STREAM].append(gap)
                node.after.append(Dependency(self._node_of[id(previous)], gap, STREAM))
            elif previous is not None:
                others.append((node, previous))
        typical = self.typical()[STREAM]
        for node, previous in others:
            assert node.kernel is not None
            room = node.kernel.start - node.unexplained - previous.end
            gap = min(typical, room)
            node.after.append(Dependency(self._node_of[id(previous)], gap, STREAM))

    def _link_kernel(
        self, node: StepNode, kernel: Kernel, previous: Kernel | None, waits: Sequence[Kernel]
    ) -> int | None:
        """Link a kernel to its call and to events; returns its gap if its stream bound it."""
        call = kernel.call
        assert call is not None
        launched = call.start + self.least_delay
        events = [event for event in waits if event.end <= kernel.start]
        stream = previous.end if previous is not None else launched
        ready = max(launched, stream, *(event.end for event in events))
        late = kernel.start - ready
        bound_by_stream, bound_by_launch = stream == ready > launched, launched == ready
        if late > JITTER:
            bound_by_stream = bound_by_launch = False
            inferred = self._ended_last(kernel.start - JITTER, kernel.start, call.start, kernel)
            if inferred:
                self.inferred += 1
                events += inferred
                late = kernel.start - inferred[0].end
            elif previous is None:
                node.not_before = node.start
                late = 0
            else:
                node.unexplained = late
                late = 0
        node.after += [
            Dependency(self._node_of[id(event)], max(late, 0), EVENT) for event in events
        ]
        delay = self.least_delay + (late if bound_by_launch else 0)
        if bound_by_launch:
            self._delays[LAUNCH].append(delay)
        elif events and not bound_by_stream:
            self._delays[EVENT].append(late)
        node.after.append(Dependency(self._made[id(call)], delay, LAUNCH))
        return late if bound_by_stream else None

    def typical(self) -> list[int]:
        """Median delay of kernels by what they were bound by."""
        return [statistics.median_low(delays) if delays else 0 for delays in self._delays]

    def _stream_waits(self) -> dict[int, list[Kernel]]:
        """Kernels of other streams that a kernel waits for by recorded events, by its id."""
        pending: dict[int, list[Kernel]] = defaultdict(list)
        found: dict[int, list[Kernel]] = {}
        for call in self.trace.calls:
            sync = call.sync
            if sync is not None and sync.kind == "wait":
                pending[sync.stream] += self._last_before_record(sync.record, sync.source)
            for kernel in self._kernels_of.get(id(call), ()):
                if pending.get(kernel.stream):
                    found[id(kernel)] = pending.pop(kernel.stream)
        return found


def _launch(kernel: Kernel) -> int:
    """When a kernel was launched; before all others if its call was not recorded."""
    return kernel.call.start if kernel.call else -1


def _last_of_others(
    by_end: Sequence[RuntimeCall],
    ends: Sequence[int],
    call: RuntimeCall,
    previous: RuntimeCall | None,
) -> RuntimeCall | None:
    """The call of another thread that returned last before a call, after the one before it."""
    position = bisect_right(ends, call.start)
    while position and (previous is None or ends[position - 1] > previous.end):
        position -= 1
        if by_end[position].thread != call.thread:
            return by_end[position]
    return None
