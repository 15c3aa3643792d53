"""Tables of a summary and of tasks, for the terminal, pages and notebooks alike.

Numbers are for one rank and one step. Of a stage with many rank classes, tables show the classes
with the least and with the most work.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.errors import UserError
from stagewright.lower.disaggregated import SIDES, Meshes
from stagewright.numbers import quantity, spans
from stagewright.program.columns import COLLECTIVES, PHASES, Program, RankClass, TaskKind
from stagewright.texttable import Table

Class = dict[str, Any]
"""One of a summary's `rank_classes`."""

MOST_CLASSES = 4
"""Rank classes of a stage that tables show; of more, those with the least and the most work."""


def stage_kind(program: Program, rank_class: RankClass) -> str:
    """`stage`, or in a disaggregated step `prefill stage` or `decode stage`."""
    mesh, first = program.mesh, int(rank_class.ranks[0])
    if isinstance(mesh, Meshes):
        for side, part in zip(SIDES, mesh.parts, strict=True):
            if first < part.world_size:
                return f"{side} stage"
            first -= part.world_size
    return "stage"


def stage_name(program: Program, rank_class: RankClass) -> str:
    """The kind of a class's stage with its number, which is its pipeline rank.

    >>> import stagewright as sw
    >>> program = sw.compile("gpt2", layers=2, mode="decode", prefill="tp=2").program
    >>> [stage_name(program, rank_class) for rank_class in program.classes]
    ['prefill stage 0', 'decode stage 0']
    """
    return f"{stage_kind(program, rank_class)} {rank_class.pipeline_rank}"


def select_classes(summary: dict[str, Any]) -> list[tuple[str, Class]]:
    """The rank classes of a summary that tables show, each with its stage in words."""
    shown: list[tuple[str, Class]] = []
    for stage, classes in itertools.groupby(
        summary["rank_classes"], key=lambda entry: entry["stage"]
    ):
        of_stage = list(classes)
        if len(of_stage) > MOST_CLASSES:
            by_work = sorted(of_stage, key=lambda entry: sum(entry["flops"].values()))
            shown += [(f"{stage} least", by_work[0]), (f"{stage} most", by_work[-1])]
        else:
            several = len(of_stage) > 1
            shown += [
                (f"{stage}: {spans(entry['ranks'])}" if several else str(stage), entry)
                for entry in of_stage
            ]
    return shown


def _stage_column(classes: Sequence[tuple[str, Class]]) -> list[Any]:
    """The column of stages: numbers where each stage has one class, words otherwise."""
    plain = all(name.isdecimal() for name, _ in classes)
    return [entry["stage"] if plain else name for name, entry in classes]


def compute(summary: dict[str, Any]) -> Table:
    """Layers, tasks and FLOPs of each stage."""
    phases = PHASES if "batch" not in summary else ("forward",)
    classes = select_classes(summary)
    columns: dict[str, list[Any]] = {
        "stage": _stage_column(classes),
        "ranks": [f"{len(entry['ranks'])}: {spans(entry['ranks'])}" for _, entry in classes],
        "layers": [entry["layers"] for _, entry in classes],
        "tasks": [entry["tasks"] for _, entry in classes],
        **{phase: [entry["flops"][phase] for _, entry in classes] for phase in phases},
    }
    units = {"layers": "", "tasks": "", **dict.fromkeys(phases, "FLOP")}
    return Table("Compute", columns, units)


def memory(summary: dict[str, Any]) -> Table:
    """Bytes by category at the peak of memory."""
    classes = select_classes(summary)
    held = [entry["memory"] for _, entry in classes]
    categories = list(dict.fromkeys(c for entry in held for c, size in entry.items() if size))
    by = {c.replace("_", " "): [entry.get(c, 0) for entry in held] for c in categories}
    columns = {"stage": _stage_column(classes), **by}
    return Table("Memory", columns, dict.fromkeys(by, "B"))


def tasks(program: Program, rank: int) -> Table:
    """The tasks of one rank, a row per task, in the order of issue."""
    if not 0 <= rank < program.mesh.world_size:
        raise UserError(f"there is no rank {rank}; use 0 to {program.mesh.world_size - 1}")
    rank_class = next(of for of in program.classes if rank in of.ranks)
    return of_class(f"Tasks of rank {rank}", program, rank_class)


_TASK_UNITS = {
    **dict.fromkeys(("task", "stage", "layer", "microbatch"), ""),
    **{"flops": "FLOP", "memory_bytes": "B", "bytes": "B"},
}


def of_class(title: str, program: Program, of: RankClass) -> Table:
    """The tasks of a rank class, a row per task, in the order of issue."""
    t = of.tasks
    groups = np.array([*map(program.label_of, range(len(program.communicators))), ""])
    peers = np.array([*(f"{axis} {shift:+d}" for axis, shift in program.peers), ""])
    collective, message = (
        t.kind == TaskKind.COLLECTIVE,
        np.isin(t.kind, (TaskKind.SEND, TaskKind.RECV)),
    )
    kinds = np.array([kind.name.lower() for kind in TaskKind])[t.kind]
    group = groups[np.where(collective, t.slot, -1)]
    columns = {
        "task": np.arange(len(t)),
        "name": np.array(t.names)[t.name],
        "kind": np.where(collective, np.array([*COLLECTIVES, ""])[t.collective], kinds),
        "op": np.array(t.ops)[t.op],
        "phase": np.array(PHASES)[t.phase],
        "stage": t.stage,
        "layer": t.layer,
        "microbatch": t.microbatch,
        "dtype": np.array(t.dtypes)[t.dtype],
        "flops": t.flops,
        "memory_bytes": t.traffic,
        "with": np.where(collective, group, peers[np.where(message, t.slot, -1)]),
        "bytes": t.comm_bytes,
    }
    return Table(title, {name: column.tolist() for name, column in columns.items()}, _TASK_UNITS)


_SHOWN = 4  # groups of values alive at the peak


def peak(summary: dict[str, Any]) -> Table:
    """The task at the peak of memory and the largest values then, in words; empty for inference."""
    rows: list[tuple[str, str, str]] = []
    for entry in summary["rank_classes"]:
        if "memory_peak" in entry:
            at = entry["memory_peak"]
            of_microbatch = f" of microbatch {at['microbatch']}" if at["microbatch"] >= 0 else ""
            largest = "; ".join(alive_in_words(g) for g in at["alive"][:_SHOWN])
            rows.append((str(entry["stage"]), at["task"] + of_microbatch, largest))
    return Table.of_rows("At the peak", ("stage", "while", "most of it"), rows)


def alive_in_words(group: dict[str, Any]) -> str:
    """A group of values in a line.

    >>> alive_in_words({"name": "act", "instances": 4, "layers": [0, 1], "microbatches": [2, 3],
    ...     "bytes": 4000})
    '4 kB act of layers 0-1, microbatches 2-3'
    """
    parts = [
        f"{one if len(group[key]) == 1 else key} {spans(group[key])}"
        for key, one in (("layers", "layer"), ("microbatches", "microbatch"))
        if group[key]
    ]
    return f"{quantity(group['bytes'], 'B')} {group['name']}" + (
        f" of {', '.join(parts)}" if parts else ""
    )


def communication(summary: dict[str, Any], *, merged: bool = True) -> Table:
    """Collectives, messages and copies; if `merged`, stages with equal communication share rows."""
    classes = select_classes(summary)
    groups: list[tuple[Any, list[tuple[Any, ...]]]] = [*_group_equal(classes)]
    if not merged:
        rows_of = [_communication_rows(entry) for _, entry in classes]
        groups = [*zip(_stage_column(classes), rows_of, strict=True)]
    rows = [(stage, *row) for stage, of_stage in groups for row in of_stage]
    names = ("stage", "phase", "what", "axis", "group", "count", "bytes")
    units = {"group": "", "count": "", "bytes": "B"}
    return Table.of_rows("Communication", names, rows, units, "stage")


def _communication_rows(entry: Class) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        (row["phase"], f"{row['kind']} {row['dtype']}", row["axis"], row["group_size"],
         row["count"], row["bytes"])
        for row in entry["collectives"]
    ]  # fmt: skip
    for what, key in (("send", "sends"), ("receive", "receives")):
        rows += [
            (row["phase"], what, row["axis"], None, row["count"], row["bytes"])
            for row in entry[key]
        ]
    for what, key in (("store", "stores"), ("load", "loads")):
        rows += [
            (row["phase"], what, "host", None, row["count"], row["bytes"])
            for row in entry.get(key, ())
        ]
    return rows


def _group_equal(classes: Sequence[tuple[str, Class]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """The communication of each class as rows; stages with equal communication share them."""
    equal: dict[str, tuple[dict[str, int], list[tuple[Any, ...]]]] = {}
    for stage, entry in classes:
        rows = _communication_rows(entry)
        equal.setdefault(json.dumps(rows), ({}, rows))[0].setdefault(stage, entry["stage"])
    return [(_stages(stages), rows) for stages, rows in equal.values()]


def _stages(stages: dict[str, int]) -> str:
    plain = all(name.isdecimal() for name in stages)
    return spans(list(stages.values())) if plain else ", ".join(stages)
