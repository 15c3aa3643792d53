"""Recorded graph of one rank as a program: rows in graph order, and live values.

All ranks of the mesh are assumed to run what the recorded one runs. Kernels are one stream and
collectives another, in the order of the graph; a `wait_tensor` is no row: readers of its result
wait for the collective.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from stagewright.errors import UserError
from stagewright.graph.node import BYTES, PHASES
from stagewright.imports.trace.nodes import operation
from stagewright.imports.trace.recording import Process, Recording, Ref, TracedNode
from stagewright.lower.assembly.streams import order_by_streams
from stagewright.lower.traced.kernels import EMPTY, MAKES, VIEWS, costs_of, first_operand
from stagewright.lower.traced.mesh import GroupsOnMesh, mesh_of
from stagewright.program.columns import (
    CATEGORIES,
    COLLECTIVES,
    Program,
    RankClass,
    RankWork,
    Shape,
    TaskKind,
    Tasks,
    Values,
)
from stagewright.program.communicators import Communicator

_KINDS = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}  # fmt: skip
"""Functional collectives, without suffixes `_coalesced`, `_` and `_out`, by their name here."""

_COPIES = ("_to_copy", "clone", "cat", "all_gather_into_tensor")
"""Operations that copy the elements of their operands."""

_BYTES = {"bool": 1, "fp16": 2, "fp64": 8, "int16": 2, "uint32": 4, "complex64": 8, "": 0}
"""Bytes of data types that only recordings have."""


def bytes_of(node: TracedNode) -> int:
    """Bytes of a node's tensor."""
    per_value = BYTES.get(node.dtype, _BYTES.get(node.dtype))
    if per_value is None:
        raise UserError(f"{node.name}: the data type {node.dtype} has no size here")
    return int(prod(int(n) for n in node.shape) * per_value) if node.dtype else 0


def program_of(recording: Recording) -> Program:
    """Build the program of all ranks of a recording's mesh.

    The first output is the loss: the forward pass is all that it depends on. Raises UserError for a
    recording of a whole module, and for groups that span no axes of a mesh.
    """
    if recording.process is None:
        raise UserError(
            f"{recording.name}: the recording is of a whole module and not of one rank; import it "
            "as a model: stagewright import ... -o model.stg"
        )
    rank = _RankWalk(recording, recording.process)
    rank.walk()
    return rank.program()


class TracedRow(NamedTuple):
    """A task before it becomes a row."""

    node: TracedNode
    op: str
    phase: str
    flops: int
    traffic: int
    shape: Shape | None
    collective: str
    group: str
    comm_bytes: int
    dtype: str
    reads: tuple[int, ...]


@dataclass(slots=True)
class TracedValue:
    """Tensor with memory that it does not share."""

    node: TracedNode
    size: int
    category: str
    first: int
    last: int


@dataclass(slots=True)
class _RankWalk:
    recording: Recording
    process: Process
    rows: list[TracedRow] = field(default_factory=list[TracedRow])
    made: dict[str, int] = field(default_factory=dict[str, int])
    """Row that makes each value."""
    base: dict[str, str] = field(default_factory=dict[str, str])
    """Value whose memory a view shares."""
    values: dict[str, TracedValue] = field(default_factory=dict[str, TracedValue])
    nodes: dict[str, TracedNode] = field(default_factory=dict[str, TracedNode])
    parts: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of the results of nodes with several."""
    weights: set[str] = field(default_factory=set[str])
    """Values that are parameters, or copies of nothing but parameters."""

    def walk(self) -> None:
        """Add the rows of all nodes."""
        self.nodes = {node.name: node for node in self.recording.nodes}
        for node in self.recording.nodes:
            source = self.nodes.get(first_operand(node))
            if node.op == "getitem" and source is not None and operation(source) not in VIEWS:
                self.parts[source.name] = self.parts.get(source.name, 0) + bytes_of(node)
        forward = _sources(self.nodes, self.recording.outputs[:1])
        for node in self.recording.nodes:
            phase = "forward" if node.name in forward else "backward"
            self._node(node, phase)
        rows, outputs = len(self.rows), {self._owner(n) for n in self.recording.outputs}
        for name, value in self.values.items():
            if name in outputs:
                value.last = rows
                if value.category == "workspace":
                    value.category = "gradients"

    def _owner(self, name: str) -> str:
        while name in self.base:
            name = self.base[name]
        return name

    def _node(self, node: TracedNode, phase: str) -> None:
        kind = operation(node)
        first = first_operand(node)
        operands = [*node.operands()]
        copied = kind in VIEWS or kind in _COPIES
        if node.op == "param" or (copied and operands and self.weights.issuperset(operands)):
            self.weights.add(node.name)
        if node.op in ("param", "input", "constant"):
            category = "parameters" if node.op == "param" else "activations"
            self.values[node.name] = TracedValue(node, bytes_of(node), category, -1, -1)
            return
        if not node.op.startswith(("aten.", "_c10d_functional.")) and node.op != "getitem":
            return  # arithmetic on sizes
        if kind in VIEWS or node.op == "getitem":
            if first:
                self.base[node.name] = first
            return
        if node.op.startswith("_c10d_functional."):
            self._collective(node, kind, phase)
        else:
            self._kernel(node, kind, phase)
        if kind.endswith("_") and first:  # the result is what was written into
            self.base[node.name] = first
            self.made[self._owner(first)] = len(self.rows) - 1
            return
        self._hold(node, phase)

    def _hold(self, node: TracedNode, phase: str) -> None:
        row = len(self.rows) - 1
        self.made[node.name] = row
        size = bytes_of(node) if node.dtype else self.parts.get(node.name, 0)
        category = "activations" if phase == "forward" else "workspace"
        if node.name in self.weights:
            category = "gathered_parameters"
        self.values[node.name] = TracedValue(node, size, category, row, row)

    def _read(self, node: TracedNode) -> tuple[int, tuple[int, ...]]:
        """Touch the values that a node reads; return their bytes and the rows that make them."""
        total, rows = 0, dict[int, None]()
        row = len(self.rows)
        for name in dict.fromkeys(node.operands()):
            owner = self._owner(name)
            value = self.values.get(owner)
            if value is None:
                continue
            value.last = max(value.last, row)
            # An expanded view reads its few values only.
            total += (
                min(bytes_of(self.nodes[name]), value.size)
                if self.nodes[name].dtype
                else value.size
            )
            if owner in self.made:
                rows[self.made[owner]] = None
        return total, tuple(rows)

    def _kernel(self, node: TracedNode, kind: str, phase: str) -> None:
        reads, rows = self._read(node)
        writes = bytes_of(node) if node.dtype else self.parts.get(node.name, 0)
        if kind in MAKES or kind in EMPTY:
            reads, rows = 0, ()
            writes = 0 if kind in EMPTY else writes
        costs = costs_of(node, kind, self._dims)
        dtype = node.dtype
        if costs.shape is not None:
            dtype = next(
                (self.nodes[n].dtype for n in node.operands() if self.nodes[n].dtype), dtype
            )
        self.rows.append(
            TracedRow(node, costs.op, phase, costs.flops, reads + writes, costs.shape, "", "", 0,
                 dtype or "fp32", rows)
        )  # fmt: skip

    def _dims(self, operand: object) -> tuple[int, ...]:
        if not isinstance(operand, Ref):
            raise UserError(f"an operand is {operand!r}, expected a tensor")
        return tuple(int(n) for n in self.nodes[operand.name].shape)

    def _collective(self, node: TracedNode, kind: str, phase: str) -> None:
        plain = re.sub(r"(_coalesced|_out|_)+$", "", kind)
        if plain not in _KINDS:
            raise UserError(
                f"{node.source or node.name}: the collective {node.op} is none of "
                f"{', '.join(_KINDS)}"
            )
        group = str(node.kwargs.get("group_name", node.args[-1]))
        if group not in self.process.groups:
            raise UserError(f"{node.name}: no process group {group!r} was recorded")
        size, rows = self._read(node)
        names = [*node.operands()]
        dtype = self.nodes[names[0]].dtype
        self.rows.append(
            TracedRow(
                node, _KINDS[plain], phase, 0, 0, None, _KINDS[plain], group, size, dtype, rows
            )
        )

    # ---- columns -----------------------------------------------------------------------------

    def program(self) -> Program:
        """Convert the rows to columns."""
        on = mesh_of(self.process)
        slots: dict[str, int] = {}
        for row in self.rows:
            if row.collective and len(self.process.groups[row.group].ranks) > 1:
                slots.setdefault(row.group, len(slots))
        same: dict[tuple[str, ...], int] = {}
        for name in slots:  # groups of different names along the same axes are one
            axes = on.communicators[name].axes
            slots[name] = same.setdefault(axes, len(same))
        tasks = self._tasks(slots)
        values = self._values(len(tasks))
        ranks = np.arange(on.mesh.world_size, dtype=np.int64)
        rank_class = RankClass(ranks, 0, RankWork.from_tables(tasks, values=values))
        return Program(on.mesh, (rank_class,), _communicators(on, slots), ())

    def _tasks(self, slots: dict[str, int]) -> Tasks:
        rows = self.rows
        names, ops, dtypes, shapes = (dict[str, int](), dict[str, int](), dict[str, int](),
                                      dict[Shape, int]())  # fmt: skip
        moves = [row.collective != "" and row.group in slots for row in rows]
        columns: dict[str, Any] = {
            "kind": np.array(
                [TaskKind.COLLECTIVE if m else TaskKind.COMPUTE for m in moves], np.uint8
            ),
            "name": np.array([names.setdefault(_name(r.node), len(names)) for r in rows], np.int32),
            "op": np.array([ops.setdefault(r.op, len(ops)) for r in rows], np.int32),
            "phase": np.array([PHASES.index(r.phase) for r in rows], np.uint8),
            "stage": np.zeros(len(rows), np.int32),
            "layer": np.array([_layer(r.node) for r in rows], np.int32),
            "microbatch": np.zeros(len(rows), np.int32),
            "flops": np.array([r.flops for r in rows], np.int64),
            "traffic": np.array([r.traffic for r in rows], np.int64),
            "collective": np.array(
                [COLLECTIVES.index(r.collective) if m else -1
                 for r, m in zip(rows, moves, strict=True)], np.int8
            ),
            "dtype": np.array([dtypes.setdefault(r.dtype, len(dtypes)) for r in rows], np.int8),
            "comm_bytes": np.array(
                [r.comm_bytes if m else 0 for r, m in zip(rows, moves, strict=True)], np.int64
            ),
            "slot": np.array(
                [slots[r.group] if m else -1 for r, m in zip(rows, moves, strict=True)], np.int16
            ),
            "tag": np.full(len(rows), -1, np.int32),
            "shape": np.array(
                [-1 if r.shape is None else shapes.setdefault(r.shape, len(shapes)) for r in rows],
                np.int32,
            ),
        }  # fmt: skip
        counts = np.array([len(r.reads) for r in rows], np.int64)
        data = np.array([at for r in rows for at in r.reads], np.int32)
        pointer, order = order_by_streams(columns, counts, "one")
        return Tasks(
            **columns, data_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            data=data, order_ptr=pointer, order=order, names=(*names,), ops=(*ops,),
            dtypes=(*dtypes,), shapes=(*shapes,),
        )  # fmt: skip

    def _values(self, rows: int) -> Values:
        values = [v for v in self.values.values() if v.size]
        names: dict[str, int] = {}
        count = len(values)
        permanent = [v.category == "parameters" or v.first < 0 for v in values]
        return Values(
            name=np.array([names.setdefault(_name(v.node), len(names)) for v in values], np.int32),
            stage=np.zeros(count, np.int32),
            layer=np.array([_layer(v.node) for v in values], np.int32),
            category=np.array([CATEGORIES.index(v.category) for v in values], np.uint8),
            size=np.array([v.size for v in values], np.int64),
            value=np.arange(count, dtype=np.int32),
            microbatch=np.array([-1 if p else 0 for p in permanent], np.int32),
            first=np.array([v.first for v in values], np.int32),
            last=np.array(
                [rows if p else v.last for v, p in zip(values, permanent, strict=True)], np.int32
            ),
            names=(*names,),
        )


def _communicators(on: GroupsOnMesh, slots: dict[str, int]) -> tuple[Communicator, ...]:
    by_slot = {slot: on.communicators[name] for name, slot in slots.items()}
    return tuple(by_slot[slot] for slot in sorted(by_slot))


def _sources(nodes: dict[str, TracedNode], outputs: Sequence[str]) -> set[str]:
    """Nodes that some values depend on, including themselves."""
    sources, stack = set[str](), [*outputs]
    while stack:
        name = stack.pop()
        if name not in sources:
            sources.add(name)
            stack += nodes[name].operands()
    return sources


def _name(node: TracedNode) -> str:
    return f"{node.path}.{node.name}" if node.path and node.op not in LEAVES else node.name


LEAVES = ("param", "input", "constant")


def _layer(node: TracedNode) -> int:
    """Layer of a node: the first number in its module's path; -1: none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", node.path)
    return int(match.group(1)) if match else -1
