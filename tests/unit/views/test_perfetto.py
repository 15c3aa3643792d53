"""Traces for Perfetto follow the Trace Event Format, and show every task of the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagewright.lower.compile import compile
from stagewright.program.columns import TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.timeline import timeline
from stagewright.views import perfetto
from timed import RUNS, durations
from trace_events import check


@pytest.mark.numerics
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
    line = timeline(program, [np.full(len(of.work.actions.tasks), 1e-6) for of in program.classes])
    perfetto.write(line, tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert names[:2] == ["actions", "kernels"]
    assert {"tp", "dp", "pp: send to +1", "pp: receive from +1"} <= {*names}
    actions = [e["name"] for e in events if e.get("cat") == "action" and e["pid"] == 0]
    assert actions[:6] == ["0F0", "0F1", "2F0", "2F1", "0F2", "2B0"]
    assert actions[-1] == "step"
