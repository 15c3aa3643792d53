"""Protocol-buffer messages written column by column: numpy arrays in, one buffer of bytes out.

A block of messages is built side by side, as rows. Each call appends one piece to many rows: a
string out of a table, a number, a packed list. When all lengths are known, every piece is scattered
to its place. Nothing loops over rows in Python, and varints are canonical (shortest), so the bytes
are those that the official runtime would write.

Pieces are scattered in steps of 8 or 16 bytes, because numpy takes about 8 ns per element of any
width up to 64 bytes. A step may spill past the end of its piece: what follows is written later and
covers the spill.

>>> rows = MessageRows(2, tail=field(2, b"some constant tail"))
>>> rows.put(varints(np.array([1, 300])).keyed(key(1, VARINT)))
>>> out = np.empty(rows.size, np.uint8)
>>> starts, end = rows.write(out)
>>> bytes(out[: starts[1] - 1]).hex(" ", 1)
'16 08 01 12 12 73 6f 6d 65 20 63 6f 6e 73 74 61 6e 74 20 74 61 69 6c'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Pieces = NDArray[np.void]  # fixed-width runs of bytes

SPILL = 15  # most bytes that a step writes past the end of its piece
VARINT, LENGTH = 0, 2  # wire types

_STEP = SPILL + 1
_CONTINUE = np.uint64(0x8080808080808080)  # the bit of each byte that says "more follows"
_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
# Each step moves up the upper half of every 56-, 28- and 14-bit field: in the end 7 bits a byte.
_SPREAD = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)


def varint(value: int) -> bytes:
    """A canonical varint; a negative number takes ten bytes, as in int32 and int64 fields."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def key(number: int, wire_type: int) -> bytes:
    """The key before the value of field `number`."""
    return varint(number << 3 | wire_type)


def field(number: int, payload: bytes) -> bytes:
    """A field that carries its length: a string, a message or a packed list."""
    return key(number, LENGTH) + varint(len(payload)) + payload


@dataclass(frozen=True, slots=True)
class Varints:
    """Many varints: the first 8 bytes of each, the last 2 if any number needs them, and lengths."""

    low: Words
    high: Words | None
    lengths: Int

    def __getitem__(self, index: slice | Int) -> Varints:
        """The varints in a slice, or at indices."""
        high = None if self.high is None else self.high[index]
        return Varints(self.low[index], high, self.lengths[index])

    def keyed(self, key: bytes) -> Varints:
        """The varints with a one-byte key before each; none may be longer than 7 bytes."""
        assert len(key) == 1
        assert self.high is None
        assert int(self.lengths.max(initial=0)) < 8
        return Varints(self.low << np.uint64(8) | np.uint64(key[0]), None, self.lengths + 1)

    def pieces(self) -> Pieces:
        """The bytes, padded to 8 or 16."""
        if self.high is None:
            return self.low.astype("<u8", copy=False).view("V8")
        return np.stack((self.low, self.high), axis=1).astype("<u8", copy=False).view("V16")[:, 0]


def varints(values: Int) -> Varints:
    """Canonical varints of 64-bit numbers; negative ones take ten bytes."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    low = bits & np.uint64(0x00FFFFFFFFFFFFFF)
    for keep, move, shift in _SPREAD:
        low = (low & move) << shift | low & keep
    # Bring to every byte what lies in the bytes above it: not zero there means that more follows.
    above = low >> np.uint64(8)
    for shift in (8, 16, 32):
        above |= above >> np.uint64(shift)
    more = (above + _SEVEN) & _CONTINUE
    rest = bits >> np.uint64(56)
    if not rest.any():
        return Varints(low | more, None, _count(more) + 1)
    more[rest != 0] = _CONTINUE
    ten = rest >> np.uint64(7)
    high = rest & np.uint64(0x7F) | ten << np.uint64(7) | ten << np.uint64(8)
    return Varints(low | more, high, _count(more) + 1 + ten.astype(np.int64))


def _count(more: Words) -> Int:
    # The product adds up all bytes in the highest one.
    return ((more >> np.uint64(7)) * np.uint64(0x0101010101010101) >> np.uint64(56)).astype(
        np.int64
    )


class ByteTable:
    """Byte strings that rows choose by index."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        """Entries in order of their index."""
        self.lengths = np.array([len(e) for e in entries], np.int64)
        longest = max(map(len, entries), default=0)
        self.shortest = min(map(len, entries), default=0)
        # Equal lengths are copied exactly, whatever the width; others in steps that may spill.
        self.step = longest if 0 < longest == self.shortest else _STEP
        self.columns: list[Pieces] = []
        for at in range(0, longest, self.step):
            column = b"".join(e[at : at + self.step].ljust(self.step, b"\0") for e in entries)
            self.columns.append(np.frombuffer(column, f"V{self.step}"))


def dictionary(codes: Int, entry: Callable[[int], bytes]) -> tuple[ByteTable, Int]:
    """A table of the codes that occur (small numbers from 0 up), and each row's place in it."""
    present = np.flatnonzero(np.bincount(codes))
    place = np.zeros(int(present[-1]) + 1 if len(present) else 0, np.int64)
    place[present] = np.arange(len(present))
    return ByteTable([entry(int(code)) for code in present]), place[codes]


class MessageRows:
    """Messages under construction, each preceded by its length when written.

    Every method appends to all rows, or to those whose numbers (ascending) are given in `rows`;
    pieces lie in the message in the order of the calls. `tail` ends every message: it covers what
    the last pieces spill.
    """

    def __init__(self, count: int, tail: bytes) -> None:
        """Begin `count` messages."""
        assert len(tail) >= SPILL
        self.count = count
        self._lengths = np.zeros(count, np.int64)
        self._strokes: list[tuple[Pieces, Int, Int | None]] = []
        self._tail = tail

    @property
    def size(self) -> int:
        """Bytes of all messages with the lengths before them."""
        lengths = self._lengths + len(self._tail)
        return int((lengths + varints(lengths).lengths).sum())

    def choose(self, table: ByteTable, index: Int, rows: Int | None = None) -> Int:
        """Append entry `index` of a table; returns where it begins within each message."""
        lengths = table.lengths[index]
        at = self._advance(lengths, rows)
        for nth, column in enumerate(table.columns):
            done = nth * table.step
            if done < table.shortest:
                self._strokes.append((column[index], at + done if done else at, rows))
            else:
                some = np.flatnonzero(lengths > done)
                where = some if rows is None else rows[some]
                self._strokes.append((column[index[some]], at[some] + done, where))
        return at

    def put(self, values: Varints, rows: Int | None = None) -> None:
        """Append numbers."""
        self._strokes.append((values.pieces(), self._advance(values.lengths, rows), rows))

    def packed(self, key: bytes, owner: Int, values: Varints) -> None:
        """Append a packed list to every row that owns values; `owner`: their rows, ascending."""
        ends = np.zeros(len(values.lengths) + 1, np.int64)
        np.cumsum(values.lengths, out=ends[1:])
        upto = np.cumsum(
            np.bincount(owner, minlength=self.count)
        )  # values of this row and those before
        payload = np.diff(ends[upto], prepend=0)
        rows = np.flatnonzero(payload)
        self.put(varints(payload[rows]).keyed(key), rows)
        shift = self._advance(payload, None) - (ends[upto] - payload)
        self._strokes.append((values.pieces(), ends[:-1] + shift[owner], owner))

    def write(self, out: Bytes) -> tuple[Int, int]:
        """Write all messages to the front of `out`; returns where each begins, and the end."""
        lengths = self._lengths + len(self._tail)
        frame = varints(lengths)
        ends = np.cumsum(lengths + frame.lengths)
        starts = ends - lengths
        scatter(out, starts - frame.lengths, frame.pieces())
        for pieces, at, rows in self._strokes:
            scatter(out, at + (starts if rows is None else starts[rows]), pieces)
        scatter(out, ends - len(self._tail), np.frombuffer(self._tail, f"V{len(self._tail)}"))
        return starts, int(ends[-1])

    def _advance(self, lengths: Int | int, rows: Int | None) -> Int:
        # Never in place: strokes hold the array as their positions.
        at = self._lengths
        if rows is None:
            self._lengths = at + lengths
            return at
        self._lengths = at.copy()
        self._lengths[rows] += lengths
        return at[rows]


def scatter(out: Bytes, at: Int, pieces: Pieces) -> None:
    """Copy piece `i` to `out[at[i]:]`, in order of `i`; a single piece goes to every place."""
    width = pieces.dtype.itemsize
    # Overlapping windows, one per byte of the buffer: numpy then checks places against its end.
    windows = np.ndarray((max(0, out.size - width + 1),), pieces.dtype, out, strides=(1,))
    windows[at] = pieces
