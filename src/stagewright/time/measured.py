"""Measured durations in place of formulas: a CSV, by kernel, shape and data type.

`stagewright show MODEL ... --kernels > kernels.csv` lists the kernels and the collectives of a run;
measure some, fill in their `duration_us`, and give the file to `simulate`, `report` or `generate`
with `--durations`. The shape of a collective is its bytes (`Tasks.comm_bytes`), its ranks, and
their span: the number of ranks from the first to the last, which is larger across nodes. Rows
without a duration are skipped, a row without a `dtype` holds for all data types, and extents may be
in any order.

>>> table = parse("kernel,shape,dtype,duration_us\\ngemm,m=64 n=8 k=2 batch=1,bf16,3.5\\n", "k.csv")
>>> from stagewright.program.columns import Shape
>>> table.of(Shape("gemm", (("batch", 1), ("m", 64), ("n", 8), ("k", 2))), "bf16")
3500
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, distinct_numbers
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text
from stagewright.graph.node import BYTES
from stagewright.program.columns import (
    COLLECTIVES,
    Program,
    RankClass,
    Shape,
    TaskKind,
    groups_of_ranks,
)

COLUMNS = ("kernel", "shape", "dtype", "duration_us")
UNREAD = ("count", "flops", "bytes")
"""Columns that the list of kernels has for people; reading ignores them."""

MAX_BYTES = 100_000_000
MAX_SECONDS = 86_400

Key = tuple[str, frozenset[tuple[str, int]], str]


@dataclass(frozen=True, slots=True)
class Durations:
    """Measured nanoseconds of kernels by name, extents and data type ("": all data types)."""

    rows: Mapping[Key, int]

    def of(self, shape: Shape, dtype: str) -> int:
        """Nanoseconds of a kernel; 0 where there is no row for it."""
        extents = frozenset(shape.extents)
        exact = self.rows.get((shape.kernel, extents, dtype), 0)
        return exact or self.rows.get((shape.kernel, extents, ""), 0)


class Coverage(NamedTuple):
    """Numbers of kernels and collectives, and of those with a measured duration.

    Rows of one rank of each class count.
    """

    kernels: int
    measured_kernels: int
    missing: Mapping[str, int]
    """Kernels without a duration by name, shape and data type, most frequent first."""
    collectives: int
    measured_collectives: int

    def entry(self) -> dict[str, Any]:
        """Entry of a manifest."""
        return {
            "kernels": self.kernels,
            "measured": self.measured_kernels,
            "missing": dict(self.missing),
        }

    def __str__(self) -> str:
        return (
            f"durations of {self.measured_kernels} of {self.kernels} kernels and of "
            f"{self.measured_collectives} of {self.collectives} collectives"
        )


def describe(entry: Mapping[str, Any]) -> str:
    """A manifest's entry in one line.

    >>> describe({"file": "k.csv", "kernels": 9, "measured": 8, "missing": {"gemm m=4 bf16": 1}})
    'k.csv: durations of 8 of 9 kernels; no row for gemm m=4 bf16 (1)'
    """
    text = f"{entry['file']}: durations of {entry['measured']} of {entry['kernels']} kernels"
    missing = [f"{name} ({count})" for name, count in entry["missing"].items()]
    if missing:
        text += f"; no row for {', '.join(missing[:3])}"
        text += f" and {len(missing) - 3} more shapes" if len(missing) > 3 else ""
    return text


def load(path: str | Path) -> Durations:
    """Read a file; every error is a UserError that names the line."""
    return parse(read_text(path, "a list of kernels as CSV", MAX_BYTES), str(path))


def parse(text: str, path: str) -> Durations:
    """Read the text of a file."""
    lines = csv.reader(text.splitlines(), strict=True)
    durations: dict[Key, int] = {}
    try:
        header = [name.strip() for name in next(lines, list[str]())]
        _check_header(header, path)
        for cells in lines:
            where = f"{path}, line {lines.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise UserError(f"{where}: {len(cells)} cells, wanted {len(header)}")
            row = dict(zip(header, cells, strict=True))
            if not row["duration_us"].strip():
                continue
            key, nanoseconds = _parse_row(row, where)
            if key in durations:
                raise UserError(f"{where}: this kernel comes twice; keep one row")
            durations[key] = nanoseconds
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: {error}; wanted CSV") from None
    return Durations(durations)


def _check_header(header: list[str], path: str) -> None:
    for name in ("kernel", "shape", "duration_us"):
        if name not in header:
            got = ", ".join(header)[:80]
            raise UserError(f"{path}, line 1: no column {name!r} among {got!r}; wanted {COLUMNS}")
    for name in header:
        if name not in (*COLUMNS, *UNREAD):
            hint = did_you_mean(name, (*COLUMNS, *UNREAD))
            raise UserError(f"{path}, line 1: unknown column {name[:40]!r}{hint}")
        if header.count(name) > 1:
            raise UserError(f"{path}, line 1: column {name!r} comes twice")


def _parse_row(row: Mapping[str, str], where: str) -> tuple[Key, int]:
    """Key and nanoseconds of a row with a duration."""
    text = row["duration_us"].strip()
    try:
        seconds = float(text) / 1e6
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(f"{where}: duration_us is {text[:40]!r}, wanted microseconds above 0")
    extents: dict[str, int] = {}
    for word in row["shape"].split():
        name, _, number = word.partition("=")
        if not (name and number.isascii() and number.isdecimal() and len(number) < 19):
            raise UserError(f"{where}: shape has {word[:40]!r}, wanted such as m=4096")
        if extents.setdefault(name, int(number)) != int(number):
            raise UserError(f"{where}: shape has {name} twice")
    dtype = row.get("dtype", "").strip()
    if dtype and dtype not in BYTES:
        hint = did_you_mean(dtype, BYTES) or f"; use one of {', '.join(BYTES)}"
        raise UserError(f"{where}: dtype is {dtype[:40]!r}{hint}")
    key = row["kernel"].strip(), frozenset(extents.items()), dtype
    return key, max(1, round(seconds * 1e9))


def kernel_rows(rank_class: RankClass) -> Iterator[tuple[Shape, str, Int]]:
    """Distinct kernels of a rank: shape, data type, rows."""
    tasks = rank_class.tasks
    rows = np.flatnonzero((tasks.kind == TaskKind.COMPUTE) & (tasks.shape >= 0))
    for equal in _equal_rows(rows, tasks.shape, tasks.dtype):
        first = equal[0]
        yield tasks.shapes[int(tasks.shape[first])], tasks.dtypes[int(tasks.dtype[first])], equal


def collective_rows(program: Program, rank_class: RankClass) -> Iterator[tuple[Shape, str, Int]]:
    """Distinct collectives of a rank: shape, no data type, rows.

    Of the groups that a class is in, the one with the widest span counts: it is the slowest.
    """
    tasks = rank_class.tasks
    extents: dict[int, tuple[int, int]] = {}
    rows = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
    for equal in _equal_rows(rows, tasks.collective, tasks.slot, tasks.comm_bytes):
        first, slot = equal[0], int(tasks.slot[equal[0]])
        if slot not in extents:
            groups = groups_of_ranks(program.group_of(slot), rank_class.ranks)
            span = int((groups[:, -1] - groups[:, 0]).max()) + 1
            extents[slot] = groups.shape[1], span
        ranks, span = extents[slot]
        size = int(tasks.comm_bytes[first])
        shape = (("bytes", size), ("ranks", ranks), ("span", span))
        yield Shape(COLLECTIVES[int(tasks.collective[first])], shape), "", equal


def _equal_rows(rows: Int, *columns: NDArray[np.integer]) -> Iterator[Int]:
    """Sets of rows with equal values in all columns."""
    if not len(rows):
        return
    _, index = distinct_numbers([column[rows] for column in columns], len(rows))
    order = np.argsort(index, kind="stable")
    yield from np.split(rows[order], np.cumsum(np.bincount(index))[:-1])


def kernels(program: Program) -> list[dict[str, Any]]:
    """The distinct kernels of a program, largest total FLOPs first: CSV rows without a duration."""
    return _listed(program, kernel_rows, "flops")


def collectives(program: Program) -> list[dict[str, Any]]:
    """The distinct collectives of a program, largest total bytes first: rows without a duration."""
    return _listed(program, partial(collective_rows, program), "bytes")


def _listed(
    program: Program,
    rows_of: Callable[[RankClass], Iterator[tuple[Shape, str, Int]]],
    largest: str,
) -> list[dict[str, Any]]:
    """CSV rows of the distinct tasks of all classes, by count times the column `largest`."""
    by_key: dict[Key, dict[str, Any]] = {}
    for rank_class in program.classes:
        tasks = rank_class.tasks
        for shape, dtype, rows in rows_of(rank_class):
            entry = by_key.setdefault(
                (shape.kernel, frozenset(shape.extents), dtype),
                {
                    "kernel": shape.kernel,
                    "shape": describe_extents(shape),
                    "dtype": dtype,
                    "count": 0,
                    "flops": int(tasks.flops[rows[0]]),
                    "bytes": int(tasks.traffic[rows[0]] or tasks.comm_bytes[rows[0]]),
                    "duration_us": "",
                },
            )
            entry["count"] += len(rows) * len(rank_class.ranks)
    return sorted(by_key.values(), key=lambda entry: -entry["count"] * entry[largest])


def describe_extents(shape: Shape) -> str:
    """The extents of a row, as a file has them: `m=64 n=8`."""
    return " ".join(f"{name}={n}" for name, n in shape.extents)


def to_csv(program: Program) -> str:
    """The distinct kernels and collectives as a file in which to fill in durations."""
    text = io.StringIO()
    columns: list[str] = ["kernel", "shape", "dtype", *UNREAD, "duration_us"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kernels(program), *collectives(program)])
    return text.getvalue()


def measured(
    program: Program, table: Durations, *, with_collectives: bool = False
) -> tuple[Program, Coverage]:
    """Program with the durations of kernels in the table, and their coverage.

    Traces hold the durations of kernels only, since simulators that read traces time collectives
    themselves; simulations of this package also take collectives.
    """
    missing: Counter[str] = Counter()
    total, covered = Counter[bool](), Counter[bool]()  # of kernels, of collectives
    classes: list[RankClass] = []
    for rank_class in program.classes:
        duration = np.zeros(len(rank_class.tasks), np.int64)
        distinct = list(kernel_rows(rank_class))
        num_kernels = len(distinct)
        if with_collectives:
            distinct += collective_rows(program, rank_class)
        for index, (shape, dtype, rows) in enumerate(distinct):
            is_collective = index >= num_kernels
            duration[rows] = nanoseconds = table.of(shape, dtype)
            total[is_collective] += len(rows)
            if nanoseconds:
                covered[is_collective] += len(rows)
            elif not is_collective:
                missing[f"{shape} {dtype}"] += len(rows)
        tasks = dataclasses.replace(rank_class.tasks, duration=duration)
        classes.append(dataclasses.replace(rank_class, work=rank_class.work.with_tasks(tasks)))
    by_count = dict(sorted(missing.items(), key=lambda item: (-item[1], item[0])))
    coverage = Coverage(total[False], covered[False], by_count, total[True], covered[True])
    return dataclasses.replace(program, classes=tuple(classes)), coverage
