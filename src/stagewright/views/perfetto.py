"""Traces in the Trace Event Format (JSON), for https://ui.perfetto.dev and chrome://tracing.

A step: a process per lane (ranks with equal timing), a thread per stream, and a thread `actions`
with the actions of the schedule (`2F0`). Arrows lead from where a message is sent to where it is
received. Slices of a thread never overlap. A serving run: a process for each engine with its
requests as slices that may overlap (queue, prompt, decode, and the transfer of the cache between
pools), and counters of requests that run and wait and of blocks of the cache. Times are
microseconds, in whole nanoseconds.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.files import atomic
from stagewright.program.columns import CATEGORIES, FORWARD_PHASE, OPTIMIZER_PHASE, PHASES, TaskKind
from stagewright.program.comm_axes import comm_axes
from stagewright.serving.engine import Engine
from stagewright.serving.simulation import Outcome
from stagewright.time.simulate.memory import memory_timeline
from stagewright.time.simulate.rules import num_streams
from stagewright.time.simulate.timeline import Lane, Timeline

_TICKS_PER_NS = 1000
_POINTS = 2000  # of memory over time
_ACTIONS, _KERNELS = 0, 1  # numbers of threads; streams of communication come after


def write(line: Timeline, path: Path | str, title: str = "") -> None:
    """Write a timeline to a file; one that ends in `.gz` is compressed, which Perfetto reads."""
    write_events(timeline_events(line), path, title)


def write_events(events: Iterable[str], path: Path | str, title: str) -> None:
    """Write events, each as JSON, to a file; one that ends in `.gz` is compressed."""
    with ExitStack() as closed:
        raw = closed.enter_context(open(closed.enter_context(atomic(path)), "wb"))
        packed = str(path).endswith(".gz")  # noting no time: the same bytes each time
        data = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if packed else raw
        file = closed.enter_context(io.TextIOWrapper(closed.enter_context(data), "utf-8"))
        file.write('{"displayTimeUnit":"ns","otherData":' + json.dumps({"title": title}))
        file.write(',"traceEvents":[\n')
        comma = ""
        for text in events:
            file.write(comma + text)
            comma = ",\n"
        file.write("\n]}\n")


def timeline_events(line: Timeline) -> Iterator[str]:
    """Every event as JSON."""
    arrows = _arrows(line)
    for pid, lane in enumerate(line.lanes):
        yield from _names(line, pid, lane)
        yield from _actions(line, pid, lane)
        yield from _launches(line, pid, lane)
        yield from _tasks(line, pid, lane, arrows[pid])
        yield from _memory(line, pid, lane)


def event(**fields: object) -> str:
    """An event as JSON."""
    return json.dumps(fields, separators=(",", ":"))


def _names(line: Timeline, pid: int, lane: Lane) -> Iterator[str]:
    of, ranks = lane.rank_class, lane.ranks
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}.. ({len(ranks)})"
    title = f"pipeline rank {of.pipeline_rank}: {who}"
    yield event(ph="M", pid=pid, tid=0, name="process_name", args={"name": title})
    yield event(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": pid})
    for tid, name in _threads(line, lane).items():
        yield event(ph="M", pid=pid, tid=tid, name="thread_name", args={"name": name})
        yield event(ph="M", pid=pid, tid=tid, name="thread_sort_index", args={"sort_index": tid})


def _threads(line: Timeline, lane: Lane) -> dict[int, str]:
    """The threads of a lane."""
    names = {_ACTIONS: "actions", _KERNELS: "kernels"}
    if lane.last_wait is not None:
        names[_host(line)] = "launches by the host"
    tasks = lane.rank_class.tasks
    thread = thread_of(line, lane)
    slots = tasks.slot[lane.issue.rows]
    axes = comm_axes(line.program, tasks)
    for (kind, slot, collective), axis in zip(axes.keys, axes.axes, strict=True):
        on_thread = (lane.kind == kind) & (slots == slot)
        on_thread &= tasks.collective[lane.issue.rows] == collective
        for tid in np.unique(thread[on_thread]):
            if line.execution.streams == "one" and kind != TaskKind.RECV:
                names[int(tid)] = "communication"
            elif kind in (TaskKind.LOAD, TaskKind.STORE):
                names[int(tid)] = "to the host" if kind == TaskKind.STORE else "from the host"
            elif kind == TaskKind.COLLECTIVE:
                names.setdefault(int(tid), str(axis))
            else:
                shift = line.program.peers[slot].shift
                verb = "send to" if kind == TaskKind.SEND else "receive from"
                names[int(tid)] = f"{axis}: {verb} {shift:+d}"
    return dict(sorted(names.items()))


def thread_of(line: Timeline, lane: Lane) -> Int:
    """The thread of each position: streams in order, then receives by peer."""
    slot = lane.rank_class.tasks.slot[lane.issue.rows].astype(np.int64)
    receives = _KERNELS + num_streams(line.program) + slot
    return np.where(lane.kind == TaskKind.RECV, receives, lane.issue.stream + _KERNELS)


def _host(line: Timeline) -> int:
    """The thread of the host, after those of receives."""
    return _KERNELS + num_streams(line.program) + len(line.program.peers)


def _launches(line: Timeline, pid: int, lane: Lane) -> Iterator[str]:
    """A slice from where the host begins to launch to where it pauses, for a result or the end."""
    if lane.last_wait is None or not len(lane.launched):
        return
    last = np.flatnonzero(np.append(np.diff(lane.last_wait.issue_index) != 0, True))
    begin, end = nanoseconds(lane.last_wait.end[last]), nanoseconds(lane.launched[last])
    for b, e in zip(begin.tolist(), end.tolist(), strict=True):
        if e > b:
            yield (
                f'{{"ph":"X","pid":{pid},"tid":{_host(line)},"ts":{micro(b)},'
                f'"dur":{micro(e - b)},"name":"launches","cat":"host"}}'
            )


def nanoseconds(ticks: Int) -> Int:
    """Ticks as whole nanoseconds."""
    return np.rint(ticks / _TICKS_PER_NS).astype(np.int64)


def micro(ns: int) -> str:
    """Nanoseconds as a number of microseconds."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _actions(line: Timeline, pid: int, lane: Lane) -> Iterator[str]:
    """A slice for consecutive kernels of one stage, direction and microbatch."""
    positions = np.flatnonzero(lane.is_kernel)
    if not len(positions):
        return
    tasks, rows = lane.rank_class.tasks, lane.issue.rows[positions]
    step = tasks.phase[rows] == OPTIMIZER_PHASE
    backward = tasks.phase[rows] != FORWARD_PHASE
    action = np.stack([tasks.stage[rows], backward, tasks.microbatch[rows], step]).astype(np.int64)
    action[:3, step] = -1
    new = np.append(True, (np.diff(action, axis=1) != 0).any(axis=0))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(positions)) - 1
    begin, end = nanoseconds(lane.begin[positions[first]]), nanoseconds(lane.end[positions[last]])
    for (stage, back, microbatch, is_step), b, e in zip(
        action[:, first].T.tolist(), begin.tolist(), end.tolist(), strict=True
    ):
        if line.steady and e == b:  # of another step
            continue
        name = "step" if is_step else f"{stage}{'FB'[back]}{microbatch}"
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{_ACTIONS},"ts":{micro(b)},"dur":{micro(e - b)},'
            f'"name":"{name}","cat":"action"}}'
        )


def _tasks(line: Timeline, pid: int, lane: Lane, arrows: _Arrows) -> Iterator[str]:
    """A slice per task, and the ends of arrows."""
    tasks, rows = lane.rank_class.tasks, lane.issue.rows
    head = [json.dumps(name) for name in tasks.names]
    columns = (
        lane.kind, thread_of(line, lane), arrows.begin, arrows.end, arrows.number,
        tasks.name[rows], tasks.phase[rows], tasks.microbatch[rows],
        tasks.flops[rows], tasks.traffic[rows] + tasks.comm_bytes[rows],
    )  # fmt: skip
    for row in zip(*(column.tolist() for column in columns), strict=True):
        kind, tid, begin, end, number, name, phase, microbatch, flops, size = row
        if line.steady and end == begin:  # of another step
            continue
        where = f'"pid":{pid},"tid":{tid}'
        work = f'"flops":{flops},' if kind == TaskKind.COMPUTE else ""
        yield (
            f'{{"ph":"X",{where},"ts":{micro(begin)},"dur":{micro(end - begin)},'
            f'"name":{head[name]},"cat":"{PHASES[phase]}",'
            f'"args":{{"microbatch":{microbatch},{work}"bytes":{size}}}}}'
        )
        if number >= 0 and end > begin:
            way = '"ph":"s"' if kind == TaskKind.SEND else '"ph":"f","bp":"e"'
            at = begin if kind == TaskKind.SEND else end - 1
            yield (
                f'{{{way},{where},"ts":{micro(at)},"id":{number},"name":"message","cat":"message"}}'
            )


def _memory(line: Timeline, pid: int, lane: Lane) -> Iterator[str]:
    """A counter, in bytes by category."""
    if not len(lane.rank_class.values.size):
        return
    sampled = memory_timeline(line, pid).sampled(_POINTS)
    by_category = zip(CATEGORIES, sampled.size, strict=True)
    present = [(name, size) for name, size in by_category if size.any()]
    for point, ns in enumerate(nanoseconds(sampled.ticks).tolist()):
        sizes = ",".join(f'"{name}":{size[point]}' for name, size in present)
        yield f'{{"ph":"C","pid":{pid},"ts":{micro(ns)},"name":"memory","args":{{{sizes}}}}}'


class _Arrows(NamedTuple):
    """By position: begin and end of slices in ns, and the number of a message, -1 for other tasks.

    A receive is shown while its message is on the way, even if no task waits for it.
    """

    begin: Int
    end: Int
    number: Int


def _arrows(line: Timeline) -> list[_Arrows]:
    """Arrows of every lane."""
    lanes, messages = line.lanes, line.endpoints.messages
    arrows = [
        _Arrows(
            nanoseconds(lane.begin), nanoseconds(lane.end), np.full(len(lane.issue), -1, np.int64)
        )
        for lane in lanes
    ]
    number = 0
    for pid, receiving in enumerate(arrows):
        received = messages[messages[:, 0] == pid]
        for sender in sorted({int(s) for s in received[:, 2]}):
            _, to, _, at = received[received[:, 2] == sender].T
            receiving.begin[to] = arrows[sender].begin[at]
            receiving.end[to] = arrows[sender].end[at]
            receiving.number[to] = arrows[sender].number[at] = number + np.arange(len(to))
            number += len(to)
    return arrows


# ---- serving -------------------------------------------------------------------------------------


def write_serving(outcome: Outcome, path: Path | str, title: str = "") -> None:
    """Write a run to a file; one that ends in `.gz` is compressed, which Perfetto reads."""
    write_events(serving_events(outcome), path, title)


def serving_events(outcome: Outcome) -> Iterator[str]:
    """Every event as JSON."""
    for pid, engine in enumerate(outcome.engines):
        yield event(ph="M", pid=pid, tid=0, name="process_name", args={"name": f"engine {pid}"})
        yield event(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": pid})
        yield from _counters(pid, engine)
    for request in range(len(outcome.workload)):
        yield from _request(outcome, request)


def _request(outcome: Outcome, request: int) -> Iterator[str]:
    """The slices of a request, of which those that have not ended are left out."""
    records, engine = outcome.records, outcome.records.engine[request]
    arrival, scheduled = records.arrival[request], records.scheduled[request]
    first, finish = records.first[request], records.finish[request]
    whole = [("queue", arrival, scheduled), ("prompt", scheduled, first), ("decode", first, finish)]
    tokens = {
        "prompt": outcome.workload.prompt[request],
        "output": outcome.workload.output[request],
        "cached": records.cached[request],
        "preempted": records.preempted[request],
    }
    parts = [(f"request {request}", arrival, finish), *whole]
    if outcome.handover is not None:
        begins, arrives = outcome.handover.begins[request], outcome.handover.arrives[request]
        parts.append(("transfer of the cache", begins, arrives))
    for name, begin, end in parts:
        if not (math.isfinite(begin) and math.isfinite(end)):
            continue
        where = {"cat": "request", "id": request, "pid": max(engine, 0), "tid": 0, "name": name}
        yield event(ph="b", ts=_rounded(begin), **where, args=tokens)
        yield event(ph="e", ts=_rounded(max(begin, end)), **where)


def _counters(pid: int, engine: Engine) -> Iterator[str]:
    """The sampled state of an engine."""
    for seconds, waiting, running, blocks in zip(*engine.samples[:4], strict=True):
        ts = _rounded(seconds)
        yield event(ph="C", pid=pid, ts=ts, name="running", args={"requests": running})
        yield event(ph="C", pid=pid, ts=ts, name="waiting", args={"requests": waiting})
        yield event(ph="C", pid=pid, ts=ts, name="KV cache", args={"blocks": blocks})


def _rounded(seconds: float) -> float:
    """Microseconds in whole nanoseconds."""
    return round(seconds * 1e9) / 1e3
