"""When processes are started for jobs."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from helpers import cases
from stagewright import executors
from stagewright.executors import Processes


@cases
def test_processes_are_started_that_have_work_of_two_seconds(
    monkeypatch: pytest.MonkeyPatch, jobs: int, workers: int, started: int, here: int
) -> None:
    spent = 0.0
    counts: list[int] = []
    found: list[int] = []

    def job(number: int) -> int:  # takes a second
        nonlocal spent
        spent += 1.0
        return -number

    def spread(
        count: int, function: Callable[[int], int], rest: Iterable[int], done: Callable[[int], None]
    ) -> None:
        counts.append(count)
        assert len(found) == here
        for each in rest:
            done(function(each))

    monkeypatch.setattr(executors.time, "process_time", lambda: spent)
    monkeypatch.setattr(executors, "_spread", spread)
    Processes(workers).run(job, range(jobs), found.append)
    assert found == [-number for number in range(jobs)]
    assert sum(counts) == started
    assert started or len(found) == here


def test_a_run_that_stops_ends_its_processes() -> None:
    others = {*multiprocessing.active_children()}
    started: list[multiprocessing.process.BaseProcess] = []

    def stop(_: None) -> None:
        started.extend({*multiprocessing.active_children()} - others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # though two jobs would go on for an hour
        Processes(3, worth=0).run(time.sleep, [0.0, 3600.0, 3600.0], stop)
    assert started
    assert all(process.exitcode is not None for process in started)  # nothing to wait for


ONE_JOB_OF_AN_HOUR = """
import multiprocessing, signal, threading, time
from stagewright.executors import Processes

def report():
    while not multiprocessing.active_children():
        time.sleep(0.01)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    threading.Thread(target=lambda: (time.sleep(1), report())).start()
    Processes(2, worth=0).run(time.sleep, [3600.0, 3600.0], print)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, number: int) -> None:
    (script := tmp_path / "script.py").write_text(ONE_JOB_OF_AN_HOUR)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        os.kill(parent.pid, number)
        parent.wait(timeout=60)
        assert pids
        deadline = time.monotonic() + 60
        while any(map(runs, pids)):
            assert time.monotonic() < deadline, "processes outlive the one that started them"
            time.sleep(0.01)


def runs(pid: int) -> bool:
    """True if a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and ") Z " in state.read_text())
