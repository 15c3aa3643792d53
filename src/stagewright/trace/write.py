"""Writes a program, or ranks of a bundle, to a directory: a file per rank, groups, a manifest.

The directory either holds everything or does not exist, whatever stops the run (`staging`). The
same program gives the same bytes, whatever the number of workers.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError, did_you_mean
from stagewright.executors import RayCluster, Threads
from stagewright.files import check_parent, exists_already
from stagewright.program.columns import Program, intersect
from stagewright.program.communicators import Users
from stagewright.trace.formats import bundle, chakra
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.manifest import (
    GROUPS,
    MANIFEST,
    WrittenFile,
    counts,
    entries,
    head_of,
    text,
)
from stagewright.trace.staging import staged, write_file
from stagewright.trace.templates import (
    FORMATS,
    Batch,
    Format,
    RangeWriter,
    ShareWriter,
    most_at_once,
    ranges,
    shares,
)

BUNDLE = "bundle"  # all ranks in one file; see `formats.bundle`

Progress = Callable[[int, int, int], None]  # ranks written, of how many, bytes


class WriteOptions(TypedDict, total=False):
    """Options of writing; none changes a byte of the files."""

    force: bool
    """Replace an output that an earlier call wrote."""
    workers: int | None
    """Threads that write; by default one per core."""
    progress: Progress | None
    """Called, by the calling thread, with ranks written so far and in all, and bytes so far."""


def write(
    program: Program,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    manifest: Mapping[str, object],
    extra_files: Mapping[str, bytes] | None = None,
    custom: Format | None = None,
    **options: Unpack[WriteOptions],
) -> dict[str, Any]:
    """Write `ranks` (default: all) of a program to `out`; returns the manifest.

    `out` becomes a directory, or one file with `format="bundle"`. `extra_files` are other files of
    the directory, by name. `custom` is the format itself, where it is not one of programs.
    """
    if custom is None:
        _check_format(format, (*FORMATS, BUNDLE))
    if format == BUNDLE and ranks is not None:
        raise UserError("a bundle holds every rank: name none, and expand those that you want")
    chosen = _chosen_ranks(program.mesh.world_size, ranks)
    head = head_of(manifest, program.mesh.world_size, format, counts(program, chosen))
    if format == BUNDLE:
        file = _write_bundle(program, _absolute(out), head, options.get("force", False))
        return {**head, "files": entries([file])}
    return _write_ranks(
        program, out, chosen, head, extra_files=extra_files, custom=custom, **options
    )


def _write_ranks(
    program: Program,
    out: Path | str,
    ranks: Int,
    head: Mapping[str, Any],
    *,
    users: Sequence[Users] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    cluster: RayCluster | None = None,
    custom: Format | None = None,
    **options: Unpack[WriteOptions],
) -> dict[str, Any]:
    """Write the files of some ranks, the groups, and the manifest, which begins as `head`.

    `users` as in `Program.group_chunks`, `extra_files` and `custom` as in `write`. With a
    `cluster`, its machines write into `out`, which all of them share.
    """
    path = _absolute(out)
    format = custom or FORMATS[head["format"]]
    origin = provenance(program, head)
    written = _WrittenRanks(len(ranks), options.get("progress"))
    batches: Sequence[Batch] = ()
    try:
        with staged(path, options.get("force", False)) as folder:
            batches = format.plan(program, ranks, origin)
            if sum(len(batch.ranks) for batch in batches) != len(ranks):
                raise ValueError("the classes of the program do not hold every rank once")
            _check_space(path, batches)
            if cluster is None:
                threads = Threads(options.get("workers"), most_at_once)
                threads.run(ShareWriter(folder, format.file), shares(batches), written.add)
            else:
                writer = RangeWriter(program, folder, head["format"], origin)
                cluster.run(writer, ranges(batches, cluster.workers), written.add)
                _check_there(folder, written.files.values())
            files = [written.files[rank] for rank in sorted(written.files)]
            files.append(write_file(folder, GROUPS, chakra.comm_group(program, users)))
            files += [
                write_file(folder, name, [data]) for name, data in (extra_files or {}).items()
            ]
            write_file(folder, MANIFEST, text(head, files))
    except OSError as error:
        raise _refused(path, error, batches) from error
    return {**head, "files": entries(files)}


def expand(
    source: Bundle,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    cluster: RayCluster | None = None,
    **options: Unpack[WriteOptions],
) -> dict[str, Any]:
    """Write `ranks` of a bundle as `write` does those of its program; returns the manifest.

    With a `cluster`, its machines write into `out`, which all of them share.
    """
    _check_format(format, tuple(FORMATS))
    chosen = _chosen_ranks(source.world_size, ranks)
    manifest = source.manifest
    nodes = [
        {**entry, "files": len(intersect(class_ranks, chosen))}
        for entry, class_ranks in zip(manifest.pop("nodes"), source.ranks, strict=True)
    ]
    del manifest["format"]
    head = head_of(manifest, source.world_size, format, nodes)
    program = source.program(chosen)
    return _write_ranks(program, out, chosen, head, users=source.users, cluster=cluster, **options)


@contextmanager
def traces(path: Path | str, ranks: Sequence[int]) -> Generator[list[Path]]:
    """Traces of some ranks of a bundle, with their groups, for as long as the block lasts."""
    with TemporaryDirectory(prefix="stagewright-") as folder:
        expand(Bundle(path), f"{folder}/out", ranks=ranks)
        yield [Path(folder, "out", FORMATS["chakra"].file.format(rank=rank)) for rank in ranks]


def _check_format(format: str, formats: Sequence[str]) -> None:
    if format not in formats:
        hint = did_you_mean(format, formats)
        raise UserError(f"format {format!r}: choose of {', '.join(formats)}{hint}")


def _chosen_ranks(world: int, ranks: Sequence[int] | None) -> Int:
    """The chosen ranks, ascending and each once; None: all of the world."""
    if ranks is None:
        return np.arange(world, dtype=np.int64)
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"rank {rank}: the run has {world} ranks, 0 to {world - 1}")
    if not len(ranks):
        raise UserError("no ranks to write: name at least one, or none for all")
    return np.unique(np.array(ranks, np.int64))


def _absolute(out: Path | str) -> Path:
    """The path of an output, with links followed."""
    address = str(out).removeprefix("file://")
    if "://" in address:
        raise UserError(f"{address}: is a URL; wanted a path in a file system")
    try:
        return Path(os.path.realpath(address))
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{address!a}: cannot be written: {error}") from None


@dataclass(slots=True)
class _WrittenRanks:
    """Files of ranks that are written, each reported to `progress`."""

    total: int
    progress: Progress | None
    files: dict[int, WrittenFile] = field(default_factory=dict[int, WrittenFile])
    size: int = 0  # bytes of all files

    def add(self, files: Mapping[int, WrittenFile]) -> None:
        """Add files by rank."""
        self.files.update(files)
        self.size += sum(file.size for file in files.values())
        if self.progress is not None:
            # A callback that raises, as Ctrl-C does, is not called again while threads end.
            progress, self.progress = self.progress, None
            progress(len(self.files), self.total, self.size)
            self.progress = progress


def _check_there(folder: Path, files: Iterable[WrittenFile]) -> None:
    """Raise an OSError where a file that another machine has written cannot be seen here."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            raise OSError(f"{file.name} is not what another machine wrote; name a shared directory")


def provenance(program: Program, head: Mapping[str, Any]) -> dict[str, str | int]:
    """The origin of a trace, for its metadata."""
    mesh = ",".join(f"{name}={size}" for name, size in program.mesh.axes)
    return {
        "generator": f"stagewright {head['stagewright']}",
        "world_size": program.mesh.world_size,
        "mesh": mesh,
    }


def _write_bundle(
    program: Program, path: Path, head: Mapping[str, Any], force: bool
) -> WrittenFile:
    """Write a bundle under another name, and rename it when it is whole."""
    check_parent(path)
    if os.path.lexists(path):
        if not force:
            raise exists_already(path)
        if not is_bundle(path):
            raise UserError(f"{path}: is no bundle, so it may be yours; remove it yourself")
    try:
        return write_file(path.parent, path.name, [bundle.encode(program, head)], shared=True)
    except OSError as error:
        raise _refused(path, error, ()) from error


# ---- errors --------------------------------------------------------------------------------------


def _refused(path: Path, error: OSError, batches: Sequence[Batch]) -> UserError:
    """The UserError for what the system refused to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(_disk_full(path, batches))
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run was quicker
        return exists_already(path)
    return UserError(f"{path}: cannot be written: {error.strerror or error}")


def _check_space(path: Path, batches: Sequence[Batch]) -> None:
    """Raise a UserError where the files cannot fit on the disk."""
    free = shutil.disk_usage(path.parent).free
    # The bound costs little and nearly always fits.
    fits = sum((batch.at_most or 0) * len(batch.ranks) for batch in batches) <= free
    if not fits and _bytes(batches) > free:
        raise UserError(_disk_full(path, batches))


def _bytes(batches: Sequence[Batch]) -> int:
    """Bytes of all files; a size that is not known before the file is made counts as zero."""
    return sum((batch.size or 0) * len(batch.ranks) for batch in batches)


def _disk_full(path: Path, batches: Sequence[Batch]) -> str:
    """The message for a disk that is too small."""
    needed, free = _bytes(batches), shutil.disk_usage(path.parent).free
    needs = f"needs {needed:,} bytes, " if needed else ""
    return f"{path}: disk full: {needs}{free:,} are free in {path.parent}"
