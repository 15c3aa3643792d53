"""Progress of long work: a bar on stderr if that is a terminal, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stagewright.numbers import quantity

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """A bar with the items done, their rate, and the time left."""

    def __init__(self, progress: Progress | None = None, what: str = "ranks") -> None:
        """`what`: the items that are counted; without `progress` nothing is shown."""
        self._progress, self._what = progress, what
        self._first = 0
        """Items done when the clock of the rate started."""
        if progress is not None:
            self._task = progress.add_task("", total=None, rate="")

    def say(self, text: str) -> None:
        """Name the current work, which has no measure."""
        if self._progress is not None:
            self._progress.reset(self._task, total=None, description=text, rate="")

    def __call__(self, done: int, total: int, size: int = 0, more: str = "") -> None:
        """Update the bar: items done, in all, and bytes; append `more`."""
        if self._progress is None:
            return
        task = self._progress.tasks[0]
        if task.total is None:
            self._progress.reset(self._task, total=total, description="")
            self._first = done
        rate = _rate(done, total, size, task.elapsed or 0.0, self._what, self._first)
        rate = f"{rate}, {more}" if more else rate
        self._progress.update(self._task, completed=done, total=total, rate=rate)


def _rate(done: int, total: int, size: int, seconds: float, what: str, first: int = 0) -> str:
    """Progress and rate in words.

    `first` items were done before the clock started; until others are, there is no rate.

    >>> _rate(50, 200, 3_000_000, 2.0, "ranks")
    '50 of 200 ranks, 25/s, 3 MB, 1.5 MB/s'
    >>> _rate(1, 20, 0, 0.001, "candidates", first=1)
    '1 of 20 candidates'
    """
    words = [f"{done:,} of {total:,} {what}"]
    rate = (done - first) / seconds if seconds else 0.0
    if rate:
        words.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
    if size:
        words.append(quantity(size, "B"))
        words += [f"{quantity(int(size / seconds), 'B')}/s"] if seconds else []
    return ", ".join(words)


@contextmanager
def shown(what: str = "ranks") -> Generator[ProgressBar]:
    """A bar that goes when the work is done."""
    if not sys.stderr.isatty():
        yield ProgressBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBar(progress, what)
