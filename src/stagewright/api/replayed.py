"""Recorded steps executed again: `stagewright.replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from stagewright.api.compared import Paths, paths_of
from stagewright.api.result import PublicResult, known
from stagewright.errors import UserError, did_you_mean
from stagewright.recorded.read import read_traces
from stagewright.recorded.replay import Change, Replayed
from stagewright.recorded.replay import replay as replay_traces
from stagewright.texttable import Table
from stagewright.views import replayed as views

WITHOUT = ("host", "waiting")
LARGEST_FACTOR = 1e6


class Replay(PublicResult):
    """A recorded step: as it was, replayed, and with a change.

    Attributes (seconds from the first start to the last end of kernels on the GPUs):

    * `recorded`, `replayed`: as recorded, and executed again with every delay that was recorded;
      without a change these are equal, where the trace holds together.
    * `linked`: executed again by the dependencies alone: each kernel starts a typical delay after
      what it waits for. Its distance to `recorded` says how much of the step is understood.
    * `changed`: with the change; None if there is none.
    * `notes`: what the traces lack, and what was assumed.

    Tables: `ranks`, `families` (kernels by kind), `collectives` (transfer and waiting), and
    `kernels`, which `write` writes.
    """

    __slots__ = ("_replayed",)
    suffixes = (".csv", ".json", ".parquet")

    def __init__(self, replayed: Replayed) -> None:
        """Wrap a replay."""
        self._replayed = replayed

    @property
    def recorded(self) -> float:
        """Seconds as recorded."""
        return self._replayed.recorded.span / 1e9

    @property
    def replayed(self) -> float:
        """Seconds as replayed, without a change."""
        return self._replayed.replayed.span / 1e9

    @property
    def linked(self) -> float:
        """Seconds as replayed by the dependencies alone."""
        return self._replayed.linked.span / 1e9

    @property
    def changed(self) -> float | None:
        """Seconds with the change; None if there is none."""
        changed = self._replayed.changed
        return None if changed is None else changed.span / 1e9

    @property
    def notes(self) -> list[str]:
        """What the traces lack, and what was assumed."""
        return self._replayed.notes

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "ranks": partial(views.ranks_table, self._replayed),
            "families": partial(views.families_table, self._replayed),
            "collectives": partial(views.collectives_table, self._replayed),
            "kernels": self._rows,
        }

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright replay`."""
        return views.replay_text(self._replayed)

    def to_dict(self) -> dict[str, Any]:
        """The object of `replay --json`: seconds, bytes, shares of 1."""
        tables = ("ranks", "families", "collectives")
        return {
            "span": {
                "recorded": self.recorded,
                "replayed": self.replayed,
                "linked": self.linked,
                "changed": self.changed,
            },
            "change": views.describe(self._replayed.change) or None,
            **{name: [known(row) for row in self.table(name).rows] for name in tables},
            "notes": self.notes,
        }

    def _rows(self) -> Table:
        return views.kernels_table(self._replayed)

    def _json_rows(self) -> dict[str, Any]:
        return {"rows": self._rows().rows}


def replay(
    traces: Paths,
    *,
    step: int | None = None,
    annotation: str | None = None,
    without: Iterable[str] | str = (),
    scale: Mapping[str, float] | None = None,
    link: float = 1.0,
    stragglers: Mapping[int, float] | None = None,
) -> Replay:
    """Replay a step that PyTorch's profiler recorded, and say what it would be with a change.

    `traces`: files, archives or folders of Kineto's JSON, one file per rank of a job. `step` cuts
    them to `ProfilerStep#step`, `annotation` to a `record_function` of that name. Changes:
    `without="host"` leaves out the time of the CPU, `without="waiting"` that in which collectives
    wait for other ranks; `scale` are factors of durations by family of kernels, `link` is the
    factor of the bandwidth between ranks, `stragglers` are factors of the kernels of a rank.
    """
    if step is not None and annotation is not None:
        raise UserError("both a step and an annotation are given; wanted one of them")
    left_out = [without] if isinstance(without, str) else list(without)
    for word in left_out:
        if word not in WITHOUT:
            hint = did_you_mean(word, WITHOUT)
            raise UserError(f"without {word!r}: wanted {' or '.join(WITHOUT)}{hint}")
    change = Change(
        without_host="host" in left_out,
        without_waiting="waiting" in left_out,
        scale={name: _factor(f"scale {name}", f) for name, f in (scale or {}).items()},
        link=_factor("link", link),
        stragglers={r: _factor(f"straggler {r}", f) for r, f in (stragglers or {}).items()},
    )
    return Replay(replay_traces(read_traces(paths_of(traces), step, annotation), change))


def _factor(name: str, value: object) -> float:
    """A factor that is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}, wanted a number")
    if not 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR:
        raise UserError(f"{name} is {value:g}, wanted a factor above 0, such as 0.9 or 2")
    return float(value)
