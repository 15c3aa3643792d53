"""The page of a search for serving: the best, the front, and what was removed."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.numbers import duration, plural
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


def serving_search_page(
    of: ServingRanking, removed: Sequence[Removed], describe: str, load: str
) -> str:
    """The page as HTML; `describe` is the best in words, `load` what was served."""
    layouts = dict.fromkeys(of.choices[nth].layout for nth in of.best)
    return render(
        "search_serving.html",
        title=f"{of.rows.model.name}: the best of {plural(len(of.rows), 'layout', 'layouts')}",
        run=describe,
        load=load,
        stopped=f"stopped: {search_serving.UNTIL_STOPPED}" if of.stopped else "",
        best=search_serving.best_choices(of),
        front=_front_chart(of),
        front_table=search_serving.front_choices(of),
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
    on_front = {*of.front}
    points = [
        Point(
            (each.simulated.user_rate, each.simulated.per_gpu),
            f"{search_serving.choice_words(of, each)}, {each.simulated.gpus} GPUs: "
            f"{each.simulated.per_gpu:,.4g} tokens/s per GPU, "
            f"{each.simulated.user_rate:,.4g} per user, "
            f"TTFT p50 {duration(each.simulated.ttft.p50)}",
            f"layout-{each.layout}",
            nth in on_front,
        )
        for nth, each in enumerate(of.choices)
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
