"""Where the time of a recorded step goes: each nanosecond of a rank belongs to one part.

While kernels compute, the part is their family's; then comes communication that no kernel hides:
its transfer, or its waiting for other ranks. Of the time in which nothing runs, the part says what
the next kernel waited for: its launch by a host that is late, a host that waited for the GPU and
had to start again (`synchronisation`), or something else (`idle`), such as the gap
between two kernels of a stream, or an event.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.numbers import plural
from stagewright.recorded.rank import Annotation, Kernel, RankTrace, RuntimeCall

PART_OF_FAMILY = {
    **dict.fromkeys(("gemm", "grouped_gemm", "conv"), "products"),
    **{"attention": "attention", "norm": "norms", "elementwise": "elementwise"},
    **{"copy": "copies", "memset": "copies", "other": "other kernels"},
}
"""Part of a step by family of its kernels."""
COMMUNICATION = ("transfers", "waiting")
"""Communication that no kernel hides: what all ranks take, and what this one waits for others."""
IDLE = ("launches", "synchronisation", "idle")
"""Parts in which nothing runs."""
PARTS = (*dict.fromkeys(PART_OF_FAMILY.values()), *COMMUNICATION, *IDLE)


class StepSegment(NamedTuple):
    """A time of one part."""

    begin: int
    end: int
    part: str


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step of one rank; times are nanoseconds on the clock of the trace."""

    trace: RankTrace
    name: str
    """The annotation; "": the whole trace."""
    begin: int
    end: int
    kernels: Sequence[Kernel]
    """Those that the step launched, by start."""

    @property
    def duration(self) -> int:
        """Nanoseconds from the end of the step before to the end of this one."""
        return self.end - self.begin

    @cached_property
    def segments(self) -> list[StepSegment]:
        """The step from begin to end, without gaps."""
        computing = [
            StepSegment(kernel.start, kernel.end, PART_OF_FAMILY[kernel.family])
            for kernel in self.kernels
            if kernel.comm is None and kernel.family in PART_OF_FAMILY
        ]
        sent: list[StepSegment] = []
        waited: list[StepSegment] = []
        for kernel in self.kernels:
            if kernel.comm is not None:
                begin = kernel.end - transfer_of(kernel)
                sent.append(StepSegment(begin, kernel.end, COMMUNICATION[0]))
                waited.append(StepSegment(kernel.start, begin, COMMUNICATION[1]))
        gaps, found = [StepSegment(self.begin, self.end, "")], list[StepSegment]()
        for layer in (computing, sent, waited):
            placed, gaps = _fill(gaps, layer)
            found += placed
        found += self._idle(gaps)
        return sorted(found)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Nanoseconds by part; their sum is the step."""
        sums = dict.fromkeys(PARTS, 0)
        for begin, end, part in self.segments:
            sums[part] += end - begin
        return sums

    def _idle(self, gaps: Iterable[StepSegment]) -> Iterator[StepSegment]:
        """Times in which nothing runs, by what the next kernel waited for."""
        kernels = self.trace.kernels
        starts, delay = [kernel.start for kernel in kernels], launch_delay(self.trace)
        waits = _host_waits(self.trace)
        for begin, end, _ in gaps:
            at = bisect_left(starts, end)
            call = kernels[at].call if at < len(kernels) else None
            if at == len(kernels):  # nothing follows: the host has launched all
                yield StepSegment(begin, end, "launches")
                continue
            launched = min(end, max(begin, call.start + delay)) if call else begin
            if call is not None and launched > begin:
                ends = waits.get(call.thread, [])
                before = bisect_right(ends, call.start)
                waited = before > 0 and ends[before - 1] >= begin
                yield StepSegment(begin, launched, "synchronisation" if waited else "launches")
            if end > launched:
                yield StepSegment(launched, end, "idle")


def transfer_of(kernel: Kernel) -> int:
    """Nanoseconds of a transfer without its waiting; the kernel's where other ranks are missing."""
    assert kernel.comm is not None
    return kernel.duration if kernel.comm.transfer < 0 else kernel.comm.transfer


def launch_delay(trace: RankTrace) -> int:
    """Least nanoseconds from a call to the start of its kernel."""
    delays = (k.start - k.call.start for k in trace.kernels if k.call is not None)
    return max(0, min(delays, default=0))


def host_waits(call: RuntimeCall) -> bool:
    """Return True for a call in which the host waits for the GPU."""
    if call.sync is not None:
        return call.sync.kind in ("event", "stream", "device")
    return "Synchronize" in call.name or ("Memcpy" in call.name and "Async" not in call.name)


def _host_waits(trace: RankTrace) -> dict[str, list[int]]:
    """Ends of the waits of each thread, ascending."""
    ends: dict[str, list[int]] = defaultdict(list)
    for call in trace.calls:
        if host_waits(call):
            ends[call.thread].append(call.end)
    return {thread: sorted(times) for thread, times in ends.items()}


def _fill(
    gaps: Sequence[StepSegment], layer: Iterable[StepSegment]
) -> tuple[list[StepSegment], list[StepSegment]]:
    """Place segments in gaps: those that were placed, and the gaps that are left.

    Of segments that overlap, the first to begin has the time.
    """
    placed: list[StepSegment] = []
    rest: list[StepSegment] = []
    at, cursor = 0, 0
    position = gaps[0].begin if gaps else 0
    for begin, end, part in sorted(layer):
        begin = max(begin, cursor)
        cursor = max(cursor, end)
        while at < len(gaps) and end > begin:
            gap = gaps[at]
            position = max(position, gap.begin)
            low, high = max(begin, position), min(end, gap.end)
            if high > low:
                if low > position:
                    rest.append(StepSegment(position, low, ""))
                placed.append(StepSegment(low, high, part))
                position = high
            if end < gap.end:
                break
            if gap.end > position:
                rest.append(StepSegment(position, gap.end, ""))
            at += 1
            begin = max(begin, gap.end)
            position = gaps[at].begin if at < len(gaps) else position
    for gap in gaps[at:]:
        low = max(position, gap.begin)
        if gap.end > low:
            rest.append(StepSegment(low, gap.end, ""))
    return placed, rest


# ---- steps of a trace ----------------------------------------------------------------------------

STEP = "ProfilerStep#"


def recorded_steps(
    traces: Sequence[RankTrace], step: int | None = None, annotation: str | None = None
) -> list[RecordedStep]:
    """One step of each rank: by number, by annotation, or the middle one; else all there is."""
    name = annotation if step is None else f"{STEP}{step}"
    if name is None:
        names = [of.name for of in traces[0].annotations if of.name.startswith(STEP)]
        busy = [each for each in dict.fromkeys(names) if _cut(traces[0], each)[1]]
        name = busy[len(busy) // 2] if busy else ""
    steps: list[RecordedStep] = []
    for trace in traces:
        if not name:
            first = min([trace.start, *(call.start for call in trace.calls)])
            steps.append(RecordedStep(trace, "", first, trace.end, trace.kernels))
            continue
        window, kernels = _cut(trace, name)
        if window is None or not kernels:
            known = ", ".join(dict.fromkeys(of.name for of in trace.annotations[:5])) or "none"
            raise UserError(f"{trace.path}: no kernels of an annotation {name!r}; has {known}")
        # The GPU may still be busy with the step before, and with this one when the next begins.
        earlier = [
            k.end for k in trace.kernels if k.start < kernels[0].start and not _in(window, k)
        ]
        begin = max([window.start, *earlier])
        end = max([window.end, *(kernel.end for kernel in kernels)])
        steps.append(RecordedStep(trace, name, min(begin, kernels[0].start), end, kernels))
    return steps


def window_notes(trace: RankTrace) -> list[str]:
    """What a whole trace holds beside one step, for notes."""
    names = dict.fromkeys(of.name for of in trace.annotations if of.name.startswith(STEP))
    busy = {name: kernels for name in names if (kernels := _cut(trace, name)[1])}
    late = sum(kernel.call is None for kernel in trace.kernels)
    notes: list[str] = []
    if len(busy) > 1:
        first, *_, last = (name.removeprefix(STEP) for name in busy)
        notes.append(
            f"{len(busy)} steps recorded, {STEP}{first} to {last}: all are taken as one; "
            f"--step {first} takes one"
        )
    for name, kernels in busy.items() if len(busy) == 1 else ():
        others = len(trace.kernels) - len(kernels)
        if others:
            notes.append(
                f"1 step recorded, {name}, and {plural(others, 'kernel', 'kernels')} of none: "
                f"--step {name.removeprefix(STEP)} leaves them out"
            )
    if late:
        notes.append(
            f"{plural(late, 'kernel was', 'kernels were')} launched before the window: "
            "they start when they were recorded to start"
        )
    return notes


def _cut(trace: RankTrace, name: str) -> tuple[Annotation | None, list[Kernel]]:
    """The first annotation of a name, and the kernels that were launched in it."""
    window = next((of for of in trace.annotations if of.name == name), None)
    if window is None:
        return None, []
    return window, [kernel for kernel in trace.kernels if _in(window, kernel)]


def _in(window: Annotation, kernel: Kernel) -> bool:
    return kernel.call is not None and window.start <= kernel.call.start <= window.end
