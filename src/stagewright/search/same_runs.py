"""Candidates that are the same run as one before them, though a setting differs."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.search.candidates import Candidates

_ENDS = "first_stage_less_layers", "last_stage_less_layers"


def of_same_order(rows: Candidates, parents: Int, late: Collection[str]) -> Bool:
    """Which orders only move axes of one rank, and number ranks as another one of the same parent
    does. `late`: degrees that are not known yet, and may be more than one."""
    degrees = {axis: rows.numbers(axis) > 1 for axis in ("tp", "cp", "dp", "pp", "ep")}
    split = {axis: of | (axis in late) for axis, of in degrees.items()}
    axes = [value.split("-") for value in rows.column("order").values]
    column = rows.column("order").codes
    known: dict[tuple[str, ...], int] = {}
    number = np.zeros(len(rows), dtype=np.int64)
    pattern = sum(flag.astype(np.int64) << nth for nth, flag in enumerate(split.values()))
    for bits in np.unique(pattern).tolist():
        there = {axis for nth, axis in enumerate(split) if bits >> nth & 1}
        of_value = [
            known.setdefault(tuple(axis for axis in order if axis in there), len(known))
            for order in axes
        ]
        mine = pattern == bits
        number[mine] = np.array(of_value)[column[mine]]
    return _seen_before(parents * len(known) + number)


def of_same_stages(rows: Candidates) -> Bool:
    """Which candidates have the layers on each stage that one before them has, and differ from it
    only in how many layers the ends of the pipeline count for."""
    several = any(len(rows.columns[n].values) > 1 for n in _ENDS if n in rows.columns)
    if not several or not len(rows):
        return np.zeros(len(rows), dtype=bool)
    others = rows.distinct(*(name for name in rows.columns if name not in _ENDS)).of
    splits = rows.distinct("pp", "vpp", "layers_per_stage", "pipeline_split", *_ENDS)
    known: dict[object, int] = {}
    number = [
        known.setdefault(rows.run(row).resolved(rows.model).layers_per_stage, len(known))
        for row in splits.first.tolist()
    ]
    return _seen_before(others * len(known) + np.array(number)[splits.of])


def _seen_before(keys: Int) -> Bool:
    """Which keys an earlier row has."""
    again = np.ones(len(keys), dtype=bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again
