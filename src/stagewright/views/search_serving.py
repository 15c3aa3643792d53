"""A search for serving as sentences and tables, and what `search --serve` prints of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from stagewright.numbers import finite, plural
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import setting_in_words
from stagewright.run.sections.serving import EngineSection
from stagewright.serving.search.search import (
    ServingChoice,
    ServingRanking,
)
from stagewright.texttable import Table
from stagewright.views.serving import accuracy_notes

UNTIL_STOPPED = "the best of what was simulated until then"
_DEGREES = frozenset({"tp", "pp", "dp", "ep", "etp"})
MOST_TIES = 3
"""Ties that are named."""


# ---- sentences -----------------------------------------------------------------------------------


def answer(ranking: ServingRanking, listed_row: int = 1) -> str:
    """The deployment in a row of the tables; or what came closest, where none keeps the limits."""
    if not ranking.best:
        return _nothing(ranking)
    choice = ranking.choices[ranking.best[listed_row - 1]]
    load = choice.simulated
    cost = f", {choice.usd_per_hour:,.4g} USD/h" if choice.usd_per_hour > 0 else ""
    text = f"{deployment_words(ranking, choice)}, {plural(load.gpus, 'GPU', 'GPUs')}{cost}"
    if load.concurrency is not None:
        users = plural(load.concurrency, "user", "users")
        return f"{text}: {load.per_gpu:,.4g} tokens/s per GPU with {users}"
    smaller = ranking.smaller.get(ranking.best[listed_row - 1])
    return text if smaller is None else f"{text}; {_smaller(ranking, choice, smaller)}"


def _smaller(ranking: ServingRanking, winner: ServingChoice, smaller: ServingChoice) -> str:
    """Attainment of an instance less, or of fewer GPUs, and the limit that binds."""
    counts, load = smaller.counts, smaller.simulated
    if smaller.layouts != winner.layouts:
        which, count = deployment_words(ranking, smaller), sum(counts)
    else:
        count, role = counts[0], ""
        if len(counts) > 1:
            prefill = counts[0] < winner.counts[0]
            count, role = (counts[0], " for prefill") if prefill else (counts[1], " for decode")
        which = f"{count}{role}"
    keep = "keeps" if count == 1 else "keep"
    binds = f", {load.binding} binds" if load.binding else ""
    overloaded = ", overloaded" if load.summary.steadiness.overloaded else ""
    return f"{which} {keep} {_share(load.good)}{overloaded}{binds}"


def _nothing(ranking: ServingRanking) -> str:
    if ranking.stopped:
        return "nothing yet: no choice that was simulated keeps the limits"
    text = f"nothing with up to {plural(ranking.target.max_gpus, 'GPU', 'GPUs')} keeps the limits"
    closest = ranking.closest
    if closest is None or not closest.simulated.good:
        return text
    load = closest.simulated
    return (
        f"{text}; the closest: {deployment_words(ranking, closest)}, "
        f"{plural(load.gpus, 'GPU', 'GPUs')}, keep {_share(load.good)}, "
        f"{load.binding} binds"
    )


def remarks(ranking: ServingRanking) -> list[str]:
    """Remarks on the confirmation of the winner, dropped choices, and equally cheap ones."""
    if not ranking.best:
        return []
    first = ranking.best[0]
    load = ranking.choices[first].simulated
    notes: list[str] = []
    second = ranking.disaggregated if first in ranking.aggregated else ranking.aggregated
    if second:
        kind = "disaggregated" if first in ranking.aggregated else "aggregated"
        notes.append(f"best {kind}: {answer(ranking, ranking.best.index(second[0]) + 1)}")
    if not ranking.closed:
        notes.append(
            f"the best keeps the limits for {_share(load.good)} of "
            f"{plural(load.summary.measured, 'request', 'requests')}; {load.summary.verdict}"
        )
        if load.too_short > 1:
            notes.append(
                f"requests arrive for too short a time to tell: {load.too_short:.1f} times as "
                "many are wanted"
            )
    for dropped in ranking.dropped:
        gpus = plural(dropped.simulated.gpus, "GPU", "GPUs")
        most = "at most " if dropped.simulated.stopped else ""
        notes.append(
            f"dropped: {deployment_words(ranking, dropped)}, {gpus}, keep {most}"
            f"{_share(dropped.simulated.good)} when more requests come"
        )
    if ranking.ties:
        equal = (
            "at the same cost" if ranking.target.by_cost or ranking.closed else "with as many GPUs"
        )
        ties = sorted(ranking.ties, key=ranking.cost)
        named = "; ".join(
            f"{deployment_words(ranking, ranking.choices[tie])} "
            f"({ranking.choices[tie].simulated.user_rate:,.4g} tokens/s per user)"
            for tie in ties[:MOST_TIES]
        )
        more = f"; {len(ties) - MOST_TIES} more" if len(ties) > MOST_TIES else ""
        notes.append(
            f"{equal}, but slower than {load.user_rate:,.4g} tokens/s per user: {named}{more}"
        )
    return notes


def accuracy(ranking: ServingRanking) -> list[str]:
    """Sentences on the errors to expect of the winner."""
    if not ranking.best:
        return []
    return accuracy_notes(ranking.choices[ranking.best[0]].deployment.groups)


def _share(share: float) -> str:
    """Share of requests, of which few that miss stay visible."""
    return f"{share:.0%}" if share < 0.9 or share == 1 else f"{math.floor(share * 1e3) / 10:.1f}%"


def deployment_words(ranking: ServingRanking, choice: ServingChoice) -> str:
    """Instances of a choice in words."""
    groups = choice.deployment.groups
    hardware = {name.name for name in map(ranking.rows.hardware, range(len(ranking.rows)))}
    parts: list[str] = []
    for group, row in zip(groups, choice.layouts, strict=True):
        role = "" if group.role == "both" else f"{group.role} "
        count = plural(group.settings.instances, f"{role}instance", f"{role}instances")
        on = f" on {ranking.rows.hardware(row).name}" if len(hardware) > 1 else ""
        parts.append(f"{count} of {layout_words(ranking, choice, row)}{on}")
    return " and ".join(parts)


def layout_words(ranking: ServingRanking, choice: ServingChoice, row: int) -> str:
    """Degrees of a layout, and settings of engines in which choices differ."""
    run = ranking.rows.run(row)
    degrees = [f"tp={run.tp}"]
    more = {name: getattr(run, name) for name in ("pp", "dp", "ep")}
    degrees += [f"{name}={degree}" for name, degree in more.items() if degree > 1]
    if run.ep > 1 and run.etp not in (None, 1):
        degrees.append(f"etp={run.etp}")
    for name, column in ranking.rows.columns.items():
        varied = name in SETTINGS and name not in _DEGREES and len(column.values) > 1
        if varied and column.at(row) != SETTINGS[name].default:
            degrees.append(setting_in_words(name, column.at(row)))
    return " ".join([*degrees, *engine_words(ranking, choice)])


def engine_words(ranking: ServingRanking, choice: ServingChoice) -> list[str]:
    """Settings of engines in which choices differ."""
    sections = [other.deployment.groups[-1].settings for other in ranking.choices]
    engines = choice.deployment.groups[-1].settings
    names = [column.name for column in fields(EngineSection) if column.name != "instances"]
    differ = [name for name in names if len({getattr(section, name) for section in sections}) > 1]
    return [setting_in_words(name, getattr(engines, name)) for name in differ]


# ---- candidates ----------------------------------------------------------------------------------


def table_of_choices(
    ranking: ServingRanking, numbers: Sequence[int], title: str, *, brief: bool = True
) -> Table:
    """Choices by their numbers, with figures of the load that they were simulated with.

    If `brief`, without what follows from other columns for a load that is the same for all.
    """
    choices = [ranking.choices[number] for number in numbers]
    loads = [choice.simulated for choice in choices]
    places = {number: place + 1 for place, number in enumerate(ranking.best)}
    pairs = any(choice.prompts is not None for choice in choices)
    priced = any(not math.isnan(choice.usd_per_hour) for choice in choices)
    several_systems = len({ranking.rows.hardware(row).name for row in range(len(ranking.rows))}) > 1
    full = ranking.closed or not brief
    decode = [_instances(ranking, choice, -1, choice.layout) for choice in choices]
    prefill = [
        "" if choice.prompts is None else _instances(ranking, choice, 0, choice.prompts)
        for choice in choices
    ]
    layouts = [layout_words(ranking, choice, choice.layout) for choice in choices]
    return Table.of_columns(
        title,
        [
            ("#", "", [places.get(number) for number in numbers], True),
            ("prefill", None, prefill, pairs),
            ("decode", None, decode, pairs),
            ("settings", None, layouts, ranking.closed and not pairs),
            ("users", "count", [load.concurrency for load in loads], ranking.closed and not pairs),
            ("instances", None, decode, not ranking.closed and not pairs),
            ("GPUs", "count", [load.gpus for load in loads], True),
            ("hardware", None, [_hardware(ranking, choice) for choice in choices], several_systems),
            ("USD/h", "figure", [finite(c.usd_per_hour) for c in choices], priced),
            (
                "USD per Mtoken",
                "figure",
                [finite(c.usd_per_million) for c in choices],
                priced and full,
            ),
            ("keep limits", "share", [load.good for load in loads], True),
            ("TTFT p50", "s", [finite(load.summary.ttft.p50) for load in loads], not brief),
            ("TTFT p99", "s", [finite(load.summary.ttft.p99) for load in loads], True),
            ("TPOT p50", "s", [finite(load.summary.tpot.p50) for load in loads], True),
            ("tokens/s per GPU", "figure", [finite(load.per_gpu) for load in loads], full),
            ("tokens/s per user", "figure", [finite(load.user_rate) for load in loads], True),
        ],
    )


def _instances(ranking: ServingRanking, choice: ServingChoice, group: int, row: int) -> str:
    count = choice.deployment.groups[group].settings.instances
    return f"{count} x {layout_words(ranking, choice, row)}"


def _hardware(ranking: ServingRanking, choice: ServingChoice) -> str:
    names = (ranking.rows.hardware(layout).name for layout in choice.layouts)
    return " + ".join(dict.fromkeys(names))


def tables_of_best(ranking: ServingRanking, most: int | None = None) -> list[Table]:
    """Aggregated and disaggregated choices that none dominates, each with the cheapest first."""
    tables = [("Aggregated", ranking.aggregated), ("Disaggregated", ranking.disaggregated)]
    if ranking.best and ranking.disaggregated and ranking.best[0] == ranking.disaggregated[0]:
        tables.reverse()
    return [table_of_choices(ranking, rows[:most], title) for title, rows in tables if rows]


def every_choice(ranking: ServingRanking) -> Table:
    """All choices that were simulated; of those that were stopped, what was seen until then."""
    table = table_of_choices(ranking, range(len(ranking.choices)), "Simulated", brief=False)
    loads = [choice.simulated for choice in ranking.choices]
    columns = {
        **table.columns,
        "requests": [load.summary.requests for load in loads],
        "binds": [load.binding for load in loads],
        "keep limits": [None if load.stopped else load.good for load in loads],
        "keep at most": [load.good if load.stopped else None for load in loads],
        "stopped": [load.stopped for load in loads],
        "meets": [load.meets for load in loads],
    }
    units = {**table.units, "requests": "count", "keep at most": "share"}
    return Table("Simulated", columns, units)


# ---- text ----------------------------------------------------------------------------------------


def serving_search_text(
    ranking: ServingRanking,
    load: str,
    removed: Table,
    limit: int | None = None,
    seconds: float | None = None,
    *,
    why: bool = False,
) -> Iterator[str | Table]:
    """The winner of a search for serving, the choices that none dominates, `why` others are not."""
    yield load
    yield f"best: {answer(ranking)}"
    if ranking.stopped and ranking.best:
        yield f"stopped: {UNTIL_STOPPED}"
    yield from remarks(ranking)
    yield from tables_of_best(ranking, limit)
    yield from (f"note: {text}" for text in accuracy(ranking))
    if why and len(removed):
        yield removed
    rules = plural(len(removed), "rule", "rules")
    yield (
        f"{ranking.candidates:,} candidates ({len(ranking.rows):,} layouts), "
        f"{len(ranking.choices):,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
        + (f"; {rules} removed others (--why)" if len(removed) and not why else "")
    )
