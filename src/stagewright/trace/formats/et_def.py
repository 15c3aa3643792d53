"""The Chakra schema, and a reader of traces that anybody wrote.

The messages are those of MLCommons' et_def.proto, unchanged from 0.0.4 to 1.0.0. They live in a
descriptor pool of their own: a second, differing copy of that file in the default pool, such as
mlc-chakra brings, would be refused. protobuf is loaded when the first trace is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from stagewright.errors import UserError

# Name and number of AttributeProto's values; each has a list form with the next number.
VALUES = {
    "double": 3,
    "float": 5,
    "int32": 7,
    "int64": 9,
    "uint32": 11,
    "uint64": 13,
    "sint32": 15,
    "sint64": 17,
    "fixed32": 19,
    "fixed64": 21,
    "sfixed32": 23,
    "sfixed64": 25,
    "bool": 27,
    "string": 29,
    "bytes": 31,
}
NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
COMM_TYPES = (
    "ALL_REDUCE",
    "REDUCE",
    "ALL_GATHER",
    "GATHER",
    "SCATTER",
    "BROADCAST",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK",
    "BARRIER",
)
# Message -> its fields: type (`*`: repeated), name, number.
MESSAGES = {
    "Node": "uint64 id 1, string name 2, NodeType type 3, *uint64 ctrl_deps 4, "
    "*uint64 data_deps 5, uint64 start_time_micros 6, uint64 duration_micros 7, IOInfo inputs 8, "
    "IOInfo outputs 9, *AttributeProto attr 10",
    "IOInfo": "string values 1, string shapes 2, string types 3",
    "GlobalMetadata": "string version 1, *AttributeProto attr 2",
}


class Attribute(Protocol):
    """A message AttributeProto; the type of its value is a name like `int64_val`."""

    name: str

    def WhichOneof(self, oneof_group: str) -> str | None:
        """Name of the field that holds the value; the only oneof is called `value`."""
        ...


class Metadata(Protocol):
    """A message GlobalMetadata."""

    version: str
    attr: Sequence[Attribute]


class Node(Protocol):
    """A message Node."""

    id: int
    name: str
    type: int
    ctrl_deps: Sequence[int]
    data_deps: Sequence[int]
    start_time_micros: int
    duration_micros: int
    attr: Sequence[Attribute]


def values(message: Node | Metadata) -> dict[str, tuple[str, Any]]:
    """Attributes by name, each with the type and the value; of a name given twice, the first.

    A list is a list; an attribute without a value has type "".
    """
    found: dict[str, tuple[str, Any]] = {}
    for attr in message.attr:
        kind = attr.WhichOneof("value") or ""
        value: Any = getattr(attr, kind) if kind else None
        found.setdefault(attr.name, (kind, list(value.values) if kind.endswith("_list") else value))
    return found


@cache
def message(name: str) -> Any:
    """The class of one of the schema's messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pb: Any = descriptor_pb2
    file = pb.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for enum, names in (("NodeType", NODE_TYPES), ("CollectiveCommType", COMM_TYPES)):
        defined = file.enum_type.add(name=enum)
        for number, value in enumerate(names):
            defined.value.add(name=value, number=number)
    attribute = file.message_type.add(name="AttributeProto")
    _add_field(attribute, "string", "name", 1)
    _add_field(attribute, "string", "doc_string", 2)
    attribute.oneof_decl.add(name="value")
    for kind, number in VALUES.items():
        listed = f"{kind.capitalize()}List"
        _add_field(file.message_type.add(name=listed), f"*{kind}", "values", 1)
        _add_field(attribute, kind, f"{kind}_val", number, oneof=True)
        _add_field(attribute, listed, f"{kind}_list", number + 1, oneof=True)
    for title, fields in MESSAGES.items():
        defined = file.message_type.add(name=title)
        for kind, label, number in (text.split() for text in fields.split(",")):
            _add_field(defined, kind, label, int(number))
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))


def parse(name: str, data: bytes) -> Any:
    """A message of the schema from its bytes; ValueError where they are none.

    protobuf's three runtimes tell bad bytes in several ways.

    >>> parse("Node", bytes([8, 42])).id
    42
    """
    from google.protobuf.message import DecodeError

    try:
        return message(name).FromString(data)
    except (DecodeError, ValueError) as error:
        raise ValueError(str(error)) from None


def _add_field(to: Any, kind: str, name: str, number: int, *, oneof: bool = False) -> None:
    field = to.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
    kind = kind.lstrip("*")
    if kind in VALUES:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    else:
        field.type = field.TYPE_ENUM if kind == "NodeType" else field.TYPE_MESSAGE
        field.type_name = f".ChakraProtoMsg.{kind}"
    if oneof:
        field.oneof_index = 0


def read(path: Path) -> tuple[Metadata, Iterator[Node]]:
    """The metadata and, one by one, the nodes of a trace; UserError where it is damaged."""
    with _open(path) as file:
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path}: compressed, which ASTRA-sim cannot read; gunzip it first")
        file.seek(0)
        first = next(_messages(file, path, 0), None)
    if first is None:
        raise UserError(f"{path}: empty; a Chakra trace begins with its metadata")
    at, data = first
    metadata = cast(Metadata, _parse("GlobalMetadata", data, path, at))
    return metadata, _nodes(path, at + len(data))


def _nodes(path: Path, start: int) -> Iterator[Node]:
    with _open(path) as file:
        file.seek(start)
        for at, data in _messages(file, path, start):
            if not data:
                raise UserError(f"{path}: byte {at}: empty message where a node was expected")
            yield cast(Node, _parse("Node", data, path, at))


def _open(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; name one trace")
        return path.open("rb", buffering=1 << 18)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{str(path)!a}: cannot be read: {error}") from error


def _messages(file: BinaryIO, path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """From byte `start` on, where each message begins, after its length, and its bytes."""
    size = os.fstat(file.fileno()).st_size
    at = start
    while at < size:
        frame = at
        length = shift = 0
        more = True
        while more:
            byte = file.read(1)
            if not byte:
                raise UserError(f"{path}: byte {frame}: the file ends within a message's length")
            if shift > 63:
                raise UserError(f"{path}: byte {frame}: no message's length; is this a trace?")
            length |= (byte[0] & 0x7F) << shift
            more = byte[0] > 0x7F
            shift += 7
            at += 1
        # Looked at before reading: a damaged length may name any size.
        if length > size - at:
            raise UserError(
                f"{path}: byte {frame}: a message of {length} bytes, "
                f"but the file has only {size - at} more"
            )
        yield at, file.read(length)
        at += length


def _parse(name: str, data: bytes, path: Path, at: int) -> Any:
    try:
        return parse(name, data)
    except ValueError as error:
        raise UserError(f"{path}: byte {at}: no valid {name}: {error}") from error
