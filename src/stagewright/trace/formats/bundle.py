"""A bundle: a whole program and its manifest in one file, from which any rank is made on demand.

It is a ZIP archive, whatever its name: `unzip -l` lists it, and `numpy.load` opens the columns.
Ranks are not in it, only their classes and the arithmetic of their groups, so that a million ranks
take no more room than a thousand. docs/bundle.md describes every member.
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

_LEVEL = 6  # of DEFLATE; measured in docs/bundle.md
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
            "pipeline_rank": of.pipeline_rank,
            "ranks": len(of.ranks),
            "communicators": of.users.communicators,
            "tasks": len(of.tasks),
            "data": len(of.tasks.data),
            "order": len(of.tasks.order),
            "values": len(of.values.name),
            "instances": len(of.values.value),
            "tables": tables.setdefault(_tables(of), len(tables)),
            "memory": dict(of.memory),
        }
        for of in program.classes
    ]
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": asdict(program.mesh),
        "communicators": [who._asdict() for who in program.communicators],
        "peers": [peer._asdict() for peer in program.peers],
        "columns": {
            part: {name: str(column.dtype) for name, column in _columns(of)}
            for part, of in _parts(program.classes[0])
        },
        "classes": classes,
        "manifest": manifest,
        "tables": [
            {**some._asdict(), "shapes": [shape.fields() for shape in some.shapes]}
            for some in tables
        ],
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        archive.comment = SEAL + b"0" * DIGEST
        _add(archive, CONTENTS, (json.dumps(contents, indent=1) + "\n").encode())
        for nth, of in enumerate(program.classes):
            for name, column in _stored(of):
                npy = io.BytesIO()
                np.lib.format.write_array(npy, _small(column), allow_pickle=False)
                _add(archive, f"class{nth}/{name}.npy", npy.getvalue())
    whole = out.getbuffer()[:-DIGEST]
    digest = hashlib.sha256(whole).hexdigest().encode()
    out.getbuffer()[-DIGEST:] = digest
    del whole
    return out.getvalue()


def _parts(of: RankClass) -> tuple[tuple[str, Tasks], tuple[str, Values]]:
    return ("tasks", of.tasks), ("values", of.values)


def _columns(of: Tasks | Values) -> Iterator[tuple[str, NDArray[Any]]]:
    """The columns that are there; not the tables."""
    for field in fields(of):
        column = getattr(of, field.name)
        if isinstance(column, np.ndarray):
            yield field.name, column  # pyright: ignore


def _tables(of: RankClass) -> NameTables:
    tasks = of.tasks
    return NameTables(tasks.names, tasks.ops, tasks.dtypes, tasks.shapes, of.values.names)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name)  # dated 1980: the same program, the same bytes
    info.compress_type, info.create_system, info.external_attr = (
        zipfile.ZIP_DEFLATED,
        3,
        0o644 << 16,
    )
    archive.writestr(info, data)


def _stored(of: RankClass) -> Iterator[tuple[str, NDArray[Any]]]:
    """The columns of a class as they are stored: what grows by rank or row, as its steps."""
    yield "ranks", np.diff(of.ranks, prepend=0)
    for name, column in _columns(of.tasks):
        if name in COUNTS:
            column = np.diff(column)
        elif name in COUNTS.values():
            column = _owners(getattr(of.tasks, f"{name}_ptr")) - column
        yield f"tasks/{name}", column
    for name, column in _columns(of.values):
        steps = np.diff(column.astype(np.int64), prepend=0) if name in STEPS else column
        yield f"values/{name}", steps


def _owners(pointer: Int) -> Int:
    """The row of each dependency."""
    return np.repeat(np.arange(len(pointer) - 1, dtype=np.int64), np.diff(pointer))


def _small(column: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the narrowest type that holds them."""
    if not len(column):
        return column.astype(np.uint8)
    least, most = int(column.min()), int(column.max())
    dtype = np.promote_types(np.min_scalar_type(least), np.min_scalar_type(most))
    return column.astype(dtype if dtype.kind in "iu" else column.dtype)


# ---- reading -------------------------------------------------------------------------------------


class Bundle:
    """A bundle that is read: its manifest at once, the columns of rank classes when asked for.

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
            found = self._archive.contents()
        except Damage as damage:
            raise self._damaged(str(damage)) from None
        self.size = self._archive.size
        self.contents = self._contents(found)

    @property
    def manifest(self) -> dict[str, Any]:
        """What `manifest.json` has beside per-rank files, without the list of files."""
        return dict(self.contents.manifest)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.contents.mesh.world_size

    @cached_property
    def ranks(self) -> list[Int]:
        """The ranks of each class."""
        found: list[Int] = []
        for nth, of in enumerate(self.contents.classes):
            ranks = np.cumsum(self._column(nth, "ranks", of.ranks), dtype=np.int64)
            if (np.diff(ranks) < 1).any() or (ranks < 0).any() or (ranks >= self.world_size).any():
                raise self._damaged(f"class {nth} has no ascending ranks of the world")
            found.append(ranks)
        every = np.concatenate((*found, np.zeros(0, np.int64)))
        if (np.bincount(every, minlength=self.world_size) != 1).any():
            raise self._damaged("the classes do not hold every rank once")
        return found

    @property
    def users(self) -> list[Users]:
        """The ranks of each class, and what they communicate on."""
        found = zip(self.ranks, self.contents.classes, strict=True)
        return [Users(ranks, of.communicators) for ranks, of in found]

    def program(self, ranks: Sequence[int] | Int | None = None) -> Program:
        """The program; with the classes of some ranks only, if these are given."""
        wanted = None if ranks is None else np.unique(np.asarray(ranks, np.int64))
        classes: list[RankClass] = []
        for nth, (of, mine) in enumerate(zip(self.contents.classes, self.ranks, strict=True)):
            if wanted is None or len(intersect(mine, wanted)):
                tasks, values = self._tasks(nth), self._values(nth)
                memory = dict(of.memory)
                allowance = memory.pop("allowance", 0)
                work = RankWork.from_tables(tasks, memory, values)
                classes.append(RankClass(mine, of.pipeline_rank, work, allowance))
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

    def _contents(self, found: object) -> Contents:
        entries = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
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
            known = [f for f in fields(kind) if f.name not in NameTables._fields[:4]]
            needed = {f.name for f in known if f.default is MISSING}
            wrong = set(types) - {f.name for f in known} | needed - set(types)
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
        nodes = contents.manifest.get("nodes")
        counted = isinstance(nodes, list) and len(cast("list[object]", nodes)) == len(
            contents.classes
        )
        if not counted or not all(isinstance(of, dict) for of in cast("list[object]", nodes)):
            raise self._damaged("the manifest does not count the nodes of each class")
        self._check_lengths(contents)
        self._check_partners(contents)
        return contents

    def _check_lengths(self, contents: Contents) -> None:
        """No more numbers than a bundle of this size can hold, before any column is read."""
        most = self._archive.most_numbers
        for name in ("tasks", "data", "order", "values", "instances"):
            count = sum(getattr(of, name) for of in contents.classes)
            if count > most:
                raise self._damaged(f"{count} {name}, of which a bundle of its size has {most}")
        ranks = sum(of.ranks for of in contents.classes)
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
        for nth, of in enumerate(contents.classes):
            if of.tables >= len(contents.tables):
                raise self._damaged(f"class {nth} has no tables")
            if any(slot >= len(contents.communicators) for slot in of.communicators):
                raise self._damaged(f"class {nth} uses a communicator that is not there")

    def _tasks(self, nth: int) -> Tasks:
        of, columns = self.contents.classes[nth], self._read(nth, "tasks")
        for pointer, needed in COUNTS.items():
            ends = np.cumsum(columns[pointer], dtype=np.int64)
            if (columns[pointer] < 0).any() or (ends[-1] if len(ends) else 0) != of.length(
                "tasks", needed
            ):
                raise self._damaged(f"class {nth}: {pointer} does not count {needed}")
            columns[pointer] = np.concatenate((np.zeros(1, np.int64), ends))
            columns[needed] = _owners(columns[pointer]) - columns[needed]
        columns, tables = self._typed(nth, "tasks", columns), self.contents.tables[of.tables]
        kind, slot = columns["kind"], columns["slot"]
        peers, rows = len(self.contents.peers), len(kind)
        self._check(nth, "kind", kind, 0, len(TaskKind))
        self._check(nth, "phase", columns["phase"], 0, len(PHASES))
        self._check(nth, "collective", columns["collective"], -1, len(COLLECTIVES))
        self._check(nth, "name", columns["name"], 0, len(tables.names))
        self._check(nth, "op", columns["op"], 0, len(tables.ops))
        self._check(nth, "dtype", columns["dtype"], 0, len(tables.dtypes))
        self._check(nth, "shape", columns["shape"], -1, len(tables.shapes))
        self._check(nth, "data", columns["data"], 0, rows)
        self._check(nth, "order", columns["order"], 0, rows)
        messages = (kind == TaskKind.SEND) | (kind == TaskKind.RECV)
        self._check(nth, "slot of a message", slot[messages], 0, peers)
        used = np.unique(slot[kind == TaskKind.COLLECTIVE]).tolist()
        if used != [*of.communicators]:
            raise self._damaged(f"class {nth} uses communicators {used}, not {of.communicators}")
        return Tasks(
            **columns,
            names=tables.names,
            ops=tables.ops,
            dtypes=tables.dtypes,
            shapes=tables.shapes,
        )

    def _values(self, nth: int) -> Values:
        of, columns = self.contents.classes[nth], self._read(nth, "values")
        for name in STEPS:
            columns[name] = np.cumsum(columns[name], dtype=np.int64)
        columns, names = self._typed(nth, "values", columns), self.contents.tables[of.tables].values
        self._check(nth, "name of a value", columns["name"], 0, len(names))
        self._check(nth, "category", columns["category"], 0, len(CATEGORIES))
        self._check(nth, "value", columns["value"], 0, of.values)
        self._check(nth, "first", columns["first"], -1, of.tasks + 1)
        self._check(nth, "last", columns["last"], -1, of.tasks + 1)
        return Values(**columns, names=names)

    def _read(self, nth: int, part: str) -> Columns:
        """Columns of a class as they are stored."""
        of, types = self.contents.classes[nth], getattr(self.contents.columns, part)
        return {name: self._column(nth, f"{part}/{name}", of.length(part, name)) for name in types}

    def _typed(self, nth: int, part: str, columns: Columns) -> Columns:
        """The same columns in their types."""
        found: Columns = {}
        for name, dtype in getattr(self.contents.columns, part).items():
            found[name] = columns[name].astype(dtype)
            if (found[name] != columns[name]).any():
                raise self._damaged(f"class {nth}: {part}/{name} holds more than {dtype}")
        return found

    def _check(self, nth: int, name: str, column: NDArray[Any], least: int, end: int) -> None:
        """Numbers that point at something do; the rest is `program_check`'s."""
        if ((column < least) | (column >= end)).any():
            raise self._damaged(f"class {nth}: {name} out of range")

    def _column(self, nth: int, name: str, length: int) -> NDArray[Any]:
        try:
            return self._archive.column(f"class{nth}/{name}.npy", length)
        except Damage as damage:
            raise self._damaged(str(damage)) from None

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path}: is damaged: {why}; make it again")
