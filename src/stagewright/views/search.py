"""A search as tables: the best with the reason, what was removed, and all candidates as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.errors import either
from stagewright.explore.answer.ranking import Ranking
from stagewright.search.candidates import HARDWARE, Candidates
from stagewright.explore.lots import STOPPED
from stagewright.search.enumeration import Removed
from stagewright.numbers import many, side_by_side
from stagewright.program.fit import NEARLY_FULL
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.declare import setting_in_words
from stagewright.texttable import Table

UNTIL_STOPPED = "the best of what was simulated until then"
_LEAST = 0.005
"""Shares below this are not named."""


def shown(of: Ranking) -> int:
    """How many of the best are shown."""
    return min(len(of.best), of.how.top)


def best(of: Ranking, most: int | None = None) -> Table:
    """The best candidates: their settings, time, memory, and what limits them; `most` of them, or
    as many as `shown`."""
    rows = of.best[: shown(of) if most is None else most]
    figures = of.figures.take(rows)
    shares = [_shares(of, row) for row in rows.tolist()]
    gpus = of.rows.take(rows).world_size
    columns: dict[str, list[Any]] = {
        "#": [nth + 1 for nth in range(len(rows))],
        "settings": [words(of.rows, row) for row in rows.tolist()],
        "GPUs": gpus.tolist(),
        "step": figures.seconds.tolist(),
        "tokens/s per GPU": (figures.tokens_per_second / gpus).tolist(),
        "MFU": [None if np.isnan(share) else share for share in figures.mfu.tolist()],
        "memory": figures.peak.tolist(),
        "bubble": [each.get("bubble", 0.0) for each in shares],
        "exposed": [
            ", ".join(f"{axis} {share:.0%}" for axis, share in each.items() if axis != "bubble")
            for each in shares
        ],
        "limited by": [limit(of, row) for row in rows.tolist()],
    }
    for name, unit in (("cost", "USD per Mtoken"), ("energy", "J per token")):
        if name in of.how.objectives:
            value = figures.usd * 1e6 if name == "cost" else figures.joules
            columns[unit] = (value / np.maximum(figures.tokens, 1)).tolist()
    worlds = of.rows.world_size
    if (worlds == worlds[:1]).all():
        del columns["GPUs"]
    if figures.mfu.size and np.isnan(figures.mfu).all():
        del columns["MFU"]
    units = {"#": "", "GPUs": "count", "step": "s", "tokens/s per GPU": "rate", "MFU": "share"}
    units |= {"memory": "B", "bubble": "share"}
    units |= {"USD per Mtoken": "figure", "J per token": "figure"}
    title, names = "Best", of.how.objectives
    if len(names) > 1:
        title = f"Pareto front of {in_words(names)}, by {in_words(names[:1])}"
    return Table(title, columns, {name: unit for name, unit in units.items() if name in columns})


def not_listed(of: Ranking) -> str:
    """Which hardware none of the best has, in a sentence; empty: each has some."""
    column = of.rows.columns[HARDWARE]
    there = {column.at(row).name for row in of.best[: shown(of)].tolist()}
    lacking = [hardware.name for hardware in column.values if hardware.name not in there]
    if not lacking or len(lacking) > _FEW_SYSTEMS:
        return ""
    return f"none of those listed is on {either(lacking)}: search such hardware alone for its best"


_FEW_SYSTEMS = 8
"""Most kinds of hardware that are named one by one."""


def listed(of: Ranking) -> str:
    """Why fewer candidates are listed than were simulated, in a sentence; empty: all are."""
    figures, count = of.figures, shown(of)
    if count == of.simulated:
        return ""
    fits = figures.fits | of.how.any_memory
    too_large = int((figures.exact & ~fits).sum())
    unknown = int((figures.exact & fits & of.without(*of.how.objectives)).sum())
    behind = of.simulated - too_large - unknown - len(of.best)
    front = len(of.how.objectives) > 1
    why = {
        "does not fit|do not fit": too_large,
        "has no such figure|have no such figure": unknown,
        "is not on the front|are not on the front"
        if front
        else "is behind a candidate that is only estimated|are behind candidates that are only "
        "estimated": behind,
        "is further down|are further down": len(of.best) - count,
    }
    said = [f"{n:,} {words.split('|')[n > 1]}" for words, n in why.items() if n]
    return f"{count:,} of {of.simulated:,} simulated candidates are listed: {', '.join(said)}"


def words(rows: Candidates, row: int) -> str:
    """The settings of a candidate that others have otherwise, without those that are defaults."""
    differ: list[str] = []
    run = rows.run(row)
    given = run.given()
    for name, column in rows.columns.items():
        if len(column.values) == 1:
            continue
        value = column.at(row)
        if name == HARDWARE:
            differ.append(value.name)
        elif isinstance(value, str) and name in SETTINGS and name not in given:
            continue  # a word that other settings imply, such as 1f1b without virtual stages
        elif value != EXPERIMENT[name].default_of(run.framework):
            differ.append(setting_in_words(name, value))
    if differ:
        return " ".join(differ)
    several = any(len(column.values) > 1 for column in rows.columns.values())
    return "defaults" if several else "as given"


def _shares(of: Ranking, row: int) -> dict[str, float]:
    """The shares of a step that the mean GPU waits: by axis, the largest first; and the bubble."""
    seconds = float(of.figures.seconds[row])
    waits = {axis: float(each[row]) / seconds for axis, each in of.figures.exposed.items()}
    ordered = sorted(waits.items(), key=lambda item: -item[1])
    named = {axis: share for axis, share in ordered if share >= _LEAST}
    return {"bubble": float(of.figures.bubble[row]) / seconds, **named}


def limit(of: Ranking, row: int) -> str:
    """What a candidate spends most of its time on, and memory where it has little of it or none."""
    shares = _shares(of, row)
    kernels = 1 - sum(shares.values())
    busy = {"kernels and launches": kernels}
    if row in of.launches:
        launches = of.launches[row] / float(of.figures.seconds[row])
        busy = {"kernels": kernels - launches, "launches": launches}
    name, share = max({**busy, **shares}.items(), key=lambda item: item[1])
    told = f"{name} {share:.0%}"
    if not of.figures.fits[row]:
        return f"{told}, {_too_large(of, row)}"
    held = _tensors(of, row)
    return f"{told}, memory {held:.0%}" if held > NEARLY_FULL else told


def _tensors(of: Ranking, row: int) -> float:
    """The share of its memory that tensors of the fullest rank of a candidate take at its peak."""
    beside = of.figures.memory.get("allowance")
    held = float(of.figures.peak[row]) - (0.0 if beside is None else float(beside[row]))
    return held / max(float(of.figures.device_memory[row]), 1.0)


def _too_large(of: Ranking, row: int) -> str:
    figures = of.figures
    held, room = side_by_side(int(figures.peak[row]), int(figures.device_memory[row]), "B")
    return f"does not fit: needs {held} of {room}"


def nearly_full(of: Ranking) -> list[str]:
    """A sentence where the best leaves little memory to what is no tensor, or does not fit."""
    row = int(of.best[0])
    if not of.figures.fits[row]:
        return [f"the best {_too_large(of, row)}"]
    held = _tensors(of, row)
    if held <= NEARLY_FULL or of.rows.run(row).memory_allowance is not None:
        return []
    return [
        f"tensors of the best take {held:.0%} of the memory, where the context, libraries and "
        "fragmentation need some as well; --memory-allowance 8GB leaves 8 GB for these"
    ]


def removed(found: Sequence[Removed]) -> Table:
    """What each constraint has removed, with one example of it."""
    columns = {
        "removed": [each.count for each in found],
        "wanted": [each.why for each in found],
        "example": [each.example for each in found],
    }
    return Table("Removed", columns, {"removed": "count"})


def left(of: Ranking) -> list[str]:
    """Of which candidates columns know nothing, and why; a sentence for each reason."""
    counts: dict[str, int] = {}
    for each in of.left:
        if each.possible:
            counts[each.reason] = counts.get(each.reason, 0) + len(each.candidates)
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    told = [
        f"{_candidates(count)} {STOPPED}"
        if why == STOPPED
        else f"{_candidates(count)} cannot be estimated: {why}"
        for why, count in ordered
    ]
    bounded = [f"{_candidates(len(each.per_token))} bounded out: they {each.reason}"
               for each in of.bounded]  # fmt: skip
    without = {name: int(of.without(name).sum()) for name in of.how.objectives}
    aside = [
        f"{_candidates(count)} left aside, of which {name} is not known: {of.why_unknown(name)}"
        for name, count in without.items()
        if count
    ]
    return bounded + told + aside


def _candidates(count: int) -> str:
    return many(count, "candidate", "candidates")


def _off(share: float) -> str:
    """An error in percent, with a sign unless it is rounded to nothing.

    >>> _off(0.0021), _off(-0.00001)
    ('+0.2%', '0.0%')
    """
    text = f"{share:+.1%}"
    return "0.0%" if text[1:] == "0.0%" else text


def certainty(of: Ranking) -> str:
    """Whether a candidate that was not simulated could still win, in a sentence."""
    if of.proven:
        return (
            "proven: every other candidate has been simulated, or its lower bound is above the best"
        )
    told: list[str] = []
    every = of.simulated + len(of.refused) == of.candidates
    if every:
        told.append("all candidates have been simulated")
    for name in of.how.objectives:
        gaps = of.gaps_of(name)
        if len(gaps):
            low, high = (_off(gap - 1) for gap in (gaps.min(), gaps.max()))
            told.append(f"simulated {_AS_SEEN[name]} {low if low == high else f'{low} to {high}'} "
                        "off the estimate")  # fmt: skip
    if of.unseen:
        were = many(of.unseen, "candidate was", "candidates were")
        any_of = f"; any could still {_better(of)}" if of.stopped else ""
        told.append(f"{were} neither estimated nor simulated{any_of}")
    if len(of.best) and not every and not (of.stopped and of.unseen):
        told.append(_still_open(of))
    return "; ".join(told) or "no candidate has been simulated"


def _still_open(of: Ranking) -> str:
    """How many candidates beyond those simulated could win, and by what one knows that."""
    names, left = of.how.objectives, of.open
    if not left:
        sure = f"no candidate beyond those simulated can {_better(of)}"
        # Bounds hold for all that nobody has estimated; of the others, estimates tell.
        return sure if of.unseen else f"{sure}, unless its estimate is further off"
    could = f"{_candidates(left)} beyond those simulated could still {_better(of)}"
    exact = "--exact or " if names == ("time",) else ""
    if of.unseen:
        by = " by their lower bounds" if names == ("time",) else ""
        return f"{could}{by}; {exact}a larger --most simulates more"
    return f"{could}, if estimates were as far off; {exact}a larger --top tells"


def _better(of: Ranking) -> str:
    """What a candidate does that wins."""
    names = of.how.objectives
    return _BETTER[names[0]] if len(names) == 1 else f"join the front of {in_words(names)}"


_AS_SEEN = {
    **{"time": "times are", "memory": "memory is", "cost": "costs are", "energy": "energy is"},
    "mfu": "MFU is",
}
"""Figures of simulated candidates beside their estimates."""
_BETTER = {
    **{"time": "be faster", "memory": "take less memory", "cost": "cost less per token"},
    **{"energy": "take less energy per token", "mfu": "have a higher MFU"},
}


def in_words(names: Sequence[str]) -> str:
    """Objectives in words: `time, memory and MFU`."""
    said = ["MFU" if name == "mfu" else name for name in names]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
