"""Input and output of flag writers: a resolved candidate, and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagewright.model.config import ModelConfig
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Candidates
from stagewright.searching.run_file import non_default_settings


class FlagLine(NamedTuple):
    """Printed line: a flag with its values, or a comment."""

    text: str
    missing: str = ""
    """Setting without a flag."""
    notable: bool = False
    """True for a comment on all figures."""


Lines = Iterator[FlagLine]


def flag(name: str, *values: object) -> FlagLine:
    """Flag of a framework with its values.

    >>> flag("cuda-graph-modules", "attn", "moe").text
    '--cuda-graph-modules attn moe'
    """
    return FlagLine(" ".join([f"--{name}", *map(text_of, values)]))


def without_flag(name: str, value: object, reason: str = "") -> FlagLine:
    """Comment on a setting without a flag.

    >>> without_flag("schedule", "zbv").text, without_flag("zero", 1, "it shards all").text
    ('# schedule=zbv has no flag', '# zero=1 has no flag: it shards all')
    """
    suffix = f": {reason}" if reason else ""
    return FlagLine(f"# {name}={text_of(value)} has no flag{suffix}", name)


TIMING_ONLY = frozenset({
    "model", "hardware", "framework", "as_family", "mode", "memory_allowance", "device_memory",
    "expert_load", "streams", "pipeline_drain",
})  # fmt: skip
"""Settings of the simulator, which no framework has."""


@dataclass(frozen=True)
class TrainedRun:
    """Resolved candidate."""

    run: Run
    model: ModelConfig
    execution: Execution
    settings: Mapping[str, Any]
    """Non-default settings by name."""

    @classmethod
    def of(cls, candidates: Candidates, index: int) -> TrainedRun:
        """Resolve one candidate."""
        run, model = candidates.run(index), candidates.model
        return cls(
            run.resolved(model),
            model.with_overrides(run.layers, run.vocab, run.mtp_num_layers),
            candidates.execution(index),
            non_default_settings(candidates, index),
        )

    @property
    def routed(self) -> bool:
        """True if the model has routed experts."""
        return self.model.num_experts > 0

    @property
    def dropouts(self) -> tuple[float, float]:
        """Dropout probabilities of attention and of the residual stream."""
        model = self.model
        return (model.attention_dropout, model.hidden_dropout) if self.run.dropout else (0.0, 0.0)

    @property
    def gradient_axis(self) -> str | None:
        """Axis of gradient reductions, as `no_overlap` names it; None without reductions."""
        if self.run.dp > 1:
            return "dp"
        return "cp" if self.run.cp > 1 else None

    def unwritten(self, written: Set[str]) -> Iterator[tuple[str, Any]]:
        """Non-default settings beyond `written` that have an effect on the framework's run."""
        for name, value in self.settings.items():
            if name in written or name in TIMING_ONLY or EXPERIMENT[name].section == "cluster":
                continue
            conditions = EXPERIMENT[name].idle
            if not any(all(getattr(self.run, k) == v for k, v in c.items()) for c in conditions):
                yield name, value


Rule = Callable[[TrainedRun], Lines]
"""Writes the flags of some settings."""

_NAMES = {"megatron": "Megatron-LM", "torchtitan": "torchtitan"}


def lines_of(
    trained: TrainedRun, framework: str, rules: Iterable[Rule], written: Set[str]
) -> Lines:
    """Flags of a framework for a run, and comments on settings without one.

    `written`: settings that `rules` cover; all others have no flag. A run simulated as in another
    framework begins with a comment.
    """
    if trained.run.framework != framework:
        yield FlagLine(
            f"# figures are with the habits of {_NAMES[trained.run.framework]}; search with "
            f"--framework {framework} for those of {_NAMES[framework]}, which may have other "
            "times and memory",
            notable=True,
        )
    for rule in rules:
        yield from rule(trained)
    for name, value in trained.unwritten(written):
        yield without_flag(name, value)
