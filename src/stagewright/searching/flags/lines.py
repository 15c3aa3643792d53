"""What flags are written from and into: a run with all that follows from it, and lines."""

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
from stagewright.searching.run_file import given


class FlagLine(NamedTuple):
    """A line of what is printed: a flag with its values, or a comment."""

    text: str
    missing: str = ""
    """The setting for which there is no flag."""
    notable: bool = False
    """A comment on all figures."""


Lines = Iterator[FlagLine]


def flag(name: str, *values: object) -> FlagLine:
    """A flag of a framework with its values.

    >>> flag("cuda-graph-modules", "attn", "moe").text
    '--cuda-graph-modules attn moe'
    """
    return FlagLine(" ".join([f"--{name}", *map(text_of, values)]))


def without_flag(name: str, value: object, why: str = "") -> FlagLine:
    """The comment on a setting for which the framework has no flag.

    >>> without_flag("schedule", "zbv").text, without_flag("zero", 1, "it shards all").text
    ('# schedule=zbv has no flag', '# zero=1 has no flag: it shards all')
    """
    reason = f": {why}" if why else ""
    return FlagLine(f"# {name}={text_of(value)} has no flag{reason}", name)


OF_FIGURES = frozenset({
    "model", "hardware", "framework", "as_family", "mode", "memory_allowance", "device_memory",
    "expert_load", "streams", "pipeline_drain",
})  # fmt: skip
"""Settings of the timing alone: frameworks have no use for them."""


@dataclass(frozen=True)
class TrainedRun:
    """A candidate with all that follows from its settings."""

    run: Run
    """Resolved."""
    model: ModelConfig
    how: Execution
    given: Mapping[str, Any]
    """The settings that are not defaults, by name."""

    @classmethod
    def of(cls, candidates: Candidates, row: int) -> TrainedRun:
        """A row of candidates."""
        run, model = candidates.run(row), candidates.model
        return cls(
            run.resolved(model),
            model.with_overrides(run.layers, run.vocab, run.mtp_num_layers),
            candidates.execution(row),
            given(candidates, row),
        )

    @property
    def routed(self) -> bool:
        """Whether there are experts that tokens are sent to."""
        return self.model.num_experts > 0

    @property
    def dropouts(self) -> tuple[float, float]:
        """Probabilities of dropout of attention and of the residual stream."""
        model = self.model
        return (model.attention_dropout, model.hidden_dropout) if self.run.dropout else (0.0, 0.0)

    @property
    def gradient_axis(self) -> str | None:
        """The axis whose `no_overlap` says whether reductions of gradients overlap; None: there are
        none."""
        if self.run.dp > 1:
            return "dp"
        return "cp" if self.run.cp > 1 else None

    def others(self, written: Set[str]) -> Iterator[tuple[str, Any]]:
        """Given settings but for those in `written` and those that change nothing in this run."""
        for name, value in self.given.items():
            if name in written or name in OF_FIGURES or EXPERIMENT[name].section == "cluster":
                continue
            idle = EXPERIMENT[name].idle
            if not any(all(getattr(self.run, k) == v for k, v in each.items()) for each in idle):
                yield name, value


Rule = Callable[[TrainedRun], Lines]
"""The flags of a framework for some settings."""

_NAMES = {"megatron": "Megatron-LM", "torchtitan": "torchtitan"}


def lines_of(of: TrainedRun, framework: str, rules: Iterable[Rule], written: Set[str]) -> Lines:
    """The flags of a framework for a run, and comments on settings without one.

    `written` are the settings that `rules` say in full; all others have no flag. A run that was
    timed with the habits of another framework begins with a comment on that.
    """
    if of.run.framework != framework:
        yield FlagLine(
            f"# figures are with the habits of {_NAMES[of.run.framework]}; search with --framework "
            f"{framework} for those of {_NAMES[framework]}, which may have other times and memory",
            notable=True,
        )
    for rule in rules:
        yield from rule(of)
    for name, value in of.others(written):
        yield without_flag(name, value)
