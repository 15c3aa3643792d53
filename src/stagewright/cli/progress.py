"""Progress of long work on stderr: a bar on a terminal, else lines where the work takes minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from stagewright.numbers import quantity

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """A bar with the items done, their rate, and the time left."""

    def __init__(self, what: str, progress: Progress | None = None, *, lines: bool = False) -> None:
        """`what`: the items that are counted. Without `progress` lines are printed, if any."""
        self._what, self._progress, self._lines = what, progress, lines
        self._first, self._last_line = 0, time.monotonic()
        """Items done when the clock of the rate started, and the time of the last line."""
        if progress is not None:
            self._task = progress.add_task("", total=None, rate="")

    def say(self, text: str) -> None:
        """Name the current work, which has no measure."""
        if self._progress is not None:
            self._progress.reset(self._task, total=None, description=text, rate="")
        elif self._lines:
            click.echo(f"stagewright: {text}", err=True)

    def __call__(self, done: int, total: int, size: int = 0, more: str = "") -> None:
        """Update the bar: items done, in all, and bytes; append `more`."""
        if self._progress is None:
            if time.monotonic() > self._last_line + _SECONDS_BETWEEN_LINES:
                self._last_line = time.monotonic()
                count = f"{done:,} of {total:,} {self._what}"
                self.say(f"{count}, {more}" if more else count)
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
def shown(what: str = "ranks", *, lines: bool = False) -> Generator[ProgressBar]:
    """A bar that goes when the work is done; `lines`: what is shown where there is no terminal."""
    if not sys.stderr.isatty():
        yield ProgressBar(what, lines=lines)
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
        yield ProgressBar(what, progress)
