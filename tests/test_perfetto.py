"""Traces for Perfetto, against the Trace Event Format.

The rules are those of the document "Trace Event Format" (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): the fields of each phase, slices of a thread that
nest, flows that start once, end once and are bound to a slice.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagewright.lower.training import compile
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.time.simulate.issue import Execution
from stagewright.time.simulate.timeline import timeline
from stagewright.views import perfetto

from .test_timeline import RUNS, durations

Number = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"pid": int, "tid": int, "ts": Number, "dur": Number, "name": str},
    "M": {"pid": int, "tid": int, "name": str, "args": dict},
    "s": {"pid": int, "tid": int, "ts": Number, "id": int, "name": str, "cat": str},
    "f": {"pid": int, "tid": int, "ts": Number, "id": int, "name": str, "cat": str, "bp": str},
    "C": {"pid": int, "ts": Number, "name": str, "args": dict},
}
OPTIONAL = {"cat": str, "args": dict}
METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check(trace: dict[str, Any]) -> None:
    """Whether a trace follows the format."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, str, int], dict[str, tuple[int, int, int]]] = defaultdict(dict)
    named: set[tuple[int, int]] = set()
    for event in trace["traceEvents"]:
        fields = REQUIRED[event["ph"]]
        for name, kind in fields.items():
            assert isinstance(event[name], kind), event
        for name in event.keys() - fields.keys() - {"ph"}:
            assert isinstance(event[name], OPTIONAL[name]), event
        thread = event["pid"], event.get("tid", 0)
        if event["ph"] == "M":
            (key, kind), *rest = METADATA[event["name"]].items()
            assert not rest
            assert isinstance(event["args"][key], kind)
            named.add(thread)
            continue
        at = round(event["ts"] * 1000)
        assert at >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[thread].append((at, at + round(event["dur"] * 1000)))
        elif event["ph"] in "sf":
            ends = flows[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in ends
            ends[event["ph"]] = (*thread, at)
    assert slices.keys() <= named
    for thread, some in slices.items():
        some = sorted(some)
        for (_, end), (begin, _) in itertools.pairwise(some):
            assert begin >= end, f"slices of thread {thread} overlap at {begin} ns"
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"][2] <= ends["f"][2]
        for pid, tid, at in ends.values():
            assert any(b <= at < e for b, e in slices[pid, tid])


@pytest.mark.parametrize("way", ["separate", "one"])
@pytest.mark.parametrize("run", RUNS)
def test_traces_follow_the_format(run: str, way: Any, tmp_path: Path) -> None:
    program = compile(Run(**RUNS[run])).program
    seconds = [t * 1e-12 for t in durations(program, 7, True)]
    for factors in ({}, {1: 1.5}):
        line = timeline(program, seconds, Execution(streams=way), factors)
        perfetto.write(line, tmp_path / "out.json", run)
        trace = json.loads((tmp_path / "out.json").read_text())
        check(trace)
        events = trace["traceEvents"]
        tasks = [e for e in events if e["ph"] == "X" and e["cat"] != "action"]
        assert len(tasks) == sum(len(lane.issue) for lane in line.lanes)
        sends = sum(int((lane.kind == TaskKind.SEND).sum()) for lane in line.lanes)
        assert sum(e["ph"] == "s" for e in events) == sends
        assert max(e["ts"] + e["dur"] for e in tasks) == pytest.approx(line.seconds * 1e6, abs=1e-3)


def test_streams_and_actions_are_tracks(tmp_path: Path) -> None:
    program = compile(Run(**RUNS["vpp"])).program
    line = timeline(program, [np.full(len(of.tasks), 1e-6) for of in program.classes])
    perfetto.write(line, tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert names[:2] == ["actions", "kernels"]
    assert {"tp", "dp", "pp: send to +1", "pp: receive from +1"} <= {*names}
    actions = [e["name"] for e in events if e.get("cat") == "action" and e["pid"] == 0]
    assert actions[:6] == ["0F0", "0F1", "2F0", "2F1", "0F2", "2B0"]
    assert actions[-1] == "step"
