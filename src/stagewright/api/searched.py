"""The best execution of a model on a machine: what `stagewright.searching` returns."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from stagewright.api.endings import OF_SEARCH, ResultFile, check_ending, no_such_place
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.searching import flags as written
from stagewright.searching.enumeration import Found
from stagewright.searching.objectives import known
from stagewright.searching.ranking import MOST, TOP, Ranking, Wanted
from stagewright.searching.request import SearchRequest, asked
from stagewright.searching.run_file import printed_run_file, write_run_file
from stagewright.searching.search import search as search_candidates
from stagewright.searching.simulated import Progress
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.views import search as tables
from stagewright.views.pages.search import page
from stagewright.views.search_columns import every


@dataclass(frozen=True, eq=False)
class Search:
    """The result of a search, with its views; candidates by their place among the best, from 1."""

    found: Found
    """The candidates, and what constraints have removed."""
    ranking: Ranking
    """All candidates with their figures, and which are the best."""
    notes: tuple[str, ...]
    """What was assumed."""

    def __repr__(self) -> str:
        return f"<{len(self.ranking):,} candidates; the best: {self.describe()}>"

    def _repr_html_(self) -> str:
        return self.best()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def describe(self, place: int = 1) -> str:
        """One of the best in words."""
        row = self.row(place)
        return f"{self.ranking.rows.describe(row)} on {self.ranking.rows.machine(row)}"

    @property
    def seconds(self) -> float:
        """The step of the best, in seconds, as simulated."""
        return float(self.ranking.figures.seconds[self.row(1)])

    def run(self, place: int = 1) -> Run:
        """One of the best as a run."""
        return self.ranking.rows.run(self.row(place))

    def best(self, most: int | None = None) -> Table:
        """The best, or the front, with what limits each; without `most`, as many as `top`."""
        return tables.best(self.ranking, most)

    def choices(self) -> Table:
        """The best step for each value of a setting, and why it is slower than the best."""
        return tables.choices(self.ranking)

    def removed(self) -> Table:
        """What each constraint has removed from the space."""
        return tables.removed(self.found.removed)

    def every(self) -> Table:
        """A row for each candidate: see `reference/search-columns.md`."""
        return every(self.ranking)

    @property
    def certainty(self) -> str:
        """Whether a candidate that was not simulated could still win."""
        return tables.certainty(self.ranking)

    def run_file(self, place: int = 1) -> str:
        """One of the best as a run file in YAML."""
        return printed_run_file(self.ranking.rows, self.row(place))

    def flags(self, tool: str, place: int = 1) -> list[str]:
        """One of the best as flags of `megatron` or `torchtitan`."""
        return written.flags(self.ranking.rows, self.row(place), tool)

    def flag_notes(self, tool: str, place: int = 1) -> list[str]:
        """What the tool has no flag for, and whose habits the figures are with, in sentences."""
        return written.notes(self.ranking.rows, self.row(place), tool)

    def row(self, place: int) -> int:
        """The number of one of the best among all candidates."""
        listed = self.ranking.listed
        if not 1 <= place <= len(listed):
            more = self.ranking.simulated < len(self.ranking)
            raise UserError(no_such_place(place, len(listed), more=more))
        return int(listed[place - 1])

    def summary(self) -> dict[str, Any]:
        """The result as one object for JSON: seconds, bytes, USD and J of a step."""
        return {
            "combinations": self.found.combinations,
            "candidates": len(self.ranking),
            "removed": [
                {"wanted": each.why, "count": each.count, "example": each.example}
                for each in self.found.removed
            ],
            "simulated": self.ranking.simulated,
            "objectives": list(self.ranking.wanted.objectives),
            "proven": self.ranking.proven,
            "could_still_win": len(self.ranking.open),
            "certainty": self.certainty,
            "stopped": self.ranking.stopped,
            "best": [_filled(row) for row in self._best_rows()],
            "choices": [_filled(row) for row in self.choices().rows]
            if self.ranking.best.size
            else [],
        }

    def _best_rows(self) -> list[dict[str, Any]]:
        ranking, rows = self.ranking, self.ranking.listed
        listed = replace(
            ranking,
            rows=ranking.rows.take(rows),
            estimates=ranking.estimates.take(rows),
            figures=ranking.figures.take(rows),
            launches={n: ranking.launches[row] for n, row in enumerate(rows.tolist())},
            refused={},
            bounds=None if ranking.bounds is None else ranking.bounds[rows],
            wanted=replace(ranking.wanted, all_variants=True),
        )
        runs = [ranking.rows.describe(row) for row in rows.tolist()]
        table = every(listed).rows
        for n, row in enumerate(table):
            row["best"] = n + 1
        return [{"run": run, **row} for run, row in zip(runs, table, strict=True)]

    def write(self, path: str | os.PathLike[str], place: int = 1) -> list[str]:
        """Write the result, as the name's ending says; returns the files' names.

        `.csv`, `.parquet` (needs the extra `polars`) and `.json`: all candidates; `.html`: the
        page; `.yaml`: the run file of the best, or of another `place`, and beside it the hardware
        where its figures were varied.
        """
        check_ending(path, OF_SEARCH)

        def run_file(where: str) -> list[str]:
            return write_run_file(self.ranking.rows, self.row(place), where)

        return ResultFile(
            self.every,
            lambda: self.summary() | {"rows": [_filled(row) for row in self.every().rows]},
            lambda: page(self.found, self.ranking, self.notes),
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
    """The best executions of a model on one or several machines.

    Any of the settings (those of a run, of the machine and of the execution), and `gpus`, may be a
    list, or text with a range: `1,2,4`, `1:8`, `8:64:8`, `1:64:x2`. `vary` has lists of figures of
    the hardware by name. A setting that is not given takes several values by default; dp fills the
    GPUs. `config` replaces the configuration that the model's name stands for. Candidates are
    simulated by `executor`.

    `space` adds families of settings to the default space, such as `hsdp,offload` or `full`
    (`searching.defaults`). Other names say what is wanted (`searching.ranking.Wanted`):

    * `objective`: `time`, `memory`, `cost`, `energy`, `mfu`, or several, whose front is the result.
    * `top`: how many layouts are listed.
    * `most`: how many candidates are simulated at most.
    * `exact`: simulate all candidates that might be faster than the best.
    * `allow_oom`: candidates that do not fit into memory count, too.
    * `all_variants`: list several variants of one layout.

    Raises `UserError` for a space that is empty or too large, and where nothing fits.

    >>> import stagewright as sw
    >>> found = sw.search("gpt2", "h100-sxm", gpus=8, tp="1,2", zero=1, pp=1, layers=2,
    ...     micro_batch_size=[4, 8], global_batch_size=64, recompute="none", sequence_parallel=True)
    >>> found.run().tp, found.run().micro_batch_size, len(found.ranking.rows)
    (1, 8, 4)
    """
    alone = isinstance(hardware, str | Hardware)
    several = ([hardware] if hardware else []) if alone else [*hardware]
    space = settings.pop("space", None)
    what = wanted(settings)
    request = asked(
        {"model": os.fspath(model), **settings},
        hardware=several,
        gpus=gpus,
        vary=vary,
        model=config,
        families=_words(space),
    )
    return searched(request, what, executor)


def _words(space: object) -> str | None:
    """Families of settings as one text: of a text, or of a list of words."""
    if space is None or space in ([], ()):
        return None
    words = cast("list[object]", [*space]) if isinstance(space, list | tuple) else [space]
    if not all(isinstance(word, str) for word in words):
        raise UserError(f"space is {space!r}, wanted words such as 'hsdp,offload'")
    return ",".join(map(str, words))


def check_count(option: str, count: object) -> None:
    """Raise a UserError for a number of candidates that is none."""
    if count is None:
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UserError(f"--{option}: got {count!r}, wanted a whole number, 1 or more")


def wanted(settings: dict[str, Any]) -> Wanted:
    """What is asked of a search, taken out of the settings."""
    objective: str | Sequence[str] = settings.pop("objective", "time")
    names = [objective] if isinstance(objective, str) else [*objective]
    counts: dict[str, int | None] = {name: settings.pop(name, None) for name in ("top", "most")}
    for name, count in counts.items():
        check_count(name, count)
    top, most = counts["top"], counts["most"]
    return Wanted(
        known(names),
        TOP if top is None else top,
        MOST if most is None else most,
        prove=settings.pop("exact", False),
        any_memory=settings.pop("allow_oom", False),
        all_variants=settings.pop("all_variants", False),
    )


def searched(
    request: SearchRequest,
    what: Wanted,
    executor: Executor | None = None,
    progress: Progress | None = None,
    found: Found | None = None,
) -> Search:
    """The search of a space; `found`: its candidates, if they are known."""
    found = found or request.space.candidates()
    ranking = search_candidates(found.rows, what, executor=executor, progress=progress)
    return Search(found, ranking, request.notes)


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what is unknown, and without numbers that JSON has no word for."""
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
