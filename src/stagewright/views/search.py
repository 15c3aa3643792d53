"""A search as tables and sentences: the best, the price of other choices, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.errors import either
from stagewright.numbers import duration, many, quantity, side_by_side
from stagewright.program.fit import NEARLY_FULL
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.declare import setting_in_words, text_of
from stagewright.searching import objectives
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.searching.enumeration import Removed
from stagewright.searching.ranking import TIE, Ranking
from stagewright.texttable import Table

UNTIL_STOPPED = "the best of what was simulated until then"
EXPECTED_ERROR: Mapping[str, float] = {"dense": 0.06, "experts": 0.14}
"""Mean error of published steps, of dense models and of mixtures of experts (docs/accuracy)."""
_CHOICES = ("tp", "pp", "cp", "ep", "etp", "zero", "recompute", "precision", HARDWARE)
"""Settings of which the price of each value is shown, with those that the user varies."""
_VARIANTS = (
    *("dp", "vpp", "micro_batch_size", "schedule", "sequence_parallel", "cp_comm_type"),
    *("moe_flex_dispatcher", "fp8_recipe", "memory_allowance"),
)
"""Settings of variants of a layout, which have no price of their own."""
_LEAST = 0.005
"""Shares below this are not named."""
_FEW_SYSTEMS = 8
"""Most kinds of hardware that are named one by one."""


# ---- the best ------------------------------------------------------------------------------------


def best(ranking: Ranking, most: int | None = None) -> Table:
    """The best candidates: their settings, time, memory, and what limits them."""
    rows = ranking.listed[:most]
    figures = ranking.figures.take(rows)
    shares = [_shares(ranking, row) for row in rows.tolist()]
    gpus = ranking.rows.take(rows).world_size
    columns: dict[str, list[Any]] = {
        "#": [n + 1 for n in range(len(rows))],
        "settings": [words(ranking.rows, row) for row in rows.tolist()],
        "GPUs": gpus.tolist(),
        "step": figures.seconds.tolist(),
        "tokens/s per GPU": (figures.tokens_per_second / gpus).tolist(),
        "MFU": _known(figures.mfu),
        "causal MFU": _known(figures.mfu_causal),
        "TFLOP/s": [None if value is None else round(value) for value in _known(figures.tflops)],
        "memory": figures.peak.tolist(),
        "bubble": [share.get("bubble", 0.0) for share in shares],
        "exposed": [
            ", ".join(f"{axis} {part:.0%}" for axis, part in share.items() if axis != "bubble")
            for share in shares
        ],
        "limited by": [limit(ranking, row) for row in rows.tolist()],
    }
    for name, unit in (("cost", "USD per Mtoken"), ("energy", "J per token")):
        if name in ranking.wanted.objectives:
            value = figures.usd * 1e6 if name == "cost" else figures.joules
            columns[unit] = (value / np.maximum(figures.tokens, 1)).tolist()
    worlds = ranking.rows.world_size
    if (worlds == worlds[:1]).all():
        del columns["GPUs"]
    if np.isnan(figures.mfu).all():
        for name in ("MFU", "causal MFU", "TFLOP/s"):
            del columns[name]
    units = {"#": "", "GPUs": "count", "step": "s", "tokens/s per GPU": "rate", "MFU": "share"}
    units |= {"causal MFU": "share", "TFLOP/s": "count", "memory": "B", "bubble": "share"}
    units |= {"USD per Mtoken": "figure", "J per token": "figure"}
    title, names = "Best", ranking.wanted.objectives
    if len(names) > 1:
        title = f"Pareto front of {in_words(names)}, by {in_words(names[:1])}"
    return Table(title, columns, {name: unit for name, unit in units.items() if name in columns})


def _known(column: Float) -> list[float | None]:
    return [None if np.isnan(value) else value for value in column.tolist()]


def words(rows: Candidates, row: int) -> str:
    """The settings of a candidate that others have otherwise, without those that are defaults."""
    differ: list[str] = []
    run = rows.run(row)
    given = run.given()
    for name, column in rows.columns.items():
        if len(column.values) == 1 or name == "memory_allowance":
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


def _shares(ranking: Ranking, row: int) -> dict[str, float]:
    """Shares of a step that the mean GPU waits: the bubble, and by axis, the largest first."""
    seconds = float(ranking.figures.seconds[row])
    waits = {axis: float(each[row]) / seconds for axis, each in ranking.figures.exposed.items()}
    ordered = sorted(waits.items(), key=lambda item: -item[1])
    named = {axis: share for axis, share in ordered if share >= _LEAST}
    return {"bubble": float(ranking.figures.bubble[row]) / seconds, **named}


def limit(ranking: Ranking, row: int) -> str:
    """The largest share of a candidate's step, and its memory where that is nearly full."""
    shares = _shares(ranking, row)
    kernels = 1 - sum(shares.values())
    busy = {"kernels and launches": kernels}
    if row in ranking.launches:
        launches = ranking.launches[row] / float(ranking.figures.seconds[row])
        busy = {"kernels": kernels - launches, "launches": launches}
    name, share = max({**busy, **shares}.items(), key=lambda item: item[1])
    text = f"{name} {share:.0%}"
    if not ranking.figures.fits[row]:
        return f"{text}, {_too_large(ranking, row)}"
    held = _tensors(ranking, row)
    return f"{text}, memory {held:.0%}" if held > NEARLY_FULL else text


def _tensors(ranking: Ranking, row: int) -> float:
    """Share of its memory that tensors of the fullest rank of a candidate take at its peak."""
    allowance = ranking.figures.memory.get("allowance")
    held = float(ranking.figures.peak[row])
    held -= 0.0 if allowance is None else float(allowance[row])
    return held / max(float(ranking.figures.device_memory[row]), 1.0)


def _too_large(ranking: Ranking, row: int) -> str:
    figures = ranking.figures
    held, room = side_by_side(int(figures.peak[row]), int(figures.device_memory[row]), "B")
    return f"does not fit: needs {held} of {room}"


def choice(ranking: Ranking) -> str:
    """Why the first of the best is not the fastest, in a sentence; empty: it is."""
    if len(ranking.wanted.objectives) > 1 or len(ranking.best) < 2:
        return ""
    values = objectives.values(ranking.figures, ranking.wanted.objectives)[:, 0]
    first, fastest = int(ranking.best[0]), int(ranking.best[np.argmin(values[ranking.best])])
    if first == fastest:
        return ""
    more = abs(values[first] / values[fastest] - 1)
    peaks = ranking.figures.peak
    less = int(peaks[fastest] - peaks[first])
    why = f"takes {quantity(less, 'B')} less" if less > 0 else "uses ZeRO-1, as recipes do"
    return (
        f"candidates within {TIE:.0%} count as equal: run 1 is {more:.1%} behind "
        f"{words(ranking.rows, fastest)}, and {why}"
    )


def expected_error(ranking: Ranking) -> str:
    """How far predicted steps are off on average, in a sentence."""
    if ranking.rows.base.run.mode != "train":
        return ""
    kind = "experts" if ranking.rows.model.num_experts else "dense"
    share = EXPECTED_ERROR[kind]
    what = "mixtures of experts" if kind == "experts" else "dense models"
    return f"steps of {what} were off by {share:.0%} on average where they were measured"


def headroom(ranking: Ranking) -> str:
    """What the memory of the best counts beside tensors, in a sentence."""
    row = int(ranking.best[0])
    if not ranking.figures.fits[row]:
        return f"the best {_too_large(ranking, row)}"
    allowance = ranking.figures.memory.get("allowance")
    if allowance is not None and allowance[row]:
        free = quantity(int(allowance[row]), "B")
        return (
            f"memory has {free} for the context, libraries and fragmentation; --memory-allowance "
            "sets them, 0 takes them away"
        )
    held = _tensors(ranking, row)
    if held <= NEARLY_FULL:
        return ""
    return (
        f"tensors of the best take {held:.0%} of the memory, where the context, libraries and "
        "fragmentation need some as well"
    )


def missing_hardware(ranking: Ranking) -> str:
    """Hardware that none of the listed candidates has, in a sentence; empty: each has some."""
    column = ranking.rows.columns[HARDWARE]
    listed = {column.at(row).name for row in ranking.listed.tolist()}
    missing = [hardware.name for hardware in column.values if hardware.name not in listed]
    if not missing or len(missing) > _FEW_SYSTEMS:
        return ""
    return f"none of those listed is on {either(missing)}: see the price of each choice"


# ---- the price of other choices ------------------------------------------------------------------


def choices(ranking: Ranking) -> Table:
    """The best step for each value of a setting, whatever the others are, and why it is slower.

    Figures of candidates that were not simulated are estimates, and marked `~`.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("setting", "value", _value_name(ranking), "against the best", "why")
    }
    for name, value, mask in _alternatives(ranking):
        columns["setting"].append("GPUs" if name == "gpus" else name)
        columns["value"].append(value)
        cells = _price(ranking, mask)
        for column, cell in zip([*columns][2:], cells, strict=True):
            columns[column].append(cell)
    return Table("Best for each choice", columns)


def _value_name(ranking: Ranking) -> str:
    objective = ranking.wanted.objectives[0]
    return "step" if objective == "time" else objective


def _alternatives(ranking: Ranking) -> Iterator[tuple[str, str, Bool]]:
    """Each value of the settings that are compared, with the candidates that have it."""
    rows = ranking.rows
    names = [n for n in _CHOICES if n in rows.columns]
    names += [n for n in rows.columns if n not in {*_CHOICES, *_VARIANTS}]
    for name in names:
        column = rows.columns[name]
        if len(column.values) < 2:
            continue
        order = sorted(range(len(column.values)), key=lambda code: _order(column.values[code]))
        for code in order:
            yield name, _text(name, column.values[code]), column.codes == code
    worlds = rows.world_size
    for gpus in np.unique(worlds).tolist() if (worlds != worlds[0]).any() else ():
        yield "gpus", f"{gpus:,}", worlds == gpus


def _price(ranking: Ranking, mask: Bool) -> tuple[str, str, str]:
    """The best of some candidates: its value, how much worse than the best, and the reason."""
    names = ranking.wanted.objectives[:1]
    figures, first = ranking.figures, int(ranking.best[0])
    values = objectives.values(figures, names)[:, 0]
    usable = mask & ranking.fits & np.isfinite(values)
    if not usable.any():
        large = np.flatnonzero(mask & ~np.isnan(figures.seconds))
        if not len(large):
            return "unknown", "", ""
        lacking = (figures.peak - figures.device_memory)[large]
        row = int(large[np.argmin(lacking)])
        return "does not fit", "", _too_large(ranking, row).removeprefix("does not fit: ")
    row = int(np.argmin(np.where(usable, values, np.inf)))
    if mask[first] and values[row] >= values[first] * (1 - TIE):
        row = first
    mark = "" if figures.exact[row] else "~"
    if names[0] == "time":
        value = duration(float(figures.seconds[row]))
    elif names[0] == "memory":
        value = quantity(int(values[row]), "B")
    else:
        value = f"{abs(values[row]):.3g}"
    if row == first:
        return f"{mark}{value}", "", "the best"
    more = values[row] / values[first] - 1
    more = -more if names[0] == "mfu" else more
    reason = _reason(ranking, row, first) if names[0] == "time" else ""
    return f"{mark}{value}", f"{mark}{more:+.1%}", reason or words(ranking.rows, row)


def _reason(ranking: Ranking, row: int, first: int) -> str:
    """The part of the step that is most longer than in the best, with the candidate's settings."""
    parts, of_best = _parts(ranking, row), _parts(ranking, first)
    whole = sum(of_best.values())
    longer = {name: (size - of_best[name]) / whole for name, size in parts.items()}
    name = max(longer, key=lambda part: longer[part])
    settings = words(ranking.rows, row)
    return f"{name} {longer[name]:+.0%}: {settings}" if longer[name] >= _LEAST else settings


def _parts(ranking: Ranking, row: int) -> dict[str, float]:
    """Seconds per token of the parts of a candidate's step."""
    figures = ranking.figures
    tokens = max(int(figures.tokens[row]), 1)
    bubble = float(figures.bubble[row])
    waits = sum(float(each[row]) for each in figures.exposed.values())
    kernels = float(figures.seconds[row]) - bubble - waits
    parts = {"kernels": kernels, "bubble": bubble, "communication": waits}
    return {name: size / tokens for name, size in parts.items()}


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers by size, before all else by name."""
    number = isinstance(value, int | float)
    return (not number, value if number else _text("", value))


def _text(name: str, value: Any) -> str:
    if name == HARDWARE or hasattr(value, "scale_up"):
        return value.name
    return "on" if value is True else "off" if value is False else text_of(value)


# ---- what was removed, and how sure the answer is ------------------------------------------------


def removed(found: Sequence[Removed]) -> Table:
    """What each constraint has removed, with one example of it."""
    columns = {
        "removed": [each.count for each in found],
        "wanted": [each.why for each in found],
        "example": [each.example for each in found],
    }
    return Table("Removed", columns, {"removed": "count"})


def certainty(ranking: Ranking) -> str:
    """How far estimates were off, and if a candidate that was not simulated could still win."""
    if ranking.proven:
        return (
            "proven: every other candidate has been simulated, or its lower bound is above the best"
        )
    sentences: list[str] = []
    every = ranking.simulated + len(ranking.refused) == len(ranking)
    if every:
        sentences.append("all candidates have been simulated")
    for name in ranking.wanted.objectives:
        errors = ranking.errors(name)
        if len(errors):
            low, high = (_percent(error - 1) for error in (errors.min(), errors.max()))
            off = low if low == high else f"{low} to {high}"
            sentences.append(f"simulated {_SIMULATED[name]} {off} off the estimate")
    unknown = int(ranking.unknown.sum())
    if unknown:
        were = many(unknown, "candidate was", "candidates were")
        sentences.append(f"{were} neither estimated nor simulated, and any could {_win(ranking)}")
    if len(ranking.best) and not every:
        sentences.append(_open(ranking))
    return "; ".join(sentences) or "no candidate has been simulated"


def _open(ranking: Ranking) -> str:
    """How many candidates beyond those simulated could still win."""
    left = len(ranking.open)
    if not left:
        return (
            f"no candidate beyond those simulated can {_win(ranking)}, unless its estimate is "
            "further off"
        )
    exact = "--exact or " if ranking.wanted.objectives == ("time",) else ""
    return (
        f"{many(left, 'candidate', 'candidates')} beyond those simulated could still "
        f"{_win(ranking)}, if estimates were as far off; {exact}a larger --most tells"
    )


def _percent(share: float) -> str:
    """An error in percent, with a sign unless it is rounded to nothing.

    >>> _percent(0.0021), _percent(-0.00001)
    ('+0.2%', '0.0%')
    """
    text = f"{share:+.1%}"
    return "0.0%" if text[1:] == "0.0%" else text


def _win(ranking: Ranking) -> str:
    """What a candidate does that wins."""
    names = ranking.wanted.objectives
    return _WINS[names[0]] if len(names) == 1 else f"join the front of {in_words(names)}"


_SIMULATED = {
    **{"time": "times are", "memory": "memory is", "cost": "costs are", "energy": "energy is"},
    "mfu": "MFU is",
}
_WINS = {
    **{"time": "be faster", "memory": "take less memory", "cost": "cost less per token"},
    **{"energy": "take less energy per token", "mfu": "have a higher MFU"},
}


def without_objective(ranking: Ranking) -> list[str]:
    """Candidates that have no figure for an objective, and why; a sentence for each objective."""
    counts = {name: int(ranking.without(name).sum()) for name in ranking.wanted.objectives}
    return [
        f"{many(count, 'candidate', 'candidates')} left out, of which {name} is not known: "
        f"{ranking.why_unknown(name)}"
        for name, count in counts.items()
        if count
    ]


def in_words(names: Sequence[str]) -> str:
    """Objectives in words: `time, memory and MFU`."""
    said = ["MFU" if name == "mfu" else name for name in names]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
