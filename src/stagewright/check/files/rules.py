"""The rules for the nodes of a trace, checked on columns.

Sources: Chakra's et_def.proto, and what the readers of traces do: MLCommons' feeder (which knows
one type per attribute, and data_deps only) and ASTRA-sim. An error is what no reader can run; a
warning is what some reader, mostly ASTRA-sim, cannot run or runs otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.check.files.reader import (
    BOOL,
    COLL,
    COMM,
    COMP,
    INTEGER,
    INVALID,
    LARGEST,
    LOAD,
    METADATA,
    RECV,
    SEND,
    STORE,
    STRING,
    Trace,
)
from stagewright.check.report import Level
from stagewright.time.astra_sim import BYTES_PER_NS, FLOPS_PER_NS
from stagewright.trace.formats import et_def
from stagewright.trace.formats.et_def import CommType, NodeType

MOST_TAG = 500_000_000  # ASTRA-sim takes tags modulo this

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


class NodeRule(NamedTuple):
    """A rule, and the nodes of a trace that break it."""

    level: Level
    code: str
    nodes: Bool
    text: str


def type_rules(trace: Trace) -> Iterator[NodeRule]:
    """Types of nodes that readers can run."""
    cpu, comm = trace.on_cpu, trace.is_a(*COMM)
    unknown, invalid = (trace.type < 0) | (trace.type > COLL), trace.type == INVALID
    known = ~unknown & ~invalid
    statistics = "ASTRA-sim then loses the statistics of the rank"
    yield NodeRule("error", "node-type", unknown, "a type that Chakra does not have")
    yield NodeRule("error", "invalid-node", invalid, "type INVALID_NODE, or no type at all")
    text = "a METADATA_NODE, at which ASTRA-sim aborts"
    yield NodeRule("warning", "metadata-node", trace.is_a(METADATA), text)
    yield NodeRule(
        "warning", "memory-node", trace.is_a(LOAD, STORE), f"a memory node: {statistics}"
    )
    yield NodeRule("warning", "cpu-node", cpu & ~comm & known, f"a CPU node: {statistics}")
    text = "a communication on the CPU, at which ASTRA-sim hangs"
    yield NodeRule("warning", "cpu-comm", cpu & comm, text)
    text = "no is_cpu_op: ASTRA-sim before November 2024 takes it for a CPU node"
    unsaid = ~trace.attributes["is_cpu_op"].present
    yield NodeRule("warning", "no-is-cpu-op", unsaid & known, text)


def repeat_rules(trace: Trace) -> Iterator[NodeRule]:
    """An attribute comes once in a node: of two, readers take one or the other."""
    for name, column in trace.attributes.items():
        equal = column.again & ~column.differing
        text = f"{name} comes twice, of which MLCommons' feeder takes the last and others the first"
        yield NodeRule("error", "duplicate-attribute", column.differing, f"{text}: they differ")
        yield NodeRule("warning", "repeated-attribute", equal, f"{text}: they are equal")


def attribute_rules(trace: Trace) -> Iterator[NodeRule]:
    """Required attributes are present and have types that readers accept."""
    cpu = trace.on_cpu
    for name, (portable, types) in ATTRIBUTES.items():
        column = trace.attributes[name]
        read = column.present & trace.is_a(*types) & (~cpu | (name == "is_cpu_op"))
        read &= column.kind != et_def.VALUES[portable]
        right = column.kind == STRING if portable == "string" else INTEGER[column.kind]
        for kind in np.unique(column.kind[read]).tolist():
            nodes = read & (column.kind == kind)
            text = f"{name} is {kind_name(kind)}, wanted {portable}_val"
            yield NodeRule(
                "error", f"type-of-{name}", nodes & ~right, f"{text}: no feeder reads it"
            )
            text += ": MLCommons' feeder takes it for 0"
            yield NodeRule("warning", f"unportable-{name}", nodes & right, text)
    for name, types in NEEDED.items():
        missing = trace.is_a(*types) & ~cpu & ~trace.attributes[name].present
        yield NodeRule("error", f"no-{name}", missing, f"has no {name}")


def kind_name(kind: int) -> str:
    """The type of an attribute's value, as the schema calls it."""
    names = {number: name for name, number in et_def.VALUES.items()}
    if kind in names:
        return f"{names[kind]}_val"
    return f"{names[kind - 1]}_list" if kind - 1 in names else "without a value"


def group_rules(trace: Trace) -> Iterator[NodeRule]:
    """A collective names a group by a number, and network dimensions that can be."""
    name, dims = trace.attributes["pg_name"], trace.attributes["involved_dim"]
    collective = trace.communicates & trace.is_a(COLL)
    named = collective & (name.kind == STRING)
    for index in np.unique(name.value[named]).tolist():
        text = trace.texts[int(index)]
        if group_id(text) is None:
            text = f"pg_name is {text[:40]!a}, wanted a positive number"
            yield NodeRule("error", "group-name", named & (name.value == index), text)
    listed = dims.kind == BOOL + 1
    text = "involved_dim is no bool_list, at which ASTRA-sim exits"
    yield NodeRule("warning", "type-of-involved_dim", collective & dims.present & ~listed, text)
    none = collective & listed & (dims.value == 0) & (groups(trace) == 0)
    text = "involved_dim is all false: in ASTRA-sim it never ends"
    yield NodeRule("warning", "no-dims", none, text)


def groups(trace: Trace) -> Int:
    """The group of each collective; 0 for all ranks, and where there is no number."""
    name = trace.attributes["pg_name"]
    numbers = np.array([group_id(text) or 0 for text in [*trace.texts, ""]], np.int64)
    named = trace.is_a(COLL) & (name.kind == STRING)
    return np.where(named, numbers[np.where(named, name.value, -1)], 0)


def exchange_rules(trace: Trace, rank: int | None) -> Iterator[NodeRule]:
    """Collectives, sends and receives are valid; `rank`: whose file it is, if that is known."""
    sound = trace.communicates & ~_lacks_numbers(trace)
    size, tag, op = (trace.value(name) for name in ("comm_size", "comm_tag", "comm_type"))
    collective, message = sound & trace.is_a(COLL), sound & ~trace.is_a(COLL)
    gathers, empty = collective & (op == CommType.ALL_GATHER), size == 0
    unknown = collective & ((op < 0) | (op >= len(CommType)))
    yield NodeRule("error", "comm-type", unknown, "no comm_type of Chakra's")
    yield NodeRule("error", "comm-size", sound & (size < 0), "a negative comm_size")
    nothing = empty & (message | gathers)
    yield NodeRule("error", "comm-size", nothing, "comm_size 0: nothing to send")
    yield NodeRule("error", "comm-size", sound & (size == LARGEST), "a comm_size of 2^63 or more")
    yield NodeRule("error", "comm-tag", message & (tag < 0), "a negative comm_tag")
    zero = collective & ~gathers & empty
    yield NodeRule("warning", "zero-size", zero, "a collective of 0 bytes")
    text = f"a comm_tag of {MOST_TAG} or more, which ASTRA-sim takes modulo {MOST_TAG}"
    yield NodeRule("warning", "large-tag", message & (tag >= MOST_TAG), text)
    text = "a broadcast: ASTRA-sim only waits for duration_micros, and for nobody"
    yield NodeRule("warning", "broadcast", collective & (op == CommType.BROADCAST), text)
    good = collective & ~unknown & (size >= 0) & (size != LARGEST)
    hangs = good & ~np.isin(op, (CommType.BROADCAST, *SIMULATED))
    for kind in np.unique(op[hangs]).tolist():
        text = f"a collective of type {CommType(kind).name}, at which ASTRA-sim hangs"
        yield NodeRule("warning", "unsupported-collective", hangs & (op == kind), text)
    for type_, own, other in ((SEND, "comm_src", "comm_dst"), (RECV, "comm_dst", "comm_src")):
        ends = message & trace.is_a(type_)
        yield NodeRule("error", "peer", ends & (trace.value(other) < 0), f"a negative {other}")
        if rank is not None:
            itself = ends & (trace.value(other) == rank)
            yield NodeRule("error", "own-peer", itself, f"{other} is the rank itself")
            foreign = ends & trace.attributes[own].present & (trace.value(own) != rank)
            text = f"{own} is not the rank, {rank}, whose file this is"
            yield NodeRule("error", "not-own", foreign, text)


def _lacks_numbers(trace: Trace) -> Bool:
    """Mask of the nodes that lack an attribute that their communication needs."""
    group = trace.attributes["pg_name"]
    lacks = group.present & (group.kind != STRING)
    for name, types in NEEDED.items():
        lacks |= trace.is_a(*types) & ~INTEGER[trace.attributes[name].kind]
    return lacks


def kernel_rules(trace: Trace) -> Iterator[NodeRule]:
    """Kernels have work or a duration, from which readers can derive a time."""
    operations, moved = trace.attributes["num_ops"], trace.attributes["tensor_size"]
    kernel = trace.is_a(COMP) & ~trace.on_cpu
    bare = kernel & ~(operations.present & moved.present)
    # 0 counts as a duration if any node has one.
    timed = bool(trace.duration.any())
    text = "num_ops or tensor_size is missing"
    if timed:
        text += ": runs by its duration, with ASTRA-sim's roofline off only"
        yield NodeRule("warning", "only-duration", bare, text)
    else:
        yield NodeRule("error", "no-work", bare, f"{text}, and nothing has a duration")
    for name, why in (("num_ops", "never ends"), ("tensor_size", "stalls what waits for it")):
        column = trace.attributes[name]
        zero = kernel & ~bare & INTEGER[column.kind] & (column.value < 1)
        yield NodeRule("error", f"zero-{name}", zero, f"{name} below 1: in ASTRA-sim it {why}")
    first = (np.diff(trace.ctrl.ptr) == 0) & (np.diff(trace.data.ptr) == 0)
    short = (operations.value < FLOPS_PER_NS) & (moved.value < BYTES_PER_NS)
    text = "a first kernel of less than 1 ns on a fast device, at which ASTRA-sim aborts"
    yield NodeRule("warning", "short-first", kernel & ~bare & first & short, text)


def group_id(name: str) -> int | None:
    """The group id in a pg_name: 0 for all ranks, None if the text is no id."""
    if name in ("", "0"):
        return 0
    if not (name.isascii() and name.isdecimal() and len(name) <= 19):
        return None
    return int(name) if 0 < int(name) < 2**31 else None
