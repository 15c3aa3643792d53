"""Whole processes, measured from outside: CPU and wall seconds and peak memory, beside aims."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MB = 1e6


class Cost(NamedTuple):
    """What a process took, all its threads together."""

    cpu: float  # seconds, user and system
    wall: float
    peak: float  # bytes
    out: str = ""  # what it printed

    def __str__(self) -> str:
        return f"{self.cpu:.2f} CPU-s, {self.wall:.2f} s, {self.peak / MB:.0f} MB peak"


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: str | None = None
) -> Cost:
    """Run a command to its end; raises if it fails."""
    began = time.perf_counter()
    whole = {**os.environ, **(environment or {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=whole, cwd=cwd, text=True
    ) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024.0
    return Cost(cpu, time.perf_counter() - began, peak, out)


def stagewright(*arguments: object) -> Cost:
    """Run the command line of this interpreter's Stagewright."""
    return run([sys.executable, "-m", "stagewright", *map(str, arguments)])


def python(code: str, *arguments: object) -> Cost:
    """Run some code in a process of its own."""
    return run([sys.executable, "-c", code, *map(str, arguments)])


def at_most(what: str, got: float, aim: float, unit: str) -> None:
    """Print a figure that should be low; the ratio is above 1 where it is met."""
    _aim(what, got, aim, unit, "at most", aim / got if got else float("inf"))


def at_least(what: str, got: float, aim: float, unit: str) -> None:
    """Print a figure that should be high; the ratio is above 1 where it is met."""
    _aim(what, got, aim, unit, "at least", got / aim)


def _aim(what: str, got: float, aim: float, unit: str, side: str, ratio: float) -> None:
    met = "met" if ratio >= 1 else "MISSED"
    print(
        f"    {what}: {got:,.3g} {unit}; aim {side} {aim:,g} {unit}: {met}, ratio {ratio:.2f}",
        flush=True,
    )
