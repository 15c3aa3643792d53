"""Two runs beside each other: settings and parts of the model that differ, figures of both.

Figures of a step are those that `simulate` prints, of requests over time those of `serve`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.launch.reading import LaunchFile
from stagewright.model.config import ModelConfig
from stagewright.numbers import finite, plural, side_by_side
from stagewright.program.columns import TaskKind
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import DEGREES, text_of
from stagewright.run.sections.serving import SERVING
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.energy import ServingExpense
from stagewright.serving.metrics import ServingSummary, Spread
from stagewright.texttable import Table
from stagewright.time.simulate.breakdown import axes_of
from stagewright.time.simulate.step import SimulatedStep

DECIDES = 0.02
"""Change below which neither of two runs is said to be faster: the layout predicted best was on
average 1.7% slower than the one measured best (docs/accuracy/training.md)."""
_MOST = 60
"""Characters of a value in a table."""


class ChangedFigure(NamedTuple):
    """A figure of two runs in a unit of `Table`; None: a run has none."""

    name: str
    unit: str
    old: float | None
    new: float | None
    room: tuple[int, int] | None = None
    """Memory of the device of each, of which the figure is a part."""

    @classmethod
    def of(cls, name: str, unit: str, values: Iterable[float | None]) -> ChangedFigure:
        """A figure from its two values."""
        old, new = values
        return cls(name, unit, old, new)

    @property
    def change(self) -> float | None:
        """New over old, less 1; None where there is no such ratio."""
        return self.new / self.old - 1 if self.old and self.new is not None else None

    def cells(self) -> tuple[str, str]:
        """Both values as text."""
        texts = Table("", {"x": [self.old, self.new]}, {"x": self.unit}).cells("x")
        if self.room is not None:
            pairs = zip((self.old, self.new), self.room, strict=True)
            texts = [" of ".join(side_by_side(int(x or 0), room, "B")) for x, room in pairs]
        return texts[0], texts[1]


# ---- what differs --------------------------------------------------------------------------------


def settings(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, Any, Any]]:
    """Those of some settings that have two values; degrees come first."""
    names = [*names]
    ordered = dict.fromkeys([*(name for name in DEGREES if name in names), *names])
    return [(n, old.get(n), new.get(n)) for n in ordered if old.get(n) != new.get(n)]


def model_parts(old: ModelConfig, new: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Fields of the models with two values; name, source and notes are no parts."""
    rows: list[tuple[str, Any, Any]] = []
    for of in fields(ModelConfig):
        a, b = getattr(old, of.name), getattr(new, of.name)
        if a == b or of.name in ("name", "source", "notes"):
            continue
        if is_dataclass(a) and type(a) is type(b):
            parts, others = asdict(a), asdict(b)  # pyright: ignore[reportArgumentType]
            rows += [(f"{of.name}.{n}", x, others[n]) for n, x in parts.items() if x != others[n]]
        else:
            rows.append((of.name, a, b))
    return rows


def flags(old: LaunchFile | None, new: LaunchFile | None) -> list[tuple[str, Any, Any, str]]:
    """Flags of launch files that differ without effect on the figures, with the reason."""
    sides = [{line.flag: line for line in of.ignored} if of else {} for of in (old, new)]
    rows: list[tuple[str, Any, Any, str]] = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = (side.get(name) for side in sides)
        if (a and a.value) != (b and b.value) or (a is None) != (b is None):
            known = b or a
            assert known is not None
            old_value, new_value = (x and (x.value or "given") for x in (a, b))
            rows.append((name, old_value, new_value, known.meaning))
    return rows


def differences(title: str, head: str, rows: Sequence[tuple[Any, ...]], *more: str) -> Table:
    """A table of names with their old and new value."""
    cells = [(name, _text(name, old), _text(name, new), *rest) for name, old, new, *rest in rows]
    return Table.of_rows(title, (head, "old", "new", *more), cells)


def plain(value: Any) -> Any:
    """A value of a setting, or of a model, as JSON has it."""
    if isinstance(value, frozenset):
        return sorted(map(str, cast("frozenset[object]", value)))
    if isinstance(value, tuple | list):
        return [plain(item) for item in cast("list[object]", [*value])]
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {str(key): plain(item) for key, item in entries.items()}
    if is_dataclass(value):
        return {of.name: plain(getattr(value, of.name)) for of in fields(value)}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _text(name: str, value: Any) -> str:
    if value is None:
        declared = EXPERIMENT.get(name) or SERVING.get(name)
        return (declared.unset if declared else "") or "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = text_of(value)
    return (text or "-") if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


# ---- figures -------------------------------------------------------------------------------------


def of_steps(old: SimulatedStep, new: SimulatedStep) -> list[ChangedFigure]:
    """Figures of two steps: time, memory, communication, energy, cost."""
    pair = (old, new)
    peaks = (old.fit.peak, new.fit.peak)
    room = (old.fit.device_memory, new.fit.device_memory)
    expenses = [step.expense() for step in pair]

    def of(name: str, unit: str, figure: Callable[[SimulatedStep], float | None]) -> ChangedFigure:
        return ChangedFigure.of(name, unit, map(figure, pair))

    trains = all(step.compiled.run.mode == "train" for step in pair)
    rows = [
        of("GPUs", "count", lambda s: s.machine.gpus),
        of("parameters", "count", lambda s: s.compiled.parameters),
        of("tokens of a step", "count", lambda s: s.tokens),
        of("step", "s", lambda s: s.seconds),
        of("tokens/s", "rate", lambda s: s.tokens_per_second),
        of("tokens/s per GPU", "rate", lambda s: s.tokens_per_second / s.machine.gpus),
        *([of("MFU", "share", lambda s: s.mfu)] if trains else ()),
        of("HFU", "share", lambda s: s.hfu),
        ChangedFigure("peak memory", "B", *peaks, room),
        of("communication of a GPU", "s", lambda s: sum(s.mean.communication.values())),
        of("of it exposed", "s", lambda s: sum(s.mean.exposed.values())),
        of("bubble", "s", lambda s: s.mean.bubble),
        of("launches", "s", lambda s: s.mean.launches),
        ChangedFigure.of("W per GPU", "count", (round(e.watts_per_gpu) for e in expenses)),
        ChangedFigure.of("J per token", "figure", (e.joules_per_token for e in expenses)),
        ChangedFigure.of(
            "USD per million tokens", "figure", (e.usd_per_million_tokens for e in expenses)
        ),
        of("days of the job", "rate", lambda s: s.job and s.job.days),
        of("USD of the job", "count", lambda s: s.job and s.job.usd and round(s.job.usd)),
        of("goodput", "share", lambda s: s.goodput and s.goodput.useful_share),
    ]
    same = ("parameters",)
    return [row for row in rows if _says(row) and not (row.name in same and row.old == row.new)]


def of_servers(
    summaries: Sequence[ServingSummary],
    expenses: Sequence[ServingExpense],
    groups: Sequence[InstanceGroup],
) -> list[ChangedFigure]:
    """Figures of two servers under their loads."""

    def of(name: str, unit: str, figure: Callable[[ServingSummary], float | None]) -> ChangedFigure:
        return ChangedFigure.of(name, unit, (finite(figure(summary)) for summary in summaries))

    rows = [
        of("GPUs", "count", lambda s: s.gpus),
        of("requests/s", "figure", lambda s: s.request_rate),
        of("output tokens/s", "rate", lambda s: s.output_rate),
        of("output tokens/s per GPU", "rate", lambda s: s.output_rate / s.gpus),
    ]
    for name in ("queue", "ttft", "tpot", "e2e"):
        title = name if name == "queue" else name.upper()
        rows += [_spread(title, name, figure, summaries) for figure in ("mean", "p99")]
    limited = any(summary.good < 1 for summary in summaries)
    tokens = [float(g.num_blocks * g.instance.cache.block_size) for g in groups]
    rows += [
        *([of("requests that keep the limits", "share", lambda s: s.good)] if limited else ()),
        ChangedFigure.of("KV cache of an engine (tokens)", "count", map(round, tokens)),
        of("KV cache in use at most", "share", lambda s: s.kv_peak),
        of("preemptions", "count", lambda s: s.preemptions),
        ChangedFigure.of("W per GPU", "count", (round(e.watts_per_gpu) for e in expenses)),
        ChangedFigure.of("J per output token", "figure", (e.joules_per_token for e in expenses)),
        ChangedFigure.of(
            "USD per million output tokens", "figure", (e.usd_per_million_tokens for e in expenses)
        ),
    ]
    return [row for row in rows if _says(row)]


def _spread(
    title: str, name: str, figure: str, summaries: Sequence[ServingSummary]
) -> ChangedFigure:
    spreads: list[Spread] = [getattr(summary, name) for summary in summaries]
    return ChangedFigure.of(
        f"{title}, {figure}", "s", (finite(getattr(of, figure)) for of in spreads)
    )


def _says(figure: ChangedFigure) -> bool:
    """True unless both values are 0 or unknown."""
    return bool(figure.old or figure.new)


def figures(rows: Sequence[ChangedFigure]) -> Table:
    """Table of figures: old, new, and the change in percent."""
    columns = ("figure", "old", "new", "change")
    cells = [(row.name, *row.cells(), row.change or None) for row in rows]
    units = {"old": "", "new": "", "change": "error"}
    return Table.of_rows("figures", columns, cells, units)


def communication(old: SimulatedStep, new: SimulatedStep) -> Table:
    """Bytes that the mean GPU gives and seconds that it communicates, by axis, of both steps."""
    sides = [_by_axis(step) for step in (old, new)]
    axes = dict.fromkeys([*sides[0], *sides[1]])
    nothing = (0, 0.0, 0.0)
    pairs = {axis: zip(*(side.get(axis, nothing) for side in sides), strict=True) for axis in axes}
    rows = [(axis, *itertools.chain(*pairs[axis])) for axis in axes]
    units = {
        f"{what} {side}": unit
        for what, unit in (("bytes", "B"), ("busy", "s"), ("exposed", "s"))
        for side in ("old", "new")
    }
    return Table.of_rows("communication of the mean GPU", ("axis", *units), rows, units)


def _by_axis(step: SimulatedStep) -> dict[str, tuple[int, float, float]]:
    """Bytes, seconds and exposed seconds of the mean GPU by axis; a message counts at its
    sender."""
    sent: dict[str, float] = {}
    for lane in step.timeline.lanes:
        axes = axes_of(step.timeline, lane)
        sizes = lane.rank_class.work.actions.tasks.comm_bytes[lane.row]
        sizes = np.where(lane.kind == TaskKind.RECV, 0, sizes)
        for number, name in enumerate(axes.names):
            share = len(lane.ranks) / step.machine.gpus
            sent[name] = sent.get(name, 0.0) + share * float(sizes[axes.axis == number].sum())
    mean = step.mean
    return {
        axis: (round(sent.get(axis, 0.0)), busy, mean.exposed.get(axis, 0.0))
        for axis, busy in mean.communication.items()
    }


# ---- words ---------------------------------------------------------------------------------------


def slowdown(rows: Sequence[ChangedFigure]) -> float:
    """Growth of the time per token of a step, or of the mean request of a server, as a share."""
    by_name = {row.name: row for row in rows}
    if "tokens/s" in by_name:
        old, new = by_name["tokens/s"].old, by_name["tokens/s"].new
        return old / new - 1 if old and new else 0.0
    return by_name["E2E, mean"].change or 0.0


def verdict(rows: Sequence[ChangedFigure]) -> str:
    """A sentence: which run is faster, by how much, and if that is sure."""
    by_name = {row.name: row for row in rows}
    change, what = slowdown(rows), "token" if "tokens/s" in by_name else "request"
    words = f"new is {'slower' if change > 0 else 'faster'}: time per {what} {change:+.1%}"
    if abs(change) < DECIDES:
        words = (
            f"time per {what} {change:+.1%}: a difference below {DECIDES:.0%} does not say which "
            "is faster"
        )
    gpus = by_name["GPUs"]
    if gpus.old != gpus.new:
        per_gpu = next(row for row in rows if row.name.endswith("tokens/s per GPU"))
        words += f", {per_gpu.name} {per_gpu.change or 0:+.1%}"
    return words


def nothing_changes(ignored: int, left_out: Sequence[str], *, serves: bool) -> str:
    """The sentence on two runs with equal figures; `left_out` are flags with an effect."""
    what = "what is served" if serves else "what the step is"
    ignored -= len(left_out)
    others = f"; {plural(ignored, 'flag differs', 'flags differ')} without effect on the figures"
    text = f"no change in {f'the figures, which {effects(left_out)}' if left_out else what}"
    return text + (others if ignored else "")


def effects(left_out: Sequence[str]) -> str:
    """What is said of figures without the effects of some flags."""
    return f"leave out what {', '.join(left_out)} would change"


def lines(sides: Mapping[str, str], sentence: str) -> Iterator[str]:
    """What to conclude, and the two runs."""
    yield sentence
    yield from (f"{name}: {title}" for name, title in sides.items())
