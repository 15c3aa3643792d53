"""The profile of a trace: FLOPs and bytes by type, phase, op and group; depth; structure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.dependency_graph import graph_of_ids
from stagewright.check.files.reader import COLL, COMP, LOAD, STORE, STRING, Trace, read_trace
from stagewright.check.files.rules import group_id
from stagewright.trace.formats import et_def
from stagewright.trace.formats.et_def import CommType

TYPES = tuple(name.removesuffix("_NODE").lower() for name in et_def.NodeType.__members__)
NUMBERS = ("num_ops", "tensor_size", "comm_type", "comm_size")


class Key(NamedTuple):
    """Nodes of one key are summed; a field that the trace lacks is empty."""

    type: str  # comp, comm_coll, ...
    phase: str
    op: str  # of a collective: which
    group: int  # ranks of a collective's group; 0: unknown, or none


class Totals(NamedTuple):
    """Sums over nodes; bytes are memory traffic of kernels, and message sizes of communication."""

    nodes: int = 0
    flops: int = 0
    bytes: int = 0

    def plus(self, more: Totals, times: int = 1) -> Totals:
        """The sum with `times` multiples of other totals."""
        return Totals(*(a + b * times for a, b in zip(self, more, strict=True)))


@dataclass(slots=True)
class Profile:
    """A trace in numbers."""

    path: str
    bytes: int = 0
    nodes: int = 0
    data_deps: int = 0
    ctrl_deps: int = 0
    totals: dict[Key, Totals] = field(default_factory=dict[Key, Totals])
    depth: int = 0  # nodes of the longest path of dependencies; 0: dependencies have a cycle
    path_types: dict[str, int] = field(default_factory=dict[str, int])  # of those nodes
    structure: str = ""  # equal for files that differ in ids, names, tags and partners only
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """The profile as one JSON object."""
        return {
            "file": self.path,
            "bytes": self.bytes,
            "metadata": self.metadata,
            "nodes": self.nodes,
            "dependencies": {"data": self.data_deps, "ctrl": self.ctrl_deps},
            "totals": [
                {**key._asdict(), **self.totals[key]._asdict()} for key in sorted(self.totals)
            ],
            "critical_path": {"nodes": self.depth, "types": self.path_types},
            "structure": self.structure,
        }


def profile(path: Path, group_sizes: Mapping[int, int]) -> Profile:
    """Read a trace and add it up; `group_sizes` by id, 0: all ranks. Raises `Damaged`."""
    trace = read_trace(path)
    metadata = et_def.values(trace.metadata).items()
    result = Profile(
        str(path),
        trace.size,
        len(trace),
        len(trace.data.values),
        len(trace.ctrl.values),
        metadata={
            "version": trace.metadata.version,
            **{name: json_value(value) for name, (_, value) in metadata},
        },
    )
    for key, totals in _totals(trace, group_sizes):
        result.totals[key] = result.totals.get(key, Totals()).plus(totals)
    if len(trace):
        _add_graph(result, trace)
    return result


def json_value(value: Any) -> Any:
    """A value, or a list of values, as JSON can hold it."""
    if isinstance(value, list):
        return [json_value(item) for item in cast("list[object]", value)]
    return value.hex() if isinstance(value, bytes) else value


def _totals(trace: Trace, group_sizes: Mapping[int, int]) -> Iterator[tuple[Key, Totals]]:
    columns, texts = trace.attributes, trace.texts

    def text(*names: str) -> Int:
        values = np.full(len(trace), -1)
        for name in names:
            column = columns[name]
            values = np.where((values < 0) & (column.kind == STRING), column.value, values)
        return values

    collective = trace.type == COLL
    op = np.where(collective, columns["comm_type"].value, text("op", "op_type"))
    group = np.where(collective, text("pg_name"), -1)
    keys = np.stack([trace.type, text("phase"), op, group])
    rows = np.lexsort(keys)
    changes = (keys[:, rows[1:]] != keys[:, rows[:-1]]).any(axis=0)
    begin = np.flatnonzero(np.concatenate((np.ones(min(1, len(rows)), bool), changes)))
    moved = np.isin(trace.type, (COMP, LOAD, STORE))
    size = np.where(moved, columns["tensor_size"].value, columns["comm_size"].value)
    flops = np.where(trace.type == COMP, columns["num_ops"].value, 0)
    counts = np.diff(np.append(begin, len(rows)))
    sums = zip(counts.tolist(), _sums(flops[rows], begin), _sums(size[rows], begin), strict=True)
    for row, totals in zip(rows[begin].tolist(), sums, strict=True):
        type_, phase, op_, name = (int(key) for key in keys[:, row])
        type_name = TYPES[type_] if 0 <= type_ < len(TYPES) else f"type {type_}"
        word = str(texts[phase]) if phase >= 0 else ""
        ranks = group_sizes.get(group_id(str(texts[name]) if name >= 0 else "") or 0, 0)
        key = Key(type_name, word, _op(type_, op_, texts), ranks if type_ == COLL else 0)
        yield key, Totals(*totals)


def _op(type_: int, op: int, texts: Sequence[str]) -> str:
    if type_ == COLL:
        return CommType(op).name.lower() if 0 <= op < len(CommType) else f"type {op}"
    return texts[op] if op >= 0 else ""


def _sums(values: Int, begin: Int) -> list[int]:
    """Exact sums of runs, which may exceed 64 bits."""
    if not len(begin):
        return []
    high, low = (
        np.add.reduceat(part, begin).tolist() for part in (values >> 32, values & 0xFFFFFFFF)
    )
    return [(a << 32) + b for a, b in zip(high, low, strict=True)]


def _add_graph(result: Profile, trace: Trace) -> None:
    """The longest path and the structure, whatever the order of the nodes in the file."""
    by_id = np.argsort(trace.id, kind="stable")
    place = np.empty(len(trace), np.int64)
    place[by_id] = np.arange(len(trace))
    child, needed = trace.dependencies()
    graph, _ = graph_of_ids(trace.id[by_id], place[child], needed)
    shape = hashlib.sha256(np.unique(np.stack([graph.child, graph.parent]), axis=1).tobytes())
    # The numbers that define the work of the nodes; partners and names are left out.
    for column in (trace.type, trace.duration, *map(trace.value, NUMBERS)):
        shape.update(column[by_id].tobytes())
    result.structure = shape.hexdigest()
    order = graph.order(trace.id[by_id])
    if len(order) < len(trace):
        return
    path = graph.longest(order)
    result.depth = len(path)
    path_types = np.clip(trace.type[by_id][path], 0, len(TYPES) - 1)
    counts = np.bincount(path_types, minlength=len(TYPES)).tolist()
    result.path_types = {name: count for name, count in zip(TYPES, counts, strict=True) if count}


def summed(profiles: Iterable[tuple[Profile, int]]) -> dict[Key, Totals]:
    """The sum of the totals of several traces, each with a multiplicity."""
    totals: dict[Key, Totals] = {}
    for rank_profile, times in profiles:
        for key, added in rank_profile.totals.items():
            totals[key] = totals.get(key, Totals()).plus(added, times)
    return totals
