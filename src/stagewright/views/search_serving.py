"""A search for serving as a sentence and tables: the winner, what it beats, all choices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from stagewright.numbers import many, plural
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import setting_in_words
from stagewright.run.sections.serving import EngineSection
from stagewright.serving.search.answer import (
    ServingChoice,
    ServingRanking,
    SmallerDeployment,
    counts_of,
)
from stagewright.texttable import Table

UNTIL_STOPPED = "the best of what was simulated until then"
_DEGREES = frozenset({"tp", "pp", "dp", "ep", "etp"})
MOST_TIES = 3
"""Ties that are named."""


# ---- sentences -----------------------------------------------------------------------------------


def answer(of: ServingRanking, listed_row: int = 1) -> str:
    """The deployment in a row of the tables; or what came closest, where none keeps the limits."""
    if not of.best:
        return _nothing(of)
    choice = of.choices[of.best[listed_row - 1]]
    found = choice.simulated
    cost = f", {choice.usd_per_hour:,.4g} USD/h" if choice.usd_per_hour > 0 else ""
    text = f"{deployment_words(of, choice)}, {plural(found.gpus, 'GPU', 'GPUs')}{cost}"
    if found.concurrency is not None:
        users = plural(found.concurrency, "user", "users")
        return f"{text}: {found.per_gpu:,.4g} tokens/s per GPU with {users}"
    smaller = of.smaller.get(of.best[listed_row - 1])
    return text if smaller is None else f"{text}; {_smaller(choice, smaller)}"


def _smaller(winner: ServingChoice, smaller: SmallerDeployment) -> str:
    """How far the deployment with an instance less is from the limits."""
    deployment, found = smaller
    counts = counts_of(deployment)
    count, role = counts[0], ""
    if len(counts) > 1:
        prefill = counts[0] < counts_of(winner.deployment)[0]
        count, role = (counts[0], " for prefill") if prefill else (counts[1], " for decode")
    keep = "keeps" if count == 1 else "keep"
    binds = f", {found.binding} binds" if found.binding else ""
    overloaded = ", overloaded" if found.summary.steadiness.overloaded else ""
    return f"{count}{role} {keep} {_share(found.good)}{overloaded}{binds}"


def _nothing(of: ServingRanking) -> str:
    if of.stopped:
        return "nothing yet: no choice that was simulated keeps the limits"
    text = f"nothing with up to {plural(of.target.max_gpus, 'GPU', 'GPUs')} keeps the limits"
    closest = of.closest
    if closest is None or not closest.simulated.good:
        return text
    found = closest.simulated
    return (
        f"{text}; the closest: {deployment_words(of, closest)}, "
        f"{plural(found.gpus, 'GPU', 'GPUs')}, keep {_share(found.good)}, {found.binding} binds"
    )


def remarks(of: ServingRanking) -> list[str]:
    """How the winner was confirmed, what was dropped, and what is as cheap."""
    if not of.best:
        return []
    first = of.best[0]
    found = of.choices[first].simulated
    notes: list[str] = []
    second = of.disaggregated if first in of.aggregated else of.aggregated
    if second:
        kind = "disaggregated" if first in of.aggregated else "aggregated"
        notes.append(f"best {kind}: {answer(of, of.best.index(second[0]) + 1)}")
    if not of.closed:
        confirmed = of.confirmed.get(first, found)
        notes.append(
            f"the best keeps the limits for {_share(confirmed.good)} of "
            f"{many(confirmed.summary.measured, 'request', 'requests')}; "
            f"{confirmed.summary.verdict}"
        )
        if found.too_short > 1:
            notes.append(
                f"requests arrive for too short a time to tell: {found.too_short:.1f} times as "
                "many are wanted"
            )
    for dropped in of.dropped:
        gpus = plural(dropped.simulated.gpus, "GPU", "GPUs")
        most = "at most " if dropped.simulated.stopped else ""
        notes.append(
            f"dropped: {deployment_words(of, dropped)}, {gpus}, keep {most}"
            f"{_share(dropped.simulated.good)} when more requests come"
        )
    if of.ties:
        equal = "at the same cost" if of.target.by_cost or of.closed else "with as many GPUs"
        ties = sorted(of.ties, key=of.cost)
        named = "; ".join(
            f"{deployment_words(of, of.choices[tie])} "
            f"({of.choices[tie].simulated.user_rate:,.4g} tokens/s per user)"
            for tie in ties[:MOST_TIES]
        )
        more = f"; {len(ties) - MOST_TIES} more" if len(ties) > MOST_TIES else ""
        notes.append(
            f"{equal}, but slower than {found.user_rate:,.4g} tokens/s per user: {named}{more}"
        )
    return notes


def _share(share: float) -> str:
    """Share of requests, of which few that miss stay visible."""
    return f"{share:.0%}" if share < 0.9 or share == 1 else f"{math.floor(share * 1e3) / 10:.1f}%"


def deployment_words(of: ServingRanking, choice: ServingChoice) -> str:
    """Instances of a choice in words."""
    groups = choice.deployment.groups
    hardware = {name.name for name in map(of.rows.hardware, range(len(of.rows)))}
    parts: list[str] = []
    for group, row in zip(groups, _layout_rows(choice), strict=True):
        role = "" if group.role == "both" else f"{group.role} "
        count = plural(group.settings.instances, f"{role}instance", f"{role}instances")
        on = f" on {of.rows.hardware(row).name}" if len(hardware) > 1 else ""
        parts.append(f"{count} of {layout_words(of, choice, row)}{on}")
    return " and ".join(parts)


def layout_words(of: ServingRanking, choice: ServingChoice, row: int) -> str:
    """Degrees of a layout, and settings of engines in which choices differ."""
    run = of.rows.run(row)
    degrees = [f"tp={run.tp}"]
    more = {name: getattr(run, name) for name in ("pp", "dp", "ep")}
    degrees += [f"{name}={degree}" for name, degree in more.items() if degree > 1]
    if run.ep > 1 and run.etp not in (None, 1):
        degrees.append(f"etp={run.etp}")
    for name, column in of.rows.columns.items():
        varied = name in SETTINGS and name not in _DEGREES and len(column.values) > 1
        if varied and column.at(row) != SETTINGS[name].default:
            degrees.append(setting_in_words(name, column.at(row)))
    return " ".join([*degrees, *engine_words(of, choice)])


def engine_words(of: ServingRanking, choice: ServingChoice) -> list[str]:
    """Settings of engines in which choices differ."""
    sections = [each.deployment.groups[-1].settings for each in of.choices]
    mine = choice.deployment.groups[-1].settings
    names = [column.name for column in fields(EngineSection) if column.name != "instances"]
    differ = [name for name in names if len({getattr(each, name) for each in sections}) > 1]
    return [setting_in_words(name, getattr(mine, name)) for name in differ]


def _layout_rows(choice: ServingChoice) -> Sequence[int]:
    """Row of the layout of each group, that for prompts first."""
    return [choice.layout] if choice.prompts is None else [choice.prompts, choice.layout]


# ---- tables --------------------------------------------------------------------------------------


def table_of_choices(
    of: ServingRanking, numbers: Sequence[int], title: str, *, brief: bool = True
) -> Table:
    """Some of the choices that were simulated, in order; rows are numbered as in `best`.

    If `brief`, without what follows from the other columns for a load that is the same for all, and
    figures of winners are those of the longer run that confirmed them.
    """
    choices = [of.choices[number] for number in numbers]
    loads = [each.simulated for each in choices]
    if brief:
        loads = [of.confirmed.get(n, load) for n, load in zip(numbers, loads, strict=True)]
    places = {number: place + 1 for place, number in enumerate(of.best)}
    columns: dict[str, list[Any]] = {"#": [places.get(number) for number in numbers]}
    if any(each.prompts is not None for each in choices):
        columns["prefill"] = [
            "" if each.prompts is None else _count_and_layout(of, each, 0, each.prompts)
            for each in choices
        ]
        columns["decode"] = [_count_and_layout(of, each, -1, each.layout) for each in choices]
    elif of.closed:
        columns["settings"] = [layout_words(of, each, each.layout) for each in choices]
        columns["users"] = [each.concurrency for each in loads]
    else:
        columns["instances"] = [_count_and_layout(of, each, -1, each.layout) for each in choices]
    columns["GPUs"] = [each.gpus for each in loads]
    if len({of.rows.hardware(row).name for row in range(len(of.rows))}) > 1:
        columns["hardware"] = [
            " + ".join(
                dict.fromkeys(
                    of.rows.hardware(row).name
                    for row in (each.prompts, each.layout)
                    if row is not None
                )
            )
            for each in choices
        ]
    if any(each.usd_per_hour == each.usd_per_hour for each in choices):
        columns["USD/h"] = [_known(each.usd_per_hour) for each in choices]
        if of.closed or not brief:
            columns["USD per Mtoken"] = [_known(each.usd_per_million) for each in choices]
    columns["keep limits"] = [each.good for each in loads]
    if not brief:
        columns["TTFT p50"] = [_known(each.summary.ttft.p50) for each in loads]
    columns["TTFT p99"] = [_known(each.summary.ttft.p99) for each in loads]
    columns["TPOT p50"] = [_known(each.summary.tpot.p50) for each in loads]
    if of.closed or not brief:
        columns["tokens/s per GPU"] = [_known(each.per_gpu) for each in loads]
    columns["tokens/s per user"] = [_known(each.user_rate) for each in loads]
    units = {"#": "", "users": "count", "GPUs": "count", "keep limits": "share"}
    units |= dict.fromkeys(("TTFT p50", "TTFT p99", "TPOT p50"), "s")
    units |= dict.fromkeys(
        ("USD/h", "USD per Mtoken", "tokens/s per GPU", "tokens/s per user"), "figure"
    )
    return Table(title, columns, {name: unit for name, unit in units.items() if name in columns})


def _count_and_layout(of: ServingRanking, choice: ServingChoice, group: int, row: int) -> str:
    count = choice.deployment.groups[group].settings.instances
    return f"{count} x {layout_words(of, choice, row)}"


def _known(value: float) -> float | None:
    return None if value != value else value


def tables_of_best(of: ServingRanking, most: int | None = None) -> list[Table]:
    """Aggregated and disaggregated choices that none dominates, each with the cheapest first."""
    tables = [("Aggregated", of.aggregated), ("Disaggregated", of.disaggregated)]
    if of.best and of.disaggregated and of.best[0] == of.disaggregated[0]:
        tables.reverse()
    return [table_of_choices(of, rows[:most], title) for title, rows in tables if rows]


def every_choice(of: ServingRanking) -> Table:
    """All choices that were simulated; of those that were stopped, what was seen until then."""
    table = table_of_choices(of, range(len(of.choices)), "Simulated", brief=False)
    columns: dict[str, Any] = dict(table.columns)
    loads: Iterable[Any] = [each.simulated for each in of.choices]
    columns["requests"] = [each.summary.requests for each in loads]
    columns["binds"] = [each.binding for each in loads]
    columns["keep limits"] = [None if each.stopped else each.good for each in loads]
    columns["keep at most"] = [each.good if each.stopped else None for each in loads]
    columns["stopped"] = [each.stopped for each in loads]
    columns["meets"] = [each.meets for each in loads]
    return Table(
        "Simulated", columns, dict(table.units) | {"requests": "count", "keep at most": "share"}
    )
