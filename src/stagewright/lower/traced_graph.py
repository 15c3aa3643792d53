"""Program of a rank from a graph that PyTorch recorded there, instead of from our blocks.

In: a recording with a process. Out: a `Program` of one class of ranks; all ranks of the mesh are
assumed to run what the recorded one runs. The mesh follows from the process groups, costs from the
nodes: FLOPs of products, convolutions and attention, as PyTorch's FlopCounterMode counts them,
except that masked pairs of causal attention are not counted, as in all of Stagewright; other nodes
have the bytes that they read and write. Rows are in graph order: kernels on one stream and
collectives on another. A `wait_tensor` is no row: readers of its result wait for the collective.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.graph.node import BYTES, PHASES
from stagewright.imports.recording import (
    Process,
    ProcessGroup,
    Recording,
    Ref,
    TracedNode,
    argument,
    operation,
    words,
)
from stagewright.lower.assembly.streams import order_by_streams
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
from stagewright.program.shapes import GEMM

_COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}  # fmt: skip
"""Functional collectives, without suffixes `_coalesced`, `_` and `_out`, by their name here."""

_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand",
     "unsqueeze", "squeeze", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
     "unbind", "alias", "detach", "as_strided", "diagonal", "unfold", "lift_fresh", "view_as",
     "view_as_complex", "view_as_real", "getitem", "wait_tensor", "lift_fresh_copy"}
)  # fmt: skip
"""Operations that only change the view."""

_COPIES = ("_to_copy", "clone", "cat", "all_gather_into_tensor")
"""Operations that copy the elements of their operands."""

_FILLS = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
     "new_full", "rand", "rand_like", "randn", "randn_like", "arange", "scalar_tensor", "fill"}
)  # fmt: skip
"""Operations that write values and read nothing."""

_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"})
"""Operations that only allocate."""

_LEAVES = {"param": "parameters", "input": "activations", "constant": "activations"}
"""Category of the memory of nodes without operands."""

_BYTES = {"bool": 1, "fp16": 2, "fp64": 8, "int16": 2, "uint32": 4, "complex64": 8, "": 0}
"""Bytes of data types that only recordings have."""


# ---- mesh ----------------------------------------------------------------------------------------


def mesh_of(process: Process) -> tuple[Mesh, dict[str, Communicator]]:
    """Coarsest mesh whose axes span all groups of a process, and the axes of each group by name.

    An axis has the name of the group that spans it alone; without one, it is named after the
    distance of its ranks. Raises UserError for a group that spans no axes.

    >>> tp, dp = ProcessGroup((2, 3), "tp"), ProcessGroup((0, 2), "dp")
    >>> mesh, communicators = mesh_of(Process(2, 4, {"1": tp, "2": dp}))
    >>> mesh.axes, communicators["2"].axes
    ((('tp', 2), ('dp', 2)), ('dp',))
    """
    strides_of = {name: _strides(group) for name, group in process.groups.items()}
    cuts = {1, process.world_size}
    for name, strides in strides_of.items():
        for distance, count in strides:
            cuts |= {distance, distance * count}
        if any(r < 0 or r >= process.world_size for r in process.groups[name].ranks):
            raise _not_on_mesh(process.groups[name], process)
    spans = [*itertools.pairwise(sorted(cuts))]
    if any(end % begin for begin, end in spans):
        widest = max(process.groups.values(), key=lambda g: len(g.ranks))
        raise _not_on_mesh(widest, process)
    spans_of = {
        name: [s for s in spans if any(d <= s[0] and s[1] <= d * n for d, n in strides)]
        for name, strides in strides_of.items()
    }
    names = {span: f"every{span[0]}" for span in spans}
    for name, group in process.groups.items():
        if len(spans_of[name]) == 1 and group.dim and group.dim not in names.values():
            names[spans_of[name][0]] = group.dim
    mesh = Mesh(
        tuple((names[s], s[1] // s[0]) for s in spans), tuple((n, (n,)) for n in names.values())
    )
    communicators: dict[str, Communicator] = {}
    for name, group in process.groups.items():
        axes = tuple(names[s] for s in reversed(spans_of[name]))
        coords = mesh.coords(min(group.ranks))
        if (
            any(coords[axis] for axis in axes)
            or mesh.size(*axes) != len(group.ranks)
            or process.rank not in group.ranks
        ):
            raise _not_on_mesh(group, process)
        communicators[name] = Communicator(axes)
    return mesh, communicators


def _strides(group: ProcessGroup) -> list[tuple[int, int]]:
    """(distance, number) of a group's ranks along each axis, smallest distance first."""
    ranks = sorted(group.ranks)
    offsets = [rank - ranks[0] for rank in ranks]
    strides: list[tuple[int, int]] = []
    while len(offsets) > 1:
        distance, total = offsets[1], len(offsets)
        count = next((n for n in range(2, total) if offsets[n] != n * distance), total)
        while total % count:
            count -= 1
        heads = offsets[::count]
        if count < 2 or offsets != [head + n * distance for head in heads for n in range(count)]:
            raise UserError(f"the process group of ranks {ranks} is no product of dims of a mesh")
        strides.append((distance, count))
        offsets = heads
    return strides


def _not_on_mesh(group: ProcessGroup, process: Process) -> UserError:
    return UserError(
        f"the process group of ranks {sorted(group.ranks)} is along no dims of a mesh of "
        f"{process.world_size} ranks that all groups share, as those of init_device_mesh are"
    )


# ---- costs of nodes ------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Op of a kernel as in `graph.table`, FLOPs, and shape if it is timed by shape."""

    op: str
    flops: int = 0
    shape: Shape | None = None


DimsOf = Callable[[Any], tuple[int, ...]]
"""Function from a tensor argument to its dims."""


def costs_of(node: TracedNode, kind: str, dims: DimsOf) -> Costs:
    """Costs of a node; `kind`: its operation without library and overload."""
    if kind in _COSTS:
        return _COSTS[kind](node, dims)
    if kind.startswith("_scaled_dot_product"):
        return _attention(node, kind, dims)
    return Costs(kind)


def _gemm(
    batch: int, m: int, n: int, k: int, op: str = "einsum", flops: int | None = None
) -> Costs:
    """Matrix product; `flops`: 2 batch m n k if not given."""
    shape = Shape(GEMM, (("batch", batch), ("m", m), ("n", n), ("k", k)))
    return Costs(op, 2 * batch * m * n * k if flops is None else flops, shape)


def _product(node: TracedNode, dims: DimsOf, first: int = 0) -> Costs:
    """Product of matrices; its operands begin with argument `first`."""
    a, b = dims(node.args[first]), dims(node.args[first + 1])
    return _gemm(prod(a[:-2]), a[-2], b[-1], a[-1])


def _added_product(node: TracedNode, dims: DimsOf) -> Costs:
    return _product(node, dims, first=1)


def _grouped(node: TracedNode, dims: DimsOf) -> Costs:
    """Grouped product: rows of each expert times its matrix; for its gradient, one per expert."""
    a, b = dims(node.args[0]), dims(node.args[1])
    if len(b) == 3:
        rows = prod(a[:-1])
        return _gemm(b[0], -(-rows // b[0]), b[-1], a[-1], flops=2 * rows * b[-1] * a[-1])
    experts = int(node.shape[0]) if len(node.shape) == 3 else 1
    return _gemm(experts, a[0], b[-1], -(-a[-1] // experts), flops=2 * a[0] * a[-1] * b[-1])


def _vector(node: TracedNode, dims: DimsOf) -> Costs:
    a, b = dims(node.args[0]), dims(node.args[1])
    return _gemm(1, prod(a[:-1]), prod(b[1:]), a[-1])


def _convolution(node: TracedNode, dims: DimsOf) -> Costs:
    x, w = dims(node.args[0]), dims(node.args[1])
    transposed = len(node.args) > 6 and bool(node.args[6])
    result = x if transposed else tuple(map(int, node.shape))
    flops = 2 * prod(result) * prod(w[1:])
    return _gemm(1, prod(result) // max(1, result[1]), w[0], prod(w[1:]), "conv", flops)


def _convolution_backward(node: TracedNode, dims: DimsOf) -> Costs:
    grad, x, w = (dims(node.args[i]) for i in range(3))
    transposed = bool(node.args[7]) if len(node.args) > 7 else False
    mask = words(argument(node, len(node.args) - 1)) or (True, True, True)
    products = sum(map(bool, mask[:2]))
    flops = 2 * prod(x if transposed else grad) * prod(w[1:]) * products
    rows = prod(grad) // max(1, grad[1])
    return _gemm(products, rows, w[0], prod(w[1:]), "conv_bwd", flops)


_CAUSAL: Mapping[str, int] = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 10,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Index of the argument `is_causal` (native_functions.yaml of PyTorch 2.13)."""


def _attention(node: TracedNode, kind: str, dims: DimsOf) -> Costs:
    """Fused attention: two products per pair of query and key, in backward five."""
    backward = kind.endswith("backward")
    q, k, v = (dims(a) for a in node.args[backward : 3 + backward])
    index = _CAUSAL.get(kind, len(node.args))
    causal = bool(node.args[index] if len(node.args) > index else node.kwargs.get("is_causal"))
    pairs = prod(q[:-1]) * k[-2]
    width = 3 * q[-1] + 2 * v[-1] if backward else q[-1] + v[-1]
    op = "attention_bwd" if backward else "attention"
    extents = (
        ("batch", prod(q[:-3])), ("heads", q[-3]), ("kv_heads", k[-3]), ("q", q[-2]), ("k", k[-2]),
        ("d", q[-1]), ("v", v[-1]), ("causal", int(causal)), ("window", 0),
    )  # fmt: skip
    return Costs(op, 2 * pairs * width // (2 if causal else 1), Shape(op, extents))


_COSTS: Mapping[str, Callable[[TracedNode, DimsOf], Costs]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _added_product,
    "baddbmm": _added_product,
    "mv": _vector,
    "dot": _vector,
    "_grouped_mm": _grouped,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


# ---- rows and values -----------------------------------------------------------------------------


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
    process, rank = recording.process, _TracedRank(recording, recording.process)
    mesh, communicators = mesh_of(process)
    # Groups of different names along the same axes are one communicator.
    slots: dict[tuple[str, ...], int] = {}
    slot_of: dict[str, int] = {}
    for row in rank.rows:
        if row.collective and len(process.groups[row.group].ranks) > 1:
            axes = communicators[row.group].axes
            slot_of[row.group] = slots.setdefault(axes, len(slots))
    tasks = _tasks(rank.rows, slot_of)
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    work = RankWork.from_tables(tasks, values=_values([*rank.values.values()], len(tasks)))
    return Program(mesh, (RankClass(ranks, 0, work),), tuple(map(Communicator, slots)), ())


class _TracedRow(NamedTuple):
    """Task of the rank: a kernel or a collective."""

    node: TracedNode
    op: str
    phase: str
    dtype: str
    reads: tuple[int, ...]
    flops: int = 0
    traffic: int = 0
    shape: Shape | None = None
    collective: str = ""
    group: str = ""
    comm_bytes: int = 0


@dataclass(slots=True)
class _TracedValue:
    """Tensor that shares memory with no earlier one, and the first and last row that touch it."""

    node: TracedNode
    size: int
    category: str
    first: int
    last: int


@dataclass(slots=True)
class _TracedRank:
    """Rows and values of the recorded rank, in the order of its graph."""

    recording: Recording
    process: Process
    rows: list[_TracedRow] = field(default_factory=list[_TracedRow])
    values: dict[str, _TracedValue] = field(default_factory=dict[str, _TracedValue])
    nodes: dict[str, TracedNode] = field(default_factory=dict[str, TracedNode])
    row_of: dict[str, int] = field(default_factory=dict[str, int])
    """Row that writes each value."""
    base: dict[str, str] = field(default_factory=dict[str, str])
    """Value whose memory a view shares."""
    tuple_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of the results of nodes with several."""
    weights: set[str] = field(default_factory=set[str])
    """Parameters, and copies of nothing but parameters."""

    def __post_init__(self) -> None:
        """Add the rows of all nodes."""
        self.nodes = {node.name: node for node in self.recording.nodes}
        for node in self.recording.nodes:
            source = self.nodes.get(_first_operand(node))
            if node.op == "getitem" and source is not None and operation(source) not in _VIEWS:
                size = self.tuple_bytes.get(source.name, 0) + _bytes_of(node)
                self.tuple_bytes[source.name] = size
        forward = self._ancestors(self.recording.outputs[:1])
        for node in self.recording.nodes:
            self._add(node, "forward" if node.name in forward else "backward")
        for name in {self._owner(n) for n in self.recording.outputs} & self.values.keys():
            value = self.values[name]
            value.last = len(self.rows)
            if value.category == "workspace":
                value.category = "gradients"

    def _bytes(self, node: TracedNode) -> int:
        """Bytes of a node's results."""
        return _bytes_of(node) if node.dtype else self.tuple_bytes.get(node.name, 0)

    def _ancestors(self, outputs: Sequence[str]) -> set[str]:
        """Nodes that some outputs depend on, including themselves."""
        ancestors, stack = set[str](), [*outputs]
        while stack:
            name = stack.pop()
            if name not in ancestors:
                ancestors.add(name)
                stack += self.nodes[name].operands()
        return ancestors

    def _owner(self, name: str) -> str:
        while name in self.base:
            name = self.base[name]
        return name

    def _add(self, node: TracedNode, phase: str) -> None:
        kind, first, operands = operation(node), _first_operand(node), [*node.operands()]
        copies = kind in _VIEWS or kind in _COPIES
        if node.op == "param" or (copies and operands and self.weights.issuperset(operands)):
            self.weights.add(node.name)
        if node.op in _LEAVES:
            self.values[node.name] = _TracedValue(node, _bytes_of(node), _LEAVES[node.op], -1, -1)
            return
        if not node.op.startswith(("aten.", "_c10d_functional.")) and node.op != "getitem":
            return  # arithmetic on sizes
        if kind in _VIEWS or node.op == "getitem":
            if first:
                self.base[node.name] = first
            return
        collective = node.op.startswith("_c10d_functional.")
        self.rows.append((self._collective if collective else self._kernel)(node, kind, phase))
        row = len(self.rows) - 1
        if kind.endswith("_") and first:  # the result is the operand that was written to
            self.base[node.name] = first
            self.row_of[self._owner(first)] = row
            return
        self.row_of[node.name] = row
        category = "activations" if phase == "forward" else "workspace"
        if node.name in self.weights:
            category = "gathered_parameters"
        self.values[node.name] = _TracedValue(node, self._bytes(node), category, row, row)

    def _read(self, node: TracedNode) -> tuple[int, tuple[int, ...]]:
        """Touch the values that a node reads; return their bytes and the rows that write them."""
        total, rows = 0, dict[int, None]()
        for name in dict.fromkeys(node.operands()):
            owner = self._owner(name)
            value = self.values.get(owner)
            if value is None:
                continue
            value.last = max(value.last, len(self.rows))
            # An expanded view reads its few values only.
            operand = self.nodes[name]
            total += min(_bytes_of(operand), value.size) if operand.dtype else value.size
            if owner in self.row_of:
                rows[self.row_of[owner]] = None
        return total, tuple(rows)

    def _kernel(self, node: TracedNode, kind: str, phase: str) -> _TracedRow:
        read_bytes, reads = self._read(node)
        written = self._bytes(node)
        if kind in _FILLS or kind in _ALLOCATIONS:
            read_bytes, reads = 0, ()
            written = 0 if kind in _ALLOCATIONS else written
        costs = costs_of(node, kind, self._dims)
        dtype = node.dtype
        if costs.shape is not None:
            dtypes = (self.nodes[n].dtype for n in node.operands())
            dtype = next(filter(None, dtypes), dtype)
        traffic = read_bytes + written
        return _TracedRow(
            node, costs.op, phase, dtype or "fp32", reads, costs.flops, traffic, costs.shape
        )

    def _dims(self, operand: object) -> tuple[int, ...]:
        if not isinstance(operand, Ref):
            raise UserError(f"an operand is {operand!r}, expected a tensor")
        return tuple(int(n) for n in self.nodes[operand.name].shape)

    def _collective(self, node: TracedNode, kind: str, phase: str) -> _TracedRow:
        op = _COLLECTIVES.get(re.sub(r"(_coalesced|_out|_)+$", "", kind))
        if op is None:
            raise UserError(
                f"{node.source or node.name}: the collective {node.op} is none of "
                f"{', '.join(_COLLECTIVES)}"
            )
        group = str(node.kwargs.get("group_name", node.args[-1]))
        if group not in self.process.groups:
            raise UserError(f"{node.name}: no process group {group!r} was recorded")
        size, reads = self._read(node)
        dtype = self.nodes[next(node.operands())].dtype
        return _TracedRow(
            node, op, phase, dtype, reads, collective=op, group=group, comm_bytes=size
        )


def _first_operand(node: TracedNode) -> str:
    """Name of the first argument if it is a value, else empty."""
    first = node.args[0] if node.args else None
    return first.name if isinstance(first, Ref) else ""


def _bytes_of(node: TracedNode) -> int:
    """Bytes of a node's tensor."""
    per_value = BYTES.get(node.dtype, _BYTES.get(node.dtype))
    if per_value is None:
        raise UserError(f"{node.name}: the data type {node.dtype} has no size here")
    return int(prod(int(n) for n in node.shape) * per_value) if node.dtype else 0


def _name(node: TracedNode) -> str:
    return f"{node.path}.{node.name}" if node.path and node.op not in _LEAVES else node.name


def _layer(node: TracedNode) -> int:
    """Layer of a node: the first number in its module's path; -1: none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", node.path)
    return int(match.group(1)) if match else -1


# ---- columns -------------------------------------------------------------------------------------


def _indexed(column: Iterable[Hashable]) -> tuple[Int, tuple[Any, ...]]:
    """Index of each entry in the table of distinct entries, and the table; None has index -1."""
    index: dict[Hashable, int] = {}
    rows = [-1 if x is None else index.setdefault(x, len(index)) for x in column]
    return np.array(rows, np.int64), tuple(index)


def _tasks(rows: Sequence[_TracedRow], slot_of: Mapping[str, int]) -> Tasks:
    """Columns of the rows; `slot_of`: index of the communicator of each group."""
    name, names = _indexed(_name(r.node) for r in rows)
    op, ops = _indexed(r.op for r in rows)
    dtype, dtypes = _indexed(r.dtype for r in rows)
    shape, shapes = _indexed(r.shape for r in rows)
    moves = [bool(r.collective) and r.group in slot_of for r in rows]  # one rank moves nothing

    def of_collectives(column: Iterable[int], default: int) -> Int:
        return np.where(moves, np.array([*column], np.int64), default)

    columns: dict[str, Any] = {
        "kind": np.where(moves, TaskKind.COLLECTIVE, TaskKind.COMPUTE).astype(np.uint8),
        "name": name.astype(np.int32),
        "op": op.astype(np.int32),
        "phase": np.array([PHASES.index(r.phase) for r in rows], np.uint8),
        "stage": np.zeros(len(rows), np.int32),
        "layer": np.array([_layer(r.node) for r in rows], np.int32),
        "microbatch": np.zeros(len(rows), np.int32),
        "flops": np.array([r.flops for r in rows], np.int64),
        "traffic": np.array([r.traffic for r in rows], np.int64),
        "collective": of_collectives(
            (COLLECTIVES.index(r.collective) if r.collective else -1 for r in rows), -1
        ).astype(np.int8),
        "dtype": dtype.astype(np.int8),
        "comm_bytes": of_collectives((r.comm_bytes for r in rows), 0),
        "slot": of_collectives((slot_of.get(r.group, -1) for r in rows), -1).astype(np.int16),
        "tag": np.full(len(rows), -1, np.int32),
        "shape": shape.astype(np.int32),
    }
    counts = np.array([len(r.reads) for r in rows], np.int64)
    order_ptr, order = order_by_streams(columns, counts, "one")
    return Tasks(
        **columns, data_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        data=np.array([row for r in rows for row in r.reads], np.int32), order_ptr=order_ptr,
        order=order, names=names, ops=ops, dtypes=dtypes, shapes=shapes,
    )  # fmt: skip


def _values(traced: Sequence[_TracedValue], num_rows: int) -> Values:
    """Columns of the values with bytes."""
    values = [v for v in traced if v.size]
    name, names = _indexed(_name(v.node) for v in values)
    first = np.array([v.first for v in values], np.int32)
    permanent = np.array([v.category == "parameters" for v in values], bool) | (first < 0)
    last = np.where(permanent, num_rows, np.array([v.last for v in values], np.int32))
    return Values(
        name=name.astype(np.int32),
        stage=np.zeros(len(values), np.int32),
        layer=np.array([_layer(v.node) for v in values], np.int32),
        category=np.array([CATEGORIES.index(v.category) for v in values], np.uint8),
        size=np.array([v.size for v in values], np.int64),
        value=np.arange(len(values), dtype=np.int32),
        microbatch=np.where(permanent, -1, 0).astype(np.int32),
        first=first,
        last=last.astype(np.int32),
        names=names,
    )
