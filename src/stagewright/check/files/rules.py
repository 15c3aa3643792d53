"""The rules for the nodes of a trace, checked on columns.

Sources: Chakra's et_def.proto, and what the readers of traces do: MLCommons' feeder (which knows
one type per attribute, and data_deps only) and ASTRA-sim. An error is what no reader can run; a
warning is what some reader, mostly ASTRA-sim, cannot run or runs otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.check.files.reader import BOOL, LARGEST, STRING, AttributeColumn
from stagewright.check.report import Level
from stagewright.program.columns import TaskKind
from stagewright.time.astra_sim import BYTES_PER_NS, FLOPS_PER_NS
from stagewright.trace.formats import et_def
from stagewright.trace.formats.et_def import CommType, NodeType
from stagewright.trace.formats.wire import Words

MOST_TAG = 500_000_000  # ASTRA-sim takes tags modulo this

INVALID, METADATA, LOAD, STORE, COMP, SEND, RECV, COLL = NodeType
COMM = {COLL: TaskKind.COLLECTIVE, SEND: TaskKind.SEND, RECV: TaskKind.RECV}
SIMULATED = [
    CommType.ALL_REDUCE,
    CommType.ALL_GATHER,
    CommType.ALL_TO_ALL,
    CommType.REDUCE_SCATTER,
]
"""Collectives that ASTRA-sim carries out."""
# Attribute -> the type that all feeders read, and the nodes of which they read it.
ATTRIBUTES = {
    "is_cpu_op": ("bool", tuple(NodeType)),
    "num_ops": ("int64", (COMP,)),
    "tensor_size": ("uint64", (COMP, LOAD, STORE)),
    "comm_type": ("int64", (COLL,)),
    "comm_size": ("int64", (COLL, SEND, RECV)),
    "pg_name": ("string", (COLL,)),
    "comm_src": ("int32", (SEND, RECV)),
    "comm_dst": ("int32", (SEND, RECV)),
    "comm_tag": ("int32", (SEND, RECV)),
    "comm_priority": ("int32", (COLL,)),
}
NEEDED = {
    "comm_type": (COLL,),
    "comm_size": (COLL, SEND, RECV),
    "comm_src": (RECV,),
    "comm_dst": (SEND,),
    "comm_tag": (SEND, RECV),
    "tensor_size": (LOAD, STORE),
}
INTEGER = np.zeros(256, bool)
INTEGER[[n for name, n in et_def.VALUES.items() if "int" in name or "fixed" in name]] = True
INTEGER[BOOL] = True


def label(node: Any) -> str:
    """A node as messages name it: `node 7 "layer3.mlp_out", microbatch 5`."""
    name = node.name if len(node.name) <= 80 else node.name[:77] + "..."
    text = f"node {node.id} " + (f'"{name}"' if name.isprintable() else ascii(name))
    for attribute in node.attr:
        if attribute.name == "microbatch":
            field = attribute.WhichOneof("value")
            value = getattr(attribute, field) if field else None
            if isinstance(value, int):
                return f"{text}, microbatch {value}"
    return text


@dataclass(slots=True)
class NodeRows:
    """Nodes with their attributes; `report` takes level, code, mask of nodes and text."""

    type: Int
    duration: Words
    first: Bool  # without dependencies
    columns: Mapping[str, AttributeColumn]
    report: Callable[[Level, str, Bool, str], None]
    cpu: Bool = field(init=False)
    communicates: Bool = field(init=False)

    def __post_init__(self) -> None:
        cpu = self.columns["is_cpu_op"]
        self.cpu = INTEGER[cpu.kind] & (cpu.value != 0)
        self.communicates = self.is_a(*COMM) & ~self.cpu

    def is_a(self, *types: int) -> Bool:
        """Mask of the nodes of these types."""
        return np.isin(self.type, types)

    def value(self, name: str) -> Int:
        """An attribute; 0 where it is missing or no integer."""
        return self.columns[name].value


def check_types(rows: NodeRows) -> None:
    """Types of nodes that readers can run."""
    unknown, invalid = (rows.type < 0) | (rows.type > COLL), rows.type == INVALID
    loses_statistics = "ASTRA-sim then loses the statistics of the rank"
    comm, no_is_cpu_op = rows.is_a(*COMM), ~rows.columns["is_cpu_op"].present
    rules: tuple[tuple[Level, str, Bool, str], ...] = (
        ("error", "node-type", unknown, "a type that Chakra does not have"),
        ("error", "invalid-node", invalid, "type INVALID_NODE, or no type at all"),
        (
            "warning",
            "metadata-node",
            rows.type == METADATA,
            "a METADATA_NODE, at which ASTRA-sim aborts",
        ),
        ("warning", "memory-node", rows.is_a(LOAD, STORE), f"a memory node: {loses_statistics}"),
        (
            "warning",
            "cpu-node",
            rows.cpu & ~comm & ~unknown & ~invalid,
            f"a CPU node: {loses_statistics}",
        ),
        (
            "warning",
            "cpu-comm",
            rows.cpu & comm,
            "a communication on the CPU, at which ASTRA-sim hangs",
        ),
        (
            "warning",
            "no-is-cpu-op",
            no_is_cpu_op & ~unknown & ~invalid,
            "no is_cpu_op: ASTRA-sim before November 2024 takes it for a CPU node",
        ),
    )
    for rule in rules:
        rows.report(*rule)


def check_repeated(rows: NodeRows, name: str, column: AttributeColumn) -> None:
    """An attribute comes once in a node: of two, readers take one or the other."""
    equal = column.again & ~column.differing
    text = f"{name} comes twice, of which MLCommons' feeder takes the last and others the first"
    rows.report("error", "duplicate-attribute", column.differing, f"{text}: they differ")
    rows.report("warning", "repeated-attribute", equal, f"{text}: they are equal")


def check_attributes(rows: NodeRows) -> None:
    """Required attributes are present and have types that readers accept."""
    for name, (portable, types) in ATTRIBUTES.items():
        column = rows.columns[name]
        read = column.present & rows.is_a(*types) & (~rows.cpu | (name == "is_cpu_op"))
        read &= column.kind != et_def.VALUES[portable]
        right = column.kind == STRING if portable == "string" else INTEGER[column.kind]
        for kind in np.unique(column.kind[read]).tolist():
            mask = read & (column.kind == kind)
            text = f"{name} is {kind_name(kind)}, wanted {portable}_val"
            rows.report("error", f"type-of-{name}", mask & ~right, f"{text}: no feeder reads it")
            text += ": MLCommons' feeder takes it for 0"
            rows.report("warning", f"unportable-{name}", mask & right, text)
    for name, types in NEEDED.items():
        missing = rows.is_a(*types) & ~rows.cpu & ~rows.columns[name].present
        rows.report("error", f"no-{name}", missing, f"has no {name}")


def check_dims(rows: NodeRows, group: Int) -> None:
    """A collective on all ranks names network dimensions (`involved_dim`) that can be."""
    dims = rows.columns["involved_dim"]
    has_dims = rows.communicates & rows.is_a(COLL) & dims.present
    listed = dims.kind == BOOL + 1
    text = "involved_dim is no bool_list, at which ASTRA-sim exits"
    rows.report("warning", "type-of-involved_dim", has_dims & ~listed, text)
    all_false = has_dims & listed & (dims.value == 0) & (group == 0)
    rows.report(
        "warning", "no-dims", all_false, "involved_dim is all false: in ASTRA-sim it never ends"
    )


def kind_name(kind: int) -> str:
    """The type of an attribute's value, as the schema calls it."""
    names = {number: name for name, number in et_def.VALUES.items()}
    if kind in names:
        return f"{names[kind]}_val"
    return f"{names[kind - 1]}_list" if kind - 1 in names else "without a value"


def check_exchanges(rows: NodeRows, rank: int | None) -> Bool:
    """Collectives, sends and receives are valid; returns the mask of nodes that are."""
    good = np.ones(len(rows.type), bool)
    for name, types in NEEDED.items():
        good &= ~(rows.communicates & rows.is_a(*types) & ~INTEGER[rows.columns[name].kind])
    group = rows.columns["pg_name"]
    good &= ~(rows.communicates & group.present & (group.kind != STRING))
    size, tag, op = rows.value("comm_size"), rows.value("comm_tag"), rows.value("comm_type")
    sound = rows.communicates & good
    collective, message = sound & rows.is_a(COLL), sound & ~rows.is_a(COLL)
    is_known = (op >= 0) & (op < len(CommType))
    gathers, empty = collective & (op == CommType.ALL_GATHER), size == 0
    waits = "ASTRA-sim only waits for duration_micros, and for nobody"
    rules: tuple[tuple[Level, str, Bool, str], ...] = (
        ("error", "comm-type", collective & ~is_known, "no comm_type of Chakra's"),
        ("error", "comm-size", sound & (size < 0), "a negative comm_size"),
        ("error", "comm-size", empty & (message | gathers), "comm_size 0: nothing to send"),
        ("error", "comm-size", sound & (size == LARGEST), "a comm_size of 2^63 or more"),
        ("error", "comm-tag", message & (tag < 0), "a negative comm_tag"),
        ("warning", "zero-size", collective & ~gathers & empty, "a collective of 0 bytes"),
        (
            "warning",
            "large-tag",
            message & (tag >= MOST_TAG),
            f"a comm_tag of {MOST_TAG} or more, which ASTRA-sim takes modulo {MOST_TAG}",
        ),
        ("warning", "broadcast", collective & (op == CommType.BROADCAST), f"a broadcast: {waits}"),
    )
    for level, code, mask, text in rules:
        rows.report(level, code, mask, text)
        if level == "error":
            good &= ~mask
    hangs = collective & good & (op != CommType.BROADCAST) & ~np.isin(op, SIMULATED)
    for kind in np.unique(op[hangs]).tolist():
        text = f"a collective of type {CommType(kind).name}, at which ASTRA-sim hangs"
        rows.report("warning", "unsupported-collective", hangs & (op == kind), text)
    return good & _check_ends(rows, message, rank)


def _check_ends(rows: NodeRows, message: Bool, rank: int | None) -> Bool:
    good = np.ones(len(rows.type), bool)
    for type_, own, other in ((SEND, "comm_src", "comm_dst"), (RECV, "comm_dst", "comm_src")):
        mask = message & rows.is_a(type_)
        negative = mask & (rows.value(other) < 0)
        rows.report("error", "peer", negative, f"a negative {other}")
        good &= ~negative
        if rank is None:
            continue
        itself = mask & (rows.value(other) == rank)
        rows.report("error", "own-peer", itself, f"{other} is the rank itself")
        foreign = mask & rows.columns[own].present & (rows.value(own) != rank)
        rows.report(
            "error", "not-own", foreign, f"{own} is not the rank, {rank}, whose file this is"
        )
        good &= ~itself & ~foreign
    return good


def check_kernels(rows: NodeRows) -> None:
    """Kernels have work or a duration, from which readers can derive a time."""
    kernel = rows.is_a(COMP) & ~rows.cpu
    bare = kernel & ~(rows.columns["num_ops"].present & rows.columns["tensor_size"].present)
    rows.report("warning", "only-duration", bare, "num_ops or tensor_size is missing")
    for name, why in (("num_ops", "never ends"), ("tensor_size", "stalls what waits for it")):
        zero = kernel & ~bare & INTEGER[rows.columns[name].kind] & (rows.value(name) < 1)
        rows.report("error", f"zero-{name}", zero, f"{name} below 1: in ASTRA-sim it {why}")
    short = (rows.value("num_ops") < FLOPS_PER_NS) & (rows.value("tensor_size") < BYTES_PER_NS)
    text = "a first kernel of less than 1 ns on a fast device, at which ASTRA-sim aborts"
    rows.report("warning", "short-first", kernel & ~bare & rows.first & short, text)


def group_id(name: str) -> int | None:
    """The group id in a pg_name: 0 for all ranks, None if the text is no id."""
    if name in ("", "0"):
        return 0
    if not (name.isascii() and name.isdecimal() and len(name) <= 19):
        return None
    return int(name) if 0 < int(name) < 2**31 else None
