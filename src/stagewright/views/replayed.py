"""Replayed traces as `replay` prints them: spans by rank, kernels by family, collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from stagewright.numbers import duration, plural
from stagewright.recorded.rank import FAMILIES, Kernel
from stagewright.recorded.replay import Change, Replayed
from stagewright.texttable import Table


def replay_text(replayed: Replayed) -> Iterator[str | Table]:
    """A replay: its span beside the recorded one, what changes, and where the time goes."""
    traces = replayed.graph.traces
    kernels = sum(len(trace.kernels) for trace in traces)
    ranks = plural(len(traces), "rank", "ranks")
    device = traces[0].device or "GPUs of unknown name"
    yield f"{ranks} on {device}, {plural(kernels, 'kernel', 'kernels')}"
    recorded, span = replayed.recorded.span, replayed.replayed.span
    linked = replayed.linked.span / recorded - 1
    yield (
        f"span {duration(recorded / 1e9)} recorded, {duration(span / 1e9)} replayed "
        f"({span / recorded - 1:+.1%}); from its links alone {linked:+.1%}"
    )
    if replayed.changed is not None:
        changed = replayed.changed.span
        share = f"{changed / span - 1:+.1%}"
        line = f"{describe(replayed.change)}: {duration(changed / 1e9)} ({share})"
        # The span keeps how far the first kernels of the ranks are apart.
        before = max(replayed.replayed.of_rank.values())
        slowest = max(replayed.changed.of_rank.values())
        of_slowest = f"{slowest / before - 1:+.1%}"
        if of_slowest != share:
            line += f"; slowest rank {duration(slowest / 1e9)} ({of_slowest})"
        yield line
    yield ranks_table(replayed)
    yield families_table(replayed)
    collectives = collectives_table(replayed)
    if len(collectives):
        yield collectives


def describe(change: Change) -> str:
    """A change in words.

    >>> describe(Change(without_host=True, scale={"gemm": 0.9}, link=2.0))
    'without host, gemm x0.9, link x2'
    """
    words = ["without host"] * change.without_host + ["without waiting"] * change.without_waiting
    words += [f"{family} x{factor:g}" for family, factor in change.scale.items()]
    words += [f"link x{change.link:g}"] * (change.link != 1)
    words += [f"straggler {rank} x{factor:g}" for rank, factor in change.stragglers.items()]
    return ", ".join(words)


def ranks_table(replayed: Replayed) -> Table:
    """Spans of each rank; time in which no kernel ran, waited in collectives, and unexplained."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for trace in replayed.graph.traces:
        columns["rank"].append(trace.rank)
        columns["kernels"].append(len(trace.kernels))
        columns["recorded"].append(replayed.recorded.of_rank[trace.rank] / 1e9)
        columns["replayed"].append(replayed.replayed.of_rank[trace.rank] / 1e9)
        columns["linked"].append(replayed.linked.of_rank[trace.rank] / 1e9)
        if replayed.changed is not None:
            columns["changed"].append(replayed.changed.of_rank[trace.rank] / 1e9)
        columns["idle"].append(_idle(trace.kernels) / 1e9)
        columns["waiting"].append(_waiting(trace.kernels))
        columns["unexplained"].append(replayed.unexplained[trace.rank] / 1e9)
    units = {"rank": "", "kernels": "count"}
    return Table("Ranks", columns, units | dict.fromkeys(set(columns) - {"rank", "kernels"}, "s"))


def families_table(replayed: Replayed) -> Table:
    """Kernels by family: number and time of a rank, the mean of all ranks read."""
    traces = replayed.graph.traces
    count: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for trace in traces:
        for kernel in trace.kernels:
            count[kernel.family] += 1
            seconds[kernel.family] += kernel.duration / 1e9
    total = sum(seconds.values()) or 1.0
    families = sorted((f for f in FAMILIES if count[f]), key=lambda f: -seconds[f])
    return Table(
        "Kernels of a rank",
        {
            "family": families,
            "count": [round(count[f] / len(traces)) for f in families],
            "time": [seconds[f] / len(traces) for f in families],
            "share": [seconds[f] / total for f in families],
        },
        {"count": "count", "time": "s", "share": "share"},
    )


def collectives_table(replayed: Replayed) -> Table:
    """Collectives by kind, size of the group and bytes: transfer and waiting of a rank, the mean.

    The transfer is unknown where one rank was read; the time is then both.
    """
    traces = replayed.graph.traces
    of: dict[tuple[str, int, int], list[Kernel]] = defaultdict(list)
    for trace in traces:
        for kernel in trace.kernels:
            if kernel.comm is not None:
                of[kernel.comm.kind, kernel.comm.size, kernel.comm.bytes].append(kernel)
    keys = sorted(of, key=lambda key: -sum(kernel.duration for kernel in of[key]))
    ranks = len(traces)
    return Table(
        "Communication of a rank",
        {
            "kind": [kind or "unknown" for kind, _, _ in keys],
            "ranks": [size or None for _, size, _ in keys],
            "bytes": [size or None for _, _, size in keys],
            "count": [round(len(of[key]) / ranks) for key in keys],
            "time": [sum(kernel.duration for kernel in of[key]) / ranks / 1e9 for key in keys],
            "transfer": [_transfer(of[key], ranks) for key in keys],
            "waiting": [_waiting(of[key], ranks) for key in keys],
        },
        {
            **{"ranks": "", "bytes": "B", "count": "count"},
            **{"time": "s", "transfer": "s", "waiting": "s"},
        },
    )


def kernels_table(replayed: Replayed) -> Table:
    """Every kernel with its recorded and its replayed start, in seconds from the first one."""
    recorded, times = replayed.recorded.times, (replayed.changed or replayed.replayed).times
    nodes = [node for node in replayed.graph.nodes if node.kernel is not None]
    first = min(recorded.start[node.index] for node in nodes)
    columns: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        kernel = node.kernel
        assert kernel is not None
        columns["rank"].append(node.rank)
        columns["stream"].append(kernel.stream)
        columns["kernel"].append(kernel.name)
        columns["family"].append(kernel.family)
        columns["shape"].append(str(kernel.shape) if kernel.shape else None)
        columns["dtype"].append(kernel.dtype or None)
        columns["bytes"].append((kernel.comm.bytes if kernel.comm else kernel.bytes) or None)
        columns["start"].append((node.start - first) / 1e9)
        columns["time"].append(node.duration / 1e9)
        columns["replayed_start"].append((times.start[node.index] - first) / 1e9)
        columns["replayed_end"].append((times.end[node.index] - first) / 1e9)
    units = {"rank": "", "stream": "", "bytes": "B"}
    seconds = ("start", "time", "replayed_start", "replayed_end")
    return Table("Kernels", columns, units | dict.fromkeys(seconds, "s"))


def _idle(kernels: Sequence[Kernel]) -> int:
    """Nanoseconds of the span in which no kernel ran."""
    idle, end = 0, kernels[0].start
    for kernel in kernels:
        idle += max(kernel.start - end, 0)
        end = max(end, kernel.end)
    return idle


def _known(kernels: Sequence[Kernel]) -> list[tuple[int, int]]:
    """Duration and transfer of collectives whose transfer is known."""
    return [(k.duration, k.comm.transfer) for k in kernels if k.comm and k.comm.transfer >= 0]


def _waiting(kernels: Sequence[Kernel], ranks: int = 1) -> float | None:
    """Seconds that collectives of a mean rank waited for others; None: not known of any."""
    known = _known(kernels)
    return sum(duration - transfer for duration, transfer in known) / 1e9 / ranks if known else None


def _transfer(kernels: Sequence[Kernel], ranks: int) -> float | None:
    known = _known(kernels)
    return sum(transfer for _, transfer in known) / ranks / 1e9 if known else None
