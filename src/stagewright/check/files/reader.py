"""Reads Chakra traces of any writer into numpy columns, with protobuf's official runtime.

Nodes come in blocks, so that memory is bounded. A damaged file yields the blocks before the damage,
and then raises `Damaged`. A length in the file is checked against the file's size before anything
is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.trace.formats import et_def
from stagewright.trace.formats.et_def import VALUES
from stagewright.trace.formats.wire import Words, varint

BLOCK_BYTES = 1 << 20
BLOCK_NODES = 1 << 13
MOST_BYTES = 1 << 26  # of one message
MOST_ATTRIBUTES = 4096  # of one node; real nodes have some 20
LARGEST = 2**63 - 1  # what larger numbers are read as
STRING, BOOL, NOTHING = VALUES["string"], VALUES["bool"], 0

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
    """An attribute of every node of a block; zeros where a node lacks it.

    Of one that comes twice in a node the last counts, as in MLCommons' feeder (et_feeder_node.cpp).
    """

    present: Bool
    kind: NDArray[np.uint8]  # number of its value's type in `et_def.VALUES`, + 1 for lists; 0: none
    value: Int
    """Integers, at most 2**63 - 1; of a string its index in `TraceReader.texts`; of a list of
    truths 1 if any is true; 0 of any other value."""
    again: Bool  # comes more than once
    differing: Bool  # and with different values


class Lists(NamedTuple):
    """A list of numbers per row: those of row `i` are `values[ptr[i]:ptr[i + 1]]`."""

    ptr: Int
    values: Words


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """Consecutive nodes of a file, by column."""

    nodes: list[et_def.NodeMessage]
    messages: list[tuple[int, bytes]]  # each with its end in the file
    id: Words
    type: Int
    duration: Words  # microseconds
    ctrl: Lists  # ids
    data: Lists
    attributes: dict[str, AttributeColumn]

    def __len__(self) -> int:
        return len(self.nodes)

    def dependencies(self) -> tuple[Int, Words]:
        """Row, and id of the node that it needs, of every dependency; `ctrl` first."""
        rows = np.arange(len(self))
        child = [np.repeat(rows, np.diff(lists.ptr)) for lists in (self.ctrl, self.data)]
        return np.concatenate(child), np.concatenate([self.ctrl.values, self.data.values])

    def value_places(self, row: int) -> dict[str, tuple[int, int]]:
        """Begin and end in the file of varints and strings in a node's attributes, by name.

        Empty where a message is not what the official runtime would write: that one puts attributes
        last in a node, and values last in an attribute.
        """
        node: Any = self.nodes[row]
        end, message = self.messages[row]
        node.DiscardUnknownFields()
        if node.SerializeToString() != message:
            return {}
        places: dict[str, tuple[int, int]] = {}
        for attribute in reversed(node.attr):
            field = attribute.WhichOneof("value")
            if field == "string_val":
                places.setdefault(attribute.name, (end - len(attribute.string_val.encode()), end))
            elif field in _VARINTS:
                width = len(varint(getattr(attribute, field)))
                places.setdefault(attribute.name, (end - width, end))
            size = attribute.ByteSize()
            end -= 1 + len(varint(size)) + size  # key and length, each before the attribute
        return places


class TraceReader:
    """A trace: its `metadata`, then, by iteration, its blocks. Raises `Damaged`."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its metadata."""
        self.path = path
        self.texts: list[str] = []
        """The strings among values of attributes, each once, as far as the file has been read."""
        self._indices: dict[str, int] = {}  # of texts
        self._file, self.size = _open(path)
        self._place = 0  # byte that is read next
        self.metadata = self._metadata()

    def __iter__(self) -> Iterator[NodeBlock]:
        """The nodes in blocks."""
        with self._file:
            for messages in self._chunks():
                yield self._block(messages)

    def nodes(self) -> Iterator[et_def.NodeMessage]:
        """The nodes one by one."""
        with self._file:
            for messages in self._chunks():
                yield from map(self._node, messages)

    def close(self) -> None:
        """Close the file of a reader that is not iterated."""
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

    def _chunks(self) -> Iterator[list[tuple[int, bytes]]]:
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

    def _block(self, messages: list[tuple[int, bytes]]) -> NodeBlock:
        nodes = [self._node(message) for message in messages]
        entries: dict[str, list[tuple[int, int, int]]] = {name: [] for name in WANTED}
        for row, node in enumerate(nodes):
            for attribute in node.attr:
                rows = entries.get(attribute.name)
                if rows is not None:
                    rows.append((row, *self._value(attribute)))
        return NodeBlock(
            nodes,
            messages,
            np.array([node.id for node in nodes], np.uint64),
            np.array([node.type for node in nodes], np.int64),
            np.array([node.duration_micros for node in nodes], np.uint64),
            _lists([node.ctrl_deps for node in nodes]),
            _lists([node.data_deps for node in nodes]),
            {name: _column(rows, len(nodes)) for name, rows in entries.items()},
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


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    ptr = np.concatenate(([0], np.cumsum([len(numbers) for numbers in lists])))
    return Lists(ptr, np.fromiter(chain.from_iterable(lists), np.uint64, int(ptr[-1])))


def _column(entries: Sequence[tuple[int, int, int]], count: int) -> AttributeColumn:
    """The column of row, kind and value of an attribute, in the order of the file."""
    rows, kinds, values = np.array(entries, np.int64).reshape(-1, 3).T
    kind, value = np.zeros(count, np.uint8), np.zeros(count, np.int64)
    kind[rows], value[rows] = kinds, values  # of equal rows the last counts
    times = np.bincount(rows, minlength=count)
    differing = np.zeros(count, bool)
    differing[rows[(kinds != kind[rows]) | (values != value[rows])]] = True
    return AttributeColumn(times > 0, kind, value, times > 1, differing)
