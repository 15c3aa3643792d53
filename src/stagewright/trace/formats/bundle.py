"""A bundle: a whole program and its manifest in one file, from which any rank is made on demand.

It is a ZIP archive, whatever its name: `unzip -l` lists it, and `numpy.load` opens the columns.
Ranks are not in it, only their classes and the arithmetic of their groups, so that a million ranks
take no more room than a thousand. docs/internals/bundle.md describes every member.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, StrictInt, StrictStr, TypeAdapter, ValidationError

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.program.columns import (
    CATEGORIES,
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    RankWork,
    Shape,
    TaskKind,
    Tasks,
    Values,
    intersect,
)
from stagewright.program.communicators import Communicator, Peer, Users
from stagewright.trace.formats import json as readable
from stagewright.trace.formats.archive import CONTENTS, DIGEST, SEAL, Damage, SealedArchive

FORMAT, VERSION = "stagewright bundle", 1
MOST_RANKS = 1 << 24

COUNTS = {"data_ptr": "data", "order_ptr": "order"}
"""Pointers, stored as counts; and what they point at, stored as distances to the row itself."""
STEPS = ("value", "microbatch", "first", "last")
"""Columns of `Values` that are stored as differences to the row before."""
OF_VALUE = ("name", "stage", "layer", "category", "size")
"""Columns of `Values` that have a row per value; the others have one per instance."""

_LEVEL = 6  # of DEFLATE; measured in docs/internals/bundle.md
_DTYPES = ("uint8", "int8", "int16", "int32", "int64")

Count = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Columns = dict[str, NDArray[Any]]


class NameTables(NamedTuple):
    """The tables of names that columns index."""

    names: tuple[StrictStr, ...]
    ops: tuple[StrictStr, ...]
    dtypes: tuple[StrictStr, ...]
    shapes: tuple[Shape, ...]
    values: tuple[StrictStr, ...]


@dataclass(frozen=True, slots=True)
class ClassEntry:
    """A rank class without its columns."""

    pipeline_rank: Count
    ranks: Count  # how many
    communicators: tuple[Count, ...]  # slots of those that it uses
    tasks: Count
    data: Count  # dependencies
    order: Count
    values: Count
    instances: Count
    tables: Count  # which
    memory: Mapping[str, StrictInt]

    def length(self, part: str, column: str) -> int:
        """Rows of a column as it is stored."""
        if part == "values":
            return self.values if column in OF_VALUE else self.instances
        return {"data": self.data, "order": self.order}.get(column, self.tasks)


@dataclass(frozen=True, slots=True)
class ColumnTypes:
    """The columns of every class, and the type that each is read as."""

    tasks: Mapping[str, StrictStr]
    values: Mapping[str, StrictStr]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of `contents.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: StrictStr
    version: StrictInt
    mesh: Mesh
    communicators: tuple[Communicator, ...]
    peers: tuple[Peer, ...]
    columns: ColumnTypes
    tables: tuple[NameTables, ...]
    classes: tuple[ClassEntry, ...]
    manifest: Mapping[str, Any]


# ---- writing -------------------------------------------------------------------------------------


def encode(program: Program, manifest: Mapping[str, object]) -> bytes:
    """The bundle of a program; `manifest` has what `manifest.json` has, without the files."""
    if type(program) is not Program:  # its groups and partners are lists, not a mesh
        raise UserError(
            "a bundle holds the ranks of one mesh, got prefill and decode on ranks of their own; "
            "use another --format, or drop prefill"
        )
    tables: dict[NameTables, int] = {}
    classes = [
        {
            "pipeline_rank": rank_class.pipeline_rank,
            "ranks": len(rank_class.ranks),
            "communicators": rank_class.users.communicators,
            "tasks": len(rank_class.tasks),
            "data": len(rank_class.tasks.data),
            "order": len(rank_class.tasks.order),
            "values": len(rank_class.values.name),
            "instances": len(rank_class.values.value),
            "tables": tables.setdefault(_tables(rank_class), len(tables)),
            "memory": dict(rank_class.memory),
        }
        for rank_class in program.classes
    ]
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": asdict(program.mesh),
        "communicators": [communicator._asdict() for communicator in program.communicators],
        "peers": [peer._asdict() for peer in program.peers],
        "columns": {
            part: {name: str(column.dtype) for name, column in _columns(rank_class)}
            for part, rank_class in _parts(program.classes[0])
        },
        "classes": classes,
        "manifest": manifest,
        "tables": [
            {**table._asdict(), "shapes": [shape.fields() for shape in table.shapes]}
            for table in tables
        ],
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        archive.comment = SEAL + b"0" * DIGEST
        _add(archive, CONTENTS, (json.dumps(contents, indent=1) + "\n").encode())
        for number, rank_class in enumerate(program.classes):
            for name, column in _stored(rank_class):
                npy = io.BytesIO()
                np.lib.format.write_array(npy, _small(column), allow_pickle=False)
                _add(archive, f"class{number}/{name}.npy", npy.getvalue())
    whole = out.getbuffer()[:-DIGEST]
    digest = hashlib.sha256(whole).hexdigest().encode()
    out.getbuffer()[-DIGEST:] = digest
    del whole
    return out.getvalue()


def _parts(rank_class: RankClass) -> tuple[tuple[str, Tasks], tuple[str, Values]]:
    return ("tasks", rank_class.tasks), ("values", rank_class.values)


def _columns(table: Tasks | Values) -> Iterator[tuple[str, NDArray[Any]]]:
    """Columns that are not None; not the tables."""
    for field in fields(table):
        column = getattr(table, field.name)
        if isinstance(column, np.ndarray):
            yield field.name, column  # pyright: ignore


def _tables(rank_class: RankClass) -> NameTables:
    tasks = rank_class.tasks
    return NameTables(tasks.names, tasks.ops, tasks.dtypes, tasks.shapes, rank_class.values.names)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name)  # dated 1980: the same program, the same bytes
    info.compress_type, info.create_system, info.external_attr = (
        zipfile.ZIP_DEFLATED,
        3,
        0o644 << 16,
    )
    archive.writestr(info, data)


def _stored(rank_class: RankClass) -> Iterator[tuple[str, NDArray[Any]]]:
    """Columns of a class as they are stored: those that grow by rank or row, as differences."""
    yield "ranks", np.diff(rank_class.ranks, prepend=0)
    for name, column in _columns(rank_class.tasks):
        if name in COUNTS:
            column = np.diff(column)
        elif name in COUNTS.values():
            column = _owners(getattr(rank_class.tasks, f"{name}_ptr")) - column
        yield f"tasks/{name}", column
    for name, column in _columns(rank_class.values):
        steps = np.diff(column.astype(np.int64), prepend=0) if name in STEPS else column
        yield f"values/{name}", steps


def _owners(pointer: Int) -> Int:
    """The row of each dependency."""
    return np.repeat(np.arange(len(pointer) - 1, dtype=np.int64), np.diff(pointer))


def _small(column: NDArray[Any]) -> NDArray[Any]:
    """A column in the narrowest type that holds its numbers."""
    if not len(column):
        return column.astype(np.uint8)
    least, most = int(column.min()), int(column.max())
    dtype = np.promote_types(np.min_scalar_type(least), np.min_scalar_type(most))
    return column.astype(dtype if dtype.kind in "iu" else column.dtype)


# ---- reading -------------------------------------------------------------------------------------


class Bundle:
    """A bundle: its manifest is read at once, columns of rank classes when they are asked for.

    >>> import stagewright as sw, tempfile
    >>> compiled = sw.compile(sw.Run(model="gpt2", pp=2, layers=2, seq_length=8))
    >>> path = tempfile.mkdtemp() + "/gpt2.bundle"
    >>> _ = sw.generate(compiled, path, format="bundle")
    >>> next(sw.Bundle(path).nodes(1))["name"]
    'forward.recv'
    """

    def __init__(self, path: Path | str) -> None:
        """Open a file and check that it is whole; UserError where it is not."""
        self.path = Path(path)
        try:
            self._archive = SealedArchive(self.path)
            contents = self._archive.contents()
        except Damage as damage:
            raise self._damaged(str(damage)) from None
        self.size = self._archive.size
        self.contents = self._contents(contents)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, as in `manifest.json` beside files of ranks, without the list of files."""
        return dict(self.contents.manifest)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.contents.mesh.world_size

    @cached_property
    def ranks(self) -> list[Int]:
        """The ranks of each class."""
        by_class: list[Int] = []
        for class_id, entry in enumerate(self.contents.classes):
            ranks = np.cumsum(self._column(class_id, "ranks", entry.ranks), dtype=np.int64)
            if (np.diff(ranks) < 1).any() or (ranks < 0).any() or (ranks >= self.world_size).any():
                raise self._damaged(f"class {class_id} has no ascending ranks of the world")
            by_class.append(ranks)
        all_ranks = np.concatenate((*by_class, np.zeros(0, np.int64)))
        if (np.bincount(all_ranks, minlength=self.world_size) != 1).any():
            raise self._damaged("the classes do not hold every rank once")
        return by_class

    @property
    def users(self) -> list[Users]:
        """The ranks of each class, and the communicators that they use."""
        classes = zip(self.ranks, self.contents.classes, strict=True)
        return [Users(ranks, entry.communicators) for ranks, entry in classes]

    def program(self, ranks: Sequence[int] | Int | None = None) -> Program:
        """The program; with the classes of some ranks only, if these are given."""
        selected = None if ranks is None else np.unique(np.asarray(ranks, np.int64))
        classes: list[RankClass] = []
        for class_id, (entry, class_ranks) in enumerate(
            zip(self.contents.classes, self.ranks, strict=True)
        ):
            if selected is None or len(intersect(class_ranks, selected)):
                tasks, values = self._tasks(class_id), self._values(class_id)
                memory = dict(entry.memory)
                allowance = memory.pop("allowance", 0)
                work = RankWork.from_tables(tasks, memory, values)
                classes.append(RankClass(class_ranks, entry.pipeline_rank, work, allowance))
        contents = self.contents
        return Program(contents.mesh, tuple(classes), contents.communicators, contents.peers)

    def nodes(self, rank: int) -> Iterator[dict[str, object]]:
        """The nodes of a rank, with the keys of the JSON format."""
        if not 0 <= rank < self.world_size:
            raise UserError(
                f"rank {rank}: {self.path} has {self.world_size} ranks, 0 to {self.world_size - 1}"
            )
        program = self.program([rank])
        return readable.nodes(program, program.classes[0].tasks, rank)

    def _contents(self, value: object) -> Contents:
        entries = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if entries.get("format") != FORMAT:
            raise self._damaged(f"{CONTENTS} does not call itself a {FORMAT}")
        if entries.get("version") != VERSION:
            raise UserError(
                f"{self.path}: is a bundle of version {entries.get('version')}, and this "
                f"Stagewright reads version {VERSION}; use the one that wrote it"
            )
        try:
            contents = TypeAdapter(Contents).validate_python(entries)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise self._damaged(f"{CONTENTS}: {where}: {first['msg']}") from None
        for kind, types in ((Tasks, contents.columns.tasks), (Values, contents.columns.values)):
            fields_of_kind = [f for f in fields(kind) if f.name not in NameTables._fields[:4]]
            needed = {f.name for f in fields_of_kind if f.default is MISSING}
            wrong = set(types) - {f.name for f in fields_of_kind} | needed - set(types)
            if wrong:
                names = ", ".join(sorted(wrong))
                raise UserError(
                    f"{self.path}: has other columns ({names}) than this Stagewright; use the one "
                    "that wrote it"
                )
            if not set(types.values()) <= set(_DTYPES):
                raise self._damaged("a column is of no known type")
        sizes = [size for _, size in contents.mesh.axes]
        if min(sizes, default=1) < 1 or not 0 < contents.mesh.world_size <= MOST_RANKS:
            raise self._damaged(f"a mesh of {contents.mesh.axes}")
        self._check_manifest(contents)
        self._check_lengths(contents)
        self._check_partners(contents)
        return contents

    def _check_manifest(self, contents: Contents) -> None:
        """The manifest counts ranks, parameters, and nodes of each class, in whole numbers."""
        manifest = contents.manifest
        nodes: Any = manifest.get("nodes")
        parameters: Any = manifest.get("parameters", {})
        if not isinstance(nodes, list) or not isinstance(parameters, dict):
            raise self._damaged("the manifest does not count the nodes of each class")
        counts = cast("list[Any]", nodes)
        if len(counts) != len(contents.classes) or not all(isinstance(c, dict) for c in counts):
            raise self._damaged("the manifest does not count the nodes of each class")
        numbers = [number for count in counts for number in cast("dict[str, Any]", count).values()]
        numbers += cast("dict[str, Any]", parameters).values()
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self._damaged("a number of nodes or parameters in the manifest is none")
        if manifest.get("world_size", contents.mesh.world_size) != contents.mesh.world_size:
            raise self._damaged("the manifest has another number of ranks than the mesh")

    def _check_lengths(self, contents: Contents) -> None:
        """No more numbers than a bundle of this size can hold, before any column is read."""
        limit = self._archive.most_numbers
        for name in ("tasks", "data", "order", "values", "instances"):
            count = sum(getattr(entry, name) for entry in contents.classes)
            if count > limit:
                raise self._damaged(f"{count} {name}, of which a bundle of its size has {limit}")
        ranks = sum(entry.ranks for entry in contents.classes)
        if ranks != contents.mesh.world_size:
            raise self._damaged(f"{ranks} ranks in classes, {contents.mesh.world_size} in the mesh")

    def _check_partners(self, contents: Contents) -> None:
        mesh = contents.mesh
        names = {*mesh.names, *((MIRROR,) if mesh.mirror else ())}
        if mesh.mirror and (mesh.mirror not in mesh.names or mesh.size(mesh.mirror) % 2):
            raise self._damaged(f"no mirror along {mesh.mirror} of {mesh.axes}")
        for axes, only in contents.communicators:
            places = set(range(mesh.size(*axes)) if only is None else only)
            inside = only is None or (len(axes) == 1 and places <= set(range(mesh.size(*axes))))
            if not set(axes) <= names or not inside or len(places) < 2:
                raise self._damaged(f"a communicator over {axes} {only} of {mesh.axes}")
        for axis, _ in contents.peers:
            if axis not in mesh.names:
                raise self._damaged(f"a peer along {axis}, which is no axis of the mesh")
        for class_id, entry in enumerate(contents.classes):
            if entry.tables >= len(contents.tables):
                raise self._damaged(f"class {class_id} has no tables")
            if any(slot >= len(contents.communicators) for slot in entry.communicators):
                raise self._damaged(f"class {class_id} uses a communicator that is not there")

    def _tasks(self, class_id: int) -> Tasks:
        entry, columns = self.contents.classes[class_id], self._read(class_id, "tasks")
        for pointer, needed in COUNTS.items():
            ends = np.cumsum(columns[pointer], dtype=np.int64)
            if (columns[pointer] < 0).any() or (ends[-1] if len(ends) else 0) != entry.length(
                "tasks", needed
            ):
                raise self._damaged(f"class {class_id}: {pointer} does not count {needed}")
            columns[pointer] = np.concatenate((np.zeros(1, np.int64), ends))
            columns[needed] = _owners(columns[pointer]) - columns[needed]
        columns = self._typed(class_id, "tasks", columns)
        tables = self.contents.tables[entry.tables]
        kind, slot = columns["kind"], columns["slot"]
        peers, rows = len(self.contents.peers), len(kind)
        self._check(class_id, "kind", kind, 0, len(TaskKind))
        self._check(class_id, "phase", columns["phase"], 0, len(PHASES))
        self._check(class_id, "collective", columns["collective"], -1, len(COLLECTIVES))
        self._check(class_id, "name", columns["name"], 0, len(tables.names))
        self._check(class_id, "op", columns["op"], 0, len(tables.ops))
        self._check(class_id, "dtype", columns["dtype"], 0, len(tables.dtypes))
        self._check(class_id, "shape", columns["shape"], -1, len(tables.shapes))
        self._check(class_id, "data", columns["data"], 0, rows)
        self._check(class_id, "order", columns["order"], 0, rows)
        messages = (kind == TaskKind.SEND) | (kind == TaskKind.RECV)
        self._check(class_id, "slot of a message", slot[messages], 0, peers)
        used = np.unique(slot[kind == TaskKind.COLLECTIVE]).tolist()
        if used != [*entry.communicators]:
            raise self._damaged(
                f"class {class_id} uses communicators {used}, not {entry.communicators}"
            )
        return Tasks(
            **columns,
            names=tables.names,
            ops=tables.ops,
            dtypes=tables.dtypes,
            shapes=tables.shapes,
        )

    def _values(self, class_id: int) -> Values:
        entry, columns = self.contents.classes[class_id], self._read(class_id, "values")
        for name in STEPS:
            columns[name] = np.cumsum(columns[name], dtype=np.int64)
        columns = self._typed(class_id, "values", columns)
        names = self.contents.tables[entry.tables].values
        self._check(class_id, "name of a value", columns["name"], 0, len(names))
        self._check(class_id, "category", columns["category"], 0, len(CATEGORIES))
        self._check(class_id, "value", columns["value"], 0, entry.values)
        self._check(class_id, "first", columns["first"], -1, entry.tasks + 1)
        self._check(class_id, "last", columns["last"], -1, entry.tasks + 1)
        return Values(**columns, names=names)

    def _read(self, class_id: int, part: str) -> Columns:
        """Columns of a class as they are stored."""
        entry, types = self.contents.classes[class_id], getattr(self.contents.columns, part)
        return {
            name: self._column(class_id, f"{part}/{name}", entry.length(part, name))
            for name in types
        }

    def _typed(self, class_id: int, part: str, columns: Columns) -> Columns:
        """Columns in the types that `contents.json` names."""
        typed: Columns = {}
        for name, dtype in getattr(self.contents.columns, part).items():
            typed[name] = columns[name].astype(dtype)
            if (typed[name] != columns[name]).any():
                raise self._damaged(f"class {class_id}: {part}/{name} holds more than {dtype}")
        return typed

    def _check(self, class_id: int, name: str, column: NDArray[Any], begin: int, end: int) -> None:
        """Raise where an index is out of range; other rules are `check_program`'s."""
        if ((column < begin) | (column >= end)).any():
            raise self._damaged(f"class {class_id}: {name} out of range")

    def _column(self, class_id: int, name: str, length: int) -> NDArray[Any]:
        try:
            return self._archive.column(f"class{class_id}/{name}.npy", length)
        except Damage as damage:
            raise self._damaged(str(damage)) from None

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path}: is damaged: {why}; make it again")
