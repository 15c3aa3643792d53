"""Search for the cheapest way to serve a load: `stagewright.search_serving`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stagewright.api.experiments import with_launch_file
from stagewright.api.result import (
    HARDWARE_TYPES,
    OF_SEARCH,
    RUN_FILE,
    PublicResult,
    check_type,
    no_such_row,
    path_text,
    suffix_of,
)
from stagewright.api.workloads import REQUESTS, workload_of
from stagewright.errors import UserError
from stagewright.launch import files as launch
from stagewright.model.config import ModelConfig
from stagewright.numbers import plural
from stagewright.run.experiment import section_of
from stagewright.run.files import launched
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
from stagewright.searching.space import DIVIDES, DP_ALLOWED, Enumeration, Removed
from stagewright.serving.command_lines import command_lines
from stagewright.serving.deployment import slo_of
from stagewright.serving.schedulers.named import refuse_others
from stagewright.serving.search.bounds import LoadTotals
from stagewright.serving.search.layouts import MAX_GPUS, layouts
from stagewright.serving.search.load import ServingLoad
from stagewright.serving.search.run_files import printed_run_files, write_run_files
from stagewright.serving.search.search import (
    SearchProgress,
    ServingChoice,
    ServingRanking,
    ServingTarget,
)
from stagewright.serving.search.search import search_serving as ranked
from stagewright.serving.workload import Workload
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.views import search as search_views
from stagewright.views import search_serving as views
from stagewright.views.accuracy import GroupError, errors_of_serving
from stagewright.views.pages.search import serving_search_page
from stagewright.views.search_serving import serving_search_text

REQUESTS_PER_USER = 12
"""Default number of requests of each user of a closed loop."""
OBJECTIVES = ("gpus", "cost")


@dataclass(frozen=True, eq=False)
class ServingSearch(PublicResult):
    """The cheapest ways to serve a load; `row` is a row of the best, from 1.

    Tables: `aggregated` and `disaggregated` (choices that no other one dominates), `choices` (all
    that were simulated), and `removed` (by constraints and limits).
    """

    enumeration: Enumeration
    """Layouts, and combinations that constraints removed."""
    ranking: ServingRanking
    """Simulated choices, the best of them, and what limits removed."""
    load: str
    """The load and its limits in words."""

    suffixes = OF_SEARCH

    def __repr__(self) -> str:
        return f"<{len(self.ranking.choices):,} choices simulated; the best: {self.describe()}>"

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "aggregated": lambda: views.table_of_choices(
                self.ranking, self.ranking.aggregated, "Aggregated"
            ),
            "disaggregated": lambda: views.table_of_choices(
                self.ranking, self.ranking.disaggregated, "Disaggregated"
            ),
            "choices": lambda: views.every_choice(self.ranking),
            "removed": lambda: search_views.removed(self.all_removed),
        }

    def text(
        self, most: int | None = None, seconds: float | None = None, *, why: bool = False
    ) -> Iterator[str | Table]:
        """Lines and tables of `stagewright search --serve`; `most`: rows of each table.

        With `why` also the combinations that constraints and limits removed.
        """
        removed = self.table("removed")
        return serving_search_text(self.ranking, self.load, removed, most, seconds, why=why)

    def describe(self, row: int = 1) -> str:
        """One of the best in words; the first with how far an instance less is from the limits."""
        if self.ranking.best:
            self._index(row)
        return views.answer(self.ranking, row)

    def run(self, row: int = 1) -> Run:
        """The layout of one of the best."""
        return self.ranking.rows.run(self._choice(row).layout)

    def instances(self, row: int = 1) -> int:
        """Number of instances of one of the best, of those that decode."""
        return self._choice(row).deployment.groups[-1].settings.instances

    def commands(self, engine: str, row: int = 1) -> list[str]:
        """Command lines with which `engine` (vllm, sglang or trtllm) serves as one of the best.

        One for an instance of each group, with all settings that were timed; `#` begins comments.
        """
        return command_lines(self._choice(row).deployment, engine)

    def run_file(self, row: int = 1) -> str:
        """The layout that decodes as a run file in YAML; all groups of instances as comments."""
        return printed_run_files(self.ranking.rows, self._choice(row))

    def _choice(self, row: int) -> ServingChoice:
        return self.ranking.choices[self._index(row)]

    def _index(self, row: int) -> int:
        count = len(self.ranking.best)
        if not count:
            raise UserError(f"{self.describe()}; raise --gpus, --ttft or --tpot")
        if not 1 <= row <= count:
            raise no_such_row(row, count)
        return self.ranking.best[row - 1]

    @property
    def all_removed(self) -> tuple[Removed, ...]:
        """Combinations that constraints and limits removed."""
        crossed = (DIVIDES, DP_ALLOWED)  # sizes of instances are crossed with all degrees
        rows = [row for row in self.enumeration.removed if row.requirement not in crossed]
        return (*rows, *self.ranking.removed)

    def to_dict(self) -> dict[str, Any]:
        """The object of `search --serve --json`: seconds, tokens per second, USD."""
        ranking = self.ranking
        return {
            "load": self.load,
            "answer": self.describe(),
            "remarks": views.remarks(ranking),
            "accuracy": [of.to_dict() for of in self.accuracy()],
            "layouts": len(ranking.rows),
            "candidates": ranking.candidates,
            "simulated": len(ranking.choices),
            "stopped": ranking.stopped,
            "removed": [
                {"wanted": row.requirement, "count": row.count, "example": row.example}
                for row in self.all_removed
            ],
            "aggregated": self.table("aggregated").rows,
            "disaggregated": self.table("disaggregated").rows,
        }

    def accuracy(self) -> list[GroupError]:
        """Errors to expect of the best: TPOT, TTFT and throughput of such servers."""
        return errors_of_serving(self._choice(1).deployment.groups) if self.ranking.best else []

    def write(self, path: str | os.PathLike[str], row: int = 1) -> list[str]:
        """Write a file in the format of its suffix; returns the names of files.

        `.csv`, `.parquet` (needs the extra `polars`) and `.json`: all choices; `.html`: a page;
        `.yaml`: the run file of `row`, and next to it its groups of instances (`--pools`).
        """
        if suffix_of(path_text(path)) == RUN_FILE:
            return write_run_files(self.ranking.rows, self._choice(row), os.fspath(path))
        return super().write(path)

    def _rows(self) -> Table:
        return self.table("choices")

    def _json_rows(self) -> dict[str, Any]:
        return {"rows": self._rows().rows}

    def page(self) -> str:
        """The page that `write` writes as `.html`."""
        return serving_search_page(self.ranking, self.all_removed, self.load)


class ServingQuestion(NamedTuple):
    """Space, loads and target of a search for serving."""

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
    """Search the fewest GPUs, or the least cost, that serve a load within its limits.

    `settings` are those of `serve`: the load (`rate`, `isl`, `osl`, a trace as `requests`), the
    limits `ttft`, `tpot` and `e2e` (ms), and the engines. `classes` is the path of a file, or a
    list of rows. Layouts (`tp`, `pp`, `dp`, `ep`, ...) and settings of engines (`scheduler`,
    `max_num_batched_tokens`, ...) may be lists; layouts take several values by default. Options:

    * `attainment`: share of all requests that must keep the limits (0.9).
    * `gpus`: limit of GPUs of all instances (256).
    * `objective`: `gpus` or `cost`.
    * `pairs`: pairs of layouts to try for disaggregated prefill and decode (4).

    Synthetic requests arrive for at least ten times as long as one takes, and for five times that
    to confirm the winner. `concurrency`, a list of numbers of users in a closed loop, replaces
    `rate`: one instance of each layout serves each number, and the tables have the front of tokens
    per second per GPU over tokens per second per user. Raises `UserError` if no layout is possible.

    >>> import stagewright as sw
    >>> found = sw.search_serving("llama3.1-8b", "h100-sxm", rate=20, isl=512, osl=64, ttft=300,
    ...     tpot=20, num_requests=200, tp="1,2", pp=1, layers=8)
    >>> found.run().tp, found.instances()
    (1, 1)
    """
    check_type(hardware, "hardware as a name, a Hardware, or a list of these", *HARDWARE_TYPES)
    alone = isinstance(hardware, str | Hardware)
    systems = [hardware] if alone else [*hardware]
    question = asked_serving(
        {"model": path_text(model), **settings}, hardware=systems, workload=workload, config=config
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
    """The space, the loads and the target; UserError for settings that cannot be combined."""
    given = {name: value for name, value in settings.items() if value is not None}
    values = by_own_names(given)
    path, own = launched(path, values)
    if launch.find(path or ""):
        values, path = _with_launch_file(str(path), own), None
    share = values.pop("attainment", 0.9)
    check_type(share, "attainment as a share", float, int)
    if not 0 < share <= 1:
        raise UserError(f"--attainment is {share:g}, wanted a share above 0, at most 1")
    pairs = values.pop("pairs", 4)
    check_type(pairs, "pairs as a number", int)
    if pairs < 0:
        raise UserError(f"--pairs is {pairs}, wanted 0 or more")
    objective = values.pop("objective", "gpus")
    if objective not in OBJECTIVES:
        raise UserError(f"--objective {objective}: with --serve wanted gpus or cost")
    check_type(values.get("gpus", 1), "gpus as a number", int, str, list, tuple)
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


def _with_launch_file(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the model, the engine and the load of a launch file, without its layout.

    Requests that the user asks for replace those that the file's client sends.
    """
    arrivals = {"rate", "concurrency", "burstiness"}
    found = {"tp", "pp", "dp", "ep", "etp", "gpus", "nodes", "gpus_per_node", "instances"}
    found |= arrivals if not given.keys().isdisjoint(arrivals) else set()
    if not given.keys().isdisjoint(("requests", "classes")):
        found |= arrivals | {"isl", "osl", "range_ratio", "num_requests"}
    model, values = with_launch_file(path, given, serves=True)
    kept = {name: value for name, value in values.items() if name not in found or name in given}
    return ({} if model is None else {"model": model}) | kept


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
    """The load of open arrivals, or one of each number of users in a closed loop."""

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
    """A workload of `count` requests; 0: all of a trace."""
    return workload_of(replace(section, num_requests=count or section.num_requests), classes)


def _refuse_found(own: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting that the search chooses, or does without."""
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
    """Search the space of a question."""
    enumeration = of.request.space.enumerate()
    candidates = enumeration.candidates
    if of.target.by_cost and all(
        candidates.cluster(row).price is None
        and candidates.hardware(row).price_usd_per_gpu_hour is None
        for row in range(len(candidates))
    ):
        raise UserError("--objective cost: no hardware here has a price; give --price USD per hour")
    ranking = ranked(candidates, of.loads, of.target, of.engines, progress)
    return ServingSearch(enumeration, ranking, _describe_load(of))


def _describe_load(of: ServingQuestion) -> str:
    """The load and its limits in words."""
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
