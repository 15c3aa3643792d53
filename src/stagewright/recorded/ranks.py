"""Several ranks of a job: one clock, and transfer and waiting of each collective.

All ranks of a collective end it together. So the clocks of two machines differ by the median
difference of these ends; and the rank that was last to come has the least duration, which is the
transfer. What the others took longer is waiting.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

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


def _matched(by_rank: dict[int, list[Kernel]]) -> Iterator[Instance]:
    """Collectives of one group; a window may begin or end in the middle on some ranks."""
    (rank, first), *others = by_rank.items()
    found: list[Instance] = [{rank: kernel} for kernel in first]
    for other, kernels in others:
        length = min(len(first), len(kernels))
        front, back = len(first) - length, len(kernels) - length
        if _agree(first[:length], kernels[:length]):
            front, back = 0, 0
        elif not _agree(first[front:], kernels[back:]):
            at = next(i for i in range(length) if not _agree(first[i : i + 1], kernels[i : i + 1]))
            a, b = first[at].comm, kernels[at].comm
            assert a is not None
            assert b is not None
            raise UserError(
                f"collective {at} of group {a.group!r}: {a.kind} of {a.bytes:,} bytes on rank "
                f"{rank}, {b.kind} of {b.bytes:,} on rank {other}; wanted the same step of one job"
            )
        for index in range(length):
            found[front + index][other] = kernels[back + index]
    yield from (instance for instance in found if len(instance) > 1)


def _agree(first: Sequence[Kernel], second: Sequence[Kernel]) -> bool:
    """Return True if collectives have equal kinds and sizes; an all-to-all may be uneven."""
    return all(
        a.comm is not None
        and b.comm is not None
        and a.comm.kind == b.comm.kind
        and (a.comm.bytes == b.comm.bytes or a.comm.kind not in ("all_reduce", "reduce_scatter"))
        for a, b in zip(first, second, strict=True)
    )


def _align(traces: Sequence[RankTrace]) -> None:
    """Shift each rank's clock to that of the first, and set the transfer of each collective."""
    by_rank = {trace.rank: trace for trace in traces}
    found = instances(traces)
    differences: dict[tuple[int, int], list[int]] = defaultdict(list)
    for instance in found:
        for a in instance:
            for b in instance:
                if a != b:
                    differences[a, b].append(instance[a].end - instance[b].end)
    aligned, waiting = {traces[0].rank}, [traces[0].rank]
    while waiting:
        a = waiting.pop(0)
        for b, trace in by_rank.items():
            if b not in aligned and (a, b) in differences:
                shift = round(statistics.median(differences[a, b]))
                trace.clock_offset = by_rank[a].clock_offset + shift
                aligned.add(b)
                waiting.append(b)
    missing = sorted(set(by_rank) - aligned)
    if missing:
        traces[0].notes.append(
            f"ranks {spans(missing)} share no collective with rank {traces[0].rank}: their clocks "
            "are taken as recorded"
        )
    for instance in found:
        least = min(kernel.duration for kernel in instance.values())
        for kernel in instance.values():
            assert kernel.comm is not None
            kernel.comm.transfer = least
    partial = sum(len(i) < max(k.comm.size for k in i.values() if k.comm) for i in found)
    if partial:
        traces[0].notes.append(
            f"{plural(partial, 'collective has', 'collectives have')} ranks that were not read: "
            "their transfer is an upper bound"
        )
