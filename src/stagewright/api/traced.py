"""A step of the program that a graph of PyTorch was made into."""

from __future__ import annotations

from stagewright.program.columns import Program
from stagewright.time.durations import task_seconds
from stagewright.time.network import Machine
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.step import TracedStep
from stagewright.time.simulate.timeline import timeline


def simulate_traced(
    program: Program, name: str, machine: Machine, progress: Progress | None = None
) -> TracedStep:
    """The step of a program on a machine of as many GPUs as the program has ranks."""
    seconds = task_seconds(program, machine)
    return TracedStep(name, machine, timeline(program, seconds, progress=progress))
