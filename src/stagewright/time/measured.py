"""Measured durations in place of formulas: a CSV, by kernel, shape and data type.

`stagewright show MODEL ... --kernels > kernels.csv` lists the kernels and the collectives of a run;
measure some, fill in their `duration_us`, and give the file to `simulate`, `report` or `generate`
with `--durations`. The shape of a collective is its bytes (`Tasks.comm_bytes`), its ranks, and
their span: how many ranks lie from the first to the last, which says how far apart they are. Rows
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text
from stagewright.graph.node import BYTES
from stagewright.program.columns import (
    COLLECTIVES,
    Program,
    RankClass,
    Shape,
    TaskKind,
    Tasks,
    groups_of_ranks,
)

COLUMNS = ("kernel", "shape", "dtype", "duration_us")
UNREAD = ("count", "flops", "bytes")
"""Columns that the list of kernels has for people; reading ignores them."""

MOST_BYTES = 100_000_000
MOST_SECONDS = 86_400

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


class Matched(NamedTuple):
    """Number of kernels with a measured duration, counting one rank of each class."""

    kernels: int
    measured: int
    missing: tuple[tuple[str, int], ...]  # "gemm batch=1 ... bf16", count; most frequent first

    def entry(self) -> dict[str, Any]:
        """The entry of a manifest; `missing` counts kernels by name, shape and data type."""
        return {**self._asdict(), "missing": dict(self.missing)}


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
    text = read_text(path, "a list of kernels as CSV", MOST_BYTES)
    return parse(text, str(path))


def parse(text: str, path: str) -> Durations:
    """Read the text of a file."""
    lines = csv.reader(text.splitlines(), strict=True)
    rows: dict[Key, int] = {}
    try:
        header = [name.strip() for name in next(lines, list[str]())]
        _check_header(header, path)
        for cells in lines:
            if any(cell.strip() for cell in cells):
                where = f"{path}, line {lines.line_num}"
                _row(dict(zip(header, cells, strict=False)), len(cells), header, where, rows)
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: {error}; wanted CSV") from None
    return Durations(rows)


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


def _row(
    row: dict[str, str], cells: int, header: list[str], where: str, rows: dict[Key, int]
) -> None:
    if cells != len(header):
        raise UserError(f"{where}: {cells} cells, wanted {len(header)}")
    text = row["duration_us"].strip()
    if not text:
        return
    try:
        seconds = float(text) / 1e6
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
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
    if key in rows:
        raise UserError(f"{where}: this kernel comes twice; keep one row")
    rows[key] = max(1, round(seconds * 1e9))


def kernels(program: Program) -> list[dict[str, Any]]:
    """The distinct kernels of a program, largest total FLOPs first: CSV rows without a duration."""
    by_key: dict[Key, dict[str, Any]] = {}
    for rank_class in program.classes:
        tasks = rank_class.tasks
        for key, rows, counts in _distinct(tasks):
            shape, dtype = tasks.shapes[key[0]], tasks.dtypes[key[1]]
            row = by_key.setdefault(
                (shape.kernel, frozenset(shape.extents), dtype),
                {
                    "kernel": shape.kernel,
                    "shape": describe_extents(shape),
                    "dtype": dtype,
                    "count": 0,
                }
                | {"flops": int(tasks.flops[rows]), "bytes": int(tasks.traffic[rows])},
            )
            row["count"] += counts * len(rank_class.ranks)
    order = sorted(by_key.values(), key=lambda row: -row["count"] * row["flops"])
    return [{**row, "duration_us": ""} for row in order]


def collectives(program: Program) -> list[dict[str, Any]]:
    """The distinct collectives of a program, largest total bytes first: rows without a duration."""
    by_key: dict[Key, dict[str, Any]] = {}
    for rank_class in program.classes:
        for shape, rows in collective_rows(program, rank_class):
            row = by_key.setdefault(
                (shape.kernel, frozenset(shape.extents), ""),
                {"kernel": shape.kernel, "shape": describe_extents(shape), "dtype": "", "count": 0}
                | {"flops": 0, "bytes": dict(shape.extents)["bytes"]},
            )
            row["count"] += len(rows) * len(rank_class.ranks)
    order = sorted(by_key.values(), key=lambda row: -row["count"] * row["bytes"])
    return [{**row, "duration_us": ""} for row in order]


def collective_rows(program: Program, rank_class: RankClass) -> Iterator[tuple[Shape, Int]]:
    """The distinct collectives of a rank class, and the rows of each."""
    tasks = rank_class.tasks
    collective = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
    columns = (tasks.collective, tasks.slot, tasks.comm_bytes)
    keys = np.stack([column[collective].astype(np.int64) for column in columns], axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    sizes = {slot: _extent(program, rank_class, slot) for slot in {*distinct[:, 1].tolist()}}
    for i, (op, slot, size) in enumerate(distinct.tolist()):
        ranks, span = sizes[slot]
        extents = (("bytes", size), ("ranks", ranks), ("span", span))
        yield Shape(COLLECTIVES[int(op)], extents), collective[inverse.reshape(-1) == i]


def _extent(program: Program, rank_class: RankClass, slot: int) -> tuple[int, int]:
    """Ranks of the group of a communicator, and the span from first to last.

    Of the groups that a class is in, the one with the widest span: it is the slowest.
    """
    groups = groups_of_ranks(program.group_of(slot), rank_class.ranks)
    return groups.shape[1], int((groups[:, -1] - groups[:, 0]).max()) + 1


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


def _distinct(tasks: Tasks) -> list[tuple[tuple[int, int], int, int]]:
    """Shape and data type, first row and number of rows of each distinct kernel."""
    kernel = np.flatnonzero((tasks.kind == TaskKind.COMPUTE) & (tasks.shape >= 0))
    keys = tasks.shape[kernel].astype(np.int64) * len(tasks.dtypes) + tasks.dtype[kernel]
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return [
        (divmod(int(key), len(tasks.dtypes)), int(kernel[index]), int(count))
        for key, index, count in zip(unique, first, counts, strict=True)
    ]


def with_collectives(program: Program, table: Durations) -> tuple[Program, Counts]:
    """The program with the durations of kernels and collectives, for a simulation.

    Traces hold those of kernels alone: what reads traces times collectives itself.
    """
    program, matched = measured(program, table)
    classes = list(program.classes)
    num_measured = total = 0
    for i, rank_class in enumerate(classes):
        assert rank_class.tasks.duration is not None
        duration = rank_class.tasks.duration.copy()
        for shape, rows in collective_rows(program, rank_class):
            duration[rows] = table.of(shape, "")
            total += len(rows)
            num_measured += len(rows) if table.of(shape, "") else 0
        tasks = dataclasses.replace(rank_class.tasks, duration=duration)
        classes[i] = dataclasses.replace(rank_class, work=rank_class.work.with_tasks(tasks))
    counts = Counts(matched.kernels, matched.measured, total, num_measured)
    return dataclasses.replace(program, classes=tuple(classes)), counts


class Counts(NamedTuple):
    """Numbers of kernels and collectives, and of those with a duration."""

    kernels: int
    measured_kernels: int
    collectives: int
    measured_collectives: int

    def __str__(self) -> str:
        return (
            f"durations of {self.measured_kernels} of {self.kernels} kernels and of "
            f"{self.measured_collectives} of {self.collectives} collectives"
        )


def measured(program: Program, table: Durations) -> tuple[Program, Matched]:
    """Program with the durations of kernels in the table, and kernels without one."""
    missing: dict[str, int] = {}
    total = num_measured = 0
    classes = list(program.classes)
    for i, rank_class in enumerate(classes):
        tasks = rank_class.tasks
        nanoseconds = np.zeros((len(tasks.shapes) + 1, len(tasks.dtypes)), np.int64)  # last: none
        for (shape, dtype), _, count in _distinct(tasks):
            measured_ns = table.of(tasks.shapes[shape], tasks.dtypes[dtype])
            nanoseconds[shape, dtype] = measured_ns
            total += count
            num_measured += count if measured_ns else 0
            if not measured_ns:
                name = f"{tasks.shapes[shape]} {tasks.dtypes[dtype]}"
                missing[name] = missing.get(name, 0) + count
        duration: Int = nanoseconds[tasks.shape, tasks.dtype] * (tasks.kind == TaskKind.COMPUTE)
        timed = dataclasses.replace(tasks, duration=duration)
        classes[i] = dataclasses.replace(rank_class, work=rank_class.work.with_tasks(timed))
    order = tuple(sorted(missing.items(), key=lambda x: (-x[1], x[0])))
    return dataclasses.replace(program, classes=tuple(classes)), Matched(total, num_measured, order)
