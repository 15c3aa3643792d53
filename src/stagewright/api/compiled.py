"""A compiled run: what `stagewright.compile` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from types import NoneType
from typing import Any

from stagewright.api.experiments import gpus_per_node
from stagewright.api.result import PublicResult, check_names, check_type, path_text
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.program.fit import peak_in_program_order
from stagewright.run.experiment import Experiment
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.trace.run_manifest import read_experiment
from stagewright.views import tables as views
from stagewright.views.pages.charts import of_compiled
from stagewright.views.pages.html import Chart
from stagewright.views.pages.report import page as html_page
from stagewright.views.summary import summary, summary_text

Asked = str | os.PathLike[str] | Run
"""A run as users give it: the name of a model, the path of its config.json, or a `Run`."""


class Compiled(CompiledRun, PublicResult):
    """A compiled run: what every rank computes, communicates and holds.

    Tables: `compute`, `memory`, `communication` of a rank of each stage, and `tasks` of one `rank`
    in the order of issue.
    """

    __slots__ = ()

    suffixes = (".json", ".html")

    def _charts(self) -> list[Chart]:
        return of_compiled(self)

    @property
    def fits(self) -> bool | None:
        """True if every rank fits into the memory of a device; None: unknown memory."""
        return None if self.fit is None else self.fit.fits

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest rank, in program order."""
        return max(peak_in_program_order(of).size for of in self.program.classes)

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "compute": lambda: views.compute(self.to_dict()),
            "memory": lambda: views.memory(self.to_dict()),
            "communication": lambda: views.communication(self.to_dict(), merged=False),
            "tasks": partial(views.tasks, self.program, rank=0),
        }

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright show`."""
        return summary_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """What ranks compute, exchange and hold: the object of `show --json`."""
        return summary(self)

    def page(self) -> str:
        """The page that `write` writes as `.html`."""
        return html_page(self)


def compile(
    model: Asked,
    config: ModelConfig | None = None,
    *,
    table: Mapping[str, str] | None = None,
    **settings: Any,
) -> Compiled:
    """Compile a run: graphs, schedule, and the program of every rank.

    `model` is a preset, the path of a Hugging Face config.json, an id of the hub, or a `Run`;
    `settings` replace those of a run. `config` replaces the configuration that the model's name
    stands for. `table` gives layouts of named values, such as `{"wq": "[M, A/tp, D]"}`, in place of
    the strategy's.
    Raises `UserError` for settings that cannot be combined.

    >>> import stagewright as sw
    >>> compiled = sw.compile("llama3-8b", tp=8, dp=2, zero=1)
    >>> compiled.parameters, compiled.run.world_size
    (8030261248, 16)
    >>> compiled.table("memory").rows[0]["parameters"]  # bytes of one rank
    2008031232
    """
    check_type(config, "config as a ModelConfig", ModelConfig, NoneType)
    check_names(table, "table as a mapping of layouts")
    return with_views(compile_run(run_of(model, settings), config, table=table))


def with_views(compiled: CompiledRun) -> Compiled:
    """The same compiled run as what `compile` returns."""
    return Compiled(**{f.name: getattr(compiled, f.name) for f in fields(compiled)})


def run_of(
    model: Asked, settings: Mapping[str, Any], gpus: Callable[[str | None], int] = gpus_per_node
) -> Run:
    """The run with these settings, which replace those that it has.

    If they name nodes or GPUs and no dp, dp fills them: `gpus` counts the GPUs of a node.
    """
    if isinstance(model, Run):
        if not settings:
            return model
        given = model.model_dump(exclude_unset=True)
        return Experiment.of(given, settings, gpus_per_node=gpus).run
    given = {"model": path_text(model, "the name of a model, a path or a Run"), **settings}
    return read_experiment(None, given, gpus).run
