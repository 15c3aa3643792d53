"""A search for serving as tables: the best, the front, and all choices that were played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.serving.search.answer import ServingChoice, ServingRanking
from stagewright.texttable import Table
from stagewright.views.search import words

UNTIL_STOPPED = "the best of what was played until then"


def table_of_choices(of: ServingRanking, numbers: Sequence[int], title: str) -> Table:
    """Some of the choices that were played, in order."""
    choices = [of.choices[nth] for nth in numbers]
    played = [each.simulated for each in choices]
    columns: dict[str, list[Any]] = {
        "#": [nth + 1 for nth in range(len(choices))],
        "settings": [choice_words(of, each) for each in choices],
    }
    units = {"#": ""}
    if any(each.concurrency is not None for each in played):
        columns["users"] = [each.concurrency for each in played]
        units["users"] = "count"
    else:
        columns["instances"] = [each.instances for each in played]
        units["instances"] = "count"
    columns["GPUs"] = [each.gpus for each in played]
    units["GPUs"] = "count"
    if any(each.usd_per_hour == each.usd_per_hour for each in choices):
        columns["USD/h"] = [_known(each.usd_per_hour) for each in choices]
        columns["USD per Mtoken"] = [_known(each.usd_per_million) for each in choices]
    columns |= {
        "keep limits": [each.good for each in played],
        "TTFT p50": [_known(each.ttft.p50) for each in played],
        "TTFT p99": [_known(each.ttft.p99) for each in played],
        "TPOT p50": [_known(each.tpot.p50) for each in played],
        "tokens/s per GPU": [_known(each.per_gpu) for each in played],
        "tokens/s per user": [_known(each.user_rate) for each in played],
    }
    units |= {"USD/h": "figure", "USD per Mtoken": "figure", "keep limits": "share"}
    units |= dict.fromkeys(("TTFT p50", "TTFT p99", "TPOT p50"), "s")
    units |= dict.fromkeys(("tokens/s per GPU", "tokens/s per user"), "figure")
    return Table(title, columns, {name: unit for name, unit in units.items() if name in columns})


def choice_words(of: ServingRanking, choice: ServingChoice) -> str:
    """The layout of a choice, and that of instances for prompts with their number."""
    own = words(of.rows, choice.layout)
    if choice.prompts is None:
        return own
    count = choice.simulated.prefill_instances
    return f"{own}; prompts: {count} x {words(of.rows, choice.prompts)}"


def _known(value: float) -> float | None:
    return None if value != value else value


def best_choices(of: ServingRanking, most: int = 20) -> Table:
    """Of each layout the cheapest choice that keeps the limits, the best first."""
    return table_of_choices(of, of.best[:most], "Best")


def front_choices(of: ServingRanking) -> Table:
    """Choices that no other beats in both tokens per GPU and tokens per user."""
    title = "Front of tokens/s per GPU over tokens/s per user"
    return table_of_choices(of, of.front, title)


def every_choice(of: ServingRanking) -> Table:
    """All choices that were played; of those that were stopped, what was seen until then."""
    table = table_of_choices(of, range(len(of.choices)), "Played")
    columns: dict[str, Any] = dict(table.columns)
    columns["stopped"] = [each.simulated.stopped for each in of.choices]
    columns["meets"] = [each.simulated.meets for each in of.choices]
    places = {nth: place + 1 for place, nth in enumerate(of.best)}
    columns["best"] = [places.get(nth) for nth in range(len(of.choices))]
    columns["front"] = [nth in {*of.front} for nth in range(len(of.choices))]
    return Table("Played", columns, table.units)
