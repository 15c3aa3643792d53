"""The Chakra schema: the messages and enums of a trace, for writers and readers.

They are those of MLCommons' et_def.proto, unchanged from 0.0.4 to 1.0.0. The messages live in a
descriptor pool of their own: a second, differing copy of that file in the default pool, such as
mlc-chakra brings, would be refused. protobuf is loaded when the first trace is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any, Protocol

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


class NodeType(IntEnum):
    """The enum NodeType of the schema."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


class CommType(IntEnum):
    """The enum CollectiveCommType of the schema."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


# Message -> its fields: type (`*`: repeated), name, number.
MESSAGES = {
    "Node": "uint64 id 1, string name 2, NodeType type 3, *uint64 ctrl_deps 4, "
    "*uint64 data_deps 5, uint64 start_time_micros 6, uint64 duration_micros 7, IOInfo inputs 8, "
    "IOInfo outputs 9, *AttributeProto attr 10",
    "IOInfo": "string values 1, string shapes 2, string types 3",
    "GlobalMetadata": "string version 1, *AttributeProto attr 2",
}


class AttributeMessage(Protocol):
    """A message AttributeProto; the type of its value is a name like `int64_val`."""

    name: str

    def WhichOneof(self, oneof_group: str) -> str | None:
        """Name of the field that holds the value; the only oneof is called `value`."""
        ...


class MetadataMessage(Protocol):
    """A message GlobalMetadata."""

    version: str
    attr: Sequence[AttributeMessage]


class NodeMessage(Protocol):
    """A message Node."""

    id: int
    name: str
    type: int
    ctrl_deps: Sequence[int]
    data_deps: Sequence[int]
    start_time_micros: int
    duration_micros: int
    attr: Sequence[AttributeMessage]


def values(message: NodeMessage | MetadataMessage) -> dict[str, tuple[str, Any]]:
    """Attributes by name, each with its type and value.

    Of a name that comes twice the last counts, as in MLCommons' feeder (et_feeder_node.cpp). A list
    is a Python list; an attribute without a value has type "".
    """
    found: dict[str, tuple[str, Any]] = {}
    for attr in message.attr:
        kind = attr.WhichOneof("value") or ""
        value: Any = getattr(attr, kind) if kind else None
        found[attr.name] = kind, list(value.values) if kind.endswith("_list") else value
    return found


@cache
def message(name: str) -> Any:
    """The class of one of the schema's messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pb: Any = descriptor_pb2
    file = pb.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name_of_enum, enum in (("NodeType", NodeType), ("CollectiveCommType", CommType)):
        defined = file.enum_type.add(name=name_of_enum)
        for member in enum:
            defined.value.add(name=member.name, number=member.value)
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
    """A message of the schema from its bytes; ValueError where they are no such message.

    protobuf's three runtimes raise different exceptions for bad bytes.

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
