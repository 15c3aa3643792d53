"""Results of searches as `search` prints them: lines and tables."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.searching.ranking import Ranking
from stagewright.serving.search.search import ServingRanking
from stagewright.texttable import Table
from stagewright.views import search as views
from stagewright.views import search_serving as serving_views


def search_text(
    ranking: Ranking, description: str, seconds: float | None = None
) -> Iterator[str | Table]:
    """The best of a search, the price of other choices, and how certain the result is."""
    names = ranking.options.objectives
    if len(names) > 1:
        yield (
            f"Pareto front of {views.in_words(names)}: {len(ranking.best):,} of "
            f"{ranking.simulated:,} simulated candidates, none of which another one beats in all "
            "of these"
        )
        yield f"the one with the best {views.in_words(names[:1])}: {description}"
    else:
        yield f"best: {description}"
    if ranking.stopped:
        yield f"stopped: {views.UNTIL_STOPPED}"
    yield views.best(ranking)
    if len(choices := views.choices(ranking)):
        yield choices
    for sentence in (
        views.headroom,
        views.tie,
        views.expected_error,
        views.missing_hardware,
    ):
        if text := sentence(ranking):
            yield text
    yield (
        f"{len(ranking):,} candidates, {ranking.simulated:,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
    )
    yield views.certainty(ranking)


def serving_search_text(
    ranking: ServingRanking,
    load: str,
    removed: Table | None,
    limit: int | None = None,
    seconds: float | None = None,
) -> Iterator[str | Table]:
    """The winner of a search for serving, the choices that none dominates, and what was removed."""
    yield load
    yield f"best: {serving_views.answer(ranking)}"
    if ranking.stopped and ranking.best:
        yield f"stopped: {serving_views.UNTIL_STOPPED}"
    yield from serving_views.remarks(ranking)
    yield from serving_views.tables_of_best(ranking, limit)
    if removed is not None:
        yield removed
    yield (
        f"{ranking.candidates:,} candidates ({len(ranking.rows):,} layouts), "
        f"{len(ranking.choices):,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
    )
