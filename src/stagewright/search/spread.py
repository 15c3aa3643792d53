"""Candidates spread out, put behind each other, and without values that none of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.search.candidates import Candidates, Column, code_type
from stagewright.time.hardware import Hardware


def column_of_systems(systems: Sequence[Hardware]) -> Column:
    """A column of hardware, which cannot be hashed."""
    number: dict[int, int] = {}
    codes = [number.setdefault(id(hardware), len(number)) for hardware in systems]
    values = tuple({id(hardware): hardware for hardware in systems}.values())
    return Column(np.array(codes, dtype=code_type(len(values))), values)


def spread(rows: Candidates, name: str, values: tuple[Any, ...]) -> Candidates:
    """Each candidate with each of the values, in order."""
    count = len(rows) * len(values)
    if len(values) == 1:
        columns = {**rows.columns, name: Column.constant(values[0], count)}
        return Candidates(rows.base, rows.model, columns, count)
    columns = {
        other: Column.constant(of.values[0], count)
        if len(of.values) == 1
        else Column(np.repeat(of.codes, len(values)), of.values)
        for other, of in rows.columns.items()
    }
    codes = np.tile(np.arange(len(values), dtype=code_type(len(values))), len(rows))
    columns[name] = Column(codes, values)
    return Candidates(rows.base, rows.model, columns, count)


def paired(rows: Candidates, name: str, values: tuple[Any, ...], of: Int, value: Int) -> Candidates:
    """Some pairs of a candidate and a value, both by number."""
    found = rows.take(of)
    column = Column(value.astype(code_type(len(values))), values)
    return Candidates(rows.base, rows.model, {**found.columns, name: column}, len(of))


def concatenated(pieces: Sequence[Candidates]) -> Candidates:
    """Pieces of the same columns behind each other."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    count = sum(map(len, pieces))
    columns = {
        name: Column.constant(of.values[0], count)
        if len(of.values) == 1
        else Column(np.concatenate([piece.columns[name].codes for piece in pieces]), of.values)
        for name, of in first.columns.items()
    }
    return Candidates(first.base, first.model, columns, count)


def compact(column: Column) -> Column:
    """The column without values that no candidate has."""
    if len(column.values) == 1:
        return column
    used: Bool = np.zeros(len(column.values), dtype=bool)
    used[column.codes] = True
    if used.all():
        return column
    values = tuple(v for v, there in zip(column.values, used.tolist(), strict=True) if there)
    number = np.cumsum(used) - 1
    if len(values) == 1:
        return Column.constant(values[0], len(column))
    return Column(number[column.codes].astype(code_type(len(values))), values)
