"""A search as tables and sentences, and the lines and tables that `search` prints of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import either
from stagewright.numbers import duration, finite, plural, quantity, side_by_side
from stagewright.program.fit import NEARLY_FULL, RESERVED_SHARE
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.declare import setting_in_words, text_of
from stagewright.searching import objectives
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates
from stagewright.searching.choices import choices_of
from stagewright.searching.machines import specs_of
from stagewright.searching.ranking import TIE, Ranking
from stagewright.searching.simulated import step_of
from stagewright.searching.space import Removed
from stagewright.texttable import Table
from stagewright.time.goodput import DAY
from stagewright.time.hardware import Hardware
from stagewright.views.accuracy import error_of_step, expected
from stagewright.views.advice import remarks

UNTIL_STOPPED = "the best of what was simulated until then"
WHY = "why (% of the best step)"
"""Column of the part of a step that grew most, in percent of the best step."""
_MIN_SHARE = 0.005
"""Minimum share that is shown."""
MOST_RISKS = 2
"""Remarks on the best that are printed."""
_FEW_SYSTEMS = 8
"""Limit of hardware names in a sentence."""


# ---- all candidates ------------------------------------------------------------------------------


class ColumnMeaning(NamedTuple):
    """Unit and meaning of a column of all candidates."""

    unit: str
    meaning: str


COLUMNS: Mapping[str, ColumnMeaning] = {
    "SETTING": ColumnMeaning("", "a setting in which candidates differ"),
    "hardware": ColumnMeaning("", "the name of the hardware, where there are several"),
    "hardware.FIGURE": ColumnMeaning(
        "as its name says", "a figure of the hardware that `--vary` varies"
    ),
    "gpus": ColumnMeaning("", "GPUs: tp x cp x dp x pp"),
    "global_batch_size": ColumnMeaning("sequences", "the batch of a training step"),
    "seconds": ColumnMeaning("s", "time of a step"),
    "tokens": ColumnMeaning("", "new tokens of a step, over all GPUs"),
    "tokens_per_second": ColumnMeaning("1/s", "tokens over seconds, of all GPUs together"),
    "mfu": ColumnMeaning(
        "fraction", "model FLOPs utilization, 0 to 1, attention counted in full; training only"
    ),
    "mfu_causal": ColumnMeaning("fraction", "the same, attention counted without masked pairs"),
    "tflops": ColumnMeaning("TFLOP/s", "model FLOPs per second of a GPU, as `mfu` counts them"),
    "bubble": ColumnMeaning(
        "s",
        "the part of a step in which the mean GPU waits for other pipeline ranks (printed tables "
        "show shares)",
    ),
    "launches": ColumnMeaning(
        "s", "the part in which it waits for the host's launches; of simulated candidates alone"
    ),
    "exposed_AXIS": ColumnMeaning(
        "s",
        "the part of a step in which the mean GPU waits for communication along an axis, or "
        "(`exposed_dp+tp`) along several at once; of estimates along dp, or (`exposed_layers`) "
        "within layers",
    ),
    "peak": ColumnMeaning(
        "B", "what the fullest rank holds at its peak: the sum of all `memory_...`"
    ),
    "memory_CATEGORY": ColumnMeaning(
        "B", "tensors of one category at that peak; `memory_allowance` where a run has one"
    ),
    "device_memory": ColumnMeaning("B", "what a rank may hold"),
    "fits": ColumnMeaning("bool", "whether peak is at most device_memory"),
    "joules": ColumnMeaning("J", "energy of a step over all GPUs"),
    "useful": ColumnMeaning("share", "goodput of the job, where `failures` are known"),
    "usd": ColumnMeaning("USD", "cost of a step over all GPUs, where a price is known"),
    "simulated": ColumnMeaning(
        "bool", "true: the figures are those of `simulate`; false: all of them are estimates"
    ),
    "estimated_seconds": ColumnMeaning(
        "s", "the estimate of a step's time, also of simulated ones"
    ),
    "best": ColumnMeaning(
        "", "the place in the table of the best, from 1; with several objectives, on their front"
    ),
    "lower_bound": ColumnMeaning("s", "with `--exact`: a lower bound of the time of a step"),
}
"""Columns of `every` by name, in their order; words in capitals stand for several."""


def every(ranking: Ranking, indices: Int | None = None) -> Table:
    """Table of all candidates, or of some: settings that differ, and metrics (`COLUMNS`)."""
    rows = np.arange(len(ranking)) if indices is None else indices
    candidates, figures = ranking.candidates.take(rows), ranking.figures.take(rows)
    columns: dict[str, Any] = {}
    for name, column in candidates.columns.items():
        if len(column.values) > 1:
            cells = [_cell(name, value) for value in column.values]
            columns[name] = [cells[code] for code in column.codes.tolist()]
    columns |= _varied(candidates)
    evaluated = ~np.isnan(figures.seconds)

    def numbers(values: Any, *, present: Any = None) -> list[Any]:
        """Values, None where they are absent."""
        mask = ~np.isnan(values) if present is None else present
        pairs = zip(values.tolist(), mask.tolist(), strict=True)
        return [value if is_present else None for value, is_present in pairs]

    columns["gpus"] = candidates.world_size.tolist()
    if candidates.base.run.mode == "train":
        batch = candidates.numbers("global_batch_size")
        columns.setdefault("global_batch_size", numbers(batch, present=batch != ABSENT))
    place = {index: n + 1 for n, index in enumerate(ranking.listed.tolist())}
    exposed, memory = figures.exposed.items(), figures.memory.items()
    columns |= {
        "seconds": numbers(figures.seconds),
        "tokens": numbers(figures.tokens, present=evaluated),
        "tokens_per_second": numbers(figures.tokens_per_second),
        "mfu": numbers(figures.mfu),
        "mfu_causal": numbers(figures.mfu_causal),
        "tflops": numbers(figures.tflops),
        "bubble": numbers(figures.bubble),
        "launches": [ranking.launches.get(index) for index in rows.tolist()],
        **{f"exposed_{axis}": numbers(column, present=evaluated) for axis, column in exposed},
        "peak": numbers(figures.peak, present=evaluated),
        **{f"memory_{name}": numbers(column, present=evaluated) for name, column in memory},
        "device_memory": numbers(figures.device_memory, present=evaluated),
        "fits": numbers(figures.fits, present=evaluated),
        "joules": numbers(figures.joules),
        "usd": numbers(figures.usd),
        **({"useful": numbers(figures.useful)} if candidates.base.cluster.failures else {}),
        "simulated": figures.simulated.tolist(),
        "estimated_seconds": numbers(ranking.estimates.seconds[rows]),
        "best": [place.get(index) for index in rows.tolist()],
    }
    if ranking.bounds is not None:
        columns["lower_bound"] = numbers(ranking.bounds[rows])
    return Table("Candidates", columns)


def _varied(candidates: Candidates) -> dict[str, list[float | None]]:
    """Varied specs of the hardware, a column for each."""
    column = candidates.columns[HARDWARE]
    systems: tuple[Hardware, ...] = column.values
    if len(systems) < 2:
        return {}
    paths = dict.fromkeys(p for system in systems for p in candidates.varied.get(system.name, ()))
    specs = [specs_of(system) for system in systems]
    codes: list[int] = column.codes.tolist()
    return {f"hardware.{path}": [specs[code].get(path) for code in codes] for path in paths}


def _cell(name: str, value: Any) -> Any:
    if name == HARDWARE:
        return value.name
    return text_of(value) if EXPERIMENT[name].kind in (tuple, frozenset) else value


# ---- the best ------------------------------------------------------------------------------------


def best(ranking: Ranking) -> Table:
    """Table of the best candidates: settings, time, memory, and what limits them."""
    candidates, indices = ranking.candidates, ranking.listed
    rows, figures = indices.tolist(), every(ranking, indices).columns
    names, shares = ranking.options.objectives, [_shares(ranking, row) for row in rows]
    exposed = [
        ", ".join(f"{axis} {part:.0%}" for axis, part in share.items() if axis != "bubble")
        for share in shares
    ]
    worlds, gpus = candidates.world_size, figures["gpus"]
    trains = not np.isnan(ranking.figures.mfu).all()

    def per(figure: str, divisors: Sequence[int], factor: float = 1.0) -> list[float | None]:
        pairs = zip(figures[figure], divisors, strict=True)
        return [None if value is None else value * factor / max(d, 1) for value, d in pairs]

    columns: list[tuple[str, str | None, Sequence[Any], bool]] = [
        ("#", "", [n + 1 for n in range(len(rows))], True),
        ("settings", None, [words(candidates, row) for row in rows], True),
        ("GPUs", "count", gpus, bool((worlds != worlds[:1]).any())),
        ("step", "s", figures["seconds"], True),
        ("tokens/s per GPU", "rate", per("tokens_per_second", gpus), True),
        ("MFU", "share", figures["mfu"], trains),
        ("causal MFU", "share", figures["mfu_causal"], trains),
        ("TFLOP/s", "count", [v if v is None else round(v) for v in figures["tflops"]], trains),
        ("memory", "B", figures["peak"], True),
        ("bubble", "share", [share["bubble"] for share in shares], True),
        ("exposed", None, exposed, True),
        ("limited by", None, [limit(ranking, row) for row in rows], True),
        ("goodput", "share", figures.get("useful", []), "useful" in figures),
        ("days", "figure", _of_job(ranking, indices, "days"), bool(candidates.base.cluster.tokens)),
        ("USD per Mtoken", "figure", _of_job(ranking, indices, "cost"), "cost" in names),
        ("J per token", "figure", per("joules", figures["tokens"]), "energy" in names),
    ]
    title = f"Pareto front of {in_words(names)}, by {in_words(names[:1])}" if names[1:] else "Best"
    return Table.of_columns(title, columns, ("bubble", "causal MFU", "TFLOP/s", "exposed"))


def _of_job(ranking: Ranking, indices: Int, name: str) -> list[float | None]:
    """Values of the objective `days` or `cost`, in the unit of `_scale`; None: unknown."""
    values = objectives.OBJECTIVES[name](ranking.figures.take(indices)) * _scale(ranking, name)
    return [*map(finite, values.tolist())]


def _scale(ranking: Ranking, name: str) -> float:
    """Factor from an objective per token to what is shown: days of a job, USD per Mtoken."""
    tokens = ranking.candidates.base.cluster.tokens or 0.0
    return {"cost": 1e6, "days": tokens / DAY}.get(name, 1.0)


def words(candidates: Candidates, index: int) -> str:
    """Settings in which candidates differ, without defaults."""
    differ: list[str] = []
    run = candidates.run(index)
    explicit = run.given()
    for name, column in candidates.columns.items():
        if len(column.values) == 1 or name == "memory_allowance":
            continue
        value = column.at(index)
        if name == HARDWARE:
            differ.append(value.name)
        elif isinstance(value, str) and name in SETTINGS and name not in explicit:
            continue  # implied by other settings, such as 1f1b without virtual stages
        elif value != EXPERIMENT[name].default_of(run.framework):
            differ.append(setting_in_words(name, value))
    if differ:
        return " ".join(differ)
    several = any(len(column.values) > 1 for column in candidates.columns.values())
    return "defaults" if several else "as given"


def _shares(ranking: Ranking, row: int) -> dict[str, float]:
    """Shares of a step in which the mean GPU waits: the bubble, then axes, largest first."""
    seconds = float(ranking.figures.seconds[row])
    exposed = ranking.figures.exposed
    waits = {axis: float(column[row]) / seconds for axis, column in exposed.items()}
    ordered = sorted(waits.items(), key=lambda item: -item[1])
    named = {axis: share for axis, share in ordered if share >= _MIN_SHARE}
    return {"bubble": float(ranking.figures.bubble[row]) / seconds, **named}


def limit(ranking: Ranking, row: int) -> str:
    """Largest share of a candidate's step, and its memory if that is nearly full."""
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
    return f"{text}, tensors {held:.0%} of memory" if held > NEARLY_FULL else text


def _tensors(ranking: Ranking, row: int) -> float:
    """Share of device memory that tensors of the fullest rank take at its peak."""
    allowance = ranking.figures.memory.get("allowance")
    held = float(ranking.figures.peak[row])
    held -= 0.0 if allowance is None else float(allowance[row])
    return held / max(float(ranking.figures.device_memory[row]), 1.0)


def _too_large(ranking: Ranking, row: int) -> str:
    figures = ranking.figures
    held, room = side_by_side(int(figures.peak[row]), int(figures.device_memory[row]), "B")
    return f"does not fit: needs {held} of {room}"


def tie(ranking: Ranking) -> str:
    """Sentence on why the first of the best is not the fastest; empty if it is."""
    if len(ranking.options.objectives) > 1 or len(ranking.best) < 2:
        return ""
    values = objectives.values(ranking.figures, ranking.options.objectives)[:, 0]
    first, fastest = int(ranking.best[0]), int(ranking.best[np.argmin(values[ranking.best])])
    if first == fastest:
        return ""
    more = abs(values[first] / values[fastest] - 1)
    peaks = ranking.figures.peak
    unlisted = "" if fastest in ranking.listed else " (not listed; --all-variants)"
    why = "shards optimizer states, as recipes do"
    if ranking.saves_memory(first, fastest):
        why = f"takes {quantity(int(peaks[fastest] - peaks[first]), 'B')} less"
    return (
        f"candidates within {TIE:.0%} count as equal: run 1 is {more:.1%} behind "
        f"{words(ranking.candidates, fastest)}{unlisted}, and {why}"
    )


def expected_error(ranking: Ranking) -> str:
    """Sentence on the error of the best step, and on what a choice among layouts loses."""
    if not ranking.best.size:
        return ""
    text = f"accuracy: {error_of_step(step_of(ranking.candidates, int(ranking.best[0]))).sentence}"
    if ranking.candidates.base.run.mode != "train":
        return text
    return (
        f"{text}; layouts of one job share most of that error: the one predicted best was "
        f"{expected()['layout'].error:.1%} slower than the best, and 2% is a tie"
    )


def risks(ranking: Ranking) -> list[str]:
    """Problems and warnings of the best step, the most severe; `headroom` has those of memory."""
    step = step_of(ranking.candidates, int(ranking.best[0]))
    severe = [
        str(remark)
        for remark in remarks(step.compiled, step)
        if remark.level != "note" and remark.about != "Memory"
    ]
    return severe[:MOST_RISKS]


def headroom(ranking: Ranking) -> str:
    """Sentence on the memory of the best besides its tensors."""
    row = int(ranking.best[0])
    if not ranking.figures.fits[row]:
        return f"the best {_too_large(ranking, row)}"
    allowance, held = ranking.figures.memory.get("allowance"), _tensors(ranking, row)
    if allowance is not None and allowance[row]:
        free = quantity(int(allowance[row]), "B")
        sentence = (
            f"memory has {free} for the context, libraries and fragmentation; --memory-allowance "
            "sets them, 0 takes them away"
        )
        if held <= 1 - RESERVED_SHARE:
            return sentence
        planned = RESERVED_SHARE * float(ranking.figures.device_memory[row])
        return (
            f"{sentence}; tensors of the best take {held:.0%} of the memory, and most jobs whose "
            f"reserved memory was measured need --memory-allowance {planned / 1e9:.4g}GB"
        )
    if held <= NEARLY_FULL:
        return ""
    return (
        f"tensors of the best take {held:.0%} of the memory, where the context, libraries and "
        "fragmentation need some as well"
    )


def missing_hardware(ranking: Ranking) -> str:
    """Sentence on hardware without a listed candidate; empty if there is none."""
    column = ranking.candidates.columns[HARDWARE]
    listed = {column.at(index).name for index in ranking.listed.tolist()}
    missing = [hardware.name for hardware in column.values if hardware.name not in listed]
    if not missing or len(missing) > _FEW_SYSTEMS:
        return ""
    return f"none of those listed is on {either(missing)}: see the price of each choice"


# ---- the price of other choices ------------------------------------------------------------------


_VALUES = {"time": "step", "cost": "USD per Mtoken", "energy": "J per token"}
"""Names of the values of objectives in the table of choices, where these are others."""


def choices(ranking: Ranking) -> Table:
    """Table of the best simulated step for each value of a setting, and why it is slower.

    Other settings are free. An estimate, marked `~`, stands where nothing that fits was simulated.
    """
    objective = ranking.options.objectives[0]
    value = _VALUES.get(objective, objective)
    cells = [
        (choice.setting, choice.value, *_price(ranking, choice.mask))
        for choice in choices_of(ranking.candidates)
    ]
    names = ("setting", "value", value, "against the best", WHY)
    return Table.of_rows("Best for each choice", names, cells)


def _price(ranking: Ranking, mask: Bool) -> tuple[str, str, str]:
    """Best candidate of a mask: its value, the distance to the best, and the reason."""
    names = ranking.options.objectives[:1]
    figures, first = ranking.figures, int(ranking.best[0])
    values = objectives.values(figures, names)[:, 0]
    usable = mask & ranking.fits & np.isfinite(values)
    if not usable.any():
        return _why_none(ranking, mask)
    simulated = usable & figures.simulated
    row = int(np.argmin(np.where(simulated if simulated.any() else usable, values, np.inf)))
    if mask[first] and values[row] >= values[first] - TIE * abs(values[first]):
        row = first
    mark = "" if figures.simulated[row] else "~"
    digits = 4 if names[0] in ("cost", "days") else 3
    value = f"{mark}{abs(values[row]) * _scale(ranking, names[0]):,.{digits}g}"
    if names[0] == "time":
        value = mark + duration(float(figures.seconds[row]))
    elif names[0] == "memory":
        value = mark + quantity(int(values[row]), "B")
    if row == first:
        return value, "", "the best"
    more = values[row] / values[first] - 1
    more = -more if names[0] == "mfu" else more
    reason = _reason(ranking, row, first) if names[0] == "time" else ""
    return value, f"{mark}{more:+.1%}", reason or words(ranking.candidates, row)


def _why_none(ranking: Ranking, mask: Bool) -> tuple[str, str, str]:
    """Cells of a choice without a candidate that fits: missing memory, or the error of a run."""
    figures = ranking.figures
    large = np.flatnonzero(mask & ~np.isnan(figures.seconds))
    if len(large):
        lacking = (figures.peak - figures.device_memory)[large]
        row = int(large[np.argmin(lacking)])
        return "does not fit", "", _too_large(ranking, row).removeprefix("does not fit: ")
    refused = next((row for row in ranking.refused if mask[row]), None)
    return ("unknown", "", "") if refused is None else ("refused", "", ranking.refused[refused])


def _reason(ranking: Ranking, row: int, first: int) -> str:
    """Part of the step that grew most, as a share of the best step, and the settings."""
    parts, best_parts = _parts(ranking, row), _parts(ranking, first)
    total = sum(best_parts.values())
    growth = {name: (size - best_parts[name]) / total for name, size in parts.items()}
    name = max(growth, key=lambda part: growth[part])
    settings = words(ranking.candidates, row)
    if growth[name] < _MIN_SHARE:
        return settings
    return f"{name} {growth[name]:+.0%}: {settings}"


def _parts(ranking: Ranking, row: int) -> dict[str, float]:
    """Seconds per token of each part of a candidate's step."""
    figures = ranking.figures
    tokens = max(int(figures.tokens[row]), 1)
    bubble = float(figures.bubble[row])
    waits = sum(float(column[row]) for column in figures.exposed.values())
    kernels = float(figures.seconds[row]) - bubble - waits
    parts = {"kernels": kernels, "bubble": bubble, "communication": waits}
    return {name: size / tokens for name, size in parts.items()}


# ---- removed combinations, and certainty ------------------------------------------------


def removed(constraints: Sequence[Removed]) -> Table:
    """Table of the combinations that each constraint removed, with one example."""
    rows = [(removed.count, removed.requirement, removed.example) for removed in constraints]
    return Table.of_rows("Removed", ("removed", "wanted", "example"), rows, {"removed": "count"})


def certainty(ranking: Ranking) -> str:
    """Sentences on the errors of estimates, and on whether the best is proven."""
    if ranking.proven:
        return "proof: every other candidate was simulated, or has a lower bound above the best"
    sentences: list[str] = []
    for name in ranking.options.objectives:
        errors = ranking.errors(name)
        if len(errors):
            low, high = (_percent(1 / error - 1) for error in (errors.max(), errors.min()))
            off = low if low == high else f"{low} to {high}"
            sentences.append(f"estimated {_VERBS[name][0]} {off} off the simulation")
    missing = int(ranking.without_metrics.sum())
    if missing:
        were = plural(missing, "candidate was", "candidates were")
        sentences.append(
            f"no proof: {were} neither estimated nor simulated, and any could {_win(ranking)}"
        )
    if bool(ranking.attempted.all()):
        sentences.append("proof: all candidates were simulated")
    elif len(ranking.best):
        sentences.append(_open(ranking))
    return "; ".join(sentences) or "no candidate was simulated"


def _open(ranking: Ranking) -> str:
    """Sentence on candidates that were not simulated and could still win."""
    num_open, exact = len(ranking.open), ranking.options.objectives == ("time",)
    if num_open:
        count = plural(num_open, "candidate", "candidates")
        return (
            f"no proof: {count} not simulated could {_win(ranking)}, by estimates that are this "
            f"far off; raise --most{', or give --exact' if exact else ''}"
        )
    advice = "; --exact gives proof" if exact else ""
    return (
        f"no proof: a candidate not simulated can {_win(ranking)} only if its estimate is further "
        f"off{advice}"
    )


def _percent(share: float) -> str:
    """Error in percent, with a sign unless it rounds to 0.

    >>> _percent(0.0021), _percent(-0.00001)
    ('+0.2%', '0.0%')
    """
    text = f"{share:+.1%}"
    return "0.0%" if text[1:] == "0.0%" else text


def _win(ranking: Ranking) -> str:
    """Verb phrase for a candidate that wins."""
    names = ranking.options.objectives
    return _VERBS[names[0]][1] if len(names) == 1 else f"join the front of {in_words(names)}"


_VERBS: Mapping[str, tuple[str, str]] = {
    "time": ("times are", "be faster"),
    "memory": ("memory is", "take less memory"),
    "days": ("days are", "take fewer days"),
    "cost": ("costs are", "cost less per token"),
    "energy": ("energy is", "take less energy per token"),
    "mfu": ("MFU is", "have a higher MFU"),
}
"""An objective as the subject of a sentence, and what a better candidate does."""


def without_objective(ranking: Ranking) -> list[str]:
    """Sentence per objective on candidates that lack it, and why."""
    counts = {
        name: int(ranking.missing_objective(name).sum()) for name in ranking.options.objectives
    }
    return [
        f"{plural(count, 'candidate', 'candidates')} left out, of which {name} is not known: "
        f"{ranking.missing_reason(name)}"
        for name, count in counts.items()
        if count
    ]


def in_words(names: Sequence[str]) -> str:
    """Objectives in words: `time, memory and MFU`."""
    listed = ["MFU" if name == "mfu" else name for name in names]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


# ---- text ----------------------------------------------------------------------------------------


def search_text(
    ranking: Ranking, description: str, seconds: float | None = None
) -> Iterator[str | Table]:
    """The best of a search, the price of other choices, and how certain the result is."""
    names = ranking.options.objectives
    if len(names) > 1:
        yield (
            f"Pareto front of {in_words(names)}: {len(ranking.best):,} of "
            f"{ranking.simulated:,} simulated candidates, none of which another one beats in all "
            "of these"
        )
        yield f"the one with the best {in_words(names[:1])}: {description}"
    else:
        yield f"best: {description}"
    if ranking.stopped:
        yield f"stopped: {UNTIL_STOPPED}"
    yield best(ranking)
    yield from risks(ranking)
    yield from filter(len, [choices(ranking)])
    sentences = (headroom, tie, expected_error, missing_hardware)
    yield from filter(None, (sentence(ranking) for sentence in sentences))
    yield (
        f"{len(ranking):,} candidates, {ranking.simulated:,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
    )
    yield certainty(ranking)
