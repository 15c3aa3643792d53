"""Search for the best execution of a model on a machine: `stagewright.search`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

from stagewright.api.result import (
    HARDWARE_TYPES,
    OF_SEARCH,
    RUN_FILE,
    PublicResult,
    check_names,
    check_type,
    known,
    no_such_row,
    path_text,
    suffix_of,
)
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.run.tool_files import text_lines
from stagewright.searching.estimate import estimate
from stagewright.searching.objectives import check_objectives
from stagewright.searching.ranking import Ranking, SearchOptions
from stagewright.searching.request import SearchRequest, search_request
from stagewright.searching.run_file import printed_run_file, write_run_file
from stagewright.searching.search import Estimator
from stagewright.searching.search import search as search_candidates
from stagewright.searching.simulated import Progress, step_of
from stagewright.searching.space import Enumeration
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.views import search as views
from stagewright.views.accuracy import GroupError, error_of_step
from stagewright.views.pages.search import page as html_page
from stagewright.views.search import search_text


@dataclass(frozen=True, eq=False)
class Search(PublicResult):
    """The best executions of a model on a machine; `row` is a row of the table `best`, from 1.

    Tables: `best` (or the front), `choices` (the best step for each value of a setting, and why it
    is slower), `removed` (combinations that each constraint removed), and `candidates`
    (`reference/search-columns.md`).
    """

    enumeration: Enumeration
    """Candidates, and combinations that constraints removed."""
    ranking: Ranking
    """All candidates with their metrics, and the best of them."""
    notes: tuple[str, ...]
    """Notes on assumptions."""

    suffixes = OF_SEARCH

    def __repr__(self) -> str:
        return f"<{len(self.ranking):,} candidates; the best: {self.describe()}>"

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "best": lambda: views.best(self.ranking),
            "choices": lambda: views.choices(self.ranking),
            "removed": lambda: views.removed(self.enumeration.removed),
            "candidates": lambda: views.every(self.ranking),
        }

    def text(self, seconds: float | None = None) -> Iterator[str | Table]:
        """Lines and tables of `stagewright search`; `seconds`: duration of the search."""
        return search_text(self.ranking, self.describe(), seconds)

    def describe(self, row: int = 1) -> str:
        """One of the best in words."""
        index, candidates = self.index(row), self.ranking.candidates
        return f"{candidates.describe(index)} on {candidates.machine(index)}"

    @property
    def seconds(self) -> float:
        """Simulated step time of the best."""
        return float(self.ranking.figures.seconds[self.index(1)])

    def run(self, row: int = 1) -> Run:
        """One of the best as a run."""
        return self.ranking.candidates.run(self.index(row))

    def run_file(self, row: int = 1) -> str:
        """One of the best as a run file in YAML."""
        return printed_run_file(self.ranking.candidates, self.index(row))

    def flags(self, tool: str, row: int = 1) -> list[str]:
        """One of the best as flags of `megatron` or `torchtitan`."""
        return text_lines(self.ranking.candidates.trained(self.index(row)), tool)

    def index(self, row: int) -> int:
        """Index of one of the best among all candidates."""
        listed = self.ranking.listed
        if not 1 <= row <= len(listed):
            more = self.ranking.simulated < len(self.ranking)
            raise no_such_row(row, len(listed), more=more)
        return int(listed[row - 1])

    def to_dict(self) -> dict[str, Any]:
        """The object of `search --json`: seconds, bytes, USD and J of a step."""
        ranking, best = self.ranking, views.every(self.ranking, self.ranking.listed)
        return {
            "combinations": self.enumeration.combinations,
            "candidates": len(ranking),
            "removed": [
                {"wanted": r.requirement, "count": r.count, "example": r.example}
                for r in self.enumeration.removed
            ],
            "simulated": ranking.simulated,
            "objectives": list(ranking.options.objectives),
            "proven": ranking.proven,
            "could_still_win": len(ranking.open),
            "certainty": views.certainty(ranking),
            "stopped": ranking.stopped,
            "best": [
                {"run": ranking.candidates.describe(index), **known(row)}
                for index, row in zip(ranking.listed.tolist(), best.rows, strict=True)
            ],
            "choices": [*map(known, views.choices(ranking).rows)] if ranking.best.size else [],
            "accuracy": [of.to_dict() for of in self.accuracy()],
        }

    def accuracy(self) -> list[GroupError]:
        """Errors to expect of the time of the best, from published steps like it."""
        if not self.ranking.best.size:
            return []
        return [error_of_step(step_of(self.ranking.candidates, self.index(1)))]

    def write(self, path: str | os.PathLike[str], row: int = 1) -> list[str]:
        """Write a file in the format of its suffix; returns the names of files.

        `.csv`, `.parquet` (needs the extra `polars`) and `.json`: all candidates; `.html`: a page;
        `.yaml`: the run file of `row`, and next to it hardware with varied specs.
        """
        if suffix_of(path_text(path)) == RUN_FILE:
            return write_run_file(self.ranking.candidates, self.index(row), os.fspath(path))
        return super().write(path)

    def _rows(self) -> Table:
        return views.every(self.ranking)

    def _json_rows(self) -> dict[str, Any]:
        return {"rows": [*map(known, self._rows().rows)]}

    def page(self) -> str:
        """The page that `write` writes as `.html`."""
        return html_page(self.enumeration, self.ranking, self.notes)


def search(
    model: str | os.PathLike[str],
    hardware: str | Hardware | Sequence[str | Hardware] = (),
    *,
    gpus: object = None,
    vary: Mapping[str, Any] | None = None,
    config: ModelConfig | None = None,
    tool: str | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> Search:
    """Find the best executions of a model on one or several machines.

    Any setting of the run, the machine or the execution, and `gpus`, may be a list, or text with a
    range: `1,2,4`, `1:8`, `8:64:8`, `1:64:x2`. `vary`: lists of hardware specs by name. Open
    settings take several values by default; dp fills the GPUs. `config` overrides the configuration
    of the model's name. `tool`: only try settings for which it has a flag (`Search.flags`).
    `executor` runs the simulations; None: this process, one after the other.

    `space` adds families of settings to the default space, such as `hsdp,offload` or `full`.
    Options of the search:

    * `objective`: `time`, `memory`, `cost`, `energy`, `mfu`, or several, whose front is the result.
    * `top`: number of layouts to list.
    * `most`: limit of candidates to simulate.
    * `exact`: simulate all candidates that might be faster than the best.
    * `allow_oom`: rank candidates that do not fit into memory, too.
    * `all_variants`: list several variants of one layout.

    Raises `UserError` for a space that is empty or too large, and where nothing fits.

    >>> import stagewright as sw
    >>> result = sw.search("gpt2", "h100-sxm", gpus=8, tp="1,2", zero=1, pp=1, layers=2,
    ...     micro_batch_size=[4, 8], global_batch_size=64, recompute="none", sequence_parallel=True)
    >>> result.run().tp, result.run().micro_batch_size, len(result.ranking.candidates)
    (1, 8, 4)
    """
    check_type(config, "config as a ModelConfig", ModelConfig, NoneType)
    check_names(vary, "vary as a mapping of lists")
    check_type(hardware, "hardware as a name, a Hardware, or a list of these", *HARDWARE_TYPES)
    check_type(gpus, "gpus as a number, a list, or text", int, list, tuple, str, NoneType)
    space, options = settings.pop("space", None), pop_search_options(settings)
    request = search_request(
        {"model": path_text(model), **settings},
        hardware=[hardware] if isinstance(hardware, str | Hardware) and hardware else hardware,
        gpus=gpus,
        vary=vary,
        model=config,
        families=_families(space),
        tool=tool,
    )
    return run_search(request, options, executor)


def _families(space: object) -> str | None:
    """Families of settings as one text."""
    if space is None or space in ([], ()):
        return None
    words = cast("list[object]", [*space]) if isinstance(space, list | tuple) else [space]
    if not all(isinstance(word, str) for word in words):
        raise UserError(f"space is {space!r}, wanted words such as 'hsdp,offload'")
    return ",".join(map(str, words))


def check_count(option: str, count: object) -> None:
    """Raise a UserError for an invalid number of candidates."""
    if count is not None and (type(count) is not int or count < 1):
        raise UserError(f"--{option}: got {count!r}, wanted a whole number, 1 or more")


def pop_search_options(settings: dict[str, Any]) -> SearchOptions:
    """Pop the options of a search from settings."""
    objective: str | Sequence[str] = settings.pop("objective", "time")
    check_type(objective, "objective as a name, or a list of names", str, list, tuple)
    names = [objective] if isinstance(objective, str) else [*objective]
    for name in names:
        check_type(name, "the name of an objective", str)
    options: dict[str, Any] = {}
    for name in ("top", "most", "exact", "allow_oom", "all_variants"):
        value = settings.pop(name, None)
        if name in ("top", "most"):
            check_count(name, value)
        if value is not None:
            options[name] = value
    return SearchOptions(check_objectives(names), **options)


def run_search(
    request: SearchRequest,
    options: SearchOptions,
    executor: Executor | None = None,
    progress: Progress | None = None,
    enumeration: Enumeration | None = None,
    estimator: Estimator = estimate,
) -> Search:
    """Search a space; `enumeration`: its candidates, if they are known."""
    enumeration = enumeration or request.space.enumerate()
    ranking = search_candidates(
        enumeration.candidates, options, estimator=estimator, executor=executor, progress=progress
    )
    return Search(enumeration, ranking, request.notes)
