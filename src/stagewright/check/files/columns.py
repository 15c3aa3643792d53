"""Reads protocol-buffer messages column by column: bytes in, arrays out; `wire` the other way.

All messages are walked side by side: the first field of each, then the second, and so on. The walk
knows the forms that writers use. Rarer forms (long tags, other wire types, unknown fields, lists as
attributes) are only marked as odd, for the official runtime to read. No length is used before it is
checked against the end of its message.

>>> data = MessageBytes(bytes.fromhex("08ac02 2a0305ac02"))
>>> fields = walk(data, np.array([0]), np.array([8]), np.arange(256) < 128, 10)
>>> fields.tag.tolist(), fields.value.tolist(), fields.odd.tolist()
([8, 42], [300, 3], [])
>>> lists(data, fields, np.array([1]), 1).values.tolist()
[5, 300]
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.trace.formats.et_def import VALUES
from stagewright.trace.formats.wire import CONTINUE, SEVEN, Words

MOST_BYTES = 1 << 26  # of one message
STRING, BOOL, NOTHING = VALUES["string"], VALUES["bool"], 0
LARGEST = 2**63 - 1  # what larger numbers are read as

_PAD = 32  # zeros behind the data: most bytes that anything reads past the end
_LENGTH = 5  # most bytes of a length that the official runtime takes
# The reverse of what `wire.varints` does: each step closes up the gaps between groups of bits.
_CLOSE = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)
_FIRST = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of the first n bytes
_SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)

# Wire type of the values in AttributeProto's oneof that the walk reads; 255: others.
_WIRE = np.full(128, 255, np.uint8)
_WIRE[[VALUES[name] for name in ("int32", "int64", "uint32", "uint64", "bool")]] = 0
_WIRE[STRING] = 2


class InvalidMessage(Exception):
    """A message that is not valid."""

    def __init__(self, row: int, why: str) -> None:
        """`row`: which message."""
        super().__init__(why)
        self.row, self.why = row, why


class MessageBytes:
    """Bytes to read at many places at once."""

    def __init__(self, raw: bytes) -> None:
        """Keep a copy with room behind it."""
        self.raw = raw
        self.bytes = np.frombuffer(raw + bytes(_PAD), np.uint8)
        self._windows = np.ndarray((len(raw) + _PAD - 7,), "V8", self.bytes, strides=(1,))

    def words(self, at: Int, length: Int | None = None) -> Words:
        """Eight bytes from each place; those beyond `length` are zero."""
        words = self._windows[np.minimum(at, len(self._windows) - 1)].view("<u8")
        return words if length is None else words & _FIRST[np.clip(length, 0, 8)]

    def numbers(self, at: Int) -> tuple[Words, Int]:
        """The varint at each place, and its bytes: 99 where there is none."""
        word = self.words(at)
        stop = ~word & CONTINUE
        below = (stop & (~stop + np.uint64(1))) - np.uint64(1)
        marks = (below & CONTINUE) >> np.uint64(7)
        size = (marks * np.uint64(0x0101010101010101) >> np.uint64(56)).astype(np.int64) + 1
        value = word & below & SEVEN
        for low, high, shift in _CLOSE:
            value = value & low | (value & high) >> shift
        long = np.flatnonzero(stop == 0)
        if len(long):
            self._long(at, long, value, size)
        return value, size

    def _long(self, at: Int, long: Int, value: Words, size: Int) -> None:
        last = len(self.bytes) - 2
        ninth, tenth = (self.bytes[np.minimum(at[long] + n, last)] for n in (8, 9))
        more = ninth > 127
        value[long] |= (ninth & 127).astype(np.uint64) << np.uint64(56)
        value[long] |= (tenth & more).astype(np.uint64) << np.uint64(63)
        size[long] = np.where(more, np.where(tenth < 2, 10, 99), 9)

    def ascii(self, at: Int, end: Int) -> Bool:
        """Whether each text is ASCII; False without looking where a text is long."""
        good = end - at <= 256
        some = np.flatnonzero(good)
        at, end = at[some], end[some]
        while len(some):
            high = self.words(at, end - at) & CONTINUE != 0
            good[some[high]] = False
            more = np.flatnonzero(~high & (at + 8 < end))
            some, at, end = some[more], at[more] + 8, end[more]
        return good

    def check_text(self, at: Int, end: Int, row: Int) -> None:
        """Raise `InvalidMessage` where a text is not UTF-8, as the official runtime does."""
        for nth in np.flatnonzero(~self.ascii(at, end)).tolist():
            try:
                self.raw[at[nth] : end[nth]].decode()
            except UnicodeDecodeError as error:
                raise InvalidMessage(
                    int(row[nth]), f"a text that is not UTF-8: {error.reason}"
                ) from None


class Fields(NamedTuple):
    """Fields of many messages; those of one message are in their order."""

    row: Int  # message
    tag: NDArray[np.uint8]
    value: Words  # of a varint; else how many bytes
    at: Int  # where the payload begins (a varint: its number), and where it ends
    end: Int
    odd: Int  # messages that the walk could not read; their fields are left out


def walk(data: MessageBytes, begin: Int, stop: Int, known: Bool, most: int) -> Fields:
    """The fields of messages of at most `most` fields, with known tags of one byte."""
    row = np.flatnonzero(stop > begin)
    at, end = begin[row], stop[row]
    odd = np.zeros(len(begin), bool)
    none = np.zeros(0, np.int64)
    steps = [(none, none.astype(np.uint8), none.astype(np.uint64), none, none)]
    for _ in range(most):
        if not len(row):
            break
        tag = data.bytes[at]
        value, size = data.numbers(at + 1)
        long = tag & 7 == 2
        payload = np.where(long, at + 1 + size, at + 1)
        after = payload + np.where(long, _length(value), size)
        good = known[tag] & (after <= end) & (size < 11) & ~(long & (size > _LENGTH))
        if not good.all():
            odd[row[~good]] = True
            row, tag, value, payload = row[good], tag[good], value[good], payload[good]
            after, end = after[good], end[good]
        steps.append((row, tag, value, payload, after))
        more = np.flatnonzero(after < end)
        row, at, end = row[more], after[more], end[more]
    odd[row] = True
    columns: list[NDArray[Any]] = [np.concatenate(c) for c in zip(*steps, strict=True)]
    if odd.any():
        keep = ~odd[columns[0]]
        columns = [column[keep] for column in columns]
    return Fields(*columns, odd=np.flatnonzero(odd))


def _length(value: Words) -> Int:
    return np.minimum(value, np.uint64(MOST_BYTES)).astype(np.int64)


class Lists(NamedTuple):
    """A list of numbers per row: those of row `i` are `values[ptr[i]:ptr[i + 1]]`."""

    ptr: Int
    values: Words


def lists(data: MessageBytes, fields: Fields, some: Int, count: int) -> Lists:
    """A repeated number of `count` messages, whose fields, packed or not, are `some`."""
    some = some[fields.end[some] > fields.at[some]]
    some = some[np.argsort(fields.row[some], kind="stable")]
    row, at = fields.row[some], fields.at[some]
    length = fields.end[some] - at
    if (length == 1).all():  # one small number each
        owner, begin = row, at
    else:
        ends = np.cumsum(length)
        place = np.arange(int(ends[-1])) + np.repeat(at - ends + length, length)
        begins = np.ones(len(place), bool)
        begins[1:] = (data.bytes[place] < 128)[:-1]
        begins[ends[:-1]] = True
        owner, begin = np.repeat(row, length)[begins], place[begins]
    cut = np.flatnonzero(data.bytes[fields.end[some] - 1] > 127)
    if len(cut):
        raise InvalidMessage(int(row[cut[0]]), "a list of numbers that ends within a number")
    values, size = data.numbers(begin)
    if (size > 10).any():
        raise InvalidMessage(int(owner[size > 10][0]), "a list with what is no number")
    return Lists(np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count)))), values)


class Attributes(NamedTuple):
    """Many attributes, each with at most one value."""

    name: Int  # which of those wanted, -1: none
    kind: NDArray[np.uint8]  # number of the value's type, NOTHING if there is no value
    value: Int
    at: Int  # where a string, or the number, begins and ends
    end: Int
    odd: Bool  # of a rarer form, not read


def attributes(data: MessageBytes, at: Int, end: Int, wanted: tuple[str, ...]) -> Attributes:
    """AttributeProto messages that are a name and then a number or a string."""
    length = data.bytes[at + 1].astype(np.int64)
    name_at = at + 2
    behind = name_at + length
    odd = (data.bytes[at] != 0x0A) | (length > 16) | (behind > end)
    one, two = data.words(name_at, length), data.words(name_at + 8, length - 8)
    odd |= (one | two) & CONTINUE != 0  # not ASCII
    codes, ones, twos, which = _names(("?", *wanted))
    place = np.minimum(np.searchsorted(codes, _code(one, two)), len(codes) - 1)
    name = np.where((ones[place] == one) & (twos[place] == two), which[place], 0) - 1

    behind = np.minimum(behind, len(data.raw))
    tag, second = (data.bytes[behind + n].astype(np.int64) for n in (0, 1))
    wide = tag > 127  # tags of types from 16 up
    tag = np.where(wide, tag & 127 | second << 7, tag)
    odd |= wide & ((second > 7) | (second == 0))
    kind = np.where(tag < 1024, tag >> 3, 0)
    payload = behind + 1 + wide
    value, size = data.numbers(payload)
    text = kind == STRING
    begin = payload + np.where(text, size, 0)
    stop = begin + np.where(text, _length(value), size)
    whole = (_WIRE[kind] == tag & 7) & (stop == end) & (size < 11) & ~(text & (size > _LENGTH))
    nothing = behind == end
    odd |= ~whole & ~nothing
    kind = np.where(nothing, NOTHING, kind).astype(np.uint8)
    return Attributes(name, kind, _integers(kind, value), begin, stop, odd)


def _integers(kind: NDArray[np.uint8], value: Words) -> Int:
    """Varints as the numbers that they mean in a field of that type."""
    result = value.view(np.int64).copy()
    result[(kind == VALUES["uint64"]) & (result < 0)] = LARGEST
    some = kind == VALUES["int32"]
    result[some] = result[some].astype(np.int32)
    some = kind == VALUES["uint32"]
    result[some] &= 0xFFFFFFFF
    some = kind == BOOL
    result[some] = result[some] != 0
    result[(kind == NOTHING) | (kind == STRING)] = 0
    return result


@cache
def _names(wanted: tuple[str, ...]) -> tuple[Words, Words, Words, Int]:
    """Names as sorted codes and two words each, and which of `wanted` they are."""
    whole = [name.encode() for name in wanted]
    assert all(0 < len(name) <= 16 for name in whole)
    words = np.frombuffer(b"".join(name.ljust(16, b"\0") for name in whole), "<u8").reshape(-1, 2)
    code = _code(words[:, 0], words[:, 1])
    order = np.argsort(code)
    return code[order], words[order, 0], words[order, 1], order


def _code(one: Words, two: Words) -> Words:
    return one * _SPREAD[0] ^ two * _SPREAD[1]


def representatives(data: MessageBytes, at: Int, end: Int) -> tuple[Int, Int]:
    """A few texts equal to all others: their places, and which of them each text equals.

    -1: a text too long to be compared.
    """
    length = end - at
    words = [data.words(at + n, length - n) for n in (0, 8, 16, 24)]
    code = _code(words[0], words[1]) ^ _code(words[2] + length.astype(np.uint64), words[3])
    _, sample, which = np.unique(code, return_index=True, return_inverse=True)
    same = length <= 32
    for column in (*words, length):
        same &= column[sample][which] == column
    return sample, np.where(same, which, -1)
