"""Flags of Megatron-LM or torchtitan for a candidate.

They cover all that differs from the framework's defaults, so that it does what was simulated. A
setting without a flag is a comment. Sizes of the model are left out, and flags that all runs need.

>>> from stagewright.model.catalog import resolve as preset
>>> from stagewright.run.experiment import Experiment
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.run.settings import Run
>>> from stagewright.searching.candidates import Column
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", zero=1, dp=2), ClusterSection(), Execution())
>>> columns = {"hardware": Column.constant(resolve("h100-sxm"), 1)}
>>> flags(Candidates(base, preset("gpt2"), columns, 1), 0, "megatron")[:3]
['--use-distributed-optimizer', '--seq-length 1024', '--micro-batch-size 1']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from stagewright.errors import UserError, either
from stagewright.searching.candidates import Candidates
from stagewright.searching.flags.lines import FlagLine, TrainedRun
from stagewright.searching.flags.megatron import megatron
from stagewright.searching.flags.torchtitan import torchtitan

_WRITERS: Mapping[str, Callable[[TrainedRun], Iterator[FlagLine]]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
}
TOOLS = tuple(_WRITERS)


def flags(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Flags with which a framework trains as a candidate does; `#` begins comments."""
    return [line.text for line in _lines(candidates, index, tool)]


def notes(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Sentences that repeat the comments, for users who keep the flags only."""
    lines = _lines(candidates, index, tool)
    names = [*dict.fromkeys(line.missing for line in lines if line.missing)]
    count = f"{len(names)} settings have" if len(names) > 1 else "1 setting has"
    missing = [f"{count} no flag in {tool}: {', '.join(names)}"] if names else []
    return missing + [line.text.removeprefix("# ") for line in lines if line.notable]


def _lines(candidates: Candidates, index: int, tool: str) -> list[FlagLine]:
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    return list(_WRITERS[tool](TrainedRun.of(candidates, index)))
