"""The cheapest way to serve a load: what `stagewright.search_serving` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stagewright.api.endings import OF_SEARCH, ResultFile, check_ending, no_such_place
from stagewright.api.workloads import REQUESTS, workload_of
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.numbers import plural
from stagewright.run.experiment import section_of
from stagewright.run.sections.declare import settings_of
from stagewright.run.sections.serving import (
    SERVING,
    EngineSection,
    OperationSection,
    PoolSection,
    WorkloadSection,
    by_own_names,
)
from stagewright.run.settings import Run
from stagewright.searching.lists import values_of
from stagewright.searching.request import SearchRequest
from stagewright.searching.run_file import printed_run_file, write_run_file
from stagewright.searching.space import DIVIDES, DP_ALLOWED, Enumeration, Removed
from stagewright.serving.command_lines import command_lines
from stagewright.serving.deployment import slo_of
from stagewright.serving.schedulers.named import refuse_others
from stagewright.serving.search.answer import (
    SearchProgress,
    ServingRanking,
    ServingTarget,
)
from stagewright.serving.search.answer import (
    search_serving as ranked,
)
from stagewright.serving.search.bounds import LoadTotals
from stagewright.serving.search.layouts import MAX_GPUS, layouts
from stagewright.serving.search.simulated import ServingLoad
from stagewright.serving.workload import Workload
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.views import search as search_tables
from stagewright.views import search_serving as tables
from stagewright.views.pages.search_serving import serving_search_page

REQUESTS_PER_USER = 12
"""Of a closed loop where nothing says how many requests: they arrive for ten times as long as one
takes."""
OBJECTIVES = ("gpus", "cost")


@dataclass(frozen=True, eq=False)
class ServingSearch:
    """The result of a search for serving, with its views; choices by row of `best`, from 1."""

    found: Enumeration
    """The layouts, and what constraints have removed."""
    ranking: ServingRanking
    """The choices that were simulated, the best of them, and what limits have removed."""
    load: str
    """What was served, and under which limits, in words."""

    def __repr__(self) -> str:
        return f"<{len(self.ranking.choices):,} choices simulated; the best: {self.describe()}>"

    def _repr_html_(self) -> str:
        return "".join(
            table._repr_html_()  # pyright: ignore[reportPrivateUsage]
            for table in self.best()
        )

    def describe(self, listed_row: int = 1) -> str:
        """One of the best in words; the first with how far an instance less is from the limits."""
        if self.ranking.best:
            self._number(listed_row)
        return tables.answer(self.ranking, listed_row)

    def remarks(self) -> list[str]:
        """How the winner was confirmed, what was dropped, and what is as cheap, in sentences."""
        return tables.remarks(self.ranking)

    def run(self, listed_row: int = 1) -> Run:
        """The layout of one of the best."""
        return self.ranking.rows.run(self.ranking.choices[self._number(listed_row)].layout)

    def instances(self, listed_row: int = 1) -> int:
        """How many instances one of the best has, of those that decode."""
        choice = self.ranking.choices[self._number(listed_row)]
        return choice.deployment.groups[-1].settings.instances

    def commands(self, engine: str, listed_row: int = 1) -> list[str]:
        """Command lines with which `engine` (vllm, sglang or trtllm) serves as one of the best.

        One for an instance of each group, with all settings that were timed; `#` begins comments.
        """
        choice = self.ranking.choices[self._number(listed_row)]
        return command_lines(choice.deployment, engine)

    def run_file(self, listed_row: int = 1) -> str:
        """The layout of one of the best as a run file in YAML."""
        return printed_run_file(self.ranking.rows, self._layout(listed_row))

    def _layout(self, listed_row: int) -> int:
        return self.ranking.choices[self._number(listed_row)].layout

    def _number(self, listed_row: int) -> int:
        count = len(self.ranking.best)
        if not count:
            raise UserError(f"{self.describe()}; raise --gpus, --ttft or --tpot")
        if not 1 <= listed_row <= count:
            raise UserError(no_such_place(listed_row, count))
        return self.ranking.best[listed_row - 1]

    def best(self, most: int | None = None) -> list[Table]:
        """Aggregated and disaggregated choices that no other one dominates, a table for each."""
        return tables.tables_of_best(self.ranking, most)

    def every(self) -> Table:
        """All choices that were simulated."""
        return tables.every_choice(self.ranking)

    @property
    def all_removed(self) -> tuple[Removed, ...]:
        """What constraints and limits have removed."""
        crossed = (DIVIDES, DP_ALLOWED)  # sizes of instances are crossed with all degrees
        mine = [each for each in self.found.removed if each.requirement not in crossed]
        return (*mine, *self.ranking.removed)

    def removed(self) -> Table:
        """What constraints and limits have removed, as a table."""
        return search_tables.removed(self.all_removed)

    def summary(self) -> dict[str, Any]:
        """The result as one object for JSON: seconds, tokens per second, USD."""
        of = self.ranking
        return {
            "load": self.load,
            "answer": self.describe(),
            "remarks": self.remarks(),
            "layouts": len(of.rows),
            "candidates": of.candidates,
            "simulated": len(of.choices),
            "stopped": of.stopped,
            "removed": [
                {"wanted": each.requirement, "count": each.count, "example": each.example}
                for each in self.all_removed
            ],
            "aggregated": tables.table_of_choices(of, of.aggregated, "Aggregated").rows,
            "disaggregated": tables.table_of_choices(of, of.disaggregated, "Disaggregated").rows,
        }

    def write(self, path: str | os.PathLike[str], listed_row: int = 1) -> list[str]:
        """Write the result, as the name's ending says; returns the files' names.

        `.csv`, `.parquet` (needs the extra `polars`) and `.json`: all choices; `.html`: the page;
        `.yaml`: the run file of the best layout, or of another `listed_row`.
        """
        check_ending(path, OF_SEARCH)

        def run_file(where: str) -> list[str]:
            return write_run_file(self.ranking.rows, self._layout(listed_row), where)

        return ResultFile(
            self.every,
            lambda: self.summary() | {"rows": self.every().rows},
            lambda: serving_search_page(self.ranking, self.all_removed, self.load),
            run_file,
        ).write(path)


class ServingQuestion(NamedTuple):
    """What a search for serving is asked."""

    request: SearchRequest
    loads: Sequence[ServingLoad]
    target: ServingTarget
    engines: Sequence[EngineSection]


def search_serving(
    model: str | os.PathLike[str],
    hardware: str | Hardware | Sequence[str | Hardware],
    *,
    workload: Workload | None = None,
    config: ModelConfig | None = None,
    **settings: Any,
) -> ServingSearch:
    """The fewest GPUs, or the least cost, with which a load keeps its limits.

    `settings` are those of `serve`: the load (`rate`, `isl`, `osl`, a trace as `requests`), the
    limits `ttft`, `tpot` and `e2e` in milliseconds, and the engines. `classes` is the path of a
    file, or a list of rows. `tp`, `pp`, `dp`, `ep` and
    others may be lists, and take several values by default; settings of engines such as
    `scheduler` and `max_num_batched_tokens` may be lists. Four other names say what is wanted:
    `attainment`, the share of all requests that must keep the limits (0.9); `gpus`, the largest
    number of GPUs of all instances (256); `objective`, `gpus` or `cost`; `pairs`, how many pairs of
    layouts, the most promising ones, are tried for prompts and decode apart (4). Requests that are
    drawn are as many as it takes to tell (`num_requests` at least): they arrive for ten times as
    long as one takes, and the winner serves five times as many once more. `concurrency`, a list of
    numbers of users in a closed loop, takes the place of `rate`: each number is served by one
    instance of each layout, and `best()` has the front of tokens per second per GPU over tokens per
    second per user. Raises `UserError` where no layout can be had.

    >>> import stagewright as sw
    >>> found = sw.search_serving("llama3.1-8b", "h100-sxm", rate=20, isl=512, osl=64, ttft=300,
    ...     tpot=20, num_requests=200, tp="1,2", pp=1, layers=8)
    >>> found.run().tp, found.instances()
    (1, 1)
    """
    alone = isinstance(hardware, str | Hardware)
    systems = [hardware] if alone else [*hardware]
    question = asked_serving(
        {"model": os.fspath(model), **settings},
        hardware=systems,
        workload=workload,
        config=config,
    )
    return searched_serving(question)


def asked_serving(
    settings: Mapping[str, Any],
    path: str | None = None,
    *,
    hardware: Sequence[str | Hardware],
    workload: Workload | None = None,
    config: ModelConfig | None = None,
    vary: Mapping[str, Any] | None = None,
) -> ServingQuestion:
    """What is searched for; raises UserError for settings that cannot be combined."""
    given = {name: value for name, value in settings.items() if value is not None}
    values = by_own_names(given)
    share = float(values.pop("attainment", 0.9))
    if not 0 < share <= 1:
        raise UserError(f"--attainment is {share:g}, wanted a share above 0, at most 1")
    pairs = values.pop("pairs", 4)
    if pairs < 0:
        raise UserError(f"--pairs is {pairs}, wanted 0 or more")
    objective = values.pop("objective", "gpus")
    if objective not in OBJECTIVES:
        raise UserError(f"--objective {objective}: with --serve wanted gpus or cost")
    most = _gpus(values.pop("gpus", MAX_GPUS))
    own = {name: values.pop(name) for name in [*values] if name in SERVING}
    _refuse_found(own)
    engines = _engines(own)
    users = values_of(int, own.pop("concurrency"), "--concurrency") if "concurrency" in own else ()
    for name in {"isl", "osl", "num_requests"} & own.keys():
        own[name] = values_of(int, own[name], f"--{name.replace('_', '-')}")[0]
    classes = own.pop("classes") if isinstance(own.get("classes"), list | tuple) else None
    asked = section_of(WorkloadSection, own)
    if users and (asked.rate is not None or asked.requests is not None):
        raise UserError(
            f"--{'requests' if asked.rate is None else 'rate'} and --concurrency: a search serves "
            "requests that arrive, or a closed loop of users; give one of the two"
        )
    slo = slo_of(asked)
    if not users and slo.e2e is None and (slo.ttft is None or slo.tpot is None):
        raise UserError(
            "give --ttft and --tpot (milliseconds to the first token, and per further one), or "
            "--e2e: without limits any number of GPUs serves any load"
        )
    if workload is not None:
        loads = [ServingLoad(workload, LoadTotals.of(workload, share))]
    else:
        loads = _loads(asked, users, classes, share)
    request = layouts(values, path, hardware=hardware, max_gpus=most, vary=vary, config=config)
    lost = [
        f"{plural(count, 'request', 'requests')} rejected: {why}; counted as missing the limits"
        for why, count in loads[0].workload.rejected.items()
    ]
    request = replace(request, notes=(*request.notes, *lost))
    target = ServingTarget(
        slo=slo, share=share, max_gpus=most, pairs=pairs, by_cost=objective == "cost"
    )
    return ServingQuestion(request, loads, target, engines)


def _engines(own: dict[str, Any]) -> list[EngineSection]:
    """Settings of engines, which are taken out of `own`: each combination of lists."""
    lists = {
        of.name: values_of(of.kind, own.pop(of.name), of.flag)
        for of in settings_of(EngineSection, "engines")
        if of.name in own
    }
    sections = [
        section_of(EngineSection, dict(zip(lists, values, strict=True)))
        for values in product(*lists.values())
    ]
    for section in sections:
        refuse_others(section)
    return sections


def _loads(
    asked: WorkloadSection,
    users: Sequence[int],
    classes: Sequence[Mapping[str, Any]] | None,
    share: float,
) -> list[ServingLoad]:
    """The requests that are asked for, or those of each number of users in a closed loop."""

    def load(section: WorkloadSection, count: int) -> ServingLoad:
        draw = partial(_drawn, section, classes)
        workload = draw(count)
        return ServingLoad(workload, LoadTotals.of(workload, share), count, draw if count else None)

    if not users:
        return [load(asked, 0 if asked.requests is not None else asked.num_requests or REQUESTS)]
    return [
        load(replace(asked, concurrency=count), asked.num_requests or REQUESTS_PER_USER * count)
        for count in sorted(users)
    ]


def _drawn(
    section: WorkloadSection, classes: Sequence[Mapping[str, Any]] | None, count: int
) -> Workload:
    """So many requests that are drawn; 0: all that a trace or a profile has."""
    return workload_of(replace(section, num_requests=count or section.num_requests), classes)


def _refuse_found(own: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting that a search finds, or serves without."""
    for name in ("instances", *(of.name for of in settings_of(PoolSection, "pools"))):
        if name in own:
            flag = SERVING[name].flag
            raise UserError(f"{flag} is what a search for serving finds; give --gpus for the most")
    for of in settings_of(OperationSection, "operation"):
        if of.name in own:
            raise UserError(f"{of.flag} is of `stagewright serve`; a search serves without it")


def _gpus(value: Any) -> int:
    counts = values_of(int, value, "--gpus")
    if len(counts) != 1 or not isinstance(counts[0], int) or counts[0] < 1:
        raise UserError(f"--gpus: got {value}, with --serve wanted the most GPUs of all instances")
    return counts[0]


def searched_serving(of: ServingQuestion, progress: SearchProgress | None = None) -> ServingSearch:
    """The search itself."""
    found = of.request.space.enumerate()
    if of.target.by_cost and all(
        found.candidates.cluster(row).price is None
        and found.candidates.hardware(row).price_usd_per_gpu_hour is None
        for row in range(len(found.candidates))
    ):
        raise UserError("--objective cost: no hardware here has a price; give --price USD per hour")
    ranking = ranked(found.candidates, of.loads, of.target, of.engines, progress)
    return ServingSearch(found, ranking, _load(of))


def _load(of: ServingQuestion) -> str:
    """What is served, and under which limits."""
    work, slo = of.loads[0].workload, of.target.slo
    limits = {"TTFT": slo.ttft, "TPOT": slo.tpot, "E2E": slo.e2e}
    kept = ", ".join(f"{name} <= {s * 1e3:g} ms" for name, s in limits.items() if s is not None)
    if any(each.limited for each in work.classes):
        kept += ", or limits of their classes"
    lengths = f"prompts of {np.mean(work.prompt):,.0f} and outputs of {np.mean(work.output):,.0f}"
    name = work.name
    if len(of.loads) > 1:
        users = ", ".join(f"{each.workload.concurrency}" for each in of.loads)
        name = f"closed loops of {users} users"
    limited = f"; {of.target.share:.0%} of requests keep {kept}" if kept else ""
    return f"{name}, {lengths} tokens{limited}"
