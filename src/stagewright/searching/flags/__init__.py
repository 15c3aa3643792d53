"""A candidate as flags of the framework that will train it: Megatron-LM's or torchtitan's.

Printed is what the framework needs to do what was timed: all that differs from the framework's own
defaults, whether or not it differs from ours. What it has no flag for is a comment. Sizes of the
model are not among them, nor what all runs of the framework need.

>>> from stagewright.searching.candidates import Column
>>> from stagewright.run.experiment import Experiment
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.run.settings import Run
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", zero=1, dp=2), ClusterSection(), Execution())
>>> found = Candidates.of(base, resolve("h100-sxm"), {"schedule": Column.of(["zbv"])})
>>> flags(found, 0, "megatron")[:3]
['--use-distributed-optimizer', '--seq-length 1024', '--micro-batch-size 1']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from stagewright.errors import UserError, either
from stagewright.searching.candidates import Candidates
from stagewright.searching.flags.lines import FlagLine, TrainedRun
from stagewright.searching.flags.megatron import megatron
from stagewright.searching.flags.torchtitan import torchtitan

TOOLS = ("megatron", "torchtitan")

_WRITERS: Mapping[str, Callable[[TrainedRun], Iterator[FlagLine]]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
}


def flags(candidates: Candidates, row: int, tool: str) -> list[str]:
    """The flags with which a framework trains as a candidate does; `#` before what has none."""
    return [line.text for line in _written(candidates, row, tool)]


def notes(candidates: Candidates, row: int, tool: str) -> list[str]:
    """What the user should be told beside the flags: comments among them are lost where only the
    lines that begin with dashes are kept."""
    lines = _written(candidates, row, tool)
    names = [*dict.fromkeys(line.missing for line in lines if line.missing)]
    count = f"{len(names)} settings have" if len(names) > 1 else "1 setting has"
    found = [f"{count} no flag in {tool}: {', '.join(names)}"] if names else []
    return found + [line.text.removeprefix("# ") for line in lines if line.notable]


def _written(candidates: Candidates, row: int, tool: str) -> list[FlagLine]:
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    return list(_WRITERS[tool](TrainedRun.of(candidates, row)))
