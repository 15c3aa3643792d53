r"""Orders as text: a grid of time slots, and CSV in the format of torch.

>>> print(text(from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1")))
rank 0  0F0 0F1 .   .   0B0---- 0B1----
rank 1  .   1F0 1B0---- 1F1 1I1 1W1 .
"""

from __future__ import annotations

import re
from pathlib import Path

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.schedule.actions import SLOTS, Action, Order, Overlap, ScheduleStep, parts
from stagewright.schedule.play import play

MAX_BYTES = 1 << 26  # of a CSV file
_COMMUNICATION = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def text(order: Order, columns: int | None = None) -> str:
    """Picture of an order: ranks down, time slots across; B takes two slots, idle ones are dots.

    Lines longer than `columns` are cut and end in `...`, so that a terminal does not wrap them.
    """
    times = play(order, SLOTS)
    end = max((int(end) for _, end in times.values()), default=0)
    width = max((len(str(a)) for a in times), default=0)
    lines: list[str] = []
    for rank, steps in enumerate(order):
        cells: list[str] = []
        now = 0
        for step in steps:
            start, stop = (int(t) for t in times[parts(step)[0]])
            cells += [".".ljust(width)] * (start - now)
            label = "+".join(map(str, parts(step)))
            cells.append(label.ljust((stop - start) * (width + 1) - 1, "-"))
            now = stop
        cells += [".".ljust(width)] * (end - now)
        line = f"rank {rank:<{len(str(len(order) - 1))}}  {' '.join(cells)}".rstrip()
        if columns is not None and len(line) > columns:
            line = line[: max(columns - 3, 0)] + "..."
        lines.append(line)
    return "\n".join(lines)


def to_csv(order: Order) -> str:
    """Format as torch's files: one row per rank, one step per cell; `from_csv` reads it."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in order)


def from_csv(source: str | Path, max_bytes: int = MAX_BYTES) -> Order:
    """Read an order from a file (a Path, or a str ending in `.csv`) or from the CSV text itself.

    Empty cells (idle slots) and torch's communication cells such as `0SEND_F1` or `0UNSHARD` are
    dropped: they follow from the actions. Call `play.validate` on the result.

    >>> from_csv("0F0,,0B0")
    ((0F0, 0B0),)
    """
    where = "schedule"
    if isinstance(source, Path) or source.endswith(".csv"):
        where = str(source)
        source = read_text(source, "a schedule as CSV, in UTF-8", max_bytes)
    rows = source.rstrip().splitlines()
    if not rows:
        raise UserError(f"{where}: is empty; wanted one row of actions such as 2F0 per rank")
    return tuple(
        tuple(
            step
            for column, cell in enumerate(row.split(","), start=1)
            for step in _read_cell(cell.strip(), f"{where}, row {number}, column {column}")
        )
        for number, row in enumerate(rows, start=1)
    )


def _read_cell(cell: str, where: str) -> list[ScheduleStep]:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return []
    overlap = _OVERLAP.fullmatch(cell)
    try:
        if overlap is None:
            return [Action.parse(cell)]
        forward, backward = (Action.parse(part) for part in overlap.groups())
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if (forward.kind, backward.kind) != ("F", "B"):
        raise UserError(f"{where}: {cell}: wanted a forward (F) and then a backward (B)")
    return [Overlap(forward, backward)]
