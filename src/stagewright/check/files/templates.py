"""Reads many traces of one size; those that differ only in their partners are checked once.

Ranks of one program have files of the same bytes but for the names of groups, the ranks of peers
and their own rank. The first file of a class is read and checked node by node; of the others it is
enough that all other bytes are equal, and that the values in those places are again one per slot.
That holds for files of any writer, and a file that differs in another way is read like the first.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.check.files.dependency_graph import graph_of_ids
from stagewright.check.files.findings import Finding
from stagewright.check.files.rank import Checked, check_trace
from stagewright.check.files.reader import Damaged, TraceReader
from stagewright.check.files.rules import LOAD, STORE, group_id, label
from stagewright.check.files.world import Nodes
from stagewright.files import open_regular
from stagewright.program.columns import TaskKind
from stagewright.trace.formats.wire import Bytes, Words

MOST_COMPARED = 1 << 28
"""Most bytes of the files that a process holds in memory to compare others with them."""


@dataclass(slots=True)
class TraceClass:
    """Traces that differ only in their partners: the first, and the ranks and partners of all."""

    first: Checked
    shape: bytes  # equal for all files of the class, whichever process read them; empty: unknown
    ranks: list[int]
    partner: list[Int]
    sizes: int  # bytes of all
    digests: dict[str, str]  # file name -> SHA-256, where asked for

    def findings(self) -> list[Finding]:
        """The findings of the first trace, counted for every rank."""
        ranks = len(self.ranks)
        return [
            found._replace(ranks=ranks, nodes=found.nodes * ranks) for found in self.first.findings
        ]


class ReadTask(NamedTuple):
    """Files to read: ranks and paths."""

    files: tuple[tuple[int, Path], ...]
    digests: bool  # whether to work out their checksums


def check_files(task: ReadTask) -> list[TraceClass]:
    """Check files of one size."""
    classes: list[tuple[TraceClass, _TraceTemplate | None]] = []
    compare = len(task.files) > 1
    room = MOST_COMPARED  # for further templates
    for rank, path in task.files:
        data = _bytes(path) if compare or task.digests else None
        digest = _digest(path, data) if task.digests and data is not None else {}
        for traces, stamp in classes:
            values = None if stamp is None or data is None else stamp.values(data, rank)
            if values is not None:
                traces.ranks.append(rank)
                traces.partner.append(values)
                traces.sizes += len(data) if data is not None else 0
                traces.digests |= digest
                break
        else:
            first = check_trace(path, rank)
            if task.digests and data is None and first.exchange is not None:
                digest = _digest(path, data)  # of a sound file: a damaged one may have terabytes
            stamp = None
            if data is not None and len(data) <= room:
                stamp = _TraceTemplate.of(first, data)
                room -= len(data) if stamp is not None else 0
            partner = [first.exchange.partner] if first.exchange else []
            shape = stamp.shape() if stamp else b""
            classes.append((TraceClass(first, shape, [rank], partner, first.size, digest), stamp))
    return [traces for traces, _ in classes]


def _bytes(path: Path) -> Bytes | None:
    """A file; None if it is too large or cannot be read, which `check_trace` reports."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return None if size > MOST_COMPARED else np.frombuffer(file.read(size), np.uint8)
    except OSError:
        return None


def _digest(path: Path, data: Bytes | None) -> dict[str, str]:
    if data is not None:
        return {path.name: hashlib.sha256(data.data).hexdigest()}
    try:
        with open_regular(path) as file:
            return {path.name: hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError:
        return {}


class _TraceTemplate:
    """A template file, and the byte offsets that differ between ranks, per communicator slot.

    Slot -1 is the rank itself.
    """

    def __init__(self, checked: Checked, data: Bytes, places: list[tuple[int, Int]]) -> None:
        assert checked.exchange is not None
        self.data, self.places = data, places
        self.kind = checked.exchange.slot_kind
        self.partner = checked.exchange.partner
        self.fixed = np.ones(len(data), bool)
        for _, place in places:
            self.fixed[place] = False

    @staticmethod
    def of(checked: Checked, data: Bytes) -> _TraceTemplate | None:
        """The template of a checked file; None where offsets are unknown, or widths differ."""
        spots = checked.spots
        if checked.exchange is None or spots is None:
            return None
        places: list[tuple[int, Int]] = []
        for slot in np.unique(spots.slot).tolist():
            of_slot = spots.slot == slot
            widths = spots.end[of_slot] - spots.at[of_slot]
            width = int(widths[0])
            if not 0 < width <= 20 or (widths != width).any():
                return None
            places.append((slot, spots.at[of_slot][:, None] + np.arange(width)))
        return _TraceTemplate(checked, data, places)

    def shape(self) -> bytes:
        """A digest of what all files of the class have in common."""
        common = hashlib.sha256(np.where(self.fixed, self.data, 0).tobytes())
        for slot, place in self.places:
            common.update(f"{slot} {place.shape}".encode())
            common.update(place.tobytes())
        return common.digest()

    def values(self, data: Bytes, rank: int) -> Int | None:
        """The partners that a file names, by slot; None if it is not of this class."""
        if len(data) != len(self.data) or ((data != self.data) & self.fixed).any():
            return None
        partner = self.partner.copy()
        for slot, place in self.places:
            copies = data[place]
            if (copies != copies[0]).any():
                return None
            if slot >= 0 and self.kind[slot] == TaskKind.COLLECTIVE:
                value = group_id(bytes(copies[0]).decode("latin-1"))
            else:
                value = _number(bytes(copies[0]))
            if value is None or (slot < 0 and value != rank):
                return None
            if slot >= 0:
                if self.kind[slot] != TaskKind.COLLECTIVE and value == rank:
                    return None
                partner[slot] = value
        return partner


def _number(data: bytes) -> int | None:
    """A varint of exactly these bytes, of at most 31 bits."""
    if data[-1] > 127 or any(byte < 128 for byte in data[:-1]):
        return None
    value = sum((byte & 127) << 7 * index for index, byte in enumerate(data))
    return value if value < 2**31 else None


def merge_classes(classes: list[TraceClass]) -> list[TraceClass]:
    """Merge classes of one shape, which several calls have read."""
    by_shape: dict[tuple[bytes, bytes], TraceClass] = {}
    merged: list[TraceClass] = []
    for traces in classes:
        slots = traces.first.exchange.slot_kind.tobytes() if traces.first.exchange else b""
        same = by_shape.setdefault((traces.shape, slots), traces) if traces.shape else traces
        if same is traces:
            merged.append(traces)
            continue
        same.ranks += traces.ranks
        same.partner += traces.partner
        same.sizes += traces.sizes
        same.digests |= traces.digests
    return merged


@dataclass(slots=True)
class TraceSource:
    """The nodes of a file, which is read again when they are asked for."""

    path: Path
    _labels: dict[int, str] = field(default_factory=dict[int, str])
    _nodes: Nodes | None = None

    def label(self, row: int) -> str:
        """A node in words."""
        if row not in self._labels:
            self._labels[row] = self._label(row)
        return self._labels[row]

    def _label(self, row: int) -> str:
        node = next(islice(TraceReader(self.path).nodes(), row, None), None)
        if node is None:
            raise Damaged(f"{self.path}: changed while it was read")
        return label(node)

    def nodes(self) -> Nodes:
        """All nodes and their dependencies."""
        if self._nodes is None:
            self._nodes = self._read()
        return self._nodes

    def _read(self) -> Nodes:
        columns: list[tuple[Words, Bool, Int, Words]] = []
        count = 0
        for block in TraceReader(self.path):
            on_cpu = block.attributes["is_cpu_op"].value != 0
            memory = ((block.type == LOAD) | (block.type == STORE)) & ~on_cpu
            child, needed = block.dependencies()
            columns.append((block.id, memory, child + count, needed))
            count += len(block)
        ids, memory, child, needed = (np.concatenate(c) for c in zip(*columns, strict=True))
        place = np.empty(count, np.int64)
        place[np.argsort(ids, kind="stable")] = np.arange(count)
        return Nodes(graph_of_ids(ids, child, needed)[0], place, memory)
