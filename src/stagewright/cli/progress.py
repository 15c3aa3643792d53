"""Progress of long work on a terminal: how far, how fast, the time left; then one line."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text


class ProgressBar:
    """A line on stderr; without a terminal, nothing."""

    def __init__(self, progress: Progress | None = None, what: str = "ranks") -> None:
        """`what`: the items that are counted."""
        self._progress, self._what = progress, what
        self._first = 0
        """Number done when the clock of the rate started."""
        self._task = None if progress is None else progress.add_task("", total=None, rate="")

    def say(self, text: str) -> None:
        """Name the current work, which has no measure."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=None, description=text, rate="")

    def __call__(self, done: int, total: int, size: int = 0, more: str = "") -> None:
        """Update the bar: items done, in all, and bytes; append `more`."""
        if self._progress is None or self._task is None:
            return
        task = self._progress.tasks[0]
        if task.total is None:
            self._progress.reset(self._task, total=total, description="")
            self._first = done
        rate = _rate(done, total, size, task.elapsed or 0.0, self._what, self._first)
        rate = f"{rate}, {more}" if more else rate
        self._progress.update(self._task, completed=done, total=total, rate=rate)


def _rate(done: int, total: int, size: int, seconds: float, what: str, first: int = 0) -> str:
    """Progress and rate in words; without bytes where there are none.

    `first` items were done before the clock started; until others are, there is no rate.

    >>> _rate(50, 200, 3_000_000, 2.0, "ranks")
    '50 of 200 ranks, 25/s, 3 MB, 1.5 MB/s'
    >>> _rate(1, 20, 0, 0.001, "candidates", first=1)
    '1 of 20 candidates'
    """
    from stagewright.numbers import quantity

    counted = f"{done:,} of {total:,} {what}"
    speed = f"{quantity(int(size / seconds), 'B')}/s" if seconds and size else ""
    rate = (done - first) / seconds if seconds else 0.0
    per_second = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s" if rate else ""
    moved = quantity(size, "B") if size else ""
    return ", ".join(filter(None, (counted, per_second, moved, speed)))


@contextmanager
def shown(what: str = "ranks") -> Generator[ProgressBar]:
    """A bar that goes when the work is done."""
    if not sys.stderr.isatty():
        yield ProgressBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    text = TextColumn("{task.description}{task.fields[rate]}")
    columns = (SpinnerColumn(), BarColumn(bar_width=24), text, _left()())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBar(progress, what)


def _left() -> type:
    """A column with the time left, or with the time that has passed if that is unknown."""
    from rich.progress import TimeElapsedColumn, TimeRemainingColumn

    class Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return TimeElapsedColumn().render(task)
            return super().render(task)

    return Left


def describe_written(written: Mapping[str, Any], out: str, seconds: float) -> str:
    """One line on the traces that were written."""
    from stagewright.numbers import quantity
    from stagewright.program.columns import TaskKind

    counts = written["nodes"]  # of each class of ranks
    nodes = sum(row["files"] * row[kind.name.lower()] for row in counts for kind in TaskKind)
    ranks = sum(row["files"] for row in counts)
    size = quantity(sum(file["bytes"] for file in written["files"].values()), "B")
    return (
        f"{out}: {ranks} of {written['world_size']} ranks, {nodes} nodes, {size}, {seconds:.1f} s"
    )
