"""Reads Chakra traces of any writer into numpy columns, with protobuf's official runtime.

Messages become columns block by block, so that memory is bounded. A length in the file is checked
against the file's size before anything is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.program.columns import TaskKind
from stagewright.trace.formats import et_def
from stagewright.trace.formats.et_def import VALUES, NodeType
from stagewright.trace.formats.wire import Words, varint

BLOCK_BYTES = 1 << 20
BLOCK_NODES = 1 << 13
MOST_BYTES = 1 << 26  # of one message
MOST_NODES = 1 << 26  # of one file, at some 100 bytes of memory each
MOST_ATTRIBUTES = 4096  # of one node; real nodes have some 20
LARGEST = 2**63 - 1  # what larger numbers are read as
STRING, BOOL, NOTHING = VALUES["string"], VALUES["bool"], 0

INVALID, METADATA, LOAD, STORE, COMP, SEND, RECV, COLL = NodeType
COMM = {COLL: TaskKind.COLLECTIVE, SEND: TaskKind.SEND, RECV: TaskKind.RECV}
INTEGER = np.zeros(256, bool)
INTEGER[[n for name, n in VALUES.items() if "int" in name or "fixed" in name or n == BOOL]] = True
"""True for the kinds of integers and truths."""

WANTED = (
    "is_cpu_op",
    "num_ops",
    "tensor_size",
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "comm_priority",
    "pg_name",
    "involved_dim",
    "layer",
    "microbatch",
    "phase",
    "op",
    "op_type",
)
"""The attributes that become columns."""

_KINDS = {f"{name}_val": number for name, number in VALUES.items()} | {
    f"{name}_list": number + 1 for name, number in VALUES.items()
}
_VARINTS = ("int32_val", "int64_val", "uint32_val", "uint64_val")


class Damaged(UserError):
    """A file that cannot be read as a trace from some byte on."""


@dataclass(slots=True)
class AttributeColumn:
    """An attribute of every node; zeros where a node lacks it.

    Of one that comes twice in a node the last counts, as in MLCommons' feeder (et_feeder_node.cpp).
    """

    present: Bool
    kind: NDArray[np.uint8]  # number of its value's type in `et_def.VALUES`, + 1 for lists; 0: none
    value: Int
    """Integers, at most 2**63 - 1; of a string its index in `Trace.texts`; of a list of
    truths 1 if any is true; 0 of any other value."""
    again: Bool  # comes more than once
    differing: Bool  # and with different values


class Lists(NamedTuple):
    """A list of numbers per row: those of row `i` are `values[ptr[i]:ptr[i + 1]]`."""

    ptr: Int
    values: Words


@dataclass(frozen=True, slots=True)
class Trace:
    """All nodes of a file, by column."""

    path: Path
    size: int  # bytes
    metadata: et_def.MetadataMessage
    texts: list[str]
    """The strings among values of attributes, each once."""
    damage: Damaged | None  # what ends the nodes before the file does
    id: Words
    type: Int
    duration: Words  # microseconds
    ctrl: Lists  # ids
    data: Lists
    attributes: Mapping[str, AttributeColumn]
    places: Int
    """A row per node: begin and end in the file of the value that names the partner of a message or
    the group of a collective, and of the own rank. -2: there is none; -1: not known."""

    def __len__(self) -> int:
        return len(self.id)

    @property
    def on_cpu(self) -> Bool:
        """Mask of the nodes that say so."""
        cpu = self.attributes["is_cpu_op"]
        return INTEGER[cpu.kind] & (cpu.value != 0)

    @property
    def communicates(self) -> Bool:
        """Mask of collectives and messages, but those on the CPU."""
        return self.is_a(*COMM) & ~self.on_cpu

    def is_a(self, *types: int) -> Bool:
        """Mask of the nodes of these types."""
        return np.isin(self.type, types)

    def value(self, name: str) -> Int:
        """An attribute; 0 where it is missing or no integer."""
        return self.attributes[name].value

    def dependencies(self) -> tuple[Int, Words]:
        """Row, and id of the node that it needs, of every dependency; `ctrl` first."""
        rows = np.arange(len(self))
        child = [np.repeat(rows, np.diff(lists.ptr)) for lists in (self.ctrl, self.data)]
        return np.concatenate(child), np.concatenate([self.ctrl.values, self.data.values])


def nodes(path: Path) -> Iterator[et_def.NodeMessage]:
    """The nodes of a trace one by one."""
    return TraceReader(path).nodes()


def read_trace(path: Path, *, partial: bool = False) -> Trace:
    """A trace by column. Raises `Damaged`; or, if `partial`, keeps the nodes before the damage.

    Of a `partial` trace, `places` are known.
    """
    reader = TraceReader(path)
    blocks, damage, count = [reader.block([], places=partial)], None, 0
    try:
        for messages in reader.chunks():
            blocks.append(reader.block(messages, places=partial))
            count += len(messages)
            if count > MOST_NODES:
                raise Damaged(f"{path}: more than {MOST_NODES} nodes")
    except Damaged as error:
        if not partial:
            raise
        damage = error
    finally:
        reader.close()
    ids, types, durations, ctrl, data, entries, places = zip(*blocks, strict=True)
    lengths = [len(block) for block in ids]
    return Trace(
        path, reader.size, reader.metadata, reader.texts, damage, np.concatenate(ids),
        np.concatenate(types), np.concatenate(durations), _concatenated(ctrl), _concatenated(data),
        {name: _column([of[name] for of in entries], lengths) for name in WANTED},
        np.concatenate(places),
    )  # fmt: skip


class TraceReader:
    """A file under reading: its `metadata`, then its messages. Raises `Damaged`."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its metadata."""
        self.path = path
        self.texts: list[str] = []
        self._indices: dict[str, int] = {}  # of texts
        self._file, self.size = _open(path)
        self._place = 0  # byte that is read next
        self.metadata = self._metadata()

    def nodes(self) -> Iterator[et_def.NodeMessage]:
        """The nodes one by one."""
        with self._file:
            for messages in self.chunks():
                yield from map(self._node, messages)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # ---- messages --------------------------------------------------------------------------------

    def _metadata(self) -> et_def.MetadataMessage:
        if not self.size:
            raise self._damaged(0, "the file is empty; a Chakra trace begins with its metadata")
        data = self._message() or b""
        if _is_node(data):
            raise self._damaged(0, "no metadata: the first message is a node, which readers skip")
        try:
            return et_def.parse("GlobalMetadata", data)
        except ValueError as error:
            begin = self._place - len(data)
            raise self._damaged(begin, f"no valid GlobalMetadata: {error}") from None

    def chunks(self) -> Iterator[list[tuple[int, bytes]]]:
        """Messages of nodes, each with its end in the file; `Damaged` follows those before it."""
        damage = None
        more = True
        while more:
            chunk: list[tuple[int, bytes]] = []
            begin = self._place
            while more and self._place - begin < BLOCK_BYTES and len(chunk) < BLOCK_NODES:
                start = self._place
                try:
                    message = self._message()
                    if message == b"":
                        text = "an empty message where a node was expected"
                        raise self._damaged(start, text)
                except Damaged as error:
                    damage, message = error, None
                if message is None:
                    more = False
                else:
                    chunk.append((self._place, message))
            if chunk:
                yield chunk
        if damage is not None:
            raise damage

    def _message(self) -> bytes | None:
        """The next message, which follows its length; None at the end of the file."""
        begin = self._place
        length = shift = 0
        while True:
            byte = self._read(1)
            if not byte and self._place == begin:
                return None
            if not byte:
                raise self._damaged(begin, "the file ends within a message or its length")
            length |= (byte[0] & 127) << shift
            shift += 7
            if byte[0] < 128:
                break
            if shift > 63:
                raise self._damaged(begin, "not the length of a message")
        # Before the message is read: a damaged length may be huge.
        needed, left = self._place - begin + length, self.size - begin
        text = f"a message of {needed} bytes with its length"
        if needed > left:
            raise self._damaged(begin, f"{text}, but {left} are left in the file")
        if needed > MOST_BYTES:
            raise self._damaged(begin, f"{text}, wanted at most {MOST_BYTES}")
        message = self._read(length)
        if len(message) < length:
            raise self._damaged(begin, "the file ends within a message or its length")
        return message

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise Damaged(f"{self.path}: cannot be read: {error.strerror}") from error
        self._place += len(data)
        return data

    def _damaged(self, at: int, text: str) -> Damaged:
        self._file.close()
        return Damaged(f"{self.path}: byte {at}: {text}")

    # ---- columns ---------------------------------------------------------------------------------

    def _node(self, message: tuple[int, bytes]) -> et_def.NodeMessage:
        end, data = message
        try:
            node: et_def.NodeMessage = et_def.parse("Node", data)
            if len(node.attr) > MOST_ATTRIBUTES:
                raise ValueError(f"more than {MOST_ATTRIBUTES} attributes")
        except ValueError as error:
            raise self._damaged(end - len(data), f"no valid Node: {error}") from None
        return node

    def block(self, messages: Sequence[tuple[int, bytes]], *, places: bool) -> _NodeBlock:
        """Some messages as columns, with `places` if wanted."""
        nodes = [self._node(message) for message in messages]
        entries: dict[str, list[tuple[int, int, int]]] = {name: [] for name in WANTED}
        for row, node in enumerate(nodes):
            for attribute in node.attr:
                rows = entries.get(attribute.name)
                if rows is not None:
                    rows.append((row, *self._value(attribute)))
        found = np.full((len(nodes), 4), -2)
        for row, node in enumerate(nodes if places else ()):
            if node.type in _NAMES:
                found[row] = _places(node, *messages[row])
        return _NodeBlock(
            np.array([node.id for node in nodes], np.uint64),
            np.array([node.type for node in nodes], np.int64),
            np.array([node.duration_micros for node in nodes], np.uint64),
            _lists([node.ctrl_deps for node in nodes]),
            _lists([node.data_deps for node in nodes]),
            {name: np.array(rows, np.int64).reshape(-1, 3) for name, rows in entries.items()},
            found,
        )

    def _value(self, attribute: et_def.AttributeMessage) -> tuple[int, int]:
        """Kind and value of an attribute, as columns hold them."""
        field = attribute.WhichOneof("value")
        if field is None:
            return NOTHING, 0
        value: Any = getattr(attribute, field)
        if isinstance(value, str):
            index = self._indices.setdefault(value, len(self.texts))
            if index == len(self.texts):
                self.texts.append(value)
            return _KINDS[field], index
        if field == "bool_list":
            value = any(value.values)
        return _KINDS[field], min(int(value), LARGEST) if isinstance(value, int) else 0


def _open(path: Path) -> tuple[BinaryIO, int]:
    try:
        file = open_regular(path)
        size = os.fstat(file.fileno()).st_size
        if file.read(2) == b"\x1f\x8b":
            file.close()
            raise Damaged(
                f"{path}: compressed with gzip, which ASTRA-sim cannot read; gunzip it first"
            )
        file.seek(0)
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise Damaged(f"{str(path)!a}: cannot be read: {error}") from error
    return file, size


def _is_node(data: bytes) -> bool:
    """True for a Node where GlobalMetadata should be; they share no field's type."""
    try:
        node = et_def.parse("Node", data)
    except ValueError:
        return False
    return bool(node.id or node.type or node.attr)


class _NodeBlock(NamedTuple):
    """Consecutive nodes; of each attribute row, kind and value in the order of the file."""

    id: Words
    type: Int
    duration: Words
    ctrl: Lists
    data: Lists
    entries: dict[str, Int]
    places: Int


_NAMES: Mapping[int, Sequence[str]] = {
    SEND: ("comm_dst", "comm_src"),
    RECV: ("comm_src", "comm_dst"),
    COLL: ("pg_name",),
}
"""Attributes that name the partner or group, and the own rank."""


def _places(node: Any, end: int, message: bytes) -> list[int]:
    """The row of `Trace.places` of a node whose message ends at byte `end`.

    They are not known where a message is not what the official runtime would write: that one puts
    attributes last in a node, and values last in an attribute.
    """
    node.DiscardUnknownFields()
    known = node.SerializeToString() == message
    places: dict[str, tuple[int, int]] = {}
    for attribute in reversed(node.attr):
        field = attribute.WhichOneof("value")
        width = 0
        if field == "string_val":
            width = len(attribute.string_val.encode())
        elif field in _VARINTS:
            width = len(varint(getattr(attribute, field)))
        known_here = known and (field == "string_val" or field in _VARINTS)
        places.setdefault(attribute.name, (end - width, end) if known_here else (-1, -1))
        size = attribute.ByteSize()
        end -= 1 + len(varint(size)) + size  # key and length, each before the attribute
    partner, own, *_ = (*_NAMES[node.type], "")
    return [*places.get(partner, (-2, -2)), *places.get(own, (-2, -2))]


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    ptr = np.concatenate(([0], np.cumsum([len(numbers) for numbers in lists])))
    return Lists(ptr, np.fromiter(chain.from_iterable(lists), np.uint64, int(ptr[-1])))


def _concatenated(blocks: Sequence[Lists]) -> Lists:
    counts = np.concatenate([np.diff(lists.ptr) for lists in blocks])
    ptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Lists(ptr, np.concatenate([lists.values for lists in blocks]))


def _column(entries: Sequence[Int], lengths: Sequence[int]) -> AttributeColumn:
    """The column of an attribute, of its entries in each block of so many nodes."""
    count = sum(lengths)
    if not any(map(len, entries)):  # no memory for an attribute that no node has
        none, zero = np.broadcast_to(False, count), np.broadcast_to(np.int64(0), count)
        return AttributeColumn(none, np.broadcast_to(np.uint8(0), count), zero, none, none)
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), [len(of) for of in entries])
    rows, kinds, values = np.concatenate(entries).T
    rows = rows + first
    kind, value = np.zeros(count, np.uint8), np.zeros(count, np.int64)
    kind[rows], value[rows] = kinds, values  # of equal rows the last counts
    times = np.bincount(rows, minlength=count)
    differing = np.zeros(count, bool)
    differing[rows[(kinds != kind[rows]) | (values != value[rows])]] = True
    return AttributeColumn(times > 0, kind, value, times > 1, differing)
