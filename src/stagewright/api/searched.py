"""Search for the best execution of a model on a machine, and its result with views."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stagewright.api.endings import OF_SEARCH, ResultFile, check_ending, no_such_place
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.searching import flags as written
from stagewright.searching.estimate import estimate
from stagewright.searching.objectives import check_objectives
from stagewright.searching.ranking import Ranking, SearchOptions
from stagewright.searching.request import SearchRequest, search_request
from stagewright.searching.run_file import printed_run_file, write_run_file
from stagewright.searching.search import Estimate
from stagewright.searching.search import search as search_candidates
from stagewright.searching.simulated import Progress
from stagewright.searching.space import Enumeration
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.views import search as tables
from stagewright.views.pages.search import page


@dataclass(frozen=True, eq=False)
class Search:
    """Result of a search, with its views; `listed_row` is a row of the table `best`, from 1."""

    enumeration: Enumeration
    """Candidates, and combinations that constraints removed."""
    ranking: Ranking
    """All candidates with their metrics, and the best of them."""
    notes: tuple[str, ...]
    """Notes on assumptions."""

    def __repr__(self) -> str:
        return f"<{len(self.ranking):,} candidates; the best: {self.describe()}>"

    def _repr_html_(self) -> str:
        return self.best()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def describe(self, listed_row: int = 1) -> str:
        """One of the best in words."""
        index, candidates = self.index(listed_row), self.ranking.candidates
        return f"{candidates.describe(index)} on {candidates.machine(index)}"

    @property
    def seconds(self) -> float:
        """Simulated step time of the best."""
        return float(self.ranking.figures.seconds[self.index(1)])

    def run(self, listed_row: int = 1) -> Run:
        """One of the best as a run."""
        return self.ranking.candidates.run(self.index(listed_row))

    def best(self, most: int | None = None) -> Table:
        """Table of the best, or of the front, with what limits each; `most` None: `top` rows."""
        return tables.best(self.ranking, most)

    def choices(self) -> Table:
        """Table of the best step for each value of a setting, and why it is slower."""
        return tables.choices(self.ranking)

    def removed(self) -> Table:
        """Table of the combinations that each constraint removed."""
        return tables.removed(self.enumeration.removed)

    def every(self) -> Table:
        """Table of all candidates: see `reference/search-columns.md`."""
        return tables.every(self.ranking)

    @property
    def certainty(self) -> str:
        """Sentence on whether a candidate that was not simulated could still win."""
        return tables.certainty(self.ranking)

    def run_file(self, listed_row: int = 1) -> str:
        """One of the best as a run file in YAML."""
        return printed_run_file(self.ranking.candidates, self.index(listed_row))

    def flags(self, tool: str, listed_row: int = 1) -> list[str]:
        """One of the best as flags of `megatron` or `torchtitan`."""
        return written.flags(self.ranking.candidates, self.index(listed_row), tool)

    def flag_notes(self, tool: str, listed_row: int = 1) -> list[str]:
        """Sentences on settings without a flag, and on the framework that was simulated."""
        return written.notes(self.ranking.candidates, self.index(listed_row), tool)

    def index(self, listed_row: int) -> int:
        """Index of one of the best among all candidates."""
        listed = self.ranking.listed
        if not 1 <= listed_row <= len(listed):
            more = self.ranking.simulated < len(self.ranking)
            raise UserError(no_such_place(listed_row, len(listed), more=more))
        return int(listed[listed_row - 1])

    def summary(self) -> dict[str, Any]:
        """Result as one object for JSON: seconds, bytes, USD and J of a step."""
        ranking, best = self.ranking, tables.every(self.ranking, self.ranking.listed)
        choices = self.choices() if ranking.best.size else None
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
            "certainty": self.certainty,
            "stopped": ranking.stopped,
            "best": [
                {"run": ranking.candidates.describe(index), **_filled(row)}
                for index, row in zip(ranking.listed.tolist(), best.rows, strict=True)
            ],
            "choices": [_filled(row) for row in choices.rows] if choices else [],
        }

    def write(self, path: str | os.PathLike[str], listed_row: int = 1) -> list[str]:
        """Write the result in the format of the file ending; returns the files' names.

        `.csv`, `.parquet` (needs the extra `polars`) and `.json`: all candidates; `.html`: the
        page; `.yaml`: the run file of `listed_row`, and next to it hardware with varied specs.
        """
        check_ending(path, OF_SEARCH)

        def run_file(where: str) -> list[str]:
            return write_run_file(self.ranking.candidates, self.index(listed_row), where)

        return ResultFile(
            self.every,
            lambda: self.summary() | {"rows": [_filled(row) for row in self.every().rows]},
            lambda: page(self.enumeration, self.ranking, self.notes),
            run_file,
        ).write(path)


def search(
    model: str | os.PathLike[str],
    hardware: str | Hardware | Sequence[str | Hardware] = (),
    *,
    gpus: object = None,
    vary: Mapping[str, Any] | None = None,
    config: ModelConfig | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> Search:
    """Find the best executions of a model on one or several machines.

    Any setting of the run, the machine or the execution, and `gpus`, may be a list, or text with a
    range: `1,2,4`, `1:8`, `8:64:8`, `1:64:x2`. `vary`: lists of hardware specs by name. Open
    settings take several values by default; dp fills the GPUs. `config` overrides the configuration
    of the model's name. `executor` runs the simulations; None: this process, one after the other
    (`stagewright.executors.Processes`).

    `space` adds families of settings to the default space, such as `hsdp,offload` or `full`
    (`searching.defaults`). Options of the search (`searching.ranking.SearchOptions`):

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
    space, options = settings.pop("space", None), pop_search_options(settings)
    request = search_request(
        {"model": os.fspath(model), **settings},
        hardware=[hardware] if isinstance(hardware, str | Hardware) and hardware else hardware,
        gpus=gpus,
        vary=vary,
        model=config,
        families=_families(space),
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
    names = [objective] if isinstance(objective, str) else [*objective]
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
    estimates: Estimate = estimate,
) -> Search:
    """Search a space; `enumeration`: its candidates, if they are known."""
    enumeration = enumeration or request.space.enumerate()
    ranking = search_candidates(
        enumeration.candidates, options, estimates=estimates, executor=executor, progress=progress
    )
    return Search(enumeration, ranking, request.notes)


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Row without unknown values, and without numbers that JSON cannot write."""
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
