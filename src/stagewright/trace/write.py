"""Writes a program to a directory: a file per rank, the communicator groups, and a manifest.

The directory either holds everything or does not exist, whatever stops the run (`staging`). The
same program gives the same bytes, however many workers, processes or machines write it: each writes
a share of the ranks (`templates`), and the one that finds no rank missing adds the other files.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import Stopped, UserError, did_you_mean
from stagewright.executors import Threads, ray_cluster
from stagewright.files import check_parent, exists_already
from stagewright.program.columns import Program, intersect
from stagewright.program.communicators import Users
from stagewright.trace.formats import bundle, chakra
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.manifest import (
    GROUPS,
    MANIFEST,
    FileList,
    WrittenRanks,
    counts,
    head_of,
    identity,
    text,
)
from stagewright.trace.staging import (
    Output,
    Staging,
    leftovers,
    manifest_in,
    new_sibling,
    staged,
)
from stagewright.trace.storage import LocalFolder, Storage, WrittenFile, storage_at
from stagewright.trace.templates import (
    FORMATS,
    Batch,
    RemoteWriter,
    most_at_once,
    remote_shares,
    shares,
    write_share,
)

ENGINES = ("local", "ray")
BUNDLE = "bundle"  # all ranks in one file; see `formats.bundle`

Progress = Callable[[int, int, int], None]  # ranks written, of how many, bytes


class How(TypedDict, total=False):
    """How ranks are written; no option changes a byte of the files."""

    force: bool
    """Replace an output that an earlier call wrote."""
    workers: int | None
    """Threads that write; by default one per core."""
    progress: Progress | None
    """Called, by the calling thread, with ranks written so far and in all, and bytes so far."""
    resume: bool
    """Go on with the files that a stopped run of the same output has written; keep the files if
    this run is stopped."""
    shard: tuple[int, int] | None
    """Write share i of n only. Shares may be written at the same time; the one that finds no rank
    missing completes the output. Share 0 is share n."""
    engine: str
    """`local`: threads of this process; `ray`: a Ray cluster, each machine of which writes to the
    output itself."""
    address: str | None
    """Of the Ray cluster: `host:port`, `ray://host:port` or `auto`."""


def write(
    program: Program,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    manifest: Mapping[str, object],
    beside: Mapping[str, bytes] | None = None,
    **how: Unpack[How],
) -> dict[str, Any]:
    """Write `ranks` (default: all) of a program to `out`; returns the manifest.

    `out` is a directory, or a URL that fsspec knows. `beside` are other files of the output, by
    name. The result of a share that is not the last lists the files of the share, and says how
    many ranks are `missing`.
    """
    known = (*FORMATS, BUNDLE)
    if format not in known:
        hint = did_you_mean(format, known)
        raise UserError(f"format {format!r}: choose of {', '.join(known)}{hint}")
    if format == BUNDLE and ranks is not None:
        raise UserError("a bundle holds every rank: name none, and expand those that you want")
    wanted = chosen_ranks(program.mesh.world_size, ranks)
    head = head_of(manifest, program.mesh.world_size, format, counts(program, wanted))
    if format == BUNDLE:
        if how.get("resume") or how.get("shard") or how.get("engine", "local") != "local":
            raise UserError("a bundle is written at once: drop --resume, --shard and --engine")
        file = _write_bundle(program, Path(os.path.realpath(out)), head, how.get("force", False))
        return {**head, "files": FileList("{rank}", WrittenRanks.of({}), [file])}
    return write_ranks(program, out, wanted, head, beside=beside, **how)


def write_ranks(
    program: Program,
    out: Path | str,
    wanted: Int,
    head: Mapping[str, Any],
    *,
    users: Sequence[Users] | None = None,
    beside: Mapping[str, bytes] | None = None,
    **how: Unpack[How],
) -> dict[str, Any]:
    """Write the files of some ranks, the groups, and the manifest, which begins as `head`.

    `users` as in `Program.group_chunks`, `beside` as in `write`.
    """
    engine, address = how.get("engine", "local"), how.get("address")
    if engine not in ENGINES:
        hint = did_you_mean(engine, ENGINES)
        raise UserError(f"engine {engine!r}: choose of {', '.join(ENGINES)}{hint}")
    if address is not None and engine != "ray":
        raise UserError(f"address {address}: is of a Ray cluster; add --engine ray")
    writing = _Writing(program, _absolute(out), wanted, head, how, users, beside or {})
    with _user_errors(writing):
        return writing.write_with_others() if writing.shared else writing.write()


def chosen_ranks(world: int, ranks: Sequence[int] | None) -> Int:
    """The chosen ranks, ascending and each once; None: all of the world."""
    if ranks is None:
        return np.arange(world, dtype=np.int64)
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"rank {rank}: the run has {world} ranks, 0 to {world - 1}")
    if not len(ranks):
        raise UserError("no ranks to write: name at least one, or none for all")
    return np.unique(np.array(ranks, np.int64))


def _absolute(out: Path | str) -> str:
    """An absolute path, or a URL."""
    address = str(out).removeprefix("file://")
    try:
        return address if "://" in address else os.path.realpath(address)
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{address!a}: cannot be written: {error}") from None


def _share_of(program: Program, ranks: Int, shard: tuple[int, int] | None) -> Int:
    """The ranks of a share, ascending: as few classes as possible, for templates to be few."""
    if shard is None:
        return ranks
    nth, count = shard
    if not 0 <= nth <= count or count < 1:
        raise UserError(
            f"shard {nth}/{count}: wanted 1/{max(1, count)} to {max(1, count)}/{max(1, count)}"
        )
    by_class = np.concatenate([intersect(of.ranks, ranks) for of in program.classes])
    return np.sort(np.array_split(by_class, count)[(nth - 1) % count])


# ---- writing -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writing:
    """An output that this process writes, by itself or together with others."""

    program: Program
    address: str  # of the output
    wanted: Int  # ranks of the output
    head: Mapping[str, Any]
    how: How
    users: Sequence[Users] | None
    beside: Mapping[str, bytes]

    ranks: Int = field(init=False)  # that this process writes
    shared: bool = field(init=False)  # others may write, or have written, the same output
    batches: Sequence[Batch] = ()

    def __post_init__(self) -> None:
        shard = self.how.get("shard")
        self.shared = self.how.get("resume", False) or shard is not None
        self.ranks = _share_of(self.program, self.wanted, shard)

    @property
    def file(self) -> str:
        """The name of a rank's file, with `{rank}` in it."""
        return FORMATS[self.head["format"]].file

    def write_with_others(self) -> dict[str, Any]:
        """As `write`, though others may write the same output at the same time.

        One of them may complete the output at any moment, which takes away the directory that this
        process writes in: whatever failed for that reason, nothing is left to do.
        """
        for tries in itertools.count(1):
            if (complete := self.complete_output()) is not None:
                return self.mended(complete)
            try:
                return self.write()
            except (OSError, UserError) as error:
                if (complete := self.complete_output()) is not None:
                    return complete
                # Incomplete outputs are cleared away before the new one appears: try again.
                if not isinstance(error, FileNotFoundError) or tries == 3:
                    raise
        raise AssertionError

    def complete_output(self) -> dict[str, Any] | None:
        """The manifest of the same output, if it is there and complete."""
        if "://" not in self.address and not Path(self.address).is_dir():
            return None
        found = manifest_in(storage_at(self.address))
        if found is None:
            return None
        files = found.pop("files", None)
        if found != json.loads(json.dumps(self.head)) or not isinstance(files, dict):
            return None
        try:
            listed = FileList.read(self.file, files)  # pyright: ignore
        except ValueError:  # a damaged list is of no output
            return None
        same = np.array_equal(listed.ranks, self.wanted)
        return {**self.head, "files": listed} if same else None

    def mended(self, complete: dict[str, Any]) -> dict[str, Any]:
        """A complete output, with files that are missing or damaged written again, in its place."""
        storage = storage_at(self.address)
        listed: FileList = complete["files"]
        progress = _Progress(self.how.get("progress"), len(self.wanted))
        intact = self._intact(storage, listed.written, progress)
        todo = np.setdiff1d(self.wanted, intact.ranks, assume_unique=True)
        if len(todo):
            written: list[WrittenRanks] = []

            def done(more: WrittenRanks) -> None:
                written.append(more)
                progress(more)

            self._write_to(storage, todo, done)
            noted, made = listed.written.among(todo), WrittenRanks.merge(written)
            if not all(map(np.array_equal, noted, made)):
                raise UserError(
                    f"{self.address}: the files that its {MANIFEST} lists are not those of this "
                    "run; --force replaces all"
                )
        there = storage.sizes()
        for name, pieces in self._more_files().items():
            wanted = listed.get(name)
            kept = name in there and (name in self.beside or wanted is None)
            if not kept and _digest(storage, name) != (wanted or {}).get("sha256"):
                storage.write(name, pieces)
        return complete

    def write(self) -> dict[str, Any]:
        """Write the ranks that are missing; complete the output if no other rank is missing."""
        name = identity(self.head, self.wanted)
        output = Output(name, self.how.get("force", False), self.shared)
        with staged(self.address, output) as staging:
            if self.shared and (complete := self.complete_output()) is not None:
                return complete
            written = self._write_ranks(staging)
            if self.shared:
                staging.journal.flush()
                written = staging.journal.read()
                missing = len(np.setdiff1d(self.wanted, written.ranks, assume_unique=True))
                if missing and (complete := self.complete_output()) is not None:
                    return complete
                if missing:
                    mine = FileList(self.file, written.among(self.ranks))
                    return {**self.head, "files": mine, "missing": missing}
                _check_there(staging.storage, self.file, written.among(self.wanted))
            return self._complete(staging, FileList(self.file, written.among(self.wanted)))

    def _write_ranks(self, staging: Staging) -> WrittenRanks:
        """Write the files of this process's ranks that are not there yet; returns all of them."""
        progress = _Progress(self.how.get("progress"), len(self.ranks))
        written = [self._kept(staging, progress)] if self.shared else []
        todo = self.ranks
        if self.shared:
            todo = np.setdiff1d(self.ranks, written[0].ranks, assume_unique=True)

        def done(more: WrittenRanks) -> None:
            staging.journal.note(more)
            written.append(more)
            progress(more)

        self._write_to(staging.storage, todo, done)
        return WrittenRanks.merge(written)

    def _write_to(self, storage: Storage, todo: Int, done: Callable[[WrittenRanks], None]) -> None:
        """Write the files of some ranks."""
        provenance = _provenance(self.program, self.head)
        self.batches = FORMATS[self.head["format"]].plan(self.program, todo, provenance)
        if sum(len(batch.ranks) for batch in self.batches) != len(todo):
            raise ValueError("the classes of the program do not hold every rank once")
        if isinstance(storage, LocalFolder):
            _check_space(Path(self.address), self.batches)
        self._run(storage, provenance, done)

    def _run(
        self,
        storage: Storage,
        provenance: Mapping[str, str | int],
        done: Callable[[WrittenRanks], None],
    ) -> None:
        """Write the files of all batches, by threads or by a cluster."""
        if self.how.get("engine", "local") == "local":
            threads = Threads(self.how.get("workers"), most_at_once)
            threads.run(partial(write_share, storage, self.file), shares(self.batches), done)
            return
        remote: list[WrittenRanks] = []

        def note(more: WrittenRanks) -> None:
            remote.append(more)
            done(more)

        writer = RemoteWriter(self.program, storage.address, self.head["format"], provenance)
        with ray_cluster(self.how.get("address")) as cluster:
            cluster.run(writer, remote_shares(self.batches, cluster.workers), note)
        _check_there(storage, self.file, WrittenRanks.merge(remote))

    def _kept(self, staging: Staging, progress: Callable[[WrittenRanks], None]) -> WrittenRanks:
        """Files of ranks that are there already, with the bytes and the checksum noted for them."""
        return self._intact(staging.storage, staging.journal.read().among(self.ranks), progress)

    def _intact(
        self, storage: Storage, noted: WrittenRanks, progress: Callable[[WrittenRanks], None]
    ) -> WrittenRanks:
        """Of the files that are noted, those whose size and checksum are still the same."""
        names = [self.file.format(rank=rank) for rank in noted.ranks.tolist()]
        sizes = storage.sizes()
        intact = np.zeros(len(names), bool)

        def check(nth: int) -> int | None:
            if sizes.get(names[nth]) != noted.sizes[nth]:
                return None
            digest = _digest(storage, names[nth])
            return nth if digest == noted.digests[nth].tobytes().hex() else None

        def done(nth: int | None) -> None:
            if nth is not None:
                intact[nth] = True
                progress(noted.at(np.array([nth])))

        Threads(self.how.get("workers")).run(check, range(len(names)), done)
        return noted.at(intact)

    def _complete(self, staging: Staging, files: FileList) -> dict[str, Any]:
        """Write the files that are of no rank, and publish the output."""
        for name, pieces in self._more_files().items():
            files = files.and_also(staging.storage.write(name, pieces))
        staging.storage.write(MANIFEST, text(self.head, files))
        staging.publish({*files, MANIFEST})
        return {**self.head, "files": files}

    def _more_files(self) -> dict[str, Iterable[bytes]]:
        """The files that are of no rank, beside the manifest."""
        more: dict[str, Iterable[bytes]] = {GROUPS: chakra.comm_group(self.program, self.users)}
        return more | {name: [data] for name, data in self.beside.items()}


def _digest(storage: Storage, name: str) -> str | None:
    """The SHA-256 of a file; None where there is no file that can be read."""
    try:
        return storage.digest(name)
    except OSError:
        return None


class _Progress:
    """Adds up the ranks and bytes that are written, and reports them."""

    def __init__(self, report: Progress | None, total: int) -> None:
        self._report, self._total = report, total
        self._ranks = self._size = 0

    def __call__(self, more: WrittenRanks) -> None:
        self._ranks += len(more.ranks)
        self._size += int(more.sizes.sum())
        if self._report is not None:
            # A report that raises, as Ctrl-C does, is not called again while the run winds up.
            report, self._report = self._report, None
            report(self._ranks, self._total, self._size)
            self._report = report


def _check_there(storage: Storage, file: str, written: WrittenRanks) -> None:
    """Raise a UserError where files that other processes have noted are not there."""
    sizes = storage.sizes()
    names = [file.format(rank=rank) for rank in written.ranks.tolist()]
    found = np.array([sizes.get(name, -1) for name in names])
    wrong = np.flatnonzero(found != written.sizes).tolist()
    if wrong:
        raise UserError(
            f"{storage.address}: {names[wrong[0]]} is not what was written ({len(wrong)} such); "
            "run with --resume to write it again"
        )


def _provenance(program: Program, head: Mapping[str, Any]) -> dict[str, str | int]:
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
        folder = new_sibling(path, f"partial-{os.getpid()}")
        try:
            file = LocalFolder(folder).write(path.name, [bundle.encode(program, head)])
            (folder / path.name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise _refused(str(path), error, ()) from error
    return file


# ---- errors --------------------------------------------------------------------------------------


@contextmanager
def _user_errors(writing: _Writing) -> Generator[None]:
    """Turn errors of the system into a UserError, and say what a stopped run leaves."""
    try:
        yield
    except KeyboardInterrupt:
        if not writing.shared:
            raise
        raise Stopped(
            "stopped; what is written stays, and the same command goes on with it"
        ) from None
    except OSError as error:
        raise _refused(writing.address, error, writing.batches) from error


def _refused(address: str, error: OSError, batches: Sequence[Batch]) -> UserError:
    """What the system refused to do, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and "://" not in address:
        return UserError(_no_room(Path(address), batches))
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run was quicker
        return exists_already(address)
    return UserError(f"{address}: cannot be written: {error.strerror or error}")


def _check_space(path: Path, batches: Sequence[Batch]) -> None:
    """Raise a UserError where the files cannot fit on the disk."""
    free = shutil.disk_usage(path.parent).free
    # The bound costs little and nearly always fits.
    if _total(batches, lambda batch: batch.at_most) <= free:
        return
    if _total(batches, lambda batch: batch.size) > free:
        raise UserError(_no_room(path, batches))


def _total(batches: Sequence[Batch], size: Callable[[Batch], int | None]) -> int:
    """Bytes of all files; a size that is not known before the file is made counts as zero."""
    return sum((size(batch) or 0) * len(batch.ranks) for batch in batches)


def _no_room(path: Path, batches: Sequence[Batch]) -> str:
    needed = _total(batches, lambda batch: batch.size)
    free = shutil.disk_usage(path.parent).free
    what = f"needs {needed:,} bytes, " if needed else ""
    stale = [str(found) for found in leftovers(path)]
    hint = f"; of runs that were stopped, remove {', '.join(stale)}" if stale else ""
    return f"{path}: disk full: {what}{free:,} are free in {path.parent}{hint}"
