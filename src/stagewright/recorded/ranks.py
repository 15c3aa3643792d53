"""Several ranks of a job: one clock, and transfer and waiting of each collective and message.

All ranks of a collective end it together. So the clocks of two machines differ by the median
difference of these ends; and the rank that was last to come has the least duration, which is the
transfer. What the others took longer is waiting.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

from stagewright.errors import UserError
from stagewright.numbers import plural, spans
from stagewright.recorded.kernels import MESSAGES
from stagewright.recorded.rank import Kernel, RankTrace

Instance = dict[int, Kernel]
"""The kernels of one collective, by rank."""


def as_ranks(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Ranks of one job in ascending order, on the clock of the first."""
    traces = list(traces)
    if len(traces) == 1:
        traces[0].rank = max(traces[0].rank, 0)
    elif all(trace.rank < 0 for trace in traces):
        for rank, trace in enumerate(traces):
            trace.rank = rank
    traces.sort(key=lambda trace: trace.rank)
    for first, second in pairwise(traces):
        if second.rank == first.rank:
            raise UserError(
                f"{first.path} and {second.path}: both are rank {first.rank}; wanted one step of "
                "one job, a file per rank"
            )
        if first.world_size != second.world_size:
            raise UserError(
                f"{first.path} and {second.path}: jobs of {first.world_size} and of "
                f"{second.world_size} ranks; wanted the ranks of one job"
            )
    if traces[0].rank < 0:
        raise UserError(f"{traces[0].path}: does not say its rank; name it rank<N>.json")
    if len(traces) > 1:
        _align(traces)
    return traces


def instances(traces: Sequence[RankTrace]) -> list[Instance]:
    """The collectives that several of the ranks recorded, by their number in the group."""
    groups: dict[object, dict[int, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for kernel in trace.kernels:
            comm = kernel.comm
            if comm is not None and comm.kind not in MESSAGES and comm.size > 1:
                groups[comm.group, comm.ranks][trace.rank].append(kernel)
    found: list[Instance] = []
    for by_rank in groups.values():
        if len(by_rank) < 2:
            continue
        found += _matched(by_rank)
    return found


def messages(traces: Sequence[RankTrace]) -> list[Instance]:
    """The messages that both ends recorded: the n-th send to a rank is its n-th receive."""
    ranks = {trace.rank for trace in traces}
    ends: dict[tuple[int, int], tuple[list[Kernel], list[Kernel]]] = {}
    for trace in traces:
        for kernel in trace.kernels:
            comm = kernel.comm
            if comm is not None and comm.kind in ("send", "recv") and comm.peer in ranks:
                sends = comm.kind == "send"
                pair = (trace.rank, comm.peer) if sends else (comm.peer, trace.rank)
                ends.setdefault(pair, ([], []))[not sends].append(kernel)
    return [
        {source: send, target: receive}
        for (source, target), (sent, received) in ends.items()
        if [_bytes(kernel) for kernel in sent] == [_bytes(kernel) for kernel in received]
        for send, receive in zip(sent, received, strict=True)
    ]


def _bytes(kernel: Kernel) -> int:
    return kernel.comm.bytes if kernel.comm else 0


def _matched(by_rank: dict[int, list[Kernel]]) -> Iterator[Instance]:
    """Collectives of one group; a window may begin or end in the middle on some ranks."""
    (rank, first), *others = by_rank.items()
    found: list[Instance] = [{rank: kernel} for kernel in first]
    for other, kernels in others:
        shift = _shift(first, kernels)
        if shift is None:
            pairs = enumerate(zip(first, kernels, strict=False))
            at, (one, two) = next((n, pair) for n, pair in pairs if not _agree(*pair))
            a, b = one.comm, two.comm
            assert a is not None
            assert b is not None
            raise UserError(
                f"collective {at} of group {a.group!r}: {a.kind} of {a.bytes:,} bytes on rank "
                f"{rank}, {b.kind} of {b.bytes:,} on rank {other}; wanted the same step of one job"
            )
        for index in range(max(shift, 0), min(len(first), len(kernels) + shift)):
            found[index][other] = kernels[index - shift]
    yield from (instance for instance in found if len(instance) > 1)


def _shift(first: Sequence[Kernel], second: Sequence[Kernel]) -> int | None:
    """Collectives that the first rank recorded before the second began; None: they never agree.

    The shift with which most collectives have a partner, at least half of the shorter list.
    """

    def shared(shift: int) -> int:
        return min(len(first), len(second) + shift) - max(shift, 0)

    for shift in sorted(range(1 - len(second), len(first)), key=lambda s: (-shared(s), abs(s))):
        if 2 * shared(shift) < min(len(first), len(second)):
            return None
        if all(
            _agree(first[index], second[index - shift])
            for index in range(max(shift, 0), max(shift, 0) + shared(shift))
        ):
            return shift
    return None


def _agree(first: Kernel, second: Kernel) -> bool:
    """Return True if collectives have equal kinds and sizes; an all-to-all may be uneven."""
    a, b = first.comm, second.comm
    if a is None or b is None or a.kind != b.kind:
        return False
    return a.bytes == b.bytes or a.kind not in ("all_reduce", "reduce_scatter")


def _align(traces: Sequence[RankTrace]) -> None:
    """Shift each rank's clock to that of the first, and set the transfer of each collective."""
    collectives, pairs = instances(traces), messages(traces)
    aligned = {traces[0].rank}
    for shared in (collectives, pairs):
        _shift_clocks(traces, shared, aligned)
    missing = [trace.rank for trace in traces if trace.rank not in aligned]
    if missing:
        traces[0].notes.append(
            f"ranks {spans(missing)} share no transfer with rank {traces[0].rank}: their clocks "
            "are taken as recorded"
        )
    offsets = {trace.rank: trace.clock_offset for trace in traces}
    for instance in (*collectives, *pairs):
        # A message that was sent before it was asked for takes the time of its sender.
        last = max(kernel.start + offsets[rank] for rank, kernel in instance.items())
        sent = [k.duration for rank, k in instance.items() if k.end + offsets[rank] < last]
        transfer = min(sent or [kernel.duration for kernel in instance.values()])
        for kernel in instance.values():
            assert kernel.comm is not None
            kernel.comm.transfer = transfer
    partial = sum(len(i) < max(k.comm.size for k in i.values() if k.comm) for i in collectives)
    if partial:
        traces[0].notes.append(
            f"{plural(partial, 'collective has', 'collectives have')} ranks that were not read: "
            "their transfer is an upper bound"
        )


def _shift_clocks(traces: Sequence[RankTrace], shared: list[Instance], aligned: set[int]) -> None:
    """Shift clocks by the ends of transfers that ranks share with aligned ones; adds to these."""
    by_rank = {trace.rank: trace for trace in traces}
    differences: dict[tuple[int, int], list[int]] = defaultdict(list)
    for instance in shared:
        for a, b in permutations(instance, 2):
            differences[a, b].append(instance[a].end - instance[b].end)
    waiting = sorted(aligned)
    while waiting:
        a = waiting.pop(0)
        for b, trace in by_rank.items():
            if b not in aligned and (a, b) in differences:
                shift = round(statistics.median(differences[a, b]))
                trace.clock_offset = by_rank[a].clock_offset + shift
                aligned.add(b)
                waiting.append(b)
