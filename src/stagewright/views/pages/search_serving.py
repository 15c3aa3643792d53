"""The page of a search for serving: the answer, what none dominates, and what was removed."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.numbers import duration
from stagewright.searching.run_file import run_file
from stagewright.searching.space import Removed
from stagewright.serving.search.answer import ServingRanking
from stagewright.version import __version__
from stagewright.views import search as tables
from stagewright.views import search_serving
from stagewright.views.pages.charts import Chart, chart, front_caption
from stagewright.views.pages.templates import render
from stagewright.views.pictures.chart import Measure
from stagewright.views.pictures.points import Point, scatter


def serving_search_page(of: ServingRanking, removed: Sequence[Removed], load: str) -> str:
    """The page as HTML; `load` is what was served, in words."""
    layouts = dict.fromkeys(of.choices[number].layout for number in of.best)
    return render(
        "search_serving.html",
        title=f"{of.rows.model.name}: GPUs for a load",
        answer=search_serving.answer(of),
        load=load,
        stopped=f"stopped: {search_serving.UNTIL_STOPPED}" if of.stopped else "",
        remarks=search_serving.remarks(of),
        best=search_serving.tables_of_best(of),
        front=_front_chart(of),
        every=search_serving.every_choice(of),
        removed=tables.removed(removed),
        shown=[
            (f"layout-{row}", tables.words(of.rows, row), run_file(of.rows, row)) for row in layouts
        ],
        version=__version__,
        data={},
    )


def _rate(value: float) -> str:
    return f"{value:,.4g}"


_RATE = Measure("", _rate)


def _front_chart(of: ServingRanking) -> Chart:
    listed = {*of.best}
    points = [
        Point(
            (each.simulated.user_rate, each.simulated.per_gpu),
            f"{search_serving.deployment_words(of, each)}, {each.simulated.gpus} GPUs: "
            f"{each.simulated.per_gpu:,.4g} tokens/s per GPU, "
            f"{each.simulated.user_rate:,.4g} per user, "
            f"TTFT p50 {duration(each.simulated.summary.ttft.p50)}",
            f"layout-{each.layout}",
            index in listed,
        )
        for index, each in enumerate(of.choices)
        if each.simulated.meets and each.simulated.user_rate == each.simulated.user_rate
    ]
    caption = front_caption("choice that keeps the limits", "both", "layout")
    return chart(
        lambda name, width: scatter(
            points, "Output tokens per second", ("tokens/s per user", _RATE),
            ("tokens/s per GPU", _RATE), width,
        ),
        "front",
        caption,
    )  # fmt: skip
