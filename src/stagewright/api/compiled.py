"""A compiled run with its views: what `stagewright.compile` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from stagewright.api.experiments import gpus_per_node
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.views import tables
from stagewright.views.pages.report import compiled_html
from stagewright.views.summary import summary

Asked = str | os.PathLike[str] | Run
"""A run as users give it: the name of a model, the path of its config.json, or a `Run`."""


class Compiled(CompiledRun):
    """A compiled run, with its views: tables, text, and HTML in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return compiled_html(self)

    def summary(self) -> dict[str, Any]:
        """What the ranks compute, exchange and hold: the object that `show --json` prints."""
        return summary(self)

    def compute(self) -> Table:
        """Layers, tasks and FLOPs by phase of a rank of each stage."""
        return tables.compute(self.summary())

    def memory(self) -> Table:
        """Bytes by category at the peak of memory, of a rank of each stage."""
        return tables.memory(self.summary())

    def communication(self) -> Table:
        """Collectives and messages of a rank of each stage, by phase, kind and axis."""
        return tables.communication(self.summary(), merged=False)

    def tasks(self, rank: int = 0) -> Table:
        """All tasks of one rank, a row each, in the order of issue."""
        return tables.tasks(self.program, rank)


def compile(
    model: Asked,
    config: ModelConfig | None = None,
    *,
    table: Mapping[str, str] | None = None,
    **settings: Any,
) -> Compiled:
    """All that a run implies: graphs, schedule and the program of every rank.

    `model` is a preset, the path of a Hugging Face config.json, an id of the hub, or a `Run`;
    `settings` replace those of a run. `config` replaces the configuration that the model's name
    stands for. `table` gives layouts of named values, such as `{"wq": "[M, A/tp, D]"}`, in place of
    the strategy's.
    Raises `UserError` for settings that cannot be combined.

    >>> import stagewright as sw
    >>> compiled = sw.compile("llama3-8b", tp=8, dp=2, zero=1)
    >>> compiled.parameters, compiled.run.world_size
    (8030261248, 16)
    >>> compiled.memory().rows[0]["parameters"]  # bytes of one rank
    2008031232
    """
    return with_views(compile_run(run_of(model, settings), config, table=table))


def with_views(compiled: CompiledRun) -> Compiled:
    """The same compiled run as what `compile` returns."""
    return Compiled(**{f.name: getattr(compiled, f.name) for f in fields(compiled)})


def run_of(
    model: Asked,
    settings: Mapping[str, Any],
    gpus: Callable[[str | None], int] = gpus_per_node,
) -> Run:
    """The run that is asked for; `settings` replace those that it has.

    Where they name nodes and no dp, dp fills them: `gpus` says how many GPUs a node has.
    """
    if isinstance(model, Run):
        if not settings:
            return model
        given = {**model.model_dump(exclude_unset=True), **settings}
    else:
        given = {"model": os.fspath(model), **settings}
    return Experiment.of({}, given, gpus_per_node=gpus).run
