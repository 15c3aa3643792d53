"""Finds and reads the traces of a directory; those that differ only in partners are checked once.

Ranks of one program have files of the same bytes but for the names of groups, the ranks of peers
and their own rank. The first file of a class is read and checked node by node; of the others it is
enough that all other bytes are equal, and that the values in those places are again one per slot.
That holds for files of any writer, and a file that differs in another way is read like the first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.dependency_graph import graph_of_ids
from stagewright.check.files.groups import read_json
from stagewright.check.files.rank import Checked, check_trace
from stagewright.check.files.reader import LOAD, STORE, Damaged, nodes, read_trace
from stagewright.check.files.rules import group_id, label
from stagewright.check.files.world import Nodes, WorldPart
from stagewright.check.report import Finding
from stagewright.errors import UserError
from stagewright.executors import Processes, cores
from stagewright.files import open_regular
from stagewright.program.columns import TaskKind
from stagewright.trace.formats.wire import Bytes
from stagewright.trace.manifest import MANIFEST

MOST_COMPARED = 1 << 28
"""Most bytes of the files that a process holds in memory to compare others with them."""
TASK_FILES = 64
"""Files of a task at least: to read the first node by node takes as long as to compare these."""

NAME = re.compile(r"(?P<prefix>.+)\.(?P<rank>0|[1-9][0-9]{0,8})\.et")


class TraceFiles(NamedTuple):
    """The traces of a directory, and its manifest."""

    folder: Path
    traces: dict[int, Path]  # by rank, ascending
    manifest: dict[str, Any]  # empty: no manifest of Stagewright's
    damage: str = ""  # why the manifest cannot be read
    single: bool = False  # one file was named, and no directory


def find(path: Path) -> TraceFiles:
    """The traces of a directory, or of `directory/prefix`, or one file."""
    if path.is_file():
        match = NAME.fullmatch(path.name)
        rank = int(match["rank"]) if match else 0
        return TraceFiles(path.parent, {rank: path}, {}, single=True)
    folder, wanted = (path, None) if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir():
        raise UserError(f"{path}: no such directory")
    if wanted is not None and path.exists():
        try:
            open_regular(path).close()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read: {error.strerror}; wanted a directory of traces, a trace "
                "or a bundle"
            ) from None
    by_prefix: dict[str, dict[int, Path]] = {}
    try:
        for entry in folder.iterdir():
            match = NAME.fullmatch(entry.name)
            if match and wanted in (None, match["prefix"]):
                by_prefix.setdefault(match["prefix"], {})[int(match["rank"])] = entry
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not by_prefix:
        raise UserError(f"{path}: holds no traces, that is files such as workload.0.et")
    if len(by_prefix) > 1:
        prefixes = ", ".join(str(folder / prefix) for prefix in sorted(by_prefix)[:4])
        raise UserError(f"{path}: holds traces of several runs; name one of {prefixes}")
    (traces,) = by_prefix.values()
    manifest = folder / MANIFEST
    content: Any = None
    damage = ""
    if manifest.is_file():
        try:
            content = read_json(manifest, len(traces))
        except UserError as error:
            damage = str(error)
    is_ours = isinstance(content, dict) and "stagewright" in content
    listed = cast("dict[str, Any]", content) if is_ours else {}
    return TraceFiles(folder, dict(sorted(traces.items())), listed, damage)


def read(files: TraceFiles, workers: int | None, *, digests: bool) -> list[TraceClass]:
    """Read and check every file, in several processes where that takes less time."""
    sizes = {rank: _size(path) for rank, path in files.traces.items()}
    by_size = sorted(files.traces, key=lambda rank: (-sizes[rank], rank))
    processes = workers or cores()
    tasks: list[ReadTask] = []
    for size, ranks in groupby(by_size, key=sizes.__getitem__):
        equal_size = list(ranks)
        fewest = TASK_FILES if size <= MOST_COMPARED else 1
        parts = max(1, min(processes, len(equal_size) // fewest))
        for part in np.array_split(equal_size, parts):
            paths = tuple((rank, files.traces[rank]) for rank in part.tolist())
            tasks.append(ReadTask(paths, digests))
    found: list[TraceClass] = []
    try:
        Processes(processes).run(check_files, tasks, found.extend)
    except BrokenProcessPool:
        raise UserError(
            "a process that read traces was killed; if memory is short, use one worker"
        ) from None
    return sorted(merge_classes(found), key=lambda traces: min(traces.ranks))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


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
        digest = digest_of(path, data) if task.digests and data is not None else {}
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
                digest = digest_of(path, data)  # of a sound file: a damaged one may have terabytes
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


def digest_of(path: Path, data: Bytes | None = None) -> dict[str, str]:
    """The SHA-256 of a file by its name; none if it cannot be read. `data`: its content."""
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


def parts_of(classes: Sequence[TraceClass]) -> list[WorldPart]:
    """The parts of a world: the trace classes that have no error which prevents a comparison."""
    return [
        WorldPart(
            np.array(traces.ranks),
            traces.first.exchange,
            np.stack(traces.partner),
            TraceSource(traces.first.path),
        )
        for traces in classes
        if traces.first.exchange is not None
    ]


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
        node = next(islice(nodes(self.path), row, None), None)
        if node is None:
            raise Damaged(f"{self.path}: changed while it was read")
        return label(node)

    def nodes(self) -> Nodes:
        """All nodes and their dependencies."""
        if self._nodes is None:
            self._nodes = self._read()
        return self._nodes

    def _read(self) -> Nodes:
        trace = read_trace(self.path)
        child, needed = trace.dependencies()
        place = np.empty(len(trace), np.int64)
        place[np.argsort(trace.id, kind="stable")] = np.arange(len(trace))
        memory = trace.is_a(LOAD, STORE) & ~trace.on_cpu
        return Nodes(graph_of_ids(trace.id, child, needed)[0], place, memory)
