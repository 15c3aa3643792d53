"""Reads Chakra traces of any writer into numpy columns, in blocks: one pass, bounded memory.

Only the splitting of the file into messages loops over nodes in Python; see `columns`. A node of a
form that `columns` does not know is first rewritten by the official runtime, which thereby decides
what is a valid message. A damaged file yields the blocks before the damage, and then `Damaged`. A
length in the file is checked against the file's size before anything is allocated.

>>> node = et_def.message("Node")(id=7, type=4, data_deps=[5, 6])
>>> _ = node.attr.add(name="num_ops", int64_val=300)
>>> block = NodeParser().block(node.SerializeToString())
>>> block.id.tolist(), block.data.values.tolist(), block.attributes["num_ops"].value.tolist()
([7], [5, 6], [300])
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.check.files import columns as scan
from stagewright.check.files.columns import (
    LARGEST,
    NOTHING,
    STRING,
    Fields,
    InvalidMessage,
    Lists,
    MessageBytes,
    Words,
)
from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.trace.formats import et_def

CHUNK = 1 << 20  # bytes read at a time: their columns stay in the cache
MOST_FIELDS = 4096  # of one node, its dependencies packed; real nodes have some 20
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

# Tags of Node's fields, each with its wire type; lists of numbers come packed and not.
_ID, _NAME, _TYPE, _START, _DURATION, _ATTR = 0x08, 0x12, 0x18, 0x30, 0x38, 0x52
_CTRL, _DATA, _INFO = (0x22, 0x20), (0x2A, 0x28), (0x42, 0x4A)
_KNOWN = np.zeros(256, bool)
_KNOWN[[_ID, _NAME, _TYPE, _START, _DURATION, _ATTR, *_CTRL, *_DATA, *_INFO]] = True


class Damaged(UserError):
    """A file that cannot be read as a trace from some byte on."""


NO_ROWS: Int = np.zeros(0, np.int64)


class AttributeColumn(NamedTuple):
    """One attribute, of the nodes that have it; of one that comes twice, the last counts, as in
    MLCommons' feeder (et_feeder_node.cpp)."""

    row: Int  # of the block, ascending
    kind: NDArray[np.uint8]  # number of its value's type in `et_def.VALUES`, + 1 for lists; 0: none
    value: Int
    """Integers, at most 2**63 - 1; of a string its place in `NodeParser.texts`; of a list
    of truths 1 if any is true; others: 0."""
    at: Int  # byte of the file where a varint or a string begins, and ends; -1: unknown
    end: Int
    again: Int = NO_ROWS  # of the block, where the attribute comes more than once
    differing: Int = NO_ROWS  # and with different values


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """Consecutive nodes of a file, by column."""

    source: bytes  # what holds the nodes' messages
    first: int  # place of `source` in the file
    at: Int  # where each message begins in `source`, and ends
    end: Int
    id: Words
    type: Int
    duration: Words  # microseconds
    ctrl: Lists  # ids
    data: Lists
    attributes: dict[str, AttributeColumn]

    def __len__(self) -> int:
        return len(self.at)

    def node(self, row: int) -> et_def.NodeMessage:
        """A node, by the official runtime."""
        return et_def.parse("Node", self.source[self.at[row] : self.end[row]])


class TraceReader:
    """A trace: its `metadata`, then, by iteration, its blocks. Raises `Damaged`."""

    def __init__(self, path: Path, wanted: Sequence[str] = WANTED) -> None:
        """Open the file and read its metadata."""
        self.path = path
        self.parser = NodeParser(wanted, str(path))
        self._file, self.size = _open(path)
        self._chunks = self._messages()
        self.metadata = self._metadata()

    def __iter__(self) -> Iterator[NodeBlock]:
        """The nodes."""
        with self._file:
            for source, first, at, end in self._chunks:
                yield self.parser.block(source, first, at, end)

    def nodes(self) -> Iterator[et_def.NodeMessage]:
        """The nodes one by one, by the official runtime."""
        for block in self:
            for row in range(len(block)):
                yield block.node(row)

    def close(self) -> None:
        """Close the file of a reader that is not iterated."""
        self._file.close()

    def _messages(self) -> Iterator[tuple[bytes, int, Int, Int]]:
        """Bytes of the file, their place, the messages in them: first the metadata by itself."""
        rest, first, wanted, most = b"", 0, 4096, 1
        while True:
            more = self._read(wanted)
            source = rest + more
            cut = _split(source, most)
            if cut.starts:
                yield source, first, np.array(cut.starts), np.array(cut.ends)
                most = None
            rest = source[cut.done :]
            first += cut.done
            if cut.problem:
                raise self._damaged(first, cut.problem)
            if not more:
                break
            if cut.need > self.size - first:  # before reading: a damaged length may be huge
                left = self.size - first
                raise self._damaged(first, f"{_message(cut.need)}, but {left} are left in the file")
            if cut.need > scan.MOST_BYTES:
                raise self._damaged(
                    first, f"{_message(cut.need)}, wanted at most {scan.MOST_BYTES}"
                )
            wanted = max(CHUNK, cut.need)
        if rest:
            raise self._damaged(first, "the file ends within a message or its length")

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise Damaged(f"{self.path}: cannot be read: {error.strerror}") from error

    def _damaged(self, at: int, text: str) -> Damaged:
        self._file.close()
        return Damaged(f"{self.path}: byte {at}: {text}")

    def _metadata(self) -> et_def.MetadataMessage:
        source, _, at, end = next(self._chunks, (b"", 0, (0,), (0,)))
        data = source[at[0] : end[0]]
        if not self.size:
            raise self._damaged(0, "the file is empty; a Chakra trace begins with its metadata")
        if _is_node(data):
            raise self._damaged(0, "no metadata: the first message is a node, which readers skip")
        try:
            return et_def.parse("GlobalMetadata", data)
        except ValueError as error:
            raise self._damaged(int(at[0]), f"no valid GlobalMetadata: {error}") from None


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


class _Cut(NamedTuple):
    """Where messages begin and end; where the rest begins, and the bytes it needs, if known."""

    starts: list[int]
    ends: list[int]
    done: int
    need: int = 0
    problem: str = ""


def _split(data: bytes, most: int | None) -> _Cut:
    """The messages in some bytes of a file, each behind its length; `most` of them."""
    starts: list[int] = []
    ends: list[int] = []
    at, size = 0, len(data)
    while at < size and len(starts) != most:
        length, body = data[at], at + 1
        shift = 0
        while data[body - 1] > 127:
            if body == size:
                return _Cut(starts, ends, at)
            shift += 7
            if shift > 63:
                return _Cut(starts, ends, at, problem="not the length of a message")
            length += (data[body] - 1) << shift  # - 1: the bit of the byte before
            body += 1
        if not length and most is None:
            return _Cut(starts, ends, at, problem="an empty message where a node was expected")
        after = body + length
        if after > size:
            return _Cut(starts, ends, at, after - at)
        starts.append(body)
        ends.append(after)
        at = after
    return _Cut(starts, ends, at)


def _message(size: int) -> str:
    return f"a message of {size} bytes with its length"


def _is_node(data: bytes) -> bool:
    """Whether a message is a Node where GlobalMetadata should be; they share no field's type."""
    try:
        node = et_def.parse("Node", data)
    except ValueError:
        return False
    return bool(node.id or node.type or node.attr)


class NodeParser:
    """Turns messages into columns."""

    def __init__(self, wanted: Sequence[str] = WANTED, name: str = "-") -> None:
        """`wanted`: the attributes to read; `name`: of the file, for errors."""
        self.wanted = tuple(wanted)
        self.name = name
        self.texts: list[str] = []  # of attributes
        self._places: dict[str, int] = {}
        self._rare: dict[bytes, tuple[str, int, int | str]] = {}

    def block(
        self, source: bytes, first: int = 0, at: Int | None = None, end: Int | None = None
    ) -> NodeBlock:
        """The columns of the messages in `source`, which lies at `first` in the file."""
        if at is None or end is None:
            at, end = np.array([0]), np.array([len(source)])
        try:
            data, begin, known = MessageBytes(source), at, first
            fields = scan.walk(data, at, end, _KNOWN, 64)
            if len(fields.odd):
                data, begin, stop = _rewritten(source, at, end, fields.odd)
                fields, known = scan.walk(data, begin, stop, _KNOWN, MOST_FIELDS), -1
            if len(fields.odd):
                raise InvalidMessage(int(fields.odd[0]), f"more than {MOST_FIELDS} fields")
            return self._columns(source, first, at, end, data, fields, known)
        except InvalidMessage as odd:
            place = first + int(at[odd.row])
            raise Damaged(f"{self.name}: byte {place}: no valid Node: {odd.why}") from None

    def _columns(
        self,
        source: bytes,
        first: int,
        at: Int,
        end: Int,
        data: MessageBytes,
        fields: Fields,
        known: int,
    ) -> NodeBlock:
        count = len(at)
        places = {tag: np.flatnonzero(fields.tag == tag) for tag in np.unique(fields.tag).tolist()}
        none = np.zeros(0, np.int64)

        def of(*tags: int) -> Int:
            return np.concatenate([places.get(tag, none) for tag in tags])

        scalars = [np.zeros(count, np.uint64) for _ in range(3)]
        for tag, column in zip((_ID, _TYPE, _DURATION), scalars, strict=True):
            column[fields.row[of(tag)]] = fields.value[of(tag)]
        some = of(_NAME)
        data.check_text(fields.at[some], fields.end[some], fields.row[some])
        _check_infos(data, fields, of(*_INFO))
        return NodeBlock(
            source,
            first,
            at,
            end,
            scalars[0],
            scalars[1].astype(np.uint32).astype(np.int32).astype(np.int64),
            scalars[2],
            scan.lists(data, fields, np.sort(of(*_CTRL)), count),
            scan.lists(data, fields, np.sort(of(*_DATA)), count),
            self._attributes(data, fields, of(_ATTR), known),
        )

    def _attributes(
        self, data: MessageBytes, fields: Fields, some: Int, first: int
    ) -> dict[str, AttributeColumn]:
        row, at, end = fields.row[some], fields.at[some], fields.end[some]
        found = scan.attributes(data, at, end, self.wanted)
        found.at[found.odd] = found.end[found.odd] = -1
        for nth in np.flatnonzero(found.odd).tolist():
            name, kind, value = self._official(data.raw[at[nth] : end[nth]], int(row[nth]))
            found.name[nth] = self.wanted.index(name) if name in self.wanted else -1
            found.kind[nth] = kind
            found.value[nth] = self._text(value) if isinstance(value, str) else value
        text = np.flatnonzero((found.kind == STRING) & ~found.odd)
        data.check_text(found.at[text], found.end[text], row[text])
        text = text[found.name[text] >= 0]
        found.value[text] = self._texts(data, found.at[text], found.end[text])
        if first < 0:
            found.at[:] = found.end[:] = -1
        else:
            found.at[~found.odd] += first
            found.end[~found.odd] += first
        return {name: _column(row, found, nth) for nth, name in enumerate(self.wanted)}

    def _official(self, data: bytes, row: int) -> tuple[str, int, int | str]:
        """An attribute of a rarer form; the same few come again and again."""
        if data not in self._rare:
            if len(self._rare) >= 1 << 16:
                self._rare.clear()
            self._rare[data] = _attribute(data, row)
        return self._rare[data]

    def _texts(self, data: MessageBytes, at: Int, end: Int) -> Int:
        sample, which = scan.representatives(data, at, end)

        def text(nth: int) -> int:
            return self._text(data.raw[at[nth] : end[nth]].decode())

        known = np.array([text(nth) for nth in sample.tolist()], np.int64)
        places = known[which] if len(known) else which
        for nth in np.flatnonzero(which < 0).tolist():
            places[nth] = text(nth)
        return places

    def _text(self, text: str) -> int:
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def _column(row: Int, found: scan.Attributes, nth: int) -> AttributeColumn:
    every = np.flatnonzero(found.name == nth)[::-1]  # fields of a node come in their order
    rows, last, times = np.unique(row[every], return_index=True, return_counts=True)
    mine = every[last]
    of_last = mine[np.searchsorted(rows, row[every])]
    differs = found.kind[every] != found.kind[of_last]
    differs |= found.value[every] != found.value[of_last]
    return AttributeColumn(
        rows,
        found.kind[mine],
        found.value[mine],
        found.at[mine],
        found.end[mine],
        rows[times > 1],
        np.unique(row[every[differs]]),
    )


def _rewritten(source: bytes, at: Int, end: Int, odd: Int) -> tuple[MessageBytes, Int, Int]:
    """The same messages, those in `odd` as the official runtime writes them."""
    pieces = [source[a:b] for a, b in zip(at.tolist(), end.tolist(), strict=True)]
    for row in map(int, odd):
        pieces[row] = _canonical(pieces[row], row)
    ends = np.cumsum([len(piece) for piece in pieces])
    return MessageBytes(b"".join(pieces)), np.concatenate(([0], ends[:-1])), ends


def _canonical(data: bytes, row: int) -> bytes:
    try:
        node = et_def.parse("Node", data)
    except ValueError as error:
        raise InvalidMessage(row, str(error)) from None
    node.DiscardUnknownFields()
    return node.SerializeToString()


def _attribute(data: bytes, row: int) -> tuple[str, int, int | str]:
    """Name, type and value of an attribute, by the official runtime; 0 for other values."""
    try:
        attribute = et_def.parse("AttributeProto", data)
    except ValueError as error:
        raise InvalidMessage(row, f"an attribute: {error}") from None
    field = attribute.WhichOneof("value")
    if field is None:
        return attribute.name, NOTHING, 0
    kind, _, form = field.rpartition("_")
    value: Any = getattr(attribute, field)
    if isinstance(value, int):
        value = min(int(value), LARGEST)
    elif field == "bool_list":
        value = int(any(value.values))
    elif not isinstance(value, str):
        value = 0
    return attribute.name, et_def.VALUES[kind] + (form == "list"), value


def _check_infos(data: MessageBytes, fields: Fields, some: Int) -> None:
    """Check that inputs and outputs, which no rule reads, are messages of the schema."""
    for nth in some.tolist():
        try:
            et_def.parse("IOInfo", data.raw[fields.at[nth] : fields.end[nth]])
        except ValueError as error:
            raise InvalidMessage(int(fields.row[nth]), f"inputs or outputs: {error}") from None
