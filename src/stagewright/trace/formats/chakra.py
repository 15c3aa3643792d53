"""Chakra execution traces, `workload.<rank>.et`, for ASTRA-sim and other readers of that schema.

A file is `length | GlobalMetadata | (length | Node)*`; node id = row + 1. MLCommons' feeder reads
one type per attribute and takes any other for 0, and it knows data_deps only. So:

- the types below (int64_val, uint64_val, int32_val, ...) are those that it expects;
- comm_size is `Tasks.comm_bytes`, equal on all members of a group, as ASTRA-sim demands; where
  `Tasks.local_bytes` of the rank differ, local_bytes has these;
- data_deps are all dependencies, ctrl_deps those that the schedule demands (`Tasks.order`).

Ranks of one class share all bytes but the names of their groups, their own rank and their partners'
ranks (`RankFields`). Ranks whose values of these take equally many bytes form a `ChakraBatch`; it
is encoded once, as a `ChakraTemplate`, into which each rank patches its own values.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.program.columns import (
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
    intersect,
)
from stagewright.program.communicators import Users
from stagewright.trace.formats import wire
from stagewright.trace.formats.et_def import VALUES, CommType, NodeType
from stagewright.trace.formats.wire import LENGTH, VARINT, Bytes, ByteTable, MessageRows, Pieces

FILE = "workload.{rank}.et"
"""Name of a rank's file."""

VERSION = "1.0.0"  # of the schema; its messages are those of 0.0.4
BLOCK = 8192  # rows encoded at a time, so that their arrays stay in the cache

NODE_TYPES = {
    TaskKind.LOAD: NodeType.MEM_LOAD_NODE,
    TaskKind.STORE: NodeType.MEM_STORE_NODE,
    TaskKind.COMPUTE: NodeType.COMP_NODE,
    TaskKind.SEND: NodeType.COMM_SEND_NODE,
    TaskKind.RECV: NodeType.COMM_RECV_NODE,
    TaskKind.COLLECTIVE: NodeType.COMM_COLL_NODE,
}
COMM_TYPES = {name: CommType[name.upper()] for name in COLLECTIVES}
_INT32, _INT64, _UINT64, _BOOL, _STRING = (
    VALUES[name] for name in ("int32", "int64", "uint64", "bool", "string")
)


def plan(program: Program, ranks: Int, provenance: Mapping[str, str | int]) -> list[ChakraBatch]:
    """The batches that write the files of `ranks`, ascending.

    `provenance` goes into every file's metadata.
    """
    fields = RankFields(program)
    batches: list[ChakraBatch] = []
    for rank_class in program.classes:
        class_ranks = intersect(rank_class.ranks, ranks)
        if not len(class_ranks):
            continue
        codes = fields.used(rank_class.tasks)
        header = metadata({**provenance, "pipeline_rank": rank_class.pipeline_rank})
        for widths, batch_ranks in fields.by_width(codes, class_ranks):
            batches.append(
                ChakraBatch(
                    rank_class, batch_ranks, fields, dict(zip(codes, widths, strict=True)), header
                )
            )
    return batches


def encode(program: Program, rank: int, provenance: Mapping[str, str | int]) -> bytes:
    """The file of one rank."""
    (batch,) = plan(program, np.array([rank]), provenance)
    with batch.template().stamped(rank) as data:
        return bytes(data)


def comm_group(program: Program, users: Sequence[Users] | None = None) -> Iterator[bytes]:
    """The groups that `pg_name` names, for ASTRA-sim: `{"<id>":[ranks], ...}`, one a line.

    In pieces, since a million ranks have some ten million bytes of groups. `users` as in
    `Program.group_chunks`.
    """
    before = "{\n"
    for ids, ranks in program.group_chunks(users):
        if not len(ids):
            continue
        lines = (
            f'"{group}":[{",".join(map(str, members.tolist()))}]'
            for group, members in zip(ids.tolist(), ranks, strict=True)
        )
        yield (before + ",\n".join(lines)).encode()
        before = ",\n"
    yield b"\n}\n" if before[0] == "," else b"{\n\n}\n"


def metadata(provenance: Mapping[str, str | int]) -> bytes:
    """The first message of a file. Readers skip it unseen, but take an empty one for the end."""
    body = wire.field(1, VERSION.encode())
    for name, value in provenance.items():
        if isinstance(value, str):
            body += wire.field(2, _text(name, value))
        else:
            body += wire.field(2, _value(name, _INT64, wire.varint(value)))
    return wire.varint(len(body)) + body


def _value(name: str, number: int, value: bytes) -> bytes:
    """A message AttributeProto; `value` begins with its length where the type has one."""
    wire_type = LENGTH if number == _STRING else VARINT
    return wire.field(1, name.encode()) + wire.key(number, wire_type) + value


def _text(name: str, text: str) -> bytes:
    data = text.encode()
    return _value(name, _STRING, wire.varint(len(data)) + data)


def _attr(value: bytes) -> bytes:
    """An attribute as a field of a Node."""
    return wire.field(10, value)


def _number(name: str, number: int) -> ByteTable:
    """Headers of a numeric attribute, by the length of the varint that follows: 1 to 10 bytes."""
    return ByteTable([_attr(_value(name, number, bytes(n)))[:-n] for n in range(1, 11)])


_NUM_OPS = _number("num_ops", _INT64)
_TENSOR_SIZE = _number("tensor_size", _UINT64)
_COMM_SIZE = _number("comm_size", _INT64)
_LOCAL_BYTES = _number("local_bytes", _INT64)
_COMM_TAG = _number("comm_tag", _INT32)
_LAYER = _number("layer", _INT32)
_MICROBATCH = _number("microbatch", _INT32)
_COMM_TYPE = ByteTable(
    [_attr(_value("comm_type", _INT64, wire.varint(COMM_TYPES[name]))) for name in COLLECTIVES]
)
_IS_CPU_OP = _attr(_value("is_cpu_op", _BOOL, b"\0"))


class RankFields:
    """Fields that differ between ranks of a class: groups, own rank, peers. Each has a *code*.

    Code `s` is the group of communicator slot `s`; then comes the own rank; then the peers by slot.
    """

    def __init__(self, program: Program) -> None:
        """The codes of a program."""
        self._program = program
        self.rank_code = len(program.communicators)

    def used(self, tasks: Tasks) -> list[int]:
        """The codes in use by the tasks of a class, ascending."""
        slots = tasks.slot.astype(np.int64)
        groups = np.unique(slots[tasks.kind == TaskKind.COLLECTIVE])
        peers = np.unique(slots[(tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)])
        own_code = [self.rank_code] if len(peers) else []
        return [*groups.tolist(), *own_code, *(self.rank_code + 1 + peers).tolist()]

    def values(self, code: int, ranks: Int) -> Int:
        """The value of a code for each of some ranks."""
        if code < self.rank_code:
            return self._program.group_of(code, ranks)
        return (
            ranks
            if code == self.rank_code
            else self._program.peer_of(code - self.rank_code - 1, ranks)
        )

    def by_width(self, codes: Sequence[int], ranks: Int) -> Iterator[tuple[list[int], Int]]:
        """Ranks with values of equal widths: the bytes of each code's value, and the ranks."""
        group = np.zeros(len(ranks), np.int64)
        for code in codes:
            values = self.values(code, ranks)
            # No value takes more than 19 digits; kinds are counted anew to stay small numbers.
            group = np.unique(group * 20 + self._widths(code, values), return_inverse=True)[1]
        order = np.argsort(group, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            first_rank = ranks[rows[:1]]
            widths = [int(self._widths(code, self.values(code, first_rank))[0]) for code in codes]
            yield widths, ranks[rows]

    def _widths(self, code: int, values: Int) -> Int:
        """Bytes that values take in a file, as digits or as varints."""
        if code >= self.rank_code:
            return wire.varints(values).lengths
        if not values.all():
            raise ValueError("a collective of a rank that is in no group of its communicator")
        return np.searchsorted(10 ** np.arange(1, 19), values, side="right") + 1

    def payloads(self, code: int, ranks: Int, width: int) -> Pieces:
        """The bytes of a code's value in the files of some ranks, which take `width` each."""
        values = self.values(code, ranks)
        if code < self.rank_code:
            digits = values[:, None] // 10 ** np.arange(width - 1, -1, -1) % 10 + ord("0")
            return np.ascontiguousarray(digits.astype(np.uint8)).view(f"V{width}")[:, 0]
        pieces = wire.varints(values).pieces()
        matrix = pieces.view(np.uint8).reshape(len(values), pieces.dtype.itemsize)
        return np.ascontiguousarray(matrix[:, :width]).view(f"V{width}")[:, 0]


class Patch(NamedTuple):
    """The places in a file that hold values of one width."""

    at: Int
    which: Int  # by place, which column of values
    values: Pieces  # a row per rank


class ChakraTemplate:
    """The bytes that the ranks of a batch share, and the places where they differ."""

    def __init__(self, data: Bytes, patches: list[Patch], ranks: Int) -> None:
        """Keep `data`, which the first of `ranks` patches in place."""
        self.memory = len(data)
        self._source = data
        self._idle = [data]  # buffers that no rank is using
        self._patches = patches
        self._ranks = ranks

    @contextmanager
    def stamped(self, rank: int) -> Generator[memoryview]:
        """The file of one rank, valid inside the block only; several threads may stamp at once."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            # A copy taken while another rank patches the source serves as well: every place that
            # differs is patched again.
            buffer = self._source.copy()
        row = self._ranks.searchsorted(rank)
        try:
            for at, which, values in self._patches:
                wire.scatter(buffer, at, values[row].take(which))
            yield buffer.data
        finally:
            self._idle.append(buffer)


class Mark(NamedTuple):
    """Places at which rows of a block have the value of a code."""

    at: Int  # from the start of the row
    rows: Int
    which: Int  # index into the codes of the batch


class ChakraBatch:
    """Ranks of one class that write the values of equal codes equally wide."""

    def __init__(
        self,
        rank_class: RankClass,
        ranks: Int,
        fields: RankFields,
        widths: dict[int, int],
        header: bytes,
    ) -> None:
        """`widths`: bytes of the value of each code in use, ascending codes."""
        self.ranks = ranks
        self._tasks = rank_class.tasks
        self._fields = fields
        self._codes = np.array(list(widths), np.int64)  # ascending
        self._widths = np.array(list(widths.values()), np.int64)
        self._header = header

    @property
    def at_most(self) -> int:
        """A quick upper bound of `size`, two or three times as high."""
        tasks = self._tasks
        # 320: a send, the longest kind of node, with every number in ten bytes and empty strings.
        name, op = _longest(tasks.names), _longest(tasks.ops)
        needed = (len(tasks.data) + 2 * len(tasks.order)) * len(wire.varint(len(tasks)))
        return len(self._header) + len(tasks) * (320 + name + op) + needed

    @property
    def size(self) -> int:
        """Bytes of each rank's file; costs half as much as to encode it."""
        return len(self._header) + sum(rows.size for rows, _ in self._blocks())

    def template(self) -> ChakraTemplate:
        """Encode what the ranks share; their own values are left zero."""
        # Pages that stay untouched are free; to ask for `size` first would be half the work again.
        data = np.empty(self.at_most, np.uint8)
        data[: len(self._header)] = np.frombuffer(self._header, np.uint8)
        done = len(self._header)
        at: list[Int] = []
        which: list[Int] = []
        for rows, marks in self._blocks():
            starts, end = rows.write(data[done:])
            for mark in marks:
                at.append(mark.at + starts[mark.rows] + done)
                which.append(mark.which)
            done += end
        patches = self._patches(np.concatenate(at), np.concatenate(which)) if at else []
        return ChakraTemplate(data[:done], patches, self.ranks)

    def _patches(self, at: Int, which: Int) -> list[Patch]:
        patches: list[Patch] = []
        for width in np.unique(self._widths).tolist():
            of_width = np.flatnonzero(self._widths == width)
            rows = np.flatnonzero(np.isin(which, of_width))
            codes = self._codes[of_width].tolist()
            values = [self._fields.payloads(code, self.ranks, width) for code in codes]
            column = np.searchsorted(of_width, which[rows])
            patches.append(Patch(at[rows], column, np.stack(values, axis=1)))
        return patches

    def _blocks(self) -> Iterator[tuple[MessageRows, list[Mark]]]:
        columns = ClassColumns(self._tasks)
        for first in range(0, len(self._tasks), BLOCK):
            yield self._block(columns, slice(first, min(first + BLOCK, len(self._tasks))))

    def _block(self, columns: ClassColumns, span: slice) -> tuple[MessageRows, list[Mark]]:
        tasks = self._tasks
        rows = MessageRows(span.stop - span.start, tail=_IS_CPU_OP)
        rows.put(columns.ids[span].keyed(wire.key(1, VARINT)))
        rows.choose(columns.head, columns.head_of[span])
        order = _keys(tasks.order_ptr, tasks.order, span)
        data = _keys(tasks.data_ptr, tasks.data, span, order)
        for number, keys in ((4, order), (5, data)):
            owner, needed = keys >> 32, keys & 0xFFFFFFFF
            rows.packed(wire.key(number, LENGTH), owner, columns.ids[needed])
        if tasks.duration is not None:
            where = np.flatnonzero(tasks.duration[span] > 0)
            # Readers know microseconds only; 0 would be no duration.
            micros = np.maximum((tasks.duration[span][where] + 500) // 1000, 1)
            rows.put(wire.varints(micros).keyed(wire.key(7, VARINT)), where)
        kind = tasks.kind[span]
        where = np.flatnonzero(kind == TaskKind.COMPUTE)
        _append(rows, _NUM_OPS, np.maximum(tasks.flops[span][where], 1), where)
        _append(rows, _TENSOR_SIZE, np.maximum(tasks.traffic[span][where], 1), where)
        where = np.flatnonzero((kind == TaskKind.LOAD) | (kind == TaskKind.STORE))
        _append(rows, _TENSOR_SIZE, tasks.comm_bytes[span][where], where)
        marks = [*self._collectives(rows, span), *self._transfers(rows, span)]
        for before, column in ((_LAYER, tasks.layer), (_MICROBATCH, tasks.microbatch)):
            where = np.flatnonzero(column[span] >= 0)
            _append(rows, before, column[span][where].astype(np.int64), where)
        rows.choose(columns.origin, columns.origin_of[span])
        return rows, marks

    def _collectives(self, rows: MessageRows, span: slice) -> list[Mark]:
        tasks = self._tasks
        where = np.flatnonzero(tasks.kind[span] == TaskKind.COLLECTIVE)
        rows.choose(_COMM_TYPE, tasks.collective[span][where].astype(np.int64), where)
        _append(rows, _COMM_SIZE, tasks.comm_bytes[span][where], where)
        local = tasks.local_bytes[span]
        uneven = where[local[where] != tasks.comm_bytes[span][where]]
        _append(rows, _LOCAL_BYTES, local[uneven], uneven)
        names = [_attr(_text("pg_name", "0" * int(width))) for width in self._widths]
        return [self._code(rows, names, tasks.slot[span][where].astype(np.int64), where)]

    def _transfers(self, rows: MessageRows, span: slice) -> list[Mark]:
        tasks = self._tasks
        sends = tasks.kind[span] == TaskKind.SEND
        where = np.flatnonzero(sends | (tasks.kind[span] == TaskKind.RECV))
        peer = tasks.slot[span][where].astype(np.int64) + self._fields.rank_code + 1
        marks: list[Mark] = []
        for name, is_own in (("comm_src", sends), ("comm_dst", ~sends)):
            entries = [_attr(_value(name, _INT32, bytes(int(width)))) for width in self._widths]
            codes = np.where(is_own[where], self._fields.rank_code, peer)
            marks.append(self._code(rows, entries, codes, where))
        _append(rows, _COMM_TAG, tasks.tag[span][where].astype(np.int64), where)
        _append(rows, _COMM_SIZE, tasks.comm_bytes[span][where], where)
        return marks

    def _code(self, rows: MessageRows, entries: list[bytes], codes: Int, where: Int) -> Mark:
        """Append the attribute of each row's code; its value, still zero, ends the attribute."""
        which = np.searchsorted(self._codes, codes)
        table = ByteTable(entries)
        at = rows.choose(table, which, where)
        return Mark(at + (table.lengths - self._widths)[which], where, which)


@lru_cache
def _longest(texts: tuple[str, ...]) -> int:
    """Bytes of the longest text; classes share their names."""
    return max((len(text.encode()) for text in texts), default=0)


class ClassColumns:
    """Tables that the rows of a class index: encoded ids, and fields that follow from names."""

    def __init__(self, tasks: Tasks) -> None:
        """Encode the ids and every combination of names that occurs."""
        self.ids = wire.varints(np.arange(1, len(tasks) + 1, dtype=np.int64))
        kinds, phases = len(TaskKind), len(PHASES)

        def head(code: int) -> bytes:
            name, kind = tasks.names[code // kinds], TaskKind(code % kinds)
            if "," in name:
                raise UserError(
                    f"task name {name!r} holds a comma, at which Chakra's tools split: rename it"
                )
            node_type = wire.key(3, VARINT) + wire.varint(NODE_TYPES[kind])
            return wire.field(2, name.encode()) + node_type

        def origin(code: int) -> bytes:
            op, phase = tasks.ops[code // phases], PHASES[code % phases]
            return _attr(_text("phase", phase)) + _attr(_text("op", op))

        self.head, self.head_of = wire.dictionary(tasks.name * np.int64(kinds) + tasks.kind, head)
        self.origin, self.origin_of = wire.dictionary(
            tasks.op * np.int64(phases) + tasks.phase, origin
        )


def _append(rows: MessageRows, before: ByteTable, values: Int, where: Int) -> None:
    numbers = wire.varints(values)
    rows.choose(before, numbers.lengths - 1, where)
    rows.put(numbers, where)


def _keys(pointer: Int, needed: Int | np.ndarray, span: slice, more: Int | None = None) -> Int:
    """Dependencies of a block of rows as `row << 32 | needed row`: ascending, none twice."""
    inside = pointer[span.start : span.stop + 1]
    owner = np.repeat(np.arange(len(inside) - 1, dtype=np.int64), np.diff(inside))
    keys = owner << 32 | needed[inside[0] : inside[-1]]
    if more is not None:
        keys = np.concatenate((keys, more))
    keys.sort()
    return keys[np.diff(keys, prepend=-1) > 0]
