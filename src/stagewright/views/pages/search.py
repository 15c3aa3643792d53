"""The pages of searches, for a step and for serving: the best, why, the front, the runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from stagewright.arrays import Int
from stagewright.numbers import count, duration, plural, quantity
from stagewright.searching.objectives import front
from stagewright.searching.ranking import Ranking, nothing_found
from stagewright.searching.run_file import hardware_file, hardware_file_name, is_packaged, run_file
from stagewright.searching.sensitivity import sensitivities
from stagewright.searching.space import Enumeration, Removed
from stagewright.serving.search.search import ServingRanking
from stagewright.texttable import Table
from stagewright.views import search as tables
from stagewright.views import search_serving
from stagewright.views.pages.html import (
    Card,
    Cards,
    Chart,
    Details,
    PageSection,
    Paragraph,
    Part,
    render,
    sentence,
)
from stagewright.views.pictures.scales import BYTES, NUMBER, SECONDS
from stagewright.views.pictures.scatter import Point, scatter

MAX_POINTS = 400
"""Candidates in the chart: all that are listed or on the front, and others evenly."""
SLOWEST = 3.0
"""Candidates that take this many times as long as the best are beyond the edge of the chart."""
LARGEST = 1.25
"""Candidates that need this many times the memory of the device are beyond the edge as well."""


# ---- a step --------------------------------------------------------------------------------------


def page(enumeration: Enumeration, ranking: Ranking, notes: tuple[str, ...]) -> str:
    """The page of a search; sensitivities of the best, if there is one, are simulated for it."""
    names, candidates = ranking.options.objectives, ranking.candidates
    points, runs = _points(ranking), ranking.listed
    on_front = _front(ranking, points)
    said = [tables.certainty(ranking), *notes, f"stopped: {tables.UNTIL_STOPPED}" * ranking.stopped]
    head: list[Part] = [str(nothing_found(ranking))]
    why: list[PageSection] = []
    sensitivity: list[PageSection] = []
    if len(ranking.best):
        best = int(ranking.best[0])
        first = f"The best {tables.in_words(names[:1])} of the front: " if names[1:] else ""
        answer = f"{first}{candidates.describe(best)} on {candidates.machine(best)}"
        head = [answer, Cards(_cards(ranking, best))]
        runs = np.array(list(dict.fromkeys([*runs.tolist(), *on_front.tolist()])), dtype=np.int64)
        said += [tables.tie(ranking), tables.headroom(ranking)]
        why, sensitivity = [_why(ranking)], [_sensitivity(ranking, best)]
    said.append(tables.expected_error(ranking))
    unfit = [n for n, row in enumerate(ranking.listed.tolist()) if not ranking.figures.fits[row]]
    chart = _front_chart(ranking, points, {*on_front.tolist()}, {*runs.tolist()})
    files = [
        Details(
            _words(ranking, row) + ("" if ranking.figures.fits[row] else ": does not fit"),
            [Paragraph(run_file(candidates, row), tag="pre")],
            f"run-{row}",
            not ranking.figures.fits[row],
        )
        for row in runs.tolist()
    ]
    of_files = (
        "A run file for each candidate that is listed, or on the front, the best first: "
        "`stagewright simulate --config FILE`."
    )
    sections = [
        *why,
        *([PageSection("front", "Time and memory", [chart], "Front")] if chart else []),
        PageSection("best", "Best", [replace(tables.best(ranking), title="", bad=unfit)]),
        *sensitivity,
        PageSection("runs", "Run files", [of_files, *files, *_systems(ranking, runs)]),
        _removed(enumeration.removed, enumeration.combinations),
    ]
    what = f"Pareto front of {tables.in_words(names)}" if names[1:] else "best execution"
    title = f"{candidates.model.name}: {what} on {_machines(ranking)}"
    return render(title, [*head, *_sentences(said)], sections)


def _sentences(texts: Iterable[str]) -> list[str]:
    return [f"{sentence(text)}." for text in texts if text]


def _why(ranking: Ranking) -> PageSection:
    text = (
        "The best step for each value of a setting, whatever the others are, and the part of the "
        "step that makes it slower. A figure after ~ is an estimate."
    )
    table = replace(tables.choices(ranking), title="", grouped="setting")
    return PageSection("choices", "Why: the best step for each choice", [text, table], "Why")


def _removed(removed: Sequence[Removed], combinations: int | None = None) -> PageSection:
    if not removed:
        return PageSection("removed", "Removed", ["Nothing."])
    parts: list[Part] = [replace(tables.removed(removed), title="")]
    if combinations is not None:
        parts.insert(0, f"Of {combinations:,} combinations, before any was estimated.")
    return PageSection("removed", "Removed", parts)


def _machines(ranking: Ranking) -> str:
    """The hardware and its number, where all candidates have the same."""
    rows = ranking.candidates
    worlds = np.unique(rows.world_size).tolist()
    names = list(dict.fromkeys(hardware.name for hardware in rows.columns["hardware"].values))
    gpus = f"{worlds[0]:,}" if len(worlds) == 1 else f"{worlds[0]:,} to {worlds[-1]:,}"
    return f"{gpus} {names[0] if len(names) == 1 else 'GPUs'}"


def _cards(ranking: Ranking, row: int) -> list[Card]:
    """Key figures of the best."""
    figures, gpus = ranking.figures, int(ranking.candidates.world_size[row])
    rate, tokens = float(figures.tokens_per_second[row]), int(figures.tokens[row])
    simulated = f"of {plural(len(ranking), 'candidate', 'candidates')}"
    cards = [
        Card("Step time", duration(float(figures.seconds[row])), f"{tokens:,} tokens"),
        Card("Throughput", count(round(rate)), f"tokens/s; {count(round(rate / gpus))} per GPU"),
    ]
    if not np.isnan(figures.mfu[row]):
        causal = f"causal attention {figures.mfu_causal[row]:.1%}"
        tflops = f"{figures.tflops[row]:,.0f} TFLOP/s per GPU"
        cards.append(Card("MFU", f"{figures.mfu[row]:.1%}", f"{causal}; {tflops}"))
    device, fits = quantity(int(figures.device_memory[row]), "B"), bool(figures.fits[row])
    peak, state = quantity(int(figures.peak[row]), "B"), "" if fits else "problem"
    cards.append(Card("Peak memory per GPU", peak, f"of {device}", state))
    if not np.isnan(figures.usd[row]):
        usd = float(figures.usd[row]) * 1e6 / max(tokens, 1)
        cards.append(Card("Cost", f"{usd:.3g} USD", "per million tokens"))
    return [*cards, Card("Simulated", f"{ranking.simulated:,}", simulated)]


def _sensitivity(ranking: Ranking, row: int) -> PageSection:
    text = (
        "How much longer the best step takes where a figure of the hardware gets worse, and how "
        "much shorter where it gets better. Figures that change nothing are left out."
    )
    rows = [
        (figure, *(f"{change:+.3%}" for change in changes))
        for figure, changes in sensitivities(ranking.candidates, row).items()
    ]
    heads = ("1% worse", "1% better", "10% worse", "10% better")
    title = "Change of the best step"
    table = Table.of_rows(title, ("figure", *heads), rows, dict.fromkeys(heads, ""))
    return PageSection("sensitivity", "Sensitivity of the optimum", [text, table], "Sensitivity")


def _points(ranking: Ranking) -> Int:
    """The candidates of the chart, ascending: those that are not far from the best."""
    figures = ranking.figures
    near = ~np.isnan(figures.seconds)
    if len(ranking.best):
        per_token = figures.seconds / np.maximum(figures.tokens, 1)
        near &= per_token <= SLOWEST * per_token[ranking.best[0]]
        near &= figures.peak <= LARGEST * figures.device_memory
    rows = np.flatnonzero(near)
    chosen = {*ranking.listed.tolist(), *_front(ranking, rows).tolist()}
    others = rows[np.linspace(0, len(rows) - 1, min(MAX_POINTS, len(rows))).astype(int)]
    return np.array(sorted(chosen | {*others.tolist()}), dtype=np.int64)


def _front(ranking: Ranking, rows: Int) -> Int:
    """Candidates that no other one that fits beats in both time and memory, the fastest first."""
    figures = ranking.figures
    rows = rows[ranking.fits[rows]]
    if not len(rows):
        return rows
    values = np.stack([figures.seconds[rows], figures.peak[rows].astype(np.float64)], axis=1)
    rows = rows[front(values)]
    return rows[np.argsort(figures.seconds[rows], kind="stable")]


def _words(ranking: Ranking, row: int) -> str:
    seconds, peak = float(ranking.figures.seconds[row]), int(ranking.figures.peak[row])
    mark = "" if ranking.figures.simulated[row] else ", estimated"
    settings = tables.words(ranking.candidates, row)
    return f"{settings}: {duration(seconds)}, {quantity(peak, 'B')}{mark}"


def _systems(ranking: Ranking, rows: Int) -> list[Part]:
    """Hardware files that run files refer to."""
    candidates, texts = ranking.candidates, dict[str, str]()
    for index in rows.tolist():
        hardware = candidates.hardware(index)
        if not is_packaged(hardware):
            texts[hardware_file_name(hardware)] = hardware_file(candidates, index)
    files = [Details(name, [Paragraph(text, tag="pre")]) for name, text in texts.items()]
    return ["Files of the hardware that run files name:", *files] if files else []


def _front_chart(ranking: Ranking, rows: Int, on_front: set[int], linked: set[int]) -> Chart | None:
    """Time and memory of candidates; a click leads to the run files of those that have one."""
    if not len(rows):
        return None
    figures = ranking.figures
    best = int(ranking.best[0]) if len(ranking.best) else -1
    points = [
        Point(
            (float(figures.peak[row]), float(figures.seconds[row])),
            _words(ranking, row),
            f"run-{row}" * (row in linked),
            row in on_front,
            bool(figures.fits[row]),
            row == best,
        )
        for row in rows.tolist()
    ]
    limits = sorted({int(size) for size in figures.device_memory[rows].tolist() if size})[:4]
    caption = front_caption("candidate near the best", "both time and memory", "run")
    if limits:
        lines = "line is" if len(limits) == 1 else "lines are"
        caption += f" The dashed {lines} the memory of a device."
    across, up = ("memory of the fullest rank", BYTES), ("step", SECONDS)
    return Chart(scatter(points, "Step time and memory", across, up, limits), caption)


def front_caption(points: str, beaten_in: str, leads_to: str) -> str:
    """The caption of a chart of a search's front: what a point is, and what puts it on the front.

    >>> front_caption("candidate", "both time and memory", "run")
    'A point for each candidate, on logarithmic axes; no other beats those on the front in both \
time and memory. A click leads to the run.'
    """
    return (
        f"A point for each {points}, on logarithmic axes; no other beats those on the front in "
        f"{beaten_in}. A click leads to the {leads_to}."
    )


# ---- serving -------------------------------------------------------------------------------------


def serving_search_page(of: ServingRanking, removed: Sequence[Removed], load: str) -> str:
    """The page of a search for serving; `load` is what was served, in words."""
    cards, chart = _serving_cards(of), _serving_front(of)
    unmet = [n for n, choice in enumerate(of.choices) if not choice.simulated.meets]
    every = replace(search_serving.every_choice(of), title="", bad=unmet)
    files = [
        Details(
            tables.words(of.rows, row),
            [Paragraph(run_file(of.rows, row), tag="pre")],
            f"layout-{row}",
        )
        for row in dict.fromkeys(of.choices[number].layout for number in of.best)
    ]
    of_every = "All choices that were simulated; those that miss the limits are red."
    of_files = "A run file for each layout: `stagewright serve --config FILE`, with --instances."
    stopped = f"stopped: {search_serving.UNTIL_STOPPED}" * of.stopped
    head: list[Part] = [
        f"**{search_serving.answer(of)}**",
        *([Cards(cards)] if cards else []),
        *_sentences([load, stopped, *search_serving.remarks(of), *search_serving.accuracy(of)]),
    ]
    sections = [
        *([PageSection("front", "Tokens per GPU and per user", [chart], "Front")] if chart else []),
        PageSection("best", "Best", search_serving.tables_of_best(of)),
        PageSection("simulated", "Simulated", [of_every, every]),
        PageSection("runs", "Run files", [of_files, *files]),
        _removed(removed),
    ]
    return render(f"{of.rows.model.name}: GPUs for a load", head, sections)


def _serving_cards(of: ServingRanking) -> list[Card]:
    """Key figures of the winner, with its limits in numbers."""
    if not of.best:
        return []
    choice, slo = of.choices[of.best[0]], of.target.slo
    load = choice.simulated
    cards = [
        Card("GPUs", f"{load.gpus:,}", search_serving.deployment_words(of, choice)),
        Card("Keep limits", f"{load.good:.1%}", f"of requests; {of.target.share:.0%} must"),
    ]
    for name, spread, limit in (
        ("TTFT", load.summary.ttft, slo.ttft),
        ("TPOT", load.summary.tpot, slo.tpot),
        ("E2E", load.summary.e2e, slo.e2e),
    ):
        if limit is not None:
            more = f"median; {duration(spread.p99)} at p99; limit {duration(limit)}"
            cards.append(Card(name, duration(spread.p50), more))
    cards.append(
        Card("Throughput", f"{load.output_rate:,.4g}", f"tokens/s; {load.per_gpu:,.4g} per GPU")
    )
    if choice.usd_per_hour > 0:
        per_token = f"{choice.usd_per_million:.3g} USD per million output tokens"
        cards.append(Card("Cost", f"{choice.usd_per_hour:,.4g} USD/h", per_token))
    return cards


def _serving_front(of: ServingRanking) -> Chart | None:
    points = [
        Point(
            (choice.simulated.user_rate, choice.simulated.per_gpu),
            f"{search_serving.deployment_words(of, choice)}, {choice.simulated.gpus} GPUs: "
            f"{choice.simulated.per_gpu:,.4g} tokens/s per GPU, "
            f"{choice.simulated.user_rate:,.4g} per user, "
            f"TTFT p50 {duration(choice.simulated.summary.ttft.p50)}",
            f"layout-{choice.layout}" * (index in of.best),
            index in of.best,
            best=index == of.best[0],
        )
        for index, choice in enumerate(of.choices)
        if choice.simulated.meets and choice.simulated.user_rate > 0
    ]
    if not points:
        return None
    caption = front_caption("choice that keeps the limits", "both", "layout")
    across, up = ("tokens/s per user", NUMBER), ("tokens/s per GPU", NUMBER)
    return Chart(scatter(points, "Output tokens per second", across, up), caption)
